// SPDX-License-Identifier: Apache-2.0
// What a relayout moves of every batch: between tokens, and between tokens and what stands on every rank.
#pragma once

#include <cpx/plan/relayout.hpp>

#include <optional>
#include <vector>

namespace cpx::detail {

/// Returns the columns of a rank's messages at one end, of every peer. `width`: of a local row, elements.
inline lane_columns columns_of_all(message_columns const& columns, index_t width) {
    lane_columns all{width};
    for (int peer = 0; peer < columns.from.ranks; ++peer) all.of.push_back(columns.of(peer));
    return all;
}

/// Returns the lanes of a relayout, of every batch; none where they do not tell what moves. Between tokens and what
/// stands on every rank, a message has all rows of the rank that has the tokens.
template <any_sharding From, any_sharding To>
std::optional<lane_plan> relayout_lanes(From const& from, To const& to, plan const& p) {
    lane_plan made{.rank = p.rank, .kind = p.kind};
    if constexpr (routed<From, To>) {
        auto const all = common_cells(from, to);
        if (!all) return {};
        made.cells = *all;
        made.sends = routed_lanes(from.policy(), p.rank, to.policy());
        made.receives = routed_lanes(to.policy(), p.rank, from.policy());
        return made;
    } else if constexpr (From::every_row && in_cells<To>) {
        auto const back = relayout_lanes(to, from, p.transposed()); // but for columns: replicas are sent one way
        if (back) made = back->transposed(p.kind);
        if (!back) return {};
    } else if constexpr (in_cells<From> && To::every_row) {
        auto const& layout = from.policy();
        auto const all = cells_of(from, layout.chunks());
        if (!all) return {};
        made.cells = *all;
        for_each_chunk(layout, p.rank, [&](int c) { made.sends.push_back({lane::everyone, c, c + 1}); });
        for (int c = 0; c < layout.chunks(); ++c) made.receives.push_back({layout.owner(c), c, c + 1});
    } else {
        return {};
    }
    auto const sections = from.sections().empty() ? to.sections() : from.sections();
    constexpr section whole_row; // stands for the sections where rows move whole
    auto const groups = sections.empty() ? std::span(&whole_row, 1) : sections;
    head_shares const held(from, groups), needed(to, groups);
    made.source = columns_of_all({held, needed, p.rank, true, false}, p.source_width);
    made.target = columns_of_all({held, needed, p.rank, false, false}, p.target_width);
    return made;
}

} // namespace cpx::detail
