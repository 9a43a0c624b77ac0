// SPDX-License-Identifier: Apache-2.0
// Reads the shards of a model and audits them: by the config.json beside them if there is one.
#pragma once

#include "../common/numbers.hpp"
#include "../common/shard_files.hpp"

#include <cpx/core/error.hpp>
#include <cpx/model/audit.hpp>
#include <cpx/model/audit_config.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/shard.hpp>

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace shards {

/// Shards and what they say of their model.
struct input {
    cpx::shard_sizes sizes;
    cpx::shard_weights weights;
    std::vector<cpx::audit_shard> shards;
    std::string config{}; ///< the file that tells which weights the model has; empty: shards alone do
    std::vector<cpx::audit_problem> problems{}; ///< what they tell differently of the model; the first is believed
};

/// Reads shards, which are named as `shard_files` wants it. Throws `cpx::error` that names a file that cannot be read
/// or makes no sense.
inline input read(std::vector<std::string> const& files) {
    input in;
    std::string sizes;
    for (auto const& place : examples::shard_files(files)) {
        auto const path = place.string();
        cpx::safetensors const file(path);
        auto header = cpx::read_shard_header(file);
        auto const said = cpx::shard_metadata(header.sizes, {}, {}).at("cpx.shard");
        if (in.shards.empty()) {
            examples::blame(file.where() + ": cpx.shard", [&] { return cpx::audit(header.sizes, {}, {}); });
            in.sizes = header.sizes;
            in.weights = std::move(header.weights);
            sizes = said;
        } else {
            auto const disagree = [&](char const* what) {
                in.problems.push_back({cpx::audit_fault::disagree, "",
                                       path + " and " + in.shards.front().where + " tell of other " + what});
            };
            if (said != sizes) disagree("sizes");
            if (header.weights != in.weights) disagree("weights");
        }
        in.shards.push_back({path, header.cell, cpx::audit_records(file)});
    }
    auto const beside = std::filesystem::path(in.shards.front().where).parent_path() / "config.json";
    std::error_code failure;
    if (std::filesystem::exists(beside, failure)) in.config = beside.string();
    return in;
}

/// Audits them. Their config.json is believed more than they are. Throws `cpx::error` if it cannot be read.
inline cpx::audit_report examine(input& in) {
    auto problems = in.problems;
    if (!in.config.empty()) {
        auto const settings = cpx::hf_config::read(in.config);
        auto const found = cpx::audit_weights(settings, in.sizes, in.weights);
        problems.insert(problems.end(), found.begin(), found.end());
        in.sizes.tied = settings.tie_word_embeddings.value();
    }
    auto report = cpx::audit(in.sizes, in.weights, in.shards);
    report.problems.insert(report.problems.begin(), problems.begin(), problems.end());
    return report;
}

} // namespace shards
