// SPDX-License-Identifier: Apache-2.0
// What a training configuration states of its model and its parallelism, under the names of Megatron's arguments.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/config_problems.hpp>
#include <cpx/model/json.hpp>
#include <cpx/model/layer_choice.hpp>
#include <cpx/model/setting.hpp>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace cpx {

/// Reads one text or a list of texts.
inline void convert_setting(json_value const& stated, std::vector<std::string>& texts,
                            detail::config_problems& problems) {
    if (stated.is_array())
        texts = problems.as<std::vector<std::string>>(stated);
    else
        texts = {problems.as<std::string>(stated)};
}

/// The arguments of a training job that its model's config.json has something to say to. What the file leaves out has
/// no value, never Megatron's default; null is what Megatron has where an argument is not given.
struct train_config {
    setting<index_t> hidden_size, num_layers, num_attention_heads, num_query_groups, kv_channels, ffn_hidden_size;
    setting<index_t> vocab_size, padded_vocab_size;
    setting<bool> group_query_attention; // false: num_query_groups does not count
    setting<bool> untie_embeddings_and_output_weights, add_qkv_bias, qk_layernorm, attention_output_gate;
    setting<bool> apply_layernorm_1p;                // norms multiply by 1 + weight
    setting<double> norm_epsilon, layernorm_epsilon; // two names of one
    setting<double> rotary_base, rotary_percent;
    setting<std::vector<index_t>> mrope_section;

    setting<index_t> num_experts, moe_router_topk, moe_ffn_hidden_size, moe_shared_expert_intermediate_size;
    setting<bool> moe_router_pre_softmax, moe_shared_expert_gate;
    setting<layer_choice> moe_layer_freq; // layer i has experts if it divides i

    setting<layer_choice> linear_attention_freq; // layer i has full attention if it divides i + 1
    setting<index_t> linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim;
    setting<index_t> linear_conv_kernel_dim;

    setting<index_t> mtp_num_layers;

    setting<index_t> tensor_model_parallel_size, context_parallel_size, expert_model_parallel_size;
    setting<index_t> pipeline_model_parallel_size, virtual_pipeline_model_parallel_size;
    setting<index_t> num_layers_per_virtual_pipeline_stage, num_virtual_stages_per_pipeline_rank;
    setting<index_t> decoder_first_pipeline_num_layers, decoder_last_pipeline_num_layers;
    setting<bool> account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split;
    setting<std::string> pipeline_model_parallel_layout;
    setting<std::vector<std::string>> cp_comm_type;                    // one, or one a layer
    setting<std::vector<index_t>> hierarchical_context_parallel_sizes; // a2a, then p2p
    setting<bool> allgather_cp;                                        // ranks have tokens in sequence, not zigzag
    setting<index_t> seq_length;
    setting<bool> calculate_per_token_loss;

    std::string where; ///< the name of the document

    /// Reads a JSON file. Throws `cpx::error` as `parse` does, and if the file is not readable or not JSON.
    static train_config read(std::filesystem::path const& path, caller here = caller::here()) {
        return parse(json_value::read(path, {}, here), here);
    }

    /// Reads one object whose keys are Megatron's arguments, as Python has them, `num_layers`, or as a command line,
    /// `num-layers` or `--num-layers`. Keys that are not known say nothing.
    ///
    /// Throws one `cpx::error` that names the document and lists the settings, of very many the first 8, that are of
    /// the wrong type or out of range; or says that an argument has two values, or that keys are of a config.json.
    static train_config parse(json_value const& document, caller here = caller::here());
};

namespace detail {

/// Returns the keys of a training configuration under their names in Python. Refuses what is easily taken for one, and
/// two spellings of a key with different values.
inline std::map<std::string, std::string, std::less<>> argument_keys(json_value const& document, caller here) {
    if (!document.is_object()) document.fail("an object", here);
    std::map<std::string, std::string, std::less<>> keys;
    for (auto const& key : document.keys()) {
        auto name = key.starts_with("--") ? key.substr(2) : key;
        std::ranges::replace(name, '-', '_');
        auto const found = keys.try_emplace(name, key);
        auto const& other = found.first->second;
        require(
            found.second || document.at(key).same(document.at(other)), document.where().c_str(), "an argument",
            [&] { return "one value of " + quote(other) + " and " + quote(key); }, "two", here);
    }
    for (char const* const key : {"num_hidden_layers", "text_config"})
        if (document.has(key) && !keys.contains("num_layers"))
            throw error(document.where(), "a training configuration",
                        "names of Megatron's arguments, such as num_layers",
                        quote(key) + ", which a config.json of Hugging Face has", here);
    return keys;
}

} // namespace detail

