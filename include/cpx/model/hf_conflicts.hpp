// SPDX-License-Identifier: Apache-2.0
// Settings of one config.json that do not fit each other.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/config_conflict.hpp>
#include <cpx/model/hf_config.hpp>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

namespace cpx {

namespace detail {

/// Calls `note(config_conflict)` for what is wrong with rotary settings.
template <class Note>
void rotary_conflicts(hf_config const& c, Note const& note) {
    if (!c.head_dim.has_value() || !(c.family.whole_heads || c.partial_rotary_factor.has_value())) return;
    index_t const rotary = c.rotary_dim();
    auto const width = std::to_string(rotary) + " of head_dim " + std::to_string(*c.head_dim);
    auto const& cause = c.partial_rotary_factor.place();
    if (rotary == 0 || rotary % 2 != 0)
        return note(config_conflict{side_of(c.partial_rotary_factor), side_of(c.head_dim),
                                    "an even number of rotated channels, at least 2", width, cause});
    if (!c.mrope_section.has_value()) return;
    auto const& section = *c.mrope_section;
    auto const sum = std::accumulate(section.begin(), section.end(), index_t{0});
    if (section.size() != 3 || std::ranges::min(section) < 0 || sum != rotary / 2)
        note(config_conflict{side_of(c.mrope_section), side_of(c.head_dim),
                             "3 sizes of at least 0 with the sum " + std::to_string(rotary / 2),
                             std::to_string(section.size()) + " with the sum " + std::to_string(sum),
                             c.mrope_section.place()});
}

/// Calls `note(config_conflict)` for what is wrong with the types of layers.
template <class Note>
void layer_conflicts(hf_config const& c, Note const& note) {
    if (!c.layer_types.has_value()) return;
    auto const& types = *c.layer_types;
    auto const count = std::ssize(types);
    if (c.num_hidden_layers.value_or(count) != count)
        return note(config_conflict{side_of(c.layer_types, count), side_of(c.num_hidden_layers),
                                    "as many as num_hidden_layers, " + std::to_string(*c.num_hidden_layers),
                                    std::to_string(count), c.layer_types.place()});
    auto const first = std::ranges::find(types, layer_type::linear_attention) - types.begin();
    if (c.family.linear || first == count) return;
    config_side first_linear{c.where, "layer_types", "linear_attention",
                             c.layer_types.source() + '.' + std::to_string(first)};
    note(config_conflict{std::move(first_linear), side_of(c.model_type),
                         "full_attention, as everywhere in this model_type", "linear_attention",
                         c.layer_types.place() + '/' + std::to_string(first)});
}

/// Calls `note(config_conflict)` for what is wrong with placeholders and features of pictures.
template <class Note>
void picture_conflicts(hf_config const& c, Note const& note) {
    if (!c.multimodal()) return;
    for (auto const* id : {&c.image_token_id, &c.video_token_id})
        if (id->has_value() && c.vocab_size.has_value() && !(0 <= **id && **id < *c.vocab_size))
            note(config_conflict{side_of(*id), side_of(c.vocab_size),
                                 "0 to vocab_size - 1, " + std::to_string(*c.vocab_size - 1), std::to_string(**id),
                                 id->place()});
    if (c.image_token_id.has_value() && c.video_token_id.has_value() && *c.image_token_id == *c.video_token_id)
        note(config_conflict{side_of(c.video_token_id), side_of(c.image_token_id), "another one than image_token_id",
                             std::to_string(*c.video_token_id), c.video_token_id.place()});
    if (c.out_hidden_size.has_value() && c.hidden_size.has_value() && *c.out_hidden_size != *c.hidden_size)
        note(config_conflict{side_of(c.out_hidden_size), side_of(c.hidden_size),
                             "hidden_size of text_config, " + std::to_string(*c.hidden_size),
                             std::to_string(*c.out_hidden_size), c.out_hidden_size.place()});
    if (c.deepstack_layers() > c.num_hidden_layers.value_or(c.deepstack_layers()))
        note(config_conflict{side_of(c.deepstack_visual_indexes, c.deepstack_layers()), side_of(c.num_hidden_layers),
                             "as many as num_hidden_layers at most, " + std::to_string(*c.num_hidden_layers),
                             std::to_string(c.deepstack_layers()), c.deepstack_visual_indexes.place()});
}

} // namespace detail

/// Calls `note(config_conflict)` for settings of `c` that no model can have together: numbers of heads, layers and
/// experts, rotary sections, placeholders. Settings that the file does not state are in no conflict.
template <class Note>
void for_each_conflict(hf_config const& c, Note const& note) {
    auto const multiple = [&](setting<index_t> const& many, setting<index_t> const& few) {
        if (many.has_value() && few.has_value() && *many % *few != 0)
            note(config_conflict{side_of(many), side_of(few),
                                 "a multiple of " + few.key() + ", " + std::to_string(*few), std::to_string(*many),
                                 many.place()});
    };
    multiple(c.num_attention_heads, c.num_key_value_heads);
    multiple(c.linear_num_value_heads, c.linear_num_key_heads);
    if (c.moe() && c.num_experts.has_value() && c.num_experts_per_tok.value_or(0) > *c.num_experts)
        note(config_conflict{side_of(c.num_experts_per_tok), side_of(c.num_experts),
                             "at most num_experts, " + std::to_string(*c.num_experts),
                             std::to_string(*c.num_experts_per_tok), c.num_experts_per_tok.place()});
    detail::layer_conflicts(c, note);
    detail::rotary_conflicts(c, note);
    detail::picture_conflicts(c, note);
}

} // namespace cpx
