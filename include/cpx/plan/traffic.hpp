// SPDX-License-Identifier: Apache-2.0
// How much moves between two shardings, over all ranks.
#pragma once

#include <cpx/plan/halo.hpp>
#include <cpx/plan/relayout.hpp>
#include <cpx/plan/segments.hpp>

namespace cpx {

/// Rows that each rank holds and each rank needs: `rows[i * W + j]`; on the diagonal, rows that stay.
///
/// Counts rows of which at least one column goes from i to j. Cost: O(runs of the batch).
template <any_sharding From, any_sharding To>
std::vector<index_t> traffic(From const& from, To const& to, caller here = caller::here()) {
    std::size_t const ranks = static_cast<std::size_t>(from.ranks());
    detail::require_same_group("traffic", from, to, here);
    auto rows = detail::zeros<index_t>("traffic", {from.ranks(), from.ranks()}, here);
    for (int i = 0; i < from.ranks(); ++i) {
        plan const p = relayout(from, to, i, here);
        for (message const& m : p.sends)
            rows[static_cast<std::size_t>(i) * ranks + static_cast<std::size_t>(m.peer)] += total(m.rows);
    }
    return rows;
}
template <class X = detail::any>
std::vector<index_t> traffic(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: traffic(from, to) wants two shardings, such as shard(batch, zigzag<4>{}) "
                                    "returns");
    return {};
}

/// Rows of which all or some columns move, and what moves of them in elements.
struct volume {
    index_t rows = 0;
    index_t elements = 0;
    friend constexpr bool operator==(volume, volume) = default;
};

/// Counts what no exchange between the shardings can do without, from ownership alone, not from plans.
///
/// For every rank j: the rows that it needs and does not have whole, counted once for every rank that must supply some
/// of their columns: the holder of the row or, where every rank holds every row, the lowest holder of each head that j
/// lacks.
/// `width`: elements of a row if there are no sections. Cost: O(runs of the batch + sections * W^2).
template <any_sharding From, any_sharding To>
volume lower_bound(From const& from, To const& to, index_t width = 1, caller here = caller::here()) {
    char const* const where = "lower_bound";
    detail::require_same_group(where, from, to, here);
    detail::product(where, "elements", {from.ranks(), from.batch().tokens(), width}, here);
    section const whole{1, width};
    std::span<section const> sections = from.sections().empty() ? to.sections() : from.sections();
    if (sections.empty()) sections = std::span(&whole, 1);
    volume bound;
    for (int j = 0; j < to.ranks(); ++j) {
        index_t needed_rows = to.rows(j);
        if constexpr (From::every_row) {
            std::vector<index_t> supplied(static_cast<std::size_t>(from.ranks())); // elements of a row, by supplier
            for (section const& s : sections) {
                range const needed = to.heads(j, s.heads), own = from.heads(j, s.heads);
                index_t next = 0; // the first head that no lower rank holds: shares ascend with ranks
                for (int i = 0; i < from.ranks(); ++i) {
                    range const held = from.heads(i, s.heads);
                    range const lacking = intersect({std::max(next, held.first), held.last}, needed);
                    next = std::max(next, held.last);
                    supplied[static_cast<std::size_t>(i)] +=
                        (lacking.size() - intersect(lacking, own).size()) * s.width;
                }
            }
            for (index_t const elements : supplied) {
                bound.rows += elements > 0 ? needed_rows : 0;
                bound.elements += elements * needed_rows;
            }
        } else {
            index_t hint = 0;
            from.for_each_piece(j, [&](range own) { // what j has already
                to.for_each_holder(own, hint,
                                   [&](int holder, range common) { needed_rows -= holder == j ? common.size() : 0; });
            });
            bound.rows += needed_rows;
            bound.elements += needed_rows * detail::local_width(to, j, sections);
        }
    }
    return bound;
}
template <class X = detail::any>
volume lower_bound(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: lower_bound(from, to, width) wants two shardings and perhaps the elements of "
                                    "a row");
    return {};
}

/// Counts the rows that no halo of `reach` rows can do without: those beside a segment of a rank that are not its own,
/// each once. Cost: O(W tokens); for reports and tests.
template <any_sharding S>
index_t halo_lower_bound(S const& sharding, index_t reach, side where = side::before, caller here = caller::here()) {
    detail::product("halo_lower_bound", "rows beside a segment", {reach}, here);
    index_t bound = 0;
    for (int rank = 0; rank < sharding.ranks(); ++rank) {
        auto needed = detail::zeros<bool>("halo_lower_bound", {sharding.batch().tokens()}, here);
        for (segment const& s : segments(sharding, rank)) {
            index_t const first = sharding.batch().offset(s.sequence), start = first + s.token, end = start + s.count;
            index_t row = where == side::before ? std::max(first, start - reach) : end;
            index_t const last =
                where == side::before ? start : std::min(first + sharding.batch().length(s.sequence), end + reach);
            for (; row < last; ++row) needed[static_cast<std::size_t>(row)] = true;
        }
        sharding.for_each_piece(rank, [&](range own) {
            for (index_t row = own.first; row < own.last; ++row) needed[static_cast<std::size_t>(row)] = false;
        });
        bound += std::ranges::count(needed, true);
    }
    return bound;
}
template <class X = detail::any>
index_t halo_lower_bound(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: halo_lower_bound(sharding, reach, side) wants a sharding and a number of rows");
    return 0;
}

} // namespace cpx
