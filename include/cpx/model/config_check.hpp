// SPDX-License-Identifier: Apache-2.0
// Whether a training configuration is of the model that a config.json describes, and can be run as it says.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/model/config_conflict.hpp>
#include <cpx/model/config_report.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/hf_conflicts.hpp>
#include <cpx/model/parallel_check.hpp>
#include <cpx/model/setting.hpp>
#include <cpx/model/train_config.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx {

namespace detail {

/// What one side says, or that it does not.
template <class T>
struct stated {
    std::optional<T> value;
    config_side side;
};

/// What a setting says.
template <class T>
stated<T> said(setting<T> const& of) {
    return {of.optional(), side_of(of)};
}
/// What a setting says of which null means `none`.
template <class T>
stated<T> said(setting<T> const& of, T none) {
    return {of.null() ? std::optional<T>(std::move(none)) : of.optional(), side_of(of)};
}
/// What a config.json says by its model_type about what it would state in `of`.
template <class T>
stated<T> said_by_type(hf_config const& c, setting<T> const& of, T value) {
    return {value, {c.where, of.key(), value, c.model_type.source()}};
}

/// Compares, and notes a mismatch or that one side says nothing.
template <class T>
void compare(config_report& report, stated<T> const& hf, stated<T> const& train, bool opposite = false) {
    auto const source = [](config_side const& s) { return s.source.empty() ? s.field : s.source; };
    if (hf.value && train.value)
        report.expect((*hf.value == *train.value) != opposite, hf.side, train.side,
                      opposite ? "the opposite" : "the same");
    else if (hf.value)
        report.gaps.push_back({train.side.file, train.side.field, hf.side.file, source(hf.side)});
    else if (train.value)
        report.gaps.push_back({hf.side.file, hf.side.field, train.side.file, source(train.side)});
}

/// Tells a setting that the other file has no use for, because the model has no `what`.
template <class T>
void tell_unused(config_report& report, setting<T> const& of, std::string file, std::string field,
                 std::string const& what) {
    if (of.has_value())
        report.gaps.push_back({std::move(file), std::move(field), of.file(), of.source(), "the model has no " + what});
}
template <class T, class U>
void tell_unused(config_report& report, setting<T> const& a, setting<U> const& b, std::string const& what) {
    tell_unused(report, a, b.file(), b.key(), what);
    tell_unused(report, b, a.file(), a.key(), what);
}

/// A setting that must be the same on both sides, for the models to which the rule applies.
template <class T>
struct equal_rule {
    std::type_identity_t<setting<T> hf_config::*> hf; // spelled so, nvcc puts no parentheses around the names
    std::type_identity_t<setting<T> train_config::*> train;
    char const* (*missing)(hf_config const&) = nullptr; ///< what a model lacks that makes it unused, if it does
    bool opposite = false;
};

inline char const* without_experts(hf_config const& c) { return c.moe() ? nullptr : "experts"; }
inline char const* without_linear(hf_config const& c) { return c.family.linear ? nullptr : "linear attention"; }

/// Returns whether some layer has a dense MLP.
inline bool with_dense_mlps(hf_config const& c) {
    if (!c.moe()) return true;
    if (c.mlp_only_layers.has_value() && !c.mlp_only_layers->empty()) return true;
    return c.decoder_sparse_step.value_or(1) != 1;
}

inline constexpr std::array<equal_rule<index_t>, 10> equal_sizes{{
    {&hf_config::hidden_size, &train_config::hidden_size},
    {&hf_config::num_attention_heads, &train_config::num_attention_heads},
    {&hf_config::num_hidden_layers, &train_config::num_layers},
    {&hf_config::vocab_size, &train_config::vocab_size},
    {&hf_config::num_experts_per_tok, &train_config::moe_router_topk, without_experts},
    {&hf_config::linear_num_key_heads, &train_config::linear_num_key_heads, without_linear},
    {&hf_config::linear_num_value_heads, &train_config::linear_num_value_heads, without_linear},
    {&hf_config::linear_key_head_dim, &train_config::linear_key_head_dim, without_linear},
    {&hf_config::linear_value_head_dim, &train_config::linear_value_head_dim, without_linear},
    {&hf_config::linear_conv_kernel_dim, &train_config::linear_conv_kernel_dim, without_linear},
}};
inline constexpr std::array<equal_rule<bool>, 2> equal_flags{{
    {&hf_config::tie_word_embeddings, &train_config::untie_embeddings_and_output_weights, nullptr, true},
    {&hf_config::attention_bias, &train_config::add_qkv_bias},
}};
inline constexpr std::array<equal_rule<double>, 1> equal_numbers{
    {{&hf_config::rope_theta, &train_config::rotary_base}}};
inline constexpr std::array<equal_rule<std::vector<index_t>>, 1> equal_lists{
    {{&hf_config::mrope_section, &train_config::mrope_section}}};

template <class Rules>
void check_equal(config_report& report, hf_config const& c, train_config const& t, Rules const& rules) {
    for (auto const& rule : rules)
        if (char const* const lacks = rule.missing ? rule.missing(c) : nullptr)
            tell_unused(report, c.*rule.hf, t.*rule.train, lacks);
        else
            compare(report, said(c.*rule.hf), said(t.*rule.train), rule.opposite);
}

/// Returns whether intermediate_size is what transformers 4.57 wrote into files that left it out: 5632 beside experts
/// of 512, the defaults of one class, which others inherit. Where a layer has a dense MLP, it is that one's size.
inline bool inherited_inner_size(hf_config const& c) {
    return !with_dense_mlps(c) && c.intermediate_size == 5632 && c.moe_intermediate_size == 512;
}

/// Compares intermediate_size with ffn_hidden_size, of mixtures of experts too, unless it is a default; of Qwen3.5's
/// never, whose files leave it out. Source: miles, hf_validate_args.
inline void check_inner_size(config_report& report, hf_config const& c, train_config const& t) {
    std::string reason;
    if (c.family.name == "qwen3_5_moe")
        reason = "of a qwen3_5_moe it is nobody's";
    else if (inherited_inner_size(c))
        reason = "5632 beside experts of 512 is a default of transformers, and no layer has a dense MLP";
    else if (t.moe_ffn_hidden_size.null() && !with_dense_mlps(c))
        reason = "ffn_hidden_size is that of experts where moe_ffn_hidden_size is null";
    if (reason.empty()) return compare(report, said(c.intermediate_size), said(t.ffn_hidden_size));
    if (c.intermediate_size.has_value())
        report.gaps.push_back({t.where, t.ffn_hidden_size.key(), c.where, c.intermediate_size.source(), reason});
    if (t.ffn_hidden_size.has_value())
        report.gaps.push_back({c.where, c.intermediate_size.key(), t.where, t.ffn_hidden_size.source(), reason});
}

/// What more than one setting states, or the family. Where Megatron's argument is null, another stands in for it.
inline void check_attention(config_report& report, hf_config const& c, train_config const& t) {
    bool const grouped = t.group_query_attention.value_or(true);
    compare(report, said(c.num_key_value_heads),
            said(grouped && !t.num_query_groups.null() ? t.num_query_groups : t.num_attention_heads));
    auto channels = said(t.kv_channels);
    if (t.kv_channels.null() && t.hidden_size.has_value() && t.num_attention_heads.has_value()) {
        channels.value = *t.hidden_size / *t.num_attention_heads;
        channels.side.value = *channels.value;
        channels.side.source = "hidden_size / num_attention_heads";
    }
    compare(report, said(c.head_dim), channels);
    auto const gate =
        c.attn_output_gate.has_value() ? said(c.attn_output_gate) : said_by_type(c, c.attn_output_gate, c.family.gated);
    if (t.attention_output_gate.has_value() || gate.value == true) compare(report, gate, said(t.attention_output_gate));
    if (t.qk_layernorm.has_value()) compare(report, said_by_type(c, t.qk_layernorm, true), said(t.qk_layernorm));
    if (t.apply_layernorm_1p.has_value())
        compare(report, said_by_type(c, t.apply_layernorm_1p, c.zero_centred_norms()), said(t.apply_layernorm_1p));
    bool const whole = c.family.whole_heads && !c.partial_rotary_factor.has_value();
    if (!whole)
        compare(report, said(c.partial_rotary_factor), said(t.rotary_percent));
    else if (t.rotary_percent.has_value())
        compare(report, said_by_type(c, c.partial_rotary_factor, 1.0), said(t.rotary_percent));
    // One setting with two names, of which a file has one or both.
    if (t.layernorm_epsilon.has_value() || !t.norm_epsilon.has_value())
        compare(report, said(c.rms_norm_eps), said(t.layernorm_epsilon));
    if (t.norm_epsilon.has_value()) compare(report, said(c.rms_norm_eps), said(t.norm_epsilon));
    if (c.rope_theta.has_value() && c.second_rope_theta.has_value()) // of which trainers take one or the other
        report.expect(*c.rope_theta == *c.second_rope_theta, side_of(c.rope_theta), side_of(c.second_rope_theta),
                      "the same");
    if (t.padded_vocab_size.has_value() && c.vocab_size.has_value())
        report.expect(*t.padded_vocab_size >= *c.vocab_size, side_of(t.padded_vocab_size), side_of(c.vocab_size),
                      "at least vocab_size");
}

inline void check_experts(config_report& report, hf_config const& c, train_config const& t) {
    auto const experts = said(t.num_experts, index_t{0});
    if (c.family.experts)
        compare(report, said(c.num_experts, index_t{0}), experts);
    else {
        if (experts.value) compare(report, said_by_type(c, c.num_experts, index_t{0}), experts);
        tell_unused(report, c.num_experts, t.where, t.num_experts.key(), "experts");
    }
    bool const has_shared = c.moe() && c.family.shared_expert;
    if (!has_shared)
        tell_unused(report, c.shared_expert_intermediate_size, t.where, t.moe_shared_expert_intermediate_size.key(),
                    "shared expert");
    auto const shared = has_shared ? said(c.shared_expert_intermediate_size, index_t{0})
                                   : said_by_type(c, c.shared_expert_intermediate_size, index_t{0});
    auto const trained = said(t.moe_shared_expert_intermediate_size, index_t{0});
    if (trained.value || shared.value != index_t{0}) compare(report, shared, trained);
    if (shared.value) {
        bool const there = *shared.value > 0; // every shared expert of these families has a gate
        stated<bool> const gate{there, {c.where, "shared_expert_gate", there, shared.side.source}};
        auto const flag = said(t.moe_shared_expert_gate, false);
        if (flag.value || there) compare(report, gate, flag);
    }
    if (!c.moe()) {
        tell_unused(report, c.moe_intermediate_size, t.moe_ffn_hidden_size, "experts");
        return tell_unused(report, c.norm_topk_prob, t.moe_router_pre_softmax, "experts");
    }
    compare(report, said(c.moe_intermediate_size),
            said(t.moe_ffn_hidden_size.null() ? t.ffn_hidden_size : t.moe_ffn_hidden_size));
    auto const sums = c.family.sums_to_one ? said_by_type(c, c.norm_topk_prob, true) : said(c.norm_topk_prob);
    compare(report, sums, said(t.moe_router_pre_softmax), true);
}

inline void check_prediction(config_report& report, hf_config const& c, train_config const& t) {
    auto const trained = said(t.mtp_num_layers, index_t{0});
    if (c.family.predicts)
        compare(report, said(c.mtp_num_hidden_layers, index_t{0}), trained);
    else {
        if (trained.value) compare(report, said_by_type(c, c.mtp_num_hidden_layers, index_t{0}), trained);
        tell_unused(report, c.mtp_num_hidden_layers, t.where, t.mtp_num_layers.key(), "multi-token prediction");
    }
}

/// Returns whether a choice has a layer; `offset` is 1 where layers are counted from 1, `inverted` where every n-th is
/// not of the kind.
inline bool chosen(layer_choice const& choice, index_t layer, index_t offset, bool inverted) {
    if (choice.every > 0) return ((layer + offset) % choice.every == 0) != inverted;
    return choice.list[static_cast<std::size_t>(layer)] != 0;
}

/// Compares what layers are with a choice of the training configuration: by the first layer that differs.
template <class Is>
void check_choice(config_report& report, hf_config const& c, setting<layer_choice> const& choice, index_t offset,
                  bool inverted, config_side const& source, Is const& is) {
    auto const layers = c.layer_types.has_value() ? std::ssize(*c.layer_types) : c.num_hidden_layers.value_or(0);
    if (choice->every == 0 && std::ssize(choice->list) != layers) {
        if (layers > 0)
            report.expect(false, side_of(choice, std::ssize(choice->list)), side_of(c.num_hidden_layers, layers),
                          "as many layers");
        return;
    }
    for (index_t i = 0; i < layers; ++i)
        if (bool const wanted = is(i); chosen(*choice, i, offset, inverted) != wanted) {
            auto trained = side_of(choice, choice->every ? nlohmann::json(choice->every) : nlohmann::json(!wanted));
            if (choice->every == 0) trained.source += '.' + std::to_string(i);
            auto theirs = source;
            theirs.value = wanted;
            return report.expect(false, std::move(trained), std::move(theirs),
                                 "layer " + std::to_string(i) + (wanted ? " to be one" : " to be none"));
        }
    ++report.compared;
}

inline void check_layers(config_report& report, hf_config const& c, train_config const& t) {
    bool const full = !c.family.linear, by_list = c.layer_types.has_value();
    auto const is_linear = [&](index_t i) {
        if (by_list) return (*c.layer_types)[static_cast<std::size_t>(i)] == layer_type::linear_attention;
        return !full && (i + 1) % *c.full_attention_interval != 0;
    };
    auto const source = by_list || full ? side_of(c.layer_types, {}) : side_of(c.full_attention_interval);
    bool const told = by_list || full || c.full_attention_interval.has_value();
    if (t.linear_attention_freq.has_value() && told)
        check_choice(report, c, t.linear_attention_freq, 1, true,
                     {source.file, "linear_attention", {}, full && !by_list ? c.model_type.source() : source.source},
                     is_linear);
    else if (t.linear_attention_freq.has_value())
        report.gaps.push_back({c.where, c.full_attention_interval.key(), t.where, t.linear_attention_freq.source()});
    else if (!full && told)
        report.gaps.push_back({t.where, "linear_attention_freq", c.where, source.source});
    if (full) tell_unused(report, c.full_attention_interval, t.where, "linear_attention_freq", "linear attention");
    if (by_list && !full && c.full_attention_interval.has_value()) {
        index_t i = 0, count = std::ssize(*c.layer_types);
        while (i < count && is_linear(i) == ((i + 1) % *c.full_attention_interval != 0)) ++i;
        auto type = side_of(c.layer_types, i == count || !is_linear(i) ? "full_attention" : "linear_attention");
        type.source += '.' + std::to_string(i);
        report.expect(i == count, std::move(type), side_of(c.full_attention_interval),
                      "every layer of which full_attention_interval divides i + 1 to be full_attention, others not");
    }
    if (!c.moe()) {
        tell_unused(report, t.moe_layer_freq, c.where, c.decoder_sparse_step.key(), "experts");
        tell_unused(report, c.decoder_sparse_step, t.where, t.moe_layer_freq.key(), "experts");
        if (c.mlp_only_layers.has_value() && c.mlp_only_layers->empty()) return; // says nothing
        return tell_unused(report, c.mlp_only_layers, t.where, t.moe_layer_freq.key(), "experts");
    }
    bool const uneven = with_dense_mlps(c);
    auto const& reason =
        c.decoder_sparse_step.value_or(1) != 1 ? c.decoder_sparse_step.source() : c.mlp_only_layers.source();
    if (t.moe_layer_freq.has_value())
        check_choice(report, c, t.moe_layer_freq, 0, false, {c.where, "experts", {}, uneven ? reason : "model_type"},
                     [&](index_t i) { return c.moe(i); });
    else if (uneven)
        report.gaps.push_back({t.where, "moe_layer_freq", c.where, reason});
}

inline config_report compare_configs(hf_config const& hf, train_config const& train) {
    config_report report{.hf = hf.where, .train = train.where, .compared = 0, .mismatches = {}, .gaps = {}};
    check_equal(report, hf, train, equal_sizes);
    check_inner_size(report, hf, train);
    check_equal(report, hf, train, equal_flags);
    check_equal(report, hf, train, equal_numbers);
    check_equal(report, hf, train, equal_lists);
    check_attention(report, hf, train);
    check_experts(report, hf, train);
    check_prediction(report, hf, train);
    check_layers(report, hf, train);
    check_parallel(report, hf, train);
    for_each_conflict(hf, [&](config_conflict const& c) { report.mismatches.push_back(c); });
    return report;
}

} // namespace detail

/// Holds a training configuration against the config.json of its model: what must be the same, what parallelism must
/// divide, and what of the config.json is at odds with itself. All mismatches are in the report.
///
/// Only what files state is compared, or what model_type says for all models of a family; what one of them leaves out
/// is told as not compared. In the training configuration null is "none" where Megatron has that. For
/// num_experts N, null and 0 are no experts; so for shared experts and layers of multi-token prediction.
///
/// Throws `cpx::error` if the training configuration states nothing that can be compared.
inline config_report check_config(hf_config const& hf, train_config const& train, caller here = caller::here()) {
    auto report = detail::compare_configs(hf, train);
    // Some rules hold, or do not, of the config.json alone.
    if (report.agrees() && report.compared <= detail::compare_configs(hf, {}).compared)
        throw error(train.where, "nothing to compare", "an argument of Megatron that " + hf.where + " states, too",
                    "none", here);
    return report;
}

} // namespace cpx
