// SPDX-License-Identifier: Apache-2.0
// Names of a model's parameters as Hugging Face's files have them, told by its config.json and what stands beside it.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_names.hpp>
#include <cpx/model/hf_sizes.hpp>
#include <cpx/model/json.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/weight_sizes.hpp>

#include <cstddef>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

namespace names {

/// Returns the names of a model with so many layers and experts. Weights beside the config.json, or their index, say
/// how it is written; without them experts have a tensor each, and there is multi-token prediction.
///
/// Throws `cpx::error` if the file cannot be read, is of another model, or states too little.
inline cpx::hf_names read_hf_names(std::string const& config, cpx::index_t layers, cpx::index_t experts) {
    namespace fs = std::filesystem;
    auto const settings = cpx::hf_config::read(config);
    auto sizes = cpx::sizes_of(settings);
    cpx::require(
        layers == std::ssize(sizes.layers), "--layers", "decoder layers",
        [&] { return "those of --config, " + std::to_string(sizes.layers.size()); }, layers);
    cpx::require(
        experts == sizes.num_experts, "--experts", "experts of a layer",
        [&] { return "those of --config, " + std::to_string(sizes.num_experts); }, experts);
    fs::path const weights = fs::path(config).parent_path() / "model.safetensors";
    fs::path const index = weights.string() + ".index.json";
    if (fs::exists(index)) {
        auto const style =
            cpx::style_of(cpx::json_value::read(index, {.bytes = 100'000'000}).at("weight_map").keys(), sizes);
        return cpx::hf_names(sizes, style);
    }
    if (fs::exists(weights)) {
        auto const style = cpx::style_of(cpx::safetensors(weights).names(), sizes);
        return cpx::hf_names(sizes, style);
    }
    sizes.mtp = {{.linear = false, .moe = sizes.num_experts > 0}};
    return cpx::hf_names(sizes, {.inside = settings.nested()});
}

/// Returns the names of models of which no config.json tells: Qwen3, Qwen3-MoE and Qwen3-Next, whose layers are of any
/// kind, for a name in Megatron says of which. Sizes do not matter to names.
inline std::vector<cpx::hf_names> assumed_hf_names(cpx::index_t layers, cpx::index_t experts) {
    std::vector<cpx::hf_names> models;
    for (bool const moe : {true, false})
        for (bool const linear : {false, true}) {
            if (moe && experts == 0) continue;
            cpx::weight_sizes sizes{.hidden_size = 1,
                                    .vocab_size = 1,
                                    .intermediate_size = 1,
                                    .num_experts = experts,
                                    .moe_intermediate_size = 1,
                                    .shared_expert_intermediate_size = 1};
            sizes.num_attention_heads = sizes.num_key_value_heads = sizes.head_dim = 1;
            sizes.linear_num_key_heads = sizes.linear_num_value_heads = 1;
            sizes.linear_key_head_dim = sizes.linear_value_head_dim = sizes.linear_conv_kernel_dim = 1;
            sizes.by_key_head = true;
            sizes.layers.assign(static_cast<std::size_t>(layers), {.linear = linear, .moe = moe});
            sizes.mtp = {{.linear = false, .moe = moe}};
            models.emplace_back(sizes);
        }
    return models;
}

} // namespace names
