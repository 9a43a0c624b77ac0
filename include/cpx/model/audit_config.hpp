// SPDX-License-Identifier: Apache-2.0
// Whether shards tell of all weights of the model that a config.json describes, as it has them.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/mesh/mesh.hpp>
#include <cpx/model/audit.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_names.hpp>
#include <cpx/model/hf_sizes.hpp>
#include <cpx/model/parameter_name.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/shard.hpp>
#include <cpx/model/weight_bytes.hpp>
#include <cpx/model/weight_rules.hpp>
#include <cpx/model/weight_share.hpp>
#include <cpx/model/weight_sizes.hpp>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cpx {

/// Returns how Hugging Face's side is written where nothing tells but the weights of shards: a tensor for each expert;
/// and in `sizes.mtp` what they say of multi-token prediction.
inline weight_style style_of(shard_weights const& weights, hf_config const& settings, weight_sizes& sizes) {
    weight_style style{.inside = settings.nested()};
    bool mtp = false, dense = sizes.num_experts == 0;
    for (auto const& [name, w] : weights) {
        bool const predicted = name.find("mtp.layers.") != std::string::npos;
        mtp = mtp || predicted;
        dense = dense || (predicted && name.ends_with(".mlp.linear_fc1.weight"));
        style.expert_bias = style.expert_bias || name.ends_with(".mlp.router.expert_bias");
    }
    sizes.mtp.clear();
    if (mtp) sizes.mtp.push_back({.linear = false, .moe = !dense});
    return style;
}

/// Returns whether a tensor that is no weight of the language model may be in its checkpoint, and is copied whole: what
/// looks like a layer's may not. The name is Hugging Face's.
inline bool beside_model(std::string_view name) {
    for (auto const* layers : {"model.layers.", "model.language_model.layers.", "mtp.", "decoder.", "language_model."})
        if (name.starts_with(layers)) return false;
    return name != "lm_head.weight";
}

namespace detail {

inline std::string text_of_size(bool value) { return value ? "true" : "false"; }
inline std::string text_of_size(index_t value) { return std::to_string(value); }

/// Returns what is wrong with what shards list of a weight of a model: its shape and whether it is divided follow from
/// config.json and the mesh, and its dtype is a floating-point one, at least float32 where the weight must keep that.
inline std::optional<std::string> listed_wrongly(hf_names const& model, model_weight const& w, shard_sizes const& sizes,
                                                 shard_weight const& listed) {
    auto const& rule = *w.rule;
    auto const text = [](std::vector<index_t> const& shape, bool divided) {
        std::string all;
        for (auto const n : shape) all += (all.empty() ? "" : ", ") + std::to_string(n);
        return '[' + all + (divided ? "], divided" : "], on all ranks");
    };
    // As many rows of the vocabulary as the shards have, if these are enough.
    bool const vocabulary = rule.form == weight_form::vocabulary && !listed.shape.empty();
    index_t const unit = vocabulary ? std::max<index_t>(listed.shape.front(), 1) : 1;
    try {
        auto const share = share_of(rule, model.sizes(), {0, rule.expert ? etp_of(sizes.mesh) : sizes.mesh.tp},
                                    std::max<index_t>(w.expert, 0), unit);
        auto const shape = shape_of(rule, share, model.sizes());
        if (listed.shape != shape || listed.divided == share.replicated)
            return "expected " + text(shape, !share.replicated) + ", as config.json has it, got " +
                   text(listed.shape, listed.divided);
    } catch (error const& e) { // no such share
        return e.message();
    }
    using d = safetensors::dtype;
    bool const keeps = !rule.float32 || listed.dtype == d::f32 || listed.dtype == d::f64;
    if (keeps && is_floating(listed.dtype)) return {};
    return std::string("expected ") + (rule.float32 ? "F32, which it must keep" : "F64, F32, F16 or BF16") + ", got " +
           std::string(safetensors::name_of(listed.dtype));
}

/// Holds a list of weights against a model, and against the Hugging Face tensors of which shards were made, if known.
class listing_check {
public:
    /// `pictures` is whether the model may have a tower.
    listing_check(hf_names const& model, shard_sizes const& told, std::vector<std::string> const& tensors,
                  bool pictures)
        : model_(model), told_(told), tensors_(tensors.begin(), tensors.end()), pictures_(pictures) {}