inline train_config train_config::parse(json_value const& document, caller here) {
    auto const keys = detail::argument_keys(document, here);
    auto const spelled = [&](std::string const& key) {
        auto const found = keys.find(key);
        return found == keys.end() ? key : found->second;
    };
    detail::config_problems problems(document.where(), here);
    train_config c;
    c.where = document.where();
    auto const read = [&](at_least least, auto const& table) {
        for (auto const& [key, member] : table) (c.*member).read(document, spelled(key), problems, least);
    };
    using t = train_config;
    using sizes = std::vector<std::pair<char const*, setting<index_t> t::*>>;
    read(at_least::one, sizes{{"hidden_size", &t::hidden_size},
                              {"num_layers", &t::num_layers},
                              {"num_attention_heads", &t::num_attention_heads},
                              {"num_query_groups", &t::num_query_groups},
                              {"kv_channels", &t::kv_channels},
                              {"ffn_hidden_size", &t::ffn_hidden_size},
                              {"vocab_size", &t::vocab_size},
                              {"padded_vocab_size", &t::padded_vocab_size},
                              {"moe_router_topk", &t::moe_router_topk},
                              {"moe_ffn_hidden_size", &t::moe_ffn_hidden_size},
                              {"linear_num_key_heads", &t::linear_num_key_heads},
                              {"linear_num_value_heads", &t::linear_num_value_heads},
                              {"linear_key_head_dim", &t::linear_key_head_dim},
                              {"linear_value_head_dim", &t::linear_value_head_dim},
                              {"linear_conv_kernel_dim", &t::linear_conv_kernel_dim},
                              {"tensor_model_parallel_size", &t::tensor_model_parallel_size},
                              {"context_parallel_size", &t::context_parallel_size},
                              {"expert_model_parallel_size", &t::expert_model_parallel_size},
                              {"pipeline_model_parallel_size", &t::pipeline_model_parallel_size},
                              {"virtual_pipeline_model_parallel_size", &t::virtual_pipeline_model_parallel_size},
                              {"num_layers_per_virtual_pipeline_stage", &t::num_layers_per_virtual_pipeline_stage},
                              {"num_virtual_stages_per_pipeline_rank", &t::num_virtual_stages_per_pipeline_rank},
                              {"decoder_first_pipeline_num_layers", &t::decoder_first_pipeline_num_layers},
                              {"decoder_last_pipeline_num_layers", &t::decoder_last_pipeline_num_layers},
                              {"seq_length", &t::seq_length}});
    read(at_least::zero, sizes{{"num_experts", &t::num_experts},
                               {"moe_shared_expert_intermediate_size", &t::moe_shared_expert_intermediate_size},
                               {"mtp_num_layers", &t::mtp_num_layers}});
    using flags = std::vector<std::pair<char const*, setting<bool> t::*>>;
    read(at_least::none, flags{{"group_query_attention", &t::group_query_attention},
                               {"untie_embeddings_and_output_weights", &t::untie_embeddings_and_output_weights},
                               {"add_qkv_bias", &t::add_qkv_bias},
                               {"qk_layernorm", &t::qk_layernorm},
                               {"attention_output_gate", &t::attention_output_gate},
                               {"apply_layernorm_1p", &t::apply_layernorm_1p},
                               {"moe_router_pre_softmax", &t::moe_router_pre_softmax},
                               {"moe_shared_expert_gate", &t::moe_shared_expert_gate},
                               {"account_for_embedding_in_pipeline_split", &t::account_for_embedding_in_pipeline_split},
                               {"account_for_loss_in_pipeline_split", &t::account_for_loss_in_pipeline_split},
                               {"allgather_cp", &t::allgather_cp},
                               {"calculate_per_token_loss", &t::calculate_per_token_loss}});
    using numbers = std::vector<std::pair<char const*, setting<double> t::*>>;
    read(at_least::none, numbers{{"norm_epsilon", &t::norm_epsilon},
                                 {"layernorm_epsilon", &t::layernorm_epsilon},
                                 {"rotary_base", &t::rotary_base},
                                 {"rotary_percent", &t::rotary_percent}});
    c.mrope_section.read(document, spelled("mrope_section"), problems);
    c.moe_layer_freq.read(document, spelled("moe_layer_freq"), problems);
    c.linear_attention_freq.read(document, spelled("linear_attention_freq"), problems);
    c.pipeline_model_parallel_layout.read(document, spelled("pipeline_model_parallel_layout"), problems);
    c.cp_comm_type.read(document, spelled("cp_comm_type"), problems);
    c.hierarchical_context_parallel_sizes.read(document, spelled("hierarchical_context_parallel_sizes"), problems);
    problems.report();
    return c;
}

} // namespace cpx
