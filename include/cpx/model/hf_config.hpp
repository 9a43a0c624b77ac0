// SPDX-License-Identifier: Apache-2.0
// What the config.json of a Hugging Face model states: Qwen3, Qwen3-MoE, Qwen3-Next, Qwen3-VL, Qwen3.5.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/core/rotary_axes.hpp>
#include <cpx/model/config_problems.hpp>
#include <cpx/model/hf_family.hpp>
#include <cpx/model/json.hpp>
#include <cpx/model/setting.hpp>

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cpx {

/// How a layer mixes tokens: by the gated delta rule or by softmax attention.
enum class layer_type { linear_attention, full_attention };

/// Reads the names of layer types, for `setting`.
inline void convert_setting(json_value const& stated, std::vector<layer_type>& types,
                            detail::config_problems& problems) {
    auto const before = problems.count();
    auto const names = problems.as<std::vector<std::string>>(stated);
    if (problems.count() != before) return;
    types.reserve(names.size());
    for (auto const& name : names) {
        auto const linear = name == "linear_attention";
        if (!linear && name != "full_attention")
            problems.add(stated.pointer() + '/' + std::to_string(types.size()),
                         R"("linear_attention" or "full_attention")", quote(name));
        types.push_back(linear ? layer_type::linear_attention : layer_type::full_attention);
    }
}

/// The settings of a language model, under the names that its config.json uses, and of its vision tower what the
/// language model must know.
///
/// A setting has a value if the file states one: what it leaves out has none, never the default of some library
/// version, and `value()` of it throws the `cpx::error` that names it. What the functions below say beside that, they
/// know of the family, not of a default.
struct hf_config {
    hf_family family;
    setting<std::string> model_type; // of the language model
    setting<index_t> hidden_size, vocab_size, num_hidden_layers;
    setting<index_t> intermediate_size; // of the dense MLPs
    setting<std::vector<layer_type>> layer_types;
    setting<index_t> full_attention_interval; // instead of layer_types: layer i has full attention if it divides i + 1
    setting<double> rms_norm_eps;
    setting<bool> tie_word_embeddings; // beside text_config if it is there, else in it
    setting<std::string> hidden_act;

    setting<index_t> num_experts; // mixture of experts; 0 and null are none
    setting<index_t> num_experts_per_tok, moe_intermediate_size;
    setting<index_t> shared_expert_intermediate_size; // 0 is none
    setting<bool> norm_topk_prob;
    setting<index_t> decoder_sparse_step; // layer i is one if this divides i + 1, and mlp_only_layers has no i
    setting<std::vector<index_t>> mlp_only_layers;

    setting<index_t> num_attention_heads, num_key_value_heads, head_dim; // full attention
    setting<bool> attention_bias, attn_output_gate;

    setting<index_t> linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim;
    setting<index_t> linear_conv_kernel_dim;

    setting<double> rope_theta;            // see `parse` for where it is sought
    setting<double> second_rope_theta;     // a file may state two: the one that does not count
    setting<double> partial_rotary_factor; // at most 1
    setting<std::vector<index_t>> mrope_section;
    setting<bool> mrope_interleaved;
    setting<std::string> rope_type, old_rope_type; // "rope_type", and "type" as it was called before

    setting<index_t> mtp_num_hidden_layers; // or num_nextn_predict_layers

    setting<index_t> image_token_id, video_token_id; // beside text_config
    setting<index_t> spatial_merge_size, out_hidden_size;
    setting<std::vector<index_t>> deepstack_visual_indexes; // a layer each, from the first, gets features behind it

    std::string where;  ///< the name of the document
    std::string inside; ///< the keys before those of the language model: "text_config." or none
    std::vector<std::string>
        present; ///< what the file states, of all objects named here: "text_config.head_dim"; sorted

    /// Returns whether the file states `key`, with other keys before it: "text_config.rope_parameters.rope_theta".
    bool states(std::string_view key) const { return std::ranges::binary_search(present, key); }
    /// Returns whether MLPs are mixtures of experts.
    bool moe() const { return family.experts && !num_experts.null() && num_experts.value_or(1) > 0; }
    /// Returns whether text_config has the language model's settings, beside which a tower may stand or not: the names
    /// of its weights then begin with "model.language_model.".
    bool nested() const { return !inside.empty(); }
    /// Returns whether there is a vision tower.
    bool multimodal() const { return family.pictures && states("vision_config"); }
    /// Returns whether queries have an output gate beside each head.
    bool gated() const { return attn_output_gate.value_or(family.gated); }
    /// Returns whether a norm multiplies by 1 + weight.
    bool zero_centred_norms() const { return family.gated; }
    /// Returns how many layers, from the first, features of pictures are added behind.
    index_t deepstack_layers() const {
        return deepstack_visual_indexes.has_value() ? std::ssize(*deepstack_visual_indexes) : 0;
    }

    /// Returns the type of every layer: layer_types, or what full_attention_interval says; of a family without linear
    /// attention, full attention. Throws `cpx::error` if the file states neither, or no num_hidden_layers.
    std::vector<layer_type> layers(caller here = caller::here()) const {
        if (layer_types.has_value()) return *layer_types;
        std::vector<layer_type> types(static_cast<std::size_t>(num_hidden_layers.value(here)),
                                      layer_type::full_attention);
        if (!family.linear) return types;
        if (!full_attention_interval.has_value())
            throw error(where, layer_types.place(), "a value, or full_attention_interval", "none", here);
        auto const interval = static_cast<std::size_t>(*full_attention_interval);
        for (std::size_t i = 0; i < types.size(); ++i)
            if ((i + 1) % interval != 0) types[i] = layer_type::linear_attention;
        return types;
    }
    /// Returns whether a layer has linear attention. Throws as `layers`.
    bool linear(caller here = caller::here()) const {
        return family.linear && std::ranges::count(layers(here), layer_type::linear_attention) > 0;
    }
    /// Returns whether the MLP of a layer is a mixture of experts.
    bool moe(index_t layer) const {
        if (!moe() || (layer + 1) % decoder_sparse_step.value_or(1) != 0) return false;
        return !mlp_only_layers.has_value() || std::ranges::find(*mlp_only_layers, layer) == mlp_only_layers->end();
    }
    /// Returns the share of a head's channels that is rotated. Throws `cpx::error` if the file must say and does not.
    double rotary_factor(caller here = caller::here()) const {
        return family.whole_heads ? partial_rotary_factor.value_or(1) : partial_rotary_factor.value(here);
    }
    /// Returns how many of the first channels of a head are rotated: `head_dim * rotary_factor()`, rounded down. Throws
    /// `cpx::error` if the file does not state them.
    index_t rotary_dim(caller here = caller::here()) const {
        return static_cast<index_t>(static_cast<double>(head_dim.value(here)) * rotary_factor(here));
    }
    /// Returns the axis of every rotary pair, interleaved; none where the file has no mrope_section of 3 sizes. Throws
    /// as `rotary_dim`.
    std::vector<int> rotary_axes(caller here = caller::here()) const {
        if (!mrope_section.has_value() || mrope_section->size() != 3) return {};
        auto const& s = *mrope_section;
        return cpx::rotary_axes({s[0], s[1], s[2]}, axis_order::interleaved, rotary_dim(here) / 2);
    }

    /// Reads a config.json. Throws `cpx::error` as `parse` does, and if the file is not readable or not JSON.
    static hf_config read(std::filesystem::path const& path, caller here = caller::here()) {
        return parse(json_value::read(path, {}, here), here);
    }

    /// Reads the document of a config.json.
    ///
    /// model_type is "qwen3", "qwen3_moe" or "qwen3_next"; or "qwen3_5_text", "qwen3_5_moe_text" or "qwen3_vl_text", or
    /// the same without "_text" with one of these in text_config, where tie_word_embeddings may stand beside
    /// text_config, as does vision_config if there is a tower.
    /// rope_theta is that of rope_parameters, as in transformers, or the one beside it, or rope_parameters' global.base
    /// or full_attention.rope_theta, or that of the first other object in it, by name, that has one. rope_scaling
    /// stands for rope_parameters where there is none.
    ///
    /// Throws one `cpx::error` that names the document and lists the settings, of very many the first 8, that are of
    /// the wrong type or out of range; or says that the model is not known. Whether settings fit each other is another
    /// question: `for_each_conflict`.
    static hf_config parse(json_value const& document, caller here = caller::here());
};

namespace detail {

/// Notes the keys of an object, after those that lead to it.
inline void note_keys(hf_config& config, json_value const& object) {
    if (!object.is_object()) return;
    auto before = object.pointer() + '/';
    std::ranges::replace(before, '/', '.');
    for (auto const& key : object.keys())
        if (object.has(key)) config.present.push_back(before.substr(1) + key);
}

inline void read_layer_types(hf_config& config, json_value const& text, config_problems& problems) {
    config.num_hidden_layers.read(text, "num_hidden_layers", problems, at_least::one);
    constexpr index_t most = 1 << 20; // for which there is the memory
    if (config.num_hidden_layers.value_or(0) > most)
        config.num_hidden_layers.refuse(problems, "at most " + std::to_string(most),
                                        std::to_string(*config.num_hidden_layers));
    config.full_attention_interval.read(text, "full_attention_interval", problems, at_least::one);
    config.layer_types.read(text, "layer_types", problems);
}

inline void read_rotary(hf_config& config, json_value const& text, config_problems& problems) {
    auto const parameters = text.has("rope_parameters") ? text.at("rope_parameters")
                            : text.has("rope_scaling")  ? text.at("rope_scaling")
                                                        : text;
    if (!parameters.is_object()) problems.add(parameters.pointer(), "an object", parameters.got());
    bool const apart = parameters.pointer() != text.pointer();
    if (apart) note_keys(config, parameters);
    auto const holder = [&](char const* key) {
        return parameters.has(key) || !parameters.is_object() ? parameters : text;
    };
    config.rope_theta.read(holder("rope_theta"), "rope_theta", problems);
    if (apart && parameters.has("rope_theta")) config.second_rope_theta.read(text, "rope_theta", problems);
    for (auto const& [inner, key] : {std::pair{"global", "base"}, {"full_attention", "rope_theta"}})
        if (apart && !config.rope_theta.has_value() && !config.rope_theta.refused() && parameters.has(inner))
            config.rope_theta.read(parameters.at(inner), key, problems);
    if (apart && parameters.is_object())
        for (auto const& key : parameters.keys())
            if (!config.rope_theta.has_value() && !config.rope_theta.refused() && parameters.has(key) &&
                parameters.at(key).has("rope_theta"))
                config.rope_theta.read(parameters.at(key), "rope_theta", problems);
    config.partial_rotary_factor.read(holder("partial_rotary_factor"), "partial_rotary_factor", problems);
    if (config.partial_rotary_factor.value_or(1) > 1)
        config.partial_rotary_factor.refuse(problems, "at most 1",
                                            holder("partial_rotary_factor").at("partial_rotary_factor").got());
    config.mrope_section.read(parameters, "mrope_section", problems);
    config.mrope_interleaved.read(parameters, "mrope_interleaved", problems);
    if (!apart) return; // "type" beside the others is of something else
    config.rope_type.read(parameters, "rope_type", problems);
    config.old_rope_type.read(parameters, "type", problems);
}

/// Reads what stands beside text_config where there is a vision tower.
inline void read_vision(hf_config& config, json_value const& document, config_problems& problems) {
    config.image_token_id.read(document, "image_token_id", problems);
    config.video_token_id.read(document, "video_token_id", problems);
    if (!document.has("vision_config")) return;
    auto const tower = document.at("vision_config");
    if (!tower.is_object()) problems.add(tower.pointer(), "an object", tower.got());
    note_keys(config, tower);
    config.spatial_merge_size.read(tower, "spatial_merge_size", problems, at_least::one);
    config.out_hidden_size.read(tower, "out_hidden_size", problems, at_least::one);
    config.deepstack_visual_indexes.read(tower, "deepstack_visual_indexes", problems);
}

/// Reads all settings, and leaves those without a value that `problems` are told of. Throws `cpx::error` if the model
/// is not known.
inline hf_config read_hf_config(json_value const& document, config_problems& problems) {
    auto const [family, text, inside] = find_hf_text(document, problems.here());
    hf_config config;
    config.family = family;
    config.where = document.where();
    config.inside = inside ? "text_config." : "";
    note_keys(config, document);
    if (inside) note_keys(config, text);
    config.model_type.read(text, "model_type", problems);
    read_layer_types(config, text, problems);

    using c = hf_config;
    for (auto const& [key, member] : {std::pair{"hidden_size", &c::hidden_size},
                                      {"vocab_size", &c::vocab_size},
                                      {"intermediate_size", &c::intermediate_size},
                                      {"num_experts_per_tok", &c::num_experts_per_tok},
                                      {"moe_intermediate_size", &c::moe_intermediate_size},
                                      {"decoder_sparse_step", &c::decoder_sparse_step},
                                      {"num_attention_heads", &c::num_attention_heads},
                                      {"num_key_value_heads", &c::num_key_value_heads},
                                      {"head_dim", &c::head_dim},
                                      {"linear_num_key_heads", &c::linear_num_key_heads},
                                      {"linear_num_value_heads", &c::linear_num_value_heads},
                                      {"linear_key_head_dim", &c::linear_key_head_dim},
                                      {"linear_value_head_dim", &c::linear_value_head_dim},
                                      {"linear_conv_kernel_dim", &c::linear_conv_kernel_dim}})
        (config.*member).read(text, key, problems, at_least::one);
    for (auto const& [key, member] : {std::pair{"num_experts", &c::num_experts},
                                      {"shared_expert_intermediate_size", &c::shared_expert_intermediate_size}})
        (config.*member).read(text, key, problems, at_least::zero);
    for (auto const& [key, member] : {std::pair{"norm_topk_prob", &c::norm_topk_prob},
                                      {"attention_bias", &c::attention_bias},
                                      {"attn_output_gate", &c::attn_output_gate}})
        (config.*member).read(text, key, problems);
    config.rms_norm_eps.read(text, "rms_norm_eps", problems);
    config.hidden_act.read(text, "hidden_act", problems);
    config.mlp_only_layers.read(text, "mlp_only_layers", problems);
    config.mtp_num_hidden_layers.read(
        text, text.has("num_nextn_predict_layers") ? "num_nextn_predict_layers" : "mtp_num_hidden_layers", problems,
        at_least::zero);
    auto const& outer = document.has("tie_word_embeddings") ? document : text;
    config.tie_word_embeddings.read(outer, "tie_word_embeddings", problems);
    read_rotary(config, text, problems);
    if (family.pictures) read_vision(config, document, problems);
    std::ranges::sort(config.present);
    return config;
}

} // namespace detail

inline hf_config hf_config::parse(json_value const& document, caller here) {
    detail::config_problems problems(document.where(), here);
    auto config = detail::read_hf_config(document, problems);
    problems.report();
    return config;
}

} // namespace cpx
