// SPDX-License-Identifier: Apache-2.0
// Small models of every family, whose weights are named and divided.
#pragma once

#include <cpx/model/hf_names.hpp>

#include <doctest/doctest.h>

#include <support/random.hpp>

#include <string_view>

namespace weight_models {

using cpx::index_t;
using cpx::weight_sizes;
using cpx::weight_style;

inline weight_sizes const qwen3{.hidden_size = 8,
                                .vocab_size = 10,
                                .intermediate_size = 6,
                                .num_attention_heads = 4,
                                .num_key_value_heads = 2,
                                .head_dim = 4,
                                .tie_word_embeddings = true,
                                .layers = {{}, {}}};
inline weight_sizes const qwen3_moe{.hidden_size = 8,
                                    .vocab_size = 10,
                                    .intermediate_size = 6,
                                    .num_experts = 64,
                                    .moe_intermediate_size = 4,
                                    .num_attention_heads = 4,
                                    .num_key_value_heads = 2,
                                    .head_dim = 4,
                                    .layers = {{.moe = true}, {}, {.moe = true}}};
inline weight_sizes const qwen3_next{.hidden_size = 8,
                                     .vocab_size = 10,
                                     .num_experts = 64,
                                     .moe_intermediate_size = 4,
                                     .shared_expert_intermediate_size = 6,
                                     .num_attention_heads = 4,
                                     .num_key_value_heads = 2,
                                     .head_dim = 4,
                                     .attn_output_gate = true,
                                     .linear_num_key_heads = 2,
                                     .linear_num_value_heads = 4,
                                     .linear_key_head_dim = 3,
                                     .linear_value_head_dim = 5,
                                     .linear_conv_kernel_dim = 4,
                                     .by_key_head = true,
                                     .layers = {{.linear = true, .moe = true}, {.moe = true}},
                                     .mtp = {{.moe = true}}};

inline weight_sizes qwen3_5(bool moe) {
    auto s = qwen3_next;
    s.by_key_head = false;
    if (!moe) {
        s.num_experts = s.moe_intermediate_size = s.shared_expert_intermediate_size = 0;
        s.intermediate_size = 6;
        s.layers = {{.linear = true}, {}};
        s.mtp = {{}};
    }
    return s;
}

/// Returns some way of writing both sides.
inline weight_style some_style(support::splitmix& numbers) {
    auto const coin = [&] { return numbers.between(0, 1) == 1; };
    return {coin(), coin(), coin(), coin(), coin(), coin(), coin(), coin(), coin()};
}

/// Returns a small model of any family, which up to 4 ranks divide.
inline weight_sizes some_sizes(support::splitmix& numbers) {
    auto const from = [&](index_t a, index_t b) { return numbers.between(a, b); };
    auto const coin = [&] { return from(0, 1) == 1; };
    weight_sizes s;
    s.hidden_size = 4 * from(1, 3);
    s.vocab_size = from(1, 30);
    s.intermediate_size = 4 * from(1, 3);
    s.num_experts = from(1, 4);
    s.moe_intermediate_size = 4 * from(1, 3);
    s.shared_expert_intermediate_size = coin() ? 4 * from(1, 2) : 0;
    s.num_key_value_heads = 4 * from(1, 2);
    s.num_attention_heads = s.num_key_value_heads * from(1, 3);
    s.head_dim = from(1, 4);
    s.attn_output_gate = coin();
    s.attention_bias = coin();
    s.linear_num_key_heads = 4 * from(1, 2);
    s.linear_num_value_heads = s.linear_num_key_heads * from(1, 3);
    s.linear_key_head_dim = from(1, 3);
    s.linear_value_head_dim = from(1, 3);
    s.linear_conv_kernel_dim = from(1, 4);
    s.tie_word_embeddings = coin();
    s.by_key_head = coin();
    for (auto n = from(1, 2); n > 0; --n) s.layers.push_back({coin(), coin()});
    if (coin()) s.mtp.push_back({false, coin()});
    return s;
}

/// Returns the weight of a name in Megatron.
inline cpx::model_weight weight(cpx::hf_names const& names, std::string_view megatron) {
    auto const found = names.from_megatron(megatron);
    REQUIRE(found.has_value());
    return *found;
}

} // namespace weight_models
