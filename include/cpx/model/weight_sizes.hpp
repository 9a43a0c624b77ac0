// SPDX-License-Identifier: Apache-2.0
// The sizes of which the shapes of a language model's weights are made.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>

#include <string>
#include <vector>

namespace cpx {

/// What decides which weights a language model of the families Qwen3, Qwen3-MoE, Qwen3-Next, Qwen3-VL and Qwen3.5 has,
/// and their shapes: settings under the names that its config.json uses. Those of what it does not have are 0.
struct weight_sizes {
    /// What one decoder layer is made of.
    struct layer {
        bool linear = false; ///< linear attention (gated delta net) in place of full attention
        bool moe = false;    ///< a mixture of experts in place of a dense MLP
        friend constexpr bool operator==(layer, layer) = default;
    };

    index_t hidden_size = 0, vocab_size = 0;
    index_t intermediate_size = 0; ///< of dense MLPs
    index_t num_experts = 0, moe_intermediate_size = 0;
    index_t shared_expert_intermediate_size = 0; ///< 0: without a shared expert
    index_t num_attention_heads = 0, num_key_value_heads = 0, head_dim = 0;
    bool attn_output_gate = false; ///< q_proj has a gate beside each head
    bool attention_bias = false;   ///< q, k, v and o have biases
    index_t linear_num_key_heads = 0, linear_num_value_heads = 0, linear_key_head_dim = 0, linear_value_head_dim = 0;
    index_t linear_conv_kernel_dim = 0;
    bool tie_word_embeddings = false;
    bool by_key_head = false;    ///< Qwen3-Next: projections of linear attention are stored key head by key head
    std::vector<layer> layers{}; ///< the decoder's
    std::vector<layer> mtp{};    ///< of multi-token prediction: at most one
};

/// A size that the shape of a Hugging Face tensor names.
enum class weight_extent {
    none, ///< no such axis
    one,
    hidden,
    two_hidden,
    vocabulary,
    query,     ///< rows of q_proj: with the gates, if there are any
    key,       ///< rows of k_proj and v_proj
    attention, ///< columns of o_proj
    head,
    inner, ///< of a dense MLP
    expert_inner,
    two_expert_inner,
    shared_inner,
    experts,
    linear_qkv,    ///< q, k and v of linear attention
    linear_qkvz,   ///< and the gates z
    linear_z,      ///< as many as v
    linear_heads,  ///< of v
    linear_ba,     ///< b and a
    linear_head,   ///< of v
    linear_kernel, ///< of the convolution
};

/// Returns a size; 0 for `weight_extent::none`.
constexpr index_t size_of(weight_extent which, weight_sizes const& s) {
    index_t const keys = s.linear_num_key_heads * s.linear_key_head_dim,
                  values = s.linear_num_value_heads * s.linear_value_head_dim;
    switch (which) {
    case weight_extent::none: return 0;
    case weight_extent::one: return 1;
    case weight_extent::hidden: return s.hidden_size;
    case weight_extent::two_hidden: return 2 * s.hidden_size;
    case weight_extent::vocabulary: return s.vocab_size;
    case weight_extent::query: return s.num_attention_heads * s.head_dim * (s.attn_output_gate ? 2 : 1);
    case weight_extent::key: return s.num_key_value_heads * s.head_dim;
    case weight_extent::attention: return s.num_attention_heads * s.head_dim;
    case weight_extent::head: return s.head_dim;
    case weight_extent::inner: return s.intermediate_size;
    case weight_extent::expert_inner: return s.moe_intermediate_size;
    case weight_extent::two_expert_inner: return 2 * s.moe_intermediate_size;
    case weight_extent::shared_inner: return s.shared_expert_intermediate_size;
    case weight_extent::experts: return s.num_experts;
    case weight_extent::linear_qkv: return 2 * keys + values;
    case weight_extent::linear_qkvz: return 2 * keys + 2 * values;
    case weight_extent::linear_z: return values;
    case weight_extent::linear_heads: return s.linear_num_value_heads;
    case weight_extent::linear_ba: return 2 * s.linear_num_value_heads;
    case weight_extent::linear_head: return s.linear_value_head_dim;
    case weight_extent::linear_kernel: return s.linear_conv_kernel_dim;
    }
    return 0;
}

namespace detail {

/// Throws `cpx::error` for sizes that no weight can have: those that are needed and are below 1 or above
/// 2^30, heads that do not divide, and more than one layer of multi-token prediction, whose names nobody has settled.
inline void check(weight_sizes const& s, caller here) {
    constexpr index_t most = 1 << 30; // sums of products of two of them do not overflow
    auto const positive = [&](char const* what, index_t size) {
        require(size >= 1 && size <= most, "weight_sizes", what, "1 to " + std::to_string(most), size, here);
    };
    auto const multiple = [&](char const* what, index_t many, char const* of, index_t few) {
        require(
            many % few == 0, "weight_sizes", what,
            [&] { return std::string("a multiple of ") + of + ", " + std::to_string(few); }, many, here);
    };
    positive("hidden_size", s.hidden_size);
    positive("vocab_size", s.vocab_size);
    require(s.mtp.size() <= 1, "weight_sizes", "layers of multi-token prediction", "at most 1", s.mtp.size(), here);
    bool full = false, linear = false, dense = false, moe = false;
    for (auto const* const of : {&s.layers, &s.mtp})
        for (auto const& l : *of) {
            (l.linear ? linear : full) = true;
            (l.moe ? moe : dense) = true;
        }
    if (full) {
        positive("num_attention_heads", s.num_attention_heads);
        positive("num_key_value_heads", s.num_key_value_heads);
        positive("head_dim", s.head_dim);
        multiple("num_attention_heads", s.num_attention_heads, "num_key_value_heads", s.num_key_value_heads);
    }
    if (linear) {
        positive("linear_num_key_heads", s.linear_num_key_heads);
        positive("linear_num_value_heads", s.linear_num_value_heads);
        positive("linear_key_head_dim", s.linear_key_head_dim);
        positive("linear_value_head_dim", s.linear_value_head_dim);
        positive("linear_conv_kernel_dim", s.linear_conv_kernel_dim);
        multiple("linear_num_value_heads", s.linear_num_value_heads, "linear_num_key_heads", s.linear_num_key_heads);
    }
    if (dense) positive("intermediate_size", s.intermediate_size);
    if (moe) {
        positive("num_experts", s.num_experts);
        positive("moe_intermediate_size", s.moe_intermediate_size);
        if (s.shared_expert_intermediate_size != 0)
            positive("shared_expert_intermediate_size", s.shared_expert_intermediate_size);
    }
}

} // namespace detail

} // namespace cpx
