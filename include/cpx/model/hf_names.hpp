// SPDX-License-Identifier: Apache-2.0
// The weights of a language model, their names in Hugging Face's files and in Megatron, and what a name means.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/model/weight_pattern.hpp>
#include <cpx/model/weight_rules.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cpx {

/// A weight of a model: its rule, and where the rule is applied. Numbers are the model's, not those of a rank.
struct model_weight {
    weight_rule const* rule = nullptr;
    index_t layer = -1;  ///< of the decoder, or of multi-token prediction; -1 in neither
    index_t expert = -1; ///< -1 for what is no expert's
    bool mtp = false;    ///< `layer` is one of multi-token prediction
    friend constexpr bool operator==(model_weight const&, model_weight const&) = default;
};

/// How Hugging Face's and Megatron's side write a model: what its config.json does not say.
struct weight_style {
    bool inside = false;              ///< Hugging Face: "model.language_model." for "model.", as of `nested` settings
    bool stacked_experts = false;     ///< Hugging Face: one tensor for all experts of a layer
    bool stacked_mtp_experts = false; ///< the same in multi-token prediction
    bool expert_bias = false;         ///< routers have biases
    bool language_model = false;      ///< Megatron: "language_model." stands before names
    bool own_norms = false;           ///< Megatron: local layers in place of Transformer Engine's
    bool hf_linear = false;           ///< Megatron: linear attention is Hugging Face's module, as in miles
    bool listed_experts = false;      ///< Megatron: local_experts.N in place of weightN
    bool mtp_model_layer = false;     ///< Megatron: newer name of what was transformer_layer in multi-token prediction
};

/// Returns how Hugging Face's side writes a model of which these are the names of tensors, and in `sizes.mtp` what they
/// say of multi-token prediction.
template <class Names>
weight_style style_of(Names const& names, weight_sizes& sizes) {
    weight_style style;
    bool mtp = false, dense = sizes.num_experts == 0;
    for (std::string_view const name : names) {
        bool const predicted = name.starts_with("mtp.");
        mtp = mtp || predicted;
        dense = dense || (predicted && name.ends_with(".mlp.gate_proj.weight"));
        style.inside = style.inside || name.starts_with("model.language_model.");
        style.expert_bias = style.expert_bias || name.ends_with(".e_score_correction_bias");
        if (name.ends_with(".mlp.experts.gate_up_proj"))
            (predicted ? style.stacked_mtp_experts : style.stacked_experts) = true;
    }
    sizes.mtp.clear();
    if (mtp) sizes.mtp.push_back({.linear = false, .moe = !dense});
    return style;
}

/// The names of all weights of a model, both ways.
class hf_names {
public:
    /// Throws `cpx::error` for sizes that are missing or do not fit each other.
    explicit hf_names(weight_sizes sizes, weight_style style = {}, caller here = caller::here())
        : sizes_(std::move(sizes)), style_(style) {
        detail::check(sizes_, here);
    }

    weight_sizes const& sizes() const { return sizes_; }
    weight_style const& style() const { return style_; }

    /// Returns all weights: the embedding, the decoder's layers, its norm, the output layer unless it is the embedding,
    /// and multi-token prediction. Every tensor of Hugging Face is a source of one of them, once; a stacked one is a
    /// source of those of all experts.
    std::vector<model_weight> weights() const {
        std::vector<model_weight> all;
        for (auto const& rule : weight_rules) {
            if (!applies(rule, traits(false)) || has(rule.needs, weight_trait::tied)) continue;
            if (rule.place == weight_place::model || (rule.place == weight_place::mtp && !sizes_.mtp.empty()))
                all.push_back({&rule});
        }
        for (bool const mtp : {false, true})
            for (index_t i = 0; i < std::ssize(layers(mtp)); ++i)
                for (auto const& rule : weight_rules) {
                    if (!in_layer(rule, layers(mtp)[static_cast<std::size_t>(i)]) || !applies(rule, traits(mtp)))
                        continue;
                    if (!rule.expert) all.push_back({&rule, i, -1, mtp});
                    for (index_t e = 0; rule.expert && e < sizes_.num_experts; ++e) all.push_back({&rule, i, e, mtp});
                }
        return all;
    }

    /// Returns the name of a weight in Megatron, of the whole model: layers and experts have the model's numbers.
    std::string megatron(model_weight const& w) const {
        std::string name = style_.language_model ? "language_model." : "";
        if (w.layer >= 0)
            name += (w.mtp ? "mtp.layers." : "decoder.layers.") + std::to_string(w.layer) +
                    (w.mtp ? style_.mtp_model_layer ? ".mtp_model_layer." : ".transformer_layer." : ".");
        return name + detail::fill(w.rule->megatron, "", w.expert);
    }
    /// Returns the name of one of its sources in Hugging Face's files.
    std::string hf(model_weight const& w, std::size_t source) const {
        std::string const model = style_.inside ? "model.language_model." : "model.";
        std::string const layer =
            w.layer < 0 ? "" : (w.mtp ? "mtp." : model) + "layers." + std::to_string(w.layer) + '.';
        return layer + detail::fill(w.rule->from[source].name, model, w.expert);
    }
    /// Returns the names of all its sources, in the order of its rule.
    std::vector<std::string> hf(model_weight const& w) const {
        std::vector<std::string> names;
        for (std::size_t i = 0; i < w.rule->sources(); ++i) names.push_back(hf(w, i));
        return names;
    }

