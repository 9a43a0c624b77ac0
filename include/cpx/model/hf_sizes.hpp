// SPDX-License-Identifier: Apache-2.0
// What a config.json says of the weights of its model.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/weight_sizes.hpp>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>

namespace cpx {

/// Returns the sizes of the weights of a model's language model. Of multi-token prediction weights say more than
/// settings do: `mtp` is empty, and `style_of` fills it.
///
/// Throws `cpx::error` that names the document and a setting that it does not state, although a layer needs it, or that
/// does not fit another.
inline weight_sizes sizes_of(hf_config const& config, caller here = caller::here()) {
    weight_sizes s;
    auto const types = config.layers(here);
    require(
        !config.num_hidden_layers.has_value() || *config.num_hidden_layers == std::ssize(types), config.where.c_str(),
        "layer_types", [&] { return "as many as num_hidden_layers, " + std::to_string(*config.num_hidden_layers); },
        types.size(), here);
    for (index_t i = 0; i < std::ssize(types); ++i)
        s.layers.push_back({types[static_cast<std::size_t>(i)] == layer_type::linear_attention, config.moe(i)});
    auto const any = [&](auto member, bool value) { return std::ranges::count(s.layers, value, member) > 0; };
    using layer = weight_sizes::layer;
    s.hidden_size = config.hidden_size.value(here);
    s.vocab_size = config.vocab_size.value(here);
    s.tie_word_embeddings = config.tie_word_embeddings.value(here);
    s.by_key_head = config.family.name == "qwen3_next";
    // Multi-token prediction, which settings need not mention, has full attention too.
    s.num_attention_heads = config.num_attention_heads.value(here);
    s.num_key_value_heads = config.num_key_value_heads.value(here);
    s.head_dim = config.head_dim.value(here);
    s.attn_output_gate = config.gated();
    s.attention_bias = config.attention_bias.value_or(false);
    if (any(&layer::linear, true)) {
        s.linear_num_key_heads = config.linear_num_key_heads.value(here);
        s.linear_num_value_heads = config.linear_num_value_heads.value(here);
        s.linear_key_head_dim = config.linear_key_head_dim.value(here);
        s.linear_value_head_dim = config.linear_value_head_dim.value(here);
        s.linear_conv_kernel_dim = config.linear_conv_kernel_dim.value(here);
    }
    if (any(&layer::moe, false)) s.intermediate_size = config.intermediate_size.value(here);
    if (any(&layer::moe, true)) {
        s.num_experts = config.num_experts.value(here);
        s.moe_intermediate_size = config.moe_intermediate_size.value(here);
        if (config.family.shared_expert)
            s.shared_expert_intermediate_size = config.shared_expert_intermediate_size.value(here);
    }
    try {
        detail::check(s, here);
    } catch (error const& e) {
        throw error(config.where, e.problem(), e.expected(), e.got(), here);
    }
    return s;
}

} // namespace cpx
