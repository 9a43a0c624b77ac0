// SPDX-License-Identifier: Apache-2.0
// Whether shards tell of all weights of the model that a config.json describes.
#pragma once

#include <cpx/model/audit.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_names.hpp>
#include <cpx/model/hf_sizes.hpp>
#include <cpx/model/shard.hpp>
#include <cpx/model/weight_sizes.hpp>

#include <set>
#include <string>
#include <vector>

namespace cpx {

/// Returns how Hugging Face's side is written where nothing tells but the weights of shards: a tensor for each expert;
/// and in `sizes.mtp` what they say of multi-token prediction.
inline weight_style style_of(shard_weights const& weights, hf_config const& settings, weight_sizes& sizes) {
    weight_style style{.inside = settings.nested()};
    bool mtp = false, dense = sizes.num_experts == 0;
    for (auto const& [name, w] : weights) {
        bool const predicted = name.find("mtp.layers.") != std::string::npos;
        mtp = mtp || predicted;
        dense = dense || (predicted && name.ends_with(".mlp.linear_fc1.weight"));
        style.expert_bias = style.expert_bias || name.ends_with(".mlp.router.expert_bias");
    }
    sizes.mtp.clear();
    if (mtp) sizes.mtp.push_back({.linear = false, .moe = !dense});
    return style;
}

/// Holds the weights that shards list against the model of a config.json: what the list lacks, by the name of Hugging
/// Face, and what is in a layer and none of the model's.
///
/// `audit` holds shards against their list, so that a weight which every shard forgets is found here alone. Multi-token
/// prediction is wanted whole where the list has some of it; vision towers are not looked at. Throws `cpx::error` for
/// settings that tell of no model.
inline std::vector<audit_problem> audit_weights(hf_config const& settings, shard_weights const& weights) {
    auto sizes = sizes_of(settings);
    auto const style = style_of(weights, settings, sizes);
    hf_names const model(sizes, style);
    std::vector<audit_problem> problems;
    std::set<std::string> listed;
    for (auto const& [name, weight] : weights) {
        auto const known = model.from_megatron(name);
        if (known)
            for (auto& source : model.hf(*known)) listed.insert(std::move(source));
        else if (auto const family = parse_parameter_name(name).family;
                 family == name_family::decoder || family == name_family::mtp)
            problems.push_back({audit_fault::unexpected, name, "the model of config.json has no such weight"});
    }
    for (auto const& w : model.weights())
        for (auto const& source : model.hf(w))
            if (!listed.contains(source))
                problems.push_back({audit_fault::no_weight, source, "of config.json, which no shard tells of"});
    return problems;
}

} // namespace cpx
