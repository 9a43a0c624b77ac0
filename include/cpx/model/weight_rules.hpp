// SPDX-License-Identifier: Apache-2.0
// The names of a language model's weights in Hugging Face's files and in Megatron, as one table.
#pragma once

#include <cpx/model/weight_sizes.hpp>

#include <array>
#include <cstddef>
#include <string_view>

namespace cpx {

/// What a rule of the table needs of a model, or of the way in which one of both sides writes it; and sets of these.
enum class weight_trait : unsigned {
    none = 0,
    tied = 1,          ///< the output layer is the embedding, or has a copy of it
    untied = 2,        ///< it has weights of its own
    biases = 4,        ///< projections of full attention have biases
    shared_expert = 8, ///< there is an expert for every token
    expert_bias = 16,  ///< the router adds a number to each expert's score before it chooses
    // Hugging Face's side:
    flat = 32,              ///< linear attention: sections q, k, v, then z, b, a, each in a whole (Qwen3.5)
    by_key_head = 64,       ///< linear attention: sections of one key head after those of another (Qwen3-Next)
    separate_experts = 128, ///< a tensor for each expert
    stacked_experts = 256,  ///< one tensor for all experts of a layer
    // Megatron's side:
    fused_norms = 512,      ///< Transformer Engine's layers, which have the norm before them
    own_norms = 1024,       ///< local layers, beside which the norm is
    native_linear = 2048,   ///< linear attention is Megatron Core's
    hf_linear = 4096,       ///< linear attention is Hugging Face's module, as miles keeps it
    grouped_experts = 8192, ///< one module for the experts of a layer: weightN
    listed_experts = 16384, ///< a module for each expert: local_experts.N
};

constexpr weight_trait operator|(weight_trait a, weight_trait b) {
    return weight_trait{static_cast<unsigned>(a) | static_cast<unsigned>(b)};
}
constexpr weight_trait operator&(weight_trait a, weight_trait b) {
    return weight_trait{static_cast<unsigned>(a) & static_cast<unsigned>(b)};
}
/// Returns whether all of `needed` are in `set`.
constexpr bool has(weight_trait set, weight_trait needed) { return (set & needed) == needed; }

/// Where in a model the weights of a rule are.
enum class weight_place { model, mtp, full_attention, linear_attention, dense_mlp, moe_mlp };

/// How Megatron's tensor is made of Hugging Face's, and how tensor parallelism divides it.
enum class weight_form {
    whole,       ///< one tensor as it is; every rank has it
    rows,        ///< tensors one below the other, the rows of each divided: [gate; up] is [gate_r; up_r] of a rank
    columns,     ///< one tensor, its columns divided
    vocabulary,  ///< one tensor, its rows divided when enough are added to it
    groups,      ///< q, k, v: a key head's query heads, then their gates if there are any, then k, then v
    conv,        ///< one tensor of sections q, k, v, the heads of each divided
    linear_flat, ///< qkv, z, b, a become sections [q; k; v; z; b; a], the heads of each divided
    linear_by_key_head, ///< so do qkvz and ba, whose rows are those of one key head after another
    stacked_rows,       ///< an expert's [gate; up] of the tensor of all, as `rows`
    stacked_columns,    ///< an expert's share of the tensor of all, as `columns`
};

/// A tensor of Hugging Face: its name, after that of its layer if it is in one, and its shape.
///
/// `$` stands for "model." or "model.language_model.", `#` for the number of the expert.
struct weight_source {
    std::string_view name{};
    std::array<weight_extent, 3> shape{};
};

/// One weight on both sides.
struct weight_rule {
    std::string_view megatron; ///< after the name of its layer if it is in one; `#` is the number of the expert
    weight_place place;
    weight_form form;
    std::array<weight_source, 4> from;
    weight_trait needs = weight_trait::none;
    bool float32 = false;      ///< Megatron keeps it in float32 at least, whatever the others' dtype is
    bool zero_centred = false; ///< Megatron has it minus 1
    bool expert = false;       ///< divided over etp, and experts over ep

