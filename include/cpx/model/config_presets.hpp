// SPDX-License-Identifier: Apache-2.0
// Models by name: the settings of their config.json, and those of a training configuration that agrees.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/json.hpp>
#include <cpx/model/train_config.hpp>

#include <array>
#include <string>
#include <string_view>

namespace cpx {

/// A model: both texts are JSON and state what `check_config` compares, and nothing of parallelism.
struct config_preset {
    std::string_view name, hf, train;

    hf_config hf_settings() const { return hf_config::parse(json_value::parse(hf, std::string(name) + " (hf)")); }
    train_config train_settings() const {
        return train_config::parse(json_value::parse(train, std::string(name) + " (train)"));
    }
};

/// The models there are. Sources: launch scripts of miles and transformers' classes; of the vision towers, published
/// config.json files.
inline constexpr std::array<config_preset, 4> config_presets{{
    {"Qwen3.5-35B-A3B",
     R"({"model_type": "qwen3_5_moe", "tie_word_embeddings": false, "image_token_id": 248056,
"video_token_id": 248057, "text_config": {"model_type": "qwen3_5_moe_text", "hidden_size": 2048,
"num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
"hidden_act": "silu", "attention_bias": false, "attn_output_gate": true, "moe_intermediate_size": 512,
"shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "rms_norm_eps": 1e-06,
"rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
"mrope_section": [11, 11, 10], "mrope_interleaved": true}, "full_attention_interval": 4, "linear_num_key_heads": 16,
"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
"mtp_num_hidden_layers": 1}, "vision_config": {"depth": 27, "hidden_size": 1152, "patch_size": 16,
"temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304, "out_hidden_size": 2048,
"deepstack_visual_indexes": []}})",
     R"({"hidden_size": 2048, "num_layers": 40, "num_attention_heads": 16, "group_query_attention": true,
"num_query_groups": 2, "kv_channels": 256, "ffn_hidden_size": 512, "vocab_size": 248320, "padded_vocab_size": 248320,
"untie_embeddings_and_output_weights": true, "add_qkv_bias": false, "qk_layernorm": true,
"attention_output_gate": true, "apply_layernorm_1p": true, "norm_epsilon": 1e-06, "rotary_base": 10000000,
"rotary_percent": 0.25, "mrope_section": [11, 11, 10], "num_experts": 256, "moe_router_topk": 8,
"moe_ffn_hidden_size": 512, "moe_shared_expert_intermediate_size": 512, "moe_shared_expert_gate": true,
"moe_router_pre_softmax": false, "moe_layer_freq": 1, "linear_attention_freq": 4, "linear_num_key_heads": 16,
"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
"mtp_num_layers": 1})"},
    {"Qwen3-Next-80B-A3B",
     R"({"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
"num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "hidden_act": "silu", "attention_bias": false,
"intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
"num_experts_per_tok": 10, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
"rms_norm_eps": 1e-06, "rope_theta": 10000000, "rope_scaling": null, "partial_rotary_factor": 0.25,
"full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_nextn_predict_layers": 1,
"tie_word_embeddings": false})",
     R"({"hidden_size": 2048, "num_layers": 48, "num_attention_heads": 16, "group_query_attention": true,
"num_query_groups": 2, "kv_channels": 256, "ffn_hidden_size": 5120, "vocab_size": 151936, "padded_vocab_size": 151936,
"untie_embeddings_and_output_weights": true, "add_qkv_bias": false, "qk_layernorm": true,
"attention_output_gate": true, "apply_layernorm_1p": true, "norm_epsilon": 1e-06, "rotary_base": 10000000,
"rotary_percent": 0.25, "num_experts": 512, "moe_router_topk": 10, "moe_ffn_hidden_size": 512,
"moe_shared_expert_intermediate_size": 512, "moe_shared_expert_gate": true, "moe_router_pre_softmax": false,
"moe_layer_freq": 1, "linear_attention_freq": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mtp_num_layers": 1})"},
    {"Qwen3-30B-A3B",
     R"({"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu", "attention_bias": false,
"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
"norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-06,
"rope_theta": 1000000.0, "rope_scaling": null, "tie_word_embeddings": false})",
     R"({"hidden_size": 2048, "num_layers": 48, "num_attention_heads": 32, "group_query_attention": true,
"num_query_groups": 4, "kv_channels": 128, "ffn_hidden_size": 6144, "vocab_size": 151936, "padded_vocab_size": 151936,
"untie_embeddings_and_output_weights": true, "add_qkv_bias": false, "qk_layernorm": true,
"attention_output_gate": false, "apply_layernorm_1p": false, "norm_epsilon": 1e-06, "rotary_base": 1000000,
"rotary_percent": 1.0, "num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768,
"moe_shared_expert_intermediate_size": null, "moe_shared_expert_gate": false, "moe_router_pre_softmax": false,
"moe_layer_freq": 1, "mtp_num_layers": null})"},
    {"Qwen3-VL-2B",
     R"({"model_type": "qwen3_vl", "tie_word_embeddings": true, "image_token_id": 151655, "video_token_id": 151656,
"text_config": {"model_type": "qwen3_vl_text", "hidden_size": 2048, "num_hidden_layers": 28,
"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu",
"attention_bias": false, "intermediate_size": 6144, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": true}},
"vision_config": {"depth": 24, "hidden_size": 1024, "patch_size": 16, "temporal_patch_size": 2,
"spatial_merge_size": 2, "num_position_embeddings": 2304, "out_hidden_size": 2048,
"deepstack_visual_indexes": [5, 11, 17]}})",
     R"({"hidden_size": 2048, "num_layers": 28, "num_attention_heads": 16, "group_query_attention": true,
"num_query_groups": 8, "kv_channels": 128, "ffn_hidden_size": 6144, "vocab_size": 151936, "padded_vocab_size": 151936,
"untie_embeddings_and_output_weights": false, "add_qkv_bias": false, "qk_layernorm": true,
"attention_output_gate": false, "apply_layernorm_1p": false, "norm_epsilon": 1e-06, "rotary_base": 5000000,
"rotary_percent": 1.0, "mrope_section": [24, 20, 20], "num_experts": null, "mtp_num_layers": null})"},
}};

/// Returns a preset. Throws `cpx::error` that lists the names if there is none.
inline config_preset const& find_config_preset(std::string_view name, caller here = caller::here()) {
    std::string names;
    for (auto const& preset : config_presets) {
        if (preset.name == name) return preset;
        names += (names.empty() ? "" : ", ") + std::string(preset.name);
    }
    throw error("find_config_preset", "name", "one of " + names, quote(name), here);
}

} // namespace cpx
