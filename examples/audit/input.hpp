// SPDX-License-Identifier: Apache-2.0
// Reads the shards of a model and audits them: by the config.json beside them if there is one.
#pragma once

#include "../common/hf_files.hpp"
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
    std::string record{}; ///< the file that tells which tensors they were made of; empty: there is none
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
    auto const beside = [&](char const* name) {
        auto const place = std::filesystem::path(in.shards.front().where).parent_path() / name;
        std::error_code failure;
        return std::filesystem::exists(place, failure) ? place.string() : std::string();
    };
    in.config = beside("config.json");
    in.record = beside(examples::record_name);
    return in;
}

/// Audits them. Their config.json, and beside it the record of what they were made of, are believed more than they are.
/// Throws `cpx::error` if these cannot be read.
inline cpx::audit_report examine(input& in) {
    auto problems = in.problems;
    if (!in.config.empty()) {
        auto const settings = cpx::hf_config::read(in.config);
        std::vector<std::string> tensors;
        if (!in.record.empty()) tensors = examples::tensors_of(examples::read_files(in.record));
        auto const found = cpx::audit_weights(settings, in.sizes, in.weights, tensors);
        problems.insert(problems.end(), found.begin(), found.end());
        in.sizes.tied = settings.tie_word_embeddings.value();
    }
    auto report = cpx::audit(in.sizes, in.weights, in.shards);
    report.problems.insert(report.problems.begin(), problems.begin(), problems.end());
    return report;
}

} // namespace shards
