// SPDX-License-Identifier: Apache-2.0
// The models that cpx's main job computes: Qwen3.5, dense or a mixture of experts, and Qwen3-VL.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/config_problems.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_conflicts.hpp>
#include <cpx/model/json.hpp>
#include <cpx/model/setting.hpp>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <utility>

namespace cpx {

namespace detail {

/// Notes a problem unless the setting has a value.
template <class T>
void demand(setting<T> const& of, config_problems& problems, std::string expected = "a value") {
    if (!of.has_value() && !of.refused()) problems.add(of.place(), std::move(expected), "none");
}

/// Notes a problem if the setting has another value than `value`.
template <class T>
void only(setting<T> const& of, T const& value, std::string expected, config_problems& problems) {
    if (of.has_value() && *of != value) {
        nlohmann::json const got = *of;
        problems.add(of.place(), std::move(expected),
                     got.is_string() ? quote(got.template get<std::string>()) : got.dump());
    }
}

/// Notes what the main job misses.
inline void demand_settings(hf_config const& c, config_problems& problems) {
    for (auto const* size : {&c.hidden_size, &c.vocab_size, &c.num_hidden_layers, &c.num_attention_heads,
                             &c.num_key_value_heads, &c.head_dim})
        demand(*size, problems);
    if (c.family.experts)
        for (auto const* size :
             {&c.num_experts, &c.num_experts_per_tok, &c.moe_intermediate_size, &c.shared_expert_intermediate_size}) {
            demand(*size, problems);
            if (size->has_value() && **size == 0) problems.add(size->place(), "more than 0", "0");
        }
    else
        demand(c.intermediate_size, problems);
    if (c.family.linear) {
        if (!c.full_attention_interval.has_value())
            demand(c.layer_types, problems, "a value, or full_attention_interval");
        for (auto const* size : {&c.linear_num_key_heads, &c.linear_num_value_heads, &c.linear_key_head_dim,
                                 &c.linear_value_head_dim, &c.linear_conv_kernel_dim})
            demand(*size, problems);
    }
    demand(c.rms_norm_eps, problems);
    demand(c.tie_word_embeddings, problems);
    demand(c.hidden_act, problems);
    demand(c.rope_theta, problems);
    if (!c.family.whole_heads) demand(c.partial_rotary_factor, problems);
    if (c.multimodal())
        for (auto const* id : {&c.image_token_id, &c.video_token_id, &c.spatial_merge_size, &c.out_hidden_size})
            demand(*id, problems);
}

/// Notes what the main job does not compute.
inline void refuse_settings(hf_config const& c, config_problems& problems) {
    if (c.family.name != "qwen3_5" && c.family.name != "qwen3_5_moe" && c.family.name != "qwen3_vl")
        problems.add(c.model_type.place(), "a model of Qwen3.5 or Qwen3-VL", quote(c.family.name));
    only(c.hidden_act, std::string("silu"), R"("silu")", problems);
    only(c.attention_bias, false, "false", problems);
    only(c.attn_output_gate, c.family.gated, c.family.gated ? "true" : "false", problems);
    only(c.rope_type, std::string("default"), R"("default")", problems);
    only(c.old_rope_type, std::string("default"), R"("default")", problems);
    only(c.mrope_interleaved, true, "true", problems);
    if (c.family.sums_to_one)
        only(c.norm_topk_prob, true, "none or true: Qwen3.5 divides the weights of a token's experts by their sum",
             problems);
    if (c.family.experts) {
        only(c.decoder_sparse_step, index_t{1}, "none or 1: all layers have experts", problems);
        if (c.mlp_only_layers.has_value() && !c.mlp_only_layers->empty())
            problems.add(c.mlp_only_layers.place(), "none: all layers have experts",
                         std::to_string(c.mlp_only_layers->size()));
    }
    if (!c.family.whole_heads && c.states(c.inside + "rope_scaling"))
        problems.add((c.inside.empty() ? "/" : "/text_config/") + std::string("rope_scaling"),
                     "rope_parameters instead", "a value");
    // The sides of weights are sums of a few of these, which do not wrap then.
    auto const product = [&](setting<index_t> const& size, setting<index_t> const& many) {
        index_t const most = std::numeric_limits<std::int32_t>::max();
        if (size.value_or(0) * many.value_or(0) > most)
            problems.add(size.place(),
                         std::to_string(most) + " at most when multiplied by " + many.key() + ", " +
                             std::to_string(*many),
                         std::to_string(*size));
    };
    product(c.head_dim, c.num_attention_heads);
    product(c.linear_key_head_dim, c.linear_num_key_heads);
    product(c.linear_value_head_dim, c.linear_num_value_heads);
    if (c.family.experts) product(c.moe_intermediate_size, c.num_experts);
}

} // namespace detail

/// Reads the config.json of a model that the main job computes: all settings it needs have values that fit each other.
///
/// Throws one `cpx::error` as `hf_config::parse` does, which lists also what is missing, at odds or not supported.
inline hf_config computable_config(json_value const& document, caller here = caller::here()) {
    detail::config_problems problems(document.where(), here);
    auto config = detail::read_hf_config(document, problems);
    detail::demand_settings(config, problems);
    detail::refuse_settings(config, problems);
    for_each_conflict(config, [&](config_conflict const& c) { problems.add(c.place, c.expected, c.got); });
    problems.report();
    return config;
}

/// Reads such a file. Throws also if it is not readable or not JSON.
inline hf_config computable_config(std::filesystem::path const& path, caller here = caller::here()) {
    return computable_config(json_value::read(path, {}, here), here);
}

} // namespace cpx