    constexpr std::size_t sources() const {
        std::size_t n = 0;
        while (n < from.size() && !from[n].name.empty()) ++n;
        return n;
    }
};

/// All weights. Where the same weight has several rules, their needs exclude each other for any one model; but all of
/// them can be read, as a name on one side belongs to weights of one kind only.
///
/// Source: Megatron-LM's GPTModel and its layers (megatron/core), the modules of transformers' Qwen3 families, and
/// Megatron-Bridge's and miles' tables between both.
inline constexpr auto weight_rules = [] {
    using enum weight_extent;
    using enum weight_place;
    using trait = weight_trait;
    using form = weight_form;
    constexpr weight_source input_norm{"input_layernorm.weight", {hidden}};
    constexpr weight_source mlp_norm{"post_attention_layernorm.weight", {hidden}};
    constexpr weight_source expert_gate{"mlp.experts.#.gate_proj.weight", {expert_inner, hidden}};
    constexpr weight_source expert_up{"mlp.experts.#.up_proj.weight", {expert_inner, hidden}};
    constexpr weight_source expert_down{"mlp.experts.#.down_proj.weight", {hidden, expert_inner}};
    constexpr weight_source stacked_gate_up{"mlp.experts.gate_up_proj", {experts, two_expert_inner, hidden}};
    constexpr weight_source stacked_down{"mlp.experts.down_proj", {experts, hidden, expert_inner}};
    return std::to_array<weight_rule>({
        {"embedding.word_embeddings.weight",
         model,
         form::vocabulary,
         {{{"$embed_tokens.weight", {vocabulary, hidden}}}}},
        {"output_layer.weight", model, form::vocabulary, {{{"lm_head.weight", {vocabulary, hidden}}}}, trait::untied},
        {"output_layer.weight",
         model,
         form::vocabulary,
         {{{"$embed_tokens.weight", {vocabulary, hidden}}}},
         trait::tied},
        {"decoder.final_layernorm.weight", model, form::whole, {{{"$norm.weight", {hidden}}}}},

        {"mtp.layers.0.enorm.weight", mtp, form::whole, {{{"mtp.pre_fc_norm_embedding.weight", {hidden}}}}},
        {"mtp.layers.0.hnorm.weight", mtp, form::whole, {{{"mtp.pre_fc_norm_hidden.weight", {hidden}}}}},
        {"mtp.layers.0.eh_proj.weight", mtp, form::rows, {{{"mtp.fc.weight", {hidden, two_hidden}}}}},
        {"mtp.layers.0.final_layernorm.weight", mtp, form::whole, {{{"mtp.norm.weight", {hidden}}}}},

        {"self_attention.linear_qkv.layer_norm_weight",
         full_attention,
         form::whole,
         {{input_norm}},
         trait::fused_norms},
        {"input_layernorm.weight", full_attention, form::whole, {{input_norm}}, trait::own_norms},
        {"self_attention.linear_qkv.weight",
         full_attention,
         form::groups,
         {{{"self_attn.q_proj.weight", {query, hidden}},
           {"self_attn.k_proj.weight", {key, hidden}},
           {"self_attn.v_proj.weight", {key, hidden}}}}},
        {"self_attention.linear_qkv.bias",
         full_attention,
         form::groups,
         {{{"self_attn.q_proj.bias", {query}}, {"self_attn.k_proj.bias", {key}}, {"self_attn.v_proj.bias", {key}}}},
         trait::biases},
        {"self_attention.q_layernorm.weight", full_attention, form::whole, {{{"self_attn.q_norm.weight", {head}}}}},
        {"self_attention.k_layernorm.weight", full_attention, form::whole, {{{"self_attn.k_norm.weight", {head}}}}},
        {"self_attention.linear_proj.weight",
         full_attention,
         form::columns,
         {{{"self_attn.o_proj.weight", {hidden, attention}}}}},
        {"self_attention.linear_proj.bias",
         full_attention,
         form::whole,
         {{{"self_attn.o_proj.bias", {hidden}}}},
         trait::biases},

        {"self_attention.in_proj.layer_norm_weight",
         linear_attention,
         form::whole,
         {{input_norm}},
         trait::native_linear | trait::fused_norms},
        {"input_layernorm.weight",
         linear_attention,
         form::whole,
         {{input_norm}},
         trait::native_linear | trait::own_norms},
        {"self_attention.in_proj.weight",
         linear_attention,
         form::linear_flat,
         {{{"linear_attn.in_proj_qkv.weight", {linear_qkv, hidden}},
           {"linear_attn.in_proj_z.weight", {linear_z, hidden}},
           {"linear_attn.in_proj_b.weight", {linear_heads, hidden}},
           {"linear_attn.in_proj_a.weight", {linear_heads, hidden}}}},
         trait::native_linear | trait::flat},
        {"self_attention.in_proj.weight",
         linear_attention,
         form::linear_by_key_head,
         {{{"linear_attn.in_proj_qkvz.weight", {linear_qkvz, hidden}},
           {"linear_attn.in_proj_ba.weight", {linear_ba, hidden}}}},
         trait::native_linear | trait::by_key_head},
        {"self_attention.conv1d.weight",
         linear_attention,
         form::conv,
         {{{"linear_attn.conv1d.weight", {linear_qkv, one, linear_kernel}}}},
         trait::native_linear},
        {.megatron = "self_attention.A_log",
         .place = linear_attention,
         .form = form::rows,
         .from = {{{"linear_attn.A_log", {linear_heads}}}},
         .needs = trait::native_linear,
         .float32 = true},
        {"self_attention.dt_bias",
         linear_attention,
         form::rows,
         {{{"linear_attn.dt_bias", {linear_heads}}}},
         trait::native_linear},
        {.megatron = "self_attention.out_norm.weight",
         .place = linear_attention,
         .form = form::whole,
         .from = {{{"linear_attn.norm.weight", {linear_head}}}},
         .needs = trait::native_linear,
         .zero_centred = true},
        {"self_attention.out_proj.weight",
         linear_attention,
         form::columns,
         {{{"linear_attn.out_proj.weight", {hidden, linear_z}}}},
         trait::native_linear},

        {"self_attention.input_layernorm.weight", linear_attention, form::whole, {{input_norm}}, trait::hf_linear},
        {"self_attention.linear_attn.in_proj_qkv.weight",
         linear_attention,
         form::whole,
         {{{"linear_attn.in_proj_qkv.weight", {linear_qkv, hidden}}}},
         trait::hf_linear | trait::flat},
        {"self_attention.linear_attn.in_proj_z.weight",
         linear_attention,
         form::whole,
         {{{"linear_attn.in_proj_z.weight", {linear_z, hidden}}}},
         trait::hf_linear | trait::flat},
        {"self_attention.linear_attn.in_proj_b.weight",
         linear_attention,
         form::whole,
         {{{"linear_attn.in_proj_b.weight", {linear_heads, hidden}}}},
         trait::hf_linear | trait::flat},
        {"self_attention.linear_attn.in_proj_a.weight",
         linear_attention,
         form::whole,
         {{{"linear_attn.in_proj_a.weight", {linear_heads, hidden}}}},
         trait::hf_linear | trait::flat},
        {"self_attention.linear_attn.in_proj_qkvz.weight",
         linear_attention,
         form::whole,
         {{{"linear_attn.in_proj_qkvz.weight", {linear_qkvz, hidden}}}},
         trait::hf_linear | trait::by_key_head},
        {"self_attention.linear_attn.in_proj_ba.weight",
         linear_attention,
         form::whole,
         {{{"linear_attn.in_proj_ba.weight", {linear_ba, hidden}}}},
         trait::hf_linear | trait::by_key_head},
        {"self_attention.linear_attn.conv1d.weight",
         linear_attention,
         form::whole,
         {{{"linear_attn.conv1d.weight", {linear_qkv, one, linear_kernel}}}},
         trait::hf_linear},
        {.megatron = "self_attention.linear_attn.A_log",
         .place = linear_attention,
         .form = form::whole,
         .from = {{{"linear_attn.A_log", {linear_heads}}}},
         .needs = trait::hf_linear,
         .float32 = true},
        {"self_attention.linear_attn.dt_bias",
         linear_attention,
         form::whole,
         {{{"linear_attn.dt_bias", {linear_heads}}}},
         trait::hf_linear},
        {"self_attention.linear_attn.norm.weight",
         linear_attention,
         form::whole,
         {{{"linear_attn.norm.weight", {linear_head}}}},
         trait::hf_linear},
        {"self_attention.linear_attn.out_proj.weight",
         linear_attention,
         form::whole,
         {{{"linear_attn.out_proj.weight", {hidden, linear_z}}}},
         trait::hf_linear},

        {"mlp.linear_fc1.layer_norm_weight", dense_mlp, form::whole, {{mlp_norm}}, trait::fused_norms},
        {"pre_mlp_layernorm.weight", dense_mlp, form::whole, {{mlp_norm}}, trait::own_norms},
        {"mlp.linear_fc1.weight",
         dense_mlp,
         form::rows,
         {{{"mlp.gate_proj.weight", {inner, hidden}}, {"mlp.up_proj.weight", {inner, hidden}}}}},
        {"mlp.linear_fc2.weight", dense_mlp, form::columns, {{{"mlp.down_proj.weight", {hidden, inner}}}}},

        {"pre_mlp_layernorm.weight", moe_mlp, form::whole, {{mlp_norm}}},
        {"mlp.router.weight", moe_mlp, form::whole, {{{"mlp.gate.weight", {experts, hidden}}}}},
        {.megatron = "mlp.router.expert_bias",
         .place = moe_mlp,
         .form = form::whole,
         .from = {{{"mlp.gate.e_score_correction_bias", {experts}}}},
         .needs = trait::expert_bias,
         .float32 = true},
        {.megatron = "mlp.experts.linear_fc1.weight#",
         .place = moe_mlp,
         .form = form::rows,
         .from = {{expert_gate, expert_up}},
         .needs = trait::grouped_experts | trait::separate_experts,
         .expert = true},
        {.megatron = "mlp.experts.linear_fc2.weight#",
         .place = moe_mlp,
         .form = form::columns,
         .from = {{expert_down}},
         .needs = trait::grouped_experts | trait::separate_experts,
         .expert = true},
        {.megatron = "mlp.experts.local_experts.#.linear_fc1.weight",
         .place = moe_mlp,
         .form = form::rows,
         .from = {{expert_gate, expert_up}},
         .needs = trait::listed_experts | trait::separate_experts,
         .expert = true},
        {.megatron = "mlp.experts.local_experts.#.linear_fc2.weight",
         .place = moe_mlp,
         .form = form::columns,
         .from = {{expert_down}},
         .needs = trait::listed_experts | trait::separate_experts,
         .expert = true},
        {.megatron = "mlp.experts.linear_fc1.weight#",
         .place = moe_mlp,
         .form = form::stacked_rows,
         .from = {{stacked_gate_up}},
         .needs = trait::grouped_experts | trait::stacked_experts,
         .expert = true},
        {.megatron = "mlp.experts.linear_fc2.weight#",
         .place = moe_mlp,
         .form = form::stacked_columns,
         .from = {{stacked_down}},
         .needs = trait::grouped_experts | trait::stacked_experts,
         .expert = true},
        {.megatron = "mlp.experts.local_experts.#.linear_fc1.weight",
         .place = moe_mlp,
         .form = form::stacked_rows,
         .from = {{stacked_gate_up}},
         .needs = trait::listed_experts | trait::stacked_experts,
         .expert = true},
        {.megatron = "mlp.experts.local_experts.#.linear_fc2.weight",
         .place = moe_mlp,
         .form = form::stacked_columns,
         .from = {{stacked_down}},
         .needs = trait::listed_experts | trait::stacked_experts,
         .expert = true},
        {"mlp.shared_experts.linear_fc1.weight",
         moe_mlp,
         form::rows,
         {{{"mlp.shared_expert.gate_proj.weight", {shared_inner, hidden}},
           {"mlp.shared_expert.up_proj.weight", {shared_inner, hidden}}}},
         trait::shared_expert},
        {"mlp.shared_experts.linear_fc2.weight",
         moe_mlp,
         form::columns,
         {{{"mlp.shared_expert.down_proj.weight", {hidden, shared_inner}}}},
         trait::shared_expert},
        {"mlp.shared_experts.gate_weight",
         moe_mlp,
         form::whole,
         {{{"mlp.shared_expert_gate.weight", {one, hidden}}}},
         trait::shared_expert},
    });
}();

} // namespace cpx
