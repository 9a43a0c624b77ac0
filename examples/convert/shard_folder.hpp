// SPDX-License-Identifier: Apache-2.0
// The shards of a model in one folder: every cell of the mesh once, with every weight where it belongs.
#pragma once

#include "../audit/input.hpp"

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>
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
    /// Takes shards that an audit has found good; what else a checkpoint has is beside the first of them.
    explicit shard_folder(shards::input const& in) : sizes_(in.sizes), weights_(in.weights) {
        path_ = fs::path(in.shards.front().where).parent_path();
        for (auto const& shard : in.shards) files_.emplace(shard.cell, cpx::safetensors(shard.where));
    }

    fs::path const& path() const { return path_; }
    cpx::shard_weights const& weights() const { return weights_; }
    int ranks(bool expert) const { return expert ? cpx::etp_of(sizes_.mesh) : sizes_.mesh.tp; }

    /// Returns a shard that has the share of a rank of tensor parallelism, of an expert's weight its own. There is one.
    cpx::safetensors const& share(std::string const& name, bool expert, int rank) const {
        bool const divided = weights_.find(name)->second.divided;
        for (auto const& [cell, file] : files_)
            if (file.contains(name) && (!divided || (expert ? cell.etp : cell.tp) == rank)) return file;
        throw cpx::error(path_.string(), "tensors", cpx::quote(name) + " of rank " + std::to_string(rank), "none");
    }

private:
    fs::path path_;
    cpx::shard_sizes sizes_;
    cpx::shard_weights weights_;
    std::map<cpx::shard_cell, cpx::safetensors> files_;
};

} // namespace convert
