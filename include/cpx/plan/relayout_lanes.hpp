// SPDX-License-Identifier: Apache-2.0
// What a relayout moves of every batch: between tokens, and between tokens and what stands on every rank.
#pragma once

#include <cpx/plan/relayout.hpp>

#include <optional>
#include <span>
#include <vector>

namespace cpx::detail {

/// The columns of a rank's messages of a relayout, of every batch; where rows move whole, one that stands for all.
class relayout_columns {
public:
    template <any_sharding From, any_sharding To>
    relayout_columns(From const& from, To const& to, int rank)
        : sections_(common_sections(from, to)), held_(from, sections_), needed_(to, sections_), rank_(rank) {}

    /// Returns those of the message to a peer, or from it.
    std::vector<run> of(int peer, bool out) const {
        return message_columns{held_, needed_, rank_, out, false}.of(peer);
    }
    /// Returns those of one end. `width`: of a local row, elements.
    lane_columns all(bool out, index_t width) const {
        lane_columns list{width};
        for (int peer = 0; peer < held_.ranks; ++peer) list.of.push_back(of(peer, out));
        return list;
    }

private:
    template <any_sharding From, any_sharding To>
    static std::span<section const> common_sections(From const& from, To const& to) {
        static constexpr section whole_row;
        auto const sections = from.sections().empty() ? to.sections() : from.sections();
        return sections.empty() ? std::span(&whole_row, 1) : sections;
    }
    std::span<section const> sections_;
    head_shares held_, needed_;
    int rank_;
};

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
    relayout_columns const columns(from, to, p.rank);
    made.source = columns.all(true, p.source_width);
    made.target = columns.all(false, p.target_width);
    return made;
}

} // namespace cpx::detail
