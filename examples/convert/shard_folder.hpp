// SPDX-License-Identifier: Apache-2.0
// The shards of a model in one folder: every cell of the mesh once, with every weight where it belongs.
#pragma once

#include "../common/shard_files.hpp"

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/audit.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/shard.hpp>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace convert {

namespace fs = std::filesystem;

class shard_folder {
public:
    /// Takes a folder, or all its shards by their names; what else it has is beside the first. Throws `cpx::error` if
    /// shards disagree about the model or its division, or if `audit` finds something wrong.
    explicit shard_folder(std::vector<std::string> const& named) {
        auto const paths = examples::shard_files(named);
        path_ = fs::is_directory(named.front()) ? fs::path(named.front()) : paths.front().parent_path();
        std::vector<cpx::audit_shard> shards;
        for (auto const& path : paths) shards.push_back(add(path));
        auto const report = cpx::audit(header_.sizes, header_.weights, shards);
        cpx::require(report.good(), path_.string().c_str(), "weights", "those of all cells, and copies that are equal",
                     [&] { return text(report.problems); });
    }

    fs::path const& path() const { return path_; }
    cpx::shard_sizes const& sizes() const { return header_.sizes; }
    cpx::shard_weights const& weights() const { return header_.weights; }
    int ranks(bool expert) const {
        auto const& m = header_.sizes.mesh;
        return expert && m.etp != 0 ? m.etp : m.tp;
    }

    /// Returns a shard that has the share of a rank of tensor parallelism, of an expert's weight its own. There is one.
    cpx::safetensors const& share(std::string const& name, bool expert, int rank) const {
        bool const divided = header_.weights.find(name)->second.divided;
        for (auto const& [cell, file] : files_)
            if (file.contains(name) && (!divided || (expert ? cell.etp : cell.tp) == rank)) return file;
        throw cpx::error(path_.string(), "tensors", cpx::quote(name) + " of rank " + std::to_string(rank), "none");
    }

private:
    static std::string text(cpx::shard_sizes const& sizes) {
        return cpx::shard_metadata(sizes, {}, {}).at("cpx.shard");
    }

    /// Returns what a shard has, for `audit`.
    cpx::audit_shard add(fs::path const& path) {
        cpx::safetensors file(path);
        bool const first = files_.empty();
        auto const own = cpx::read_shard_cell(file);
        if (first) {
            header_ = cpx::read_shard_header(file);
            weights_ = file.metadata("cpx.weights");
        }
        bool const same =
            text(own.sizes) == text(header_.sizes) &&
            (file.metadata("cpx.weights") == weights_ || cpx::read_shard_header(file).weights == header_.weights);
        cpx::require(
            same, file.where().c_str(), "header",
            [&] { return "the model and the division of " + files_.begin()->second.where(); }, "another");
        files_.emplace(own.cell, file);
        return {file.where(), own.cell, cpx::audit_records(file)};
    }
    static std::string text(std::vector<cpx::audit_problem> const& problems) {
        auto const& first = problems.front();
        return (first.name.empty() ? "" : cpx::quote(first.name) + ' ') + first.detail +
               (problems.size() > 1 ? ", and " + std::to_string(problems.size() - 1) + " more" : "");
    }

    fs::path path_;
    cpx::shard_header header_;
    std::string weights_; ///< the text of it
    std::map<cpx::shard_cell, cpx::safetensors> files_;
};

} // namespace convert