    /// Returns the weight of a name in Megatron, in whichever of its styles; or nothing for a name that is none of this
    /// model's. "module.", any number of times, and "language_model." before it do not count.
    std::optional<model_weight> from_megatron(std::string_view name) const {
        while (detail::skip(name, "module.")) {
        }
        detail::skip(name, "language_model.");
        bool const mtp = name.starts_with("mtp.");
        auto const rest = detail::after_layer(name, mtp ? "mtp.layers." : "decoder.layers.");
        if (rest) {
            auto inner = rest->name;
            if (!mtp || detail::skip(inner, "transformer_layer.") || detail::skip(inner, "mtp_model_layer."))
                return find(inner, rest->layer, mtp);
        }
        return find(name, -1, false);
    }

    /// Returns what a name in Megatron is in Hugging Face's files: one name or several; none for a name that is none of
    /// this model's. Names of a vision tower that is Hugging Face's own, "vision_model.", become "model.visual.".
    std::vector<std::string> to_hf(std::string_view name) const {
        if (auto const w = from_megatron(name)) return hf(*w);
        while (detail::skip(name, "module.")) {
        }
        if (detail::skip(name, "vision_model.") && of_vision(name)) return {"model.visual." + std::string(name)};
        return {};
    }
    /// Returns what a name in Hugging Face's files is in Megatron: several names for a tensor of all experts, none for
    /// one that is none of this model's.
    std::vector<std::string> to_megatron(std::string_view name) const {
        std::vector<std::string> names;
        for (auto const& w : from_hf(name)) names.push_back(megatron(w));
        if (auto rest = name; names.empty() && detail::skip(rest, "model.visual.") && of_vision(rest))
            names.push_back("vision_model." + std::string(rest));
        return names;
    }
    /// Returns the weights that a tensor of Hugging Face is a source of, without the copy of a tied embedding.
    std::vector<model_weight> from_hf(std::string_view name) const {
        std::string_view const model = style_.inside ? "model.language_model." : "model.";
        std::vector<model_weight> found;
        bool const mtp = name.starts_with("mtp.");
        auto const inner = detail::after_layer(name, mtp ? "mtp.layers." : std::string(model) + "layers.");
        index_t const layer = inner ? inner->layer : -1;
        if (inner && layer >= std::ssize(layers(mtp))) return found;
        for (auto const& rule : weight_rules) {
            if (!applies(rule, readable(mtp)) || has(rule.needs, weight_trait::tied)) continue;
            if (inner ? !in_layer(rule, layers(mtp)[static_cast<std::size_t>(layer)]) : !alone(rule)) continue;
            for (std::size_t i = 0; i < rule.sources(); ++i) {
                auto const expert = detail::match(rule.from[i].name, inner ? inner->name : name, inner ? "" : model);
                if (!expert || *expert >= sizes_.num_experts) continue;
                if (*expert >= 0 || !rule.expert) found.push_back({&rule, layer, *expert, mtp && inner});
                for (index_t e = 0; rule.expert && *expert < 0 && e < sizes_.num_experts; ++e)
                    found.push_back({&rule, layer, e, mtp && inner});
            }
        }
        return found;
    }

private:
    std::vector<weight_sizes::layer> const& layers(bool mtp) const { return mtp ? sizes_.mtp : sizes_.layers; }

    weight_trait traits(bool mtp) const {
        using enum weight_trait;
        auto const one_of = [](bool first, weight_trait a, weight_trait b) { return first ? a : b; };
        return one_of(sizes_.tie_word_embeddings, tied, untied) | one_of(sizes_.attention_bias, biases, none) |
               one_of(sizes_.shared_expert_intermediate_size > 0, shared_expert, none) |
               one_of(style_.expert_bias, expert_bias, none) | one_of(sizes_.by_key_head, by_key_head, flat) |
               one_of(mtp ? style_.stacked_mtp_experts : style_.stacked_experts, stacked_experts, separate_experts) |
               one_of(style_.own_norms, own_norms, fused_norms) | one_of(style_.hf_linear, hf_linear, native_linear) |
               one_of(style_.listed_experts, listed_experts, grouped_experts);
    }
    /// Biases are known by their names, also of a model of which nothing says that it has them.
    weight_trait readable(bool mtp) const { return traits(mtp) | weight_trait::biases | weight_trait::expert_bias; }
    /// Returns whether this is a name in Hugging Face's tower: Megatron's own has a decoder.
    static bool of_vision(std::string_view name) { return !name.empty() && !name.starts_with("decoder."); }
    static bool applies(weight_rule const& rule, weight_trait traits) { return has(traits, rule.needs); }
    bool alone(weight_rule const& rule) const {
        return rule.place == weight_place::model || (rule.place == weight_place::mtp && !sizes_.mtp.empty());
    }
    static bool in_layer(weight_rule const& rule, weight_sizes::layer l) {
        switch (rule.place) {
        case weight_place::full_attention: return !l.linear;
        case weight_place::linear_attention: return l.linear;
        case weight_place::dense_mlp: return !l.moe;
        case weight_place::moe_mlp: return l.moe;
        default: return false;
        }
    }

    /// Returns the weight of a name after that of its layer, whatever Megatron's style.
    std::optional<model_weight> find(std::string_view name, index_t layer, bool mtp) const {
        using enum weight_trait;
        auto const any_style =
            readable(mtp) | fused_norms | own_norms | native_linear | hf_linear | grouped_experts | listed_experts;
        if (layer >= std::ssize(layers(mtp))) return {};
        for (auto const& rule : weight_rules) {
            if (!applies(rule, any_style)) continue;
            if (layer < 0 ? !alone(rule) : !in_layer(rule, layers(mtp)[static_cast<std::size_t>(layer)])) continue;
            auto const expert = detail::match(rule.megatron, name, "");
            if (expert && *expert < sizes_.num_experts) return model_weight{&rule, layer, *expert, mtp};
        }
        return {};
    }

    weight_sizes sizes_;
    weight_style style_;
};

} // namespace cpx
