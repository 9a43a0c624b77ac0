// SPDX-License-Identifier: Apache-2.0
// Whether shards tell of all weights of the model that a config.json describes, as it has them.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/mesh/mesh.hpp>
#include <cpx/model/audit.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_names.hpp>
#include <cpx/model/hf_sizes.hpp>
#include <cpx/model/parameter_name.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/shard.hpp>
#include <cpx/model/weight_bytes.hpp>
#include <cpx/model/weight_rules.hpp>
#include <cpx/model/weight_share.hpp>
#include <cpx/model/weight_sizes.hpp>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
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

namespace detail {

inline std::string text_of_size(bool value) { return value ? "true" : "false"; }
inline std::string text_of_size(index_t value) { return std::to_string(value); }

/// Returns what is wrong with what shards list of a weight of a model: its shape and whether it is divided follow from
/// config.json and the mesh, and its dtype is a floating-point one, at least float32 where the weight must keep that.
inline std::optional<std::string> listed_wrongly(hf_names const& model, model_weight const& w, shard_sizes const& sizes,
                                                 shard_weight const& listed) {
    auto const& rule = *w.rule;
    auto const text = [](std::vector<index_t> const& shape, bool divided) {
        std::string all;
        for (auto const n : shape) all += (all.empty() ? "" : ", ") + std::to_string(n);
        return '[' + all + (divided ? "], divided" : "], on all ranks");
    };
    // As many rows of the vocabulary as the shards have, if these are enough.
    bool const vocabulary = rule.form == weight_form::vocabulary && !listed.shape.empty();
    index_t const unit = vocabulary ? std::max<index_t>(listed.shape.front(), 1) : 1;
    try {
        auto const share = share_of(rule, model.sizes(), {0, rule.expert ? etp_of(sizes.mesh) : sizes.mesh.tp},
                                    std::max<index_t>(w.expert, 0), unit);
        auto const shape = shape_of(rule, share, model.sizes());
        if (listed.shape != shape || listed.divided == share.replicated)
            return "expected " + text(shape, !share.replicated) + ", as config.json has it, got " +
                   text(listed.shape, listed.divided);
    } catch (error const& e) { // no such share
        return e.message();
    }
    using d = safetensors::dtype;
    bool const keeps = !rule.float32 || listed.dtype == d::f32 || listed.dtype == d::f64;
    if (keeps && is_floating(listed.dtype)) return {};
    return std::string("expected ") + (rule.float32 ? "F32, which it must keep" : "F64, F32, F16 or BF16") + ", got " +
           std::string(safetensors::name_of(listed.dtype));
}

} // namespace detail

/// Holds what shards say of their model against a config.json: sizes; of every weight that they list shape, division
/// and dtype; what the list lacks, by the name of Hugging Face; and what is in a layer and none of the model's.
///
/// `audit` holds shards against their list, so that what all of them forget or tell wrongly is found here alone.
/// Multi-token prediction is wanted whole where the list has some of it; vision towers are not looked at. Throws
/// `cpx::error` for settings that tell of no model.
inline std::vector<audit_problem> audit_weights(hf_config const& settings, shard_sizes const& told,
                                                shard_weights const& weights) {
    auto sizes = sizes_of(settings);
    auto const style = style_of(weights, settings, sizes);
    hf_names const model(sizes, style);
    std::vector<audit_problem> problems;
    auto const same = [&](char const* what, auto of_shards, auto of_config) {
        if (of_shards != of_config)
            problems.push_back({audit_fault::disagree, what,
                                detail::text_of_size(of_config) + " in config.json, " +
                                    detail::text_of_size(of_shards) + " as shards tell"});
    };
    same("num_hidden_layers", told.pipeline.layers, static_cast<index_t>(sizes.layers.size()));
    same("num_experts", told.experts, sizes.num_experts);
    same("tie_word_embeddings", told.tied, sizes.tie_word_embeddings);
    std::set<std::string> listed;
    bool copy = false; // of a tied embedding
    std::string before;
    for (auto const& [name, weight] : weights) {
        auto const known = model.from_megatron(name);
        if (!known) {
            auto const family = parse_parameter_name(name).family;
            if (family == name_family::decoder || family == name_family::mtp)
                problems.push_back({audit_fault::unexpected, name, "the model of config.json has no such weight"});
            continue;
        }
        for (auto& source : model.hf(*known)) listed.insert(std::move(source));
        copy = copy || has(known->rule->needs, weight_trait::tied);
        if (known->rule->place == weight_place::model) before = name.substr(0, parse_parameter_name(name).root);
        if (auto wrong = detail::listed_wrongly(model, *known, told, weight))
            problems.push_back({audit_fault::other_shape, name, std::move(*wrong)});
    }
    for (auto const& w : model.weights())
        for (auto const& source : model.hf(w))
            if (!listed.contains(source))
                problems.push_back({audit_fault::no_weight, source, "of config.json, which no shard tells of"});
    if (sizes.tie_word_embeddings && told.mesh.pp > 1 && !copy)
        problems.push_back({audit_fault::no_weight, before + "output_layer.weight",
                            "the last stage's copy of the tied embedding, which no shard tells of"});
    return problems;
}

} // namespace cpx