    void take(shard_weights const& weights) {
        for (auto const& [name, weight] : weights)
            if (auto const known = model_.from_megatron(name))
                take_known(name, weight, *known);
            else
                take_other(name, weight);
    }
    /// Tells what the list lacks.
    void finish() {
        auto const& sizes = model_.sizes();
        std::set<std::string> told; // a tensor of all experts is wanted of each
        for (auto const& w : model_.weights())
            for (auto const& source : model_.hf(w))
                if (!whole_.contains({source, w.expert}) && told.insert(source).second)
                    add(audit_fault::no_weight, source, "of config.json, which no shard tells of");
        for (auto const& name : tensors_) {
            bool const head = sizes.tie_word_embeddings && name == "lm_head.weight"; // made of the embedding
            if (!head && !dtypes_.contains(name) && told.insert(name).second)
                add(audit_fault::no_weight, name, "of the checkpoint that shards were made of, which none tells of");
        }
        if (sizes.tie_word_embeddings && told_.mesh.pp > 1 && !copy_)
            add(audit_fault::no_weight, before_ + "output_layer.weight",
                "the last stage's copy of the tied embedding, which no shard tells of");
    }
    bool tower() const { return tower_; }
    std::vector<audit_problem> problems() && { return std::move(problems_); }

private:
    void add(audit_fault fault, std::string name, std::string text) {
        problems_.push_back({fault, std::move(name), std::move(text)});
    }
    void take_known(std::string const& name, shard_weight const& weight, model_weight const& w) {
        bool const tied = has(w.rule->needs, weight_trait::tied); // a copy of another
        bool first = true;
        for (auto const& source : model_.hf(w)) {
            if (std::exchange(first, false)) note(tied ? "copy of " + source : source, name, w.expert);
            if (!tied) whole_.emplace(source, w.expert);
            note_dtype(source, name, weight.dtype);
            if (!tensors_.empty() && !tensors_.contains(source))
                add(audit_fault::unexpected, name, "the checkpoint that shards were made of has no " + source);
        }
        copy_ = copy_ || tied;
        if (w.rule->place == weight_place::model) before_ = name.substr(0, parse_parameter_name(name).root);
        if (auto wrong = listed_wrongly(model_, w, told_, weight))
            add(audit_fault::other_shape, name, std::move(*wrong));
    }
    /// What no rule divides is the same on all ranks.
    void take_other(std::string const& name, shard_weight const& weight) {
        auto const mapped = model_.to_hf(name);
        auto const& source = mapped.empty() ? name : mapped.front();
        auto const family = parse_parameter_name(name).family;
        bool const of_tower = source.starts_with("model.visual.") || family == name_family::vision;
        if (family == name_family::decoder || family == name_family::mtp || !beside_model(source) ||
            !model_.from_hf(source).empty() || (tensors_.empty() && !(of_tower && pictures_)))
            return add(audit_fault::unexpected, name, "the model of config.json has no such weight");
        tower_ = tower_ || of_tower;
        note(source, name, -1);
        note_dtype(source, name, weight.dtype);
        if (!tensors_.empty() && !tensors_.contains(source))
            add(audit_fault::unexpected, name, "the checkpoint that shards were made of has no " + source);
        if (weight.divided)
            add(audit_fault::other_shape, name, "expected on all ranks, as no rule divides it, got divided");
    }
    /// Notes that a weight is listed, under whichever of its names.
    void note(std::string const& source, std::string const& name, index_t expert) {
        auto const [at, fresh] = names_.try_emplace({source, expert}, name);
        if (!fresh) add(audit_fault::tensor_twice, name, "listed as " + at->second + ", too");
    }
    void note_dtype(std::string const& source, std::string const& name, safetensors::dtype type) {
        auto const [at, fresh] = dtypes_.try_emplace(source, type, name);
        auto const& [other, of] = at->second;
        if (other != type)
            add(audit_fault::other_shape, name,
                "expected " + std::string(safetensors::name_of(other)) + ", as of " + of + ", for both are of " +
                    source + ", got " + std::string(safetensors::name_of(type)));
    }

    hf_names const& model_;
    shard_sizes const& told_;
    std::set<std::string> tensors_;
    std::set<std::pair<std::string, index_t>> whole_;                          // by Hugging Face's name, and expert
    std::map<std::pair<std::string, index_t>, std::string> names_;             // the name that is listed first
    std::map<std::string, std::pair<safetensors::dtype, std::string>> dtypes_; // and of which weight
    bool pictures_, copy_ = false, tower_ = false;
    std::string before_; // what stands before names
    std::vector<audit_problem> problems_;
};

} // namespace detail

/// Holds what shards say of their model against a config.json: sizes; of every weight that they list shape, division
/// and dtype, and that it is listed under one name; what the list lacks, by the name of Hugging Face; and what is in a
/// layer and none of the model's. Other weights, such as a tower's, are the same on all ranks.
///
/// `audit` holds shards against their list, so that what all of them forget or tell wrongly is found here alone.
///
/// `tensors` are the names of the Hugging Face tensors of which the shards were made, if they are known: these, and no
/// others, are wanted. Else multi-token prediction is wanted whole where the list has some of it; some of it where
/// config.json has mtp_num_hidden_layers; some of a tower, whose single weights nothing tells, where it has
/// vision_config; and nothing beside these.
///
/// Throws `cpx::error` for settings that tell of no model.
inline std::vector<audit_problem> audit_weights(hf_config const& settings, shard_sizes const& told,
                                                shard_weights const& weights,
                                                std::vector<std::string> const& tensors = {}) {
    auto sizes = sizes_of(settings);
    auto const style = tensors.empty() ? style_of(weights, settings, sizes) : style_of(tensors, sizes);
    hf_names const model(sizes, style);
    std::vector<audit_problem> problems;
    auto const same = [&](char const* what, auto of_shards, auto of_config) {
        if (of_shards != of_config)
            problems.push_back({audit_fault::disagree, what,
                                detail::text_of_size(of_config) + " in config.json, " +
                                    detail::text_of_size(of_shards) + " as shards tell"});
    };
    same("num_hidden_layers", told.pipeline.layers, static_cast<index_t>(sizes.layers.size()));
    same("num_experts", told.experts, sizes.num_experts);
    same("tie_word_embeddings", told.tied, sizes.tie_word_embeddings);
    detail::listing_check listing(model, told, tensors, settings.multimodal());
    listing.take(weights);
    listing.finish();
    if (tensors.empty() && settings.family.predicts && settings.mtp_num_hidden_layers.value_or(0) > 0 &&
        sizes.mtp.empty())
        problems.push_back({audit_fault::no_weight, "mtp",
                            settings.mtp_num_hidden_layers.source() + " of config.json is " +
                                std::to_string(*settings.mtp_num_hidden_layers) +
                                ", and no shard tells of its weights"});
    if (tensors.empty() && settings.multimodal() && !listing.tower())
        problems.push_back({audit_fault::no_weight, "vision_model",
                            "config.json has vision_config, and no shard tells of its weights"});
    auto found = std::move(listing).problems();
    problems.insert(problems.end(), found.begin(), found.end());
    return problems;
}

} // namespace cpx
