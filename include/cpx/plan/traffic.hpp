// SPDX-License-Identifier: Apache-2.0
// How much moves between two shardings, over all ranks.
#pragma once

#include <cpx/plan/relayout.hpp>

namespace cpx {

/// Rows that each rank holds and each rank needs: `rows[i * W + j]`; on the diagonal, rows that stay.
///
/// Counts rows of which at least one column goes from i to j. Cost: O(runs of the batch).
template <any_sharding From, any_sharding To>
std::vector<index> traffic(From const& from, To const& to) {
    std::size_t const ranks = static_cast<std::size_t>(from.ranks());
    std::vector<index> rows(ranks * ranks);
    for (int i = 0; i < from.ranks(); ++i) {
        plan const p = relayout(from, to, i);
        for (message const& m : p.sends) rows[static_cast<std::size_t>(i) * ranks + static_cast<std::size_t>(m.peer)] += total(m.rows);
    }
    return rows;
}

/// Counts the rows that no exchange between the shardings can do without, from ownership alone, not from plans.
///
/// Goes over the batch once for each rank j and counts, for every row that j needs and does not have whole, the ranks
/// that must supply it: its holder, or where every rank holds every row, the ranks with heads that j lacks.
template <any_sharding From, any_sharding To>
index lower_bound(From const& from, To const& to) {
    index bound = 0;
    section const whole{1, 1};
    std::span<section const> sections = from.sections().empty() ? to.sections() : from.sections();
    if (sections.empty()) sections = std::span(&whole, 1);
    for (int j = 0; j < to.ranks(); ++j) {
        index hint = 0;
        to.for_each_piece(j, [&](range needed) {
            if constexpr (From::every_row) {
                for (int i = 0; i < from.ranks(); ++i) {
                    bool supplies = false;
                    for (section const& s : sections)
                        for (index h = 0; h < s.heads && i != j; ++h) {
                            auto const holds = [&](int r) {
                                range const heads = from.heads(r, s.heads);
                                return heads.first <= h && h < heads.last;
                            };
                            bool first = holds(i) && !holds(j); // the lowest of the ranks that hold a head supplies it
                            for (int r = 0; r < i; ++r) first = first && !holds(r);
                            range const wanted = to.heads(j, s.heads);
                            supplies = supplies || (first && wanted.first <= h && h < wanted.last);
                        }
                    if (supplies) bound += needed.size();
                }
            } else {
                from.for_each_holder(needed, hint, [&](int holder, range part) {
                    if (holder != j) bound += part.size();
                });
            }
        });
    }
    return bound;
}

} // namespace cpx
