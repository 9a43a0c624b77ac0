// SPDX-License-Identifier: Apache-2.0
// The plan that brings every segment the rows before it.
#pragma once

#include <cpx/plan/message_list.hpp>
#include <cpx/plan/segments.hpp>

namespace cpx {

/// Rows before a segment: `count` rows from `first` on, of the halo rows or of the rank's own.
struct history {
    bool halo = false;
    index first = 0;
    index count = 0;
    friend constexpr bool operator==(history, history) = default;
};

/// Brings the rows before a rank's segments: source, its rows; target, the halo rows, each of them once.
///
/// The `before` rows that precede segment i are, in order, `histories[begin[i]] .. histories[begin[i + 1]]`; fewer only
/// where the sequence begins. Rows that the rank holds itself are named, not copied. The transposed plan carries
/// the gradients of halo rows home and adds them in rank order.
template <any_sharding S>
struct halo_plan : plan {
    S sharding;
    index before = 0;
    std::vector<segment> segments;
    std::vector<history> histories;
    std::vector<std::size_t> begin;
};

namespace detail {

/// Global rows, and the local row at which the first of them stands.
struct placed_range {
    range rows;
    index local = 0;
};

/// Returns the range that holds global row `row`, among ranges that ascend.
inline placed_range const& find(std::vector<placed_range> const& ranges, index row) {
    auto const after = std::upper_bound(ranges.begin(), ranges.end(), row,
                                        [](index value, placed_range const& r) { return value < r.rows.first; });
    return *(after - 1);
}

} // namespace detail

/// Returns the plan by which `rank` gets the `before` rows that precede each of its segments, and gives its own.
///
/// A halo may come from several ranks, when segments are shorter than `before`. Each halo row is received once, even if
/// several segments need it. Pure: no communication. Cost: O(pieces).
///
/// Throws `cpx::error` if `rank` is not one of the sharding's, or `before` is negative.
template <any_sharding S>
halo_plan<S> halo(S const& sharding, int rank, index before, caller here = caller::here()) {
    require(rank >= 0 && rank < sharding.ranks(), "halo", "rank", "0 to " + std::to_string(sharding.ranks() - 1), rank,
            here);
    require(before >= 0, "halo", "rows before a segment", "not negative", before, here);
    thd const& batch = sharding.batch();
    halo_plan<S> p{{}, sharding, before, segments(sharding, rank), {}, {0}};
    p.rank = rank;
    p.id = detail::identify("halo", sharding, sharding, before);
    p.kind = flow::copies;
    p.local = S::every_row;

    // What this rank needs: the rows before its own segments. Windows ascend, so `covered` tells what is on its way.
    detail::message_list receives(sharding.ranks());
    std::vector<detail::placed_range> own, foreign;
    index hint = 0;
    for (segment const& s : p.segments) {
        index const start = batch.offset(s.sequence) + s.token;
        range window{start - std::min(before, s.token), start};
        if (!window.empty()) // never where every rank holds every row: there segments begin where sequences do
            sharding.for_each_holder(window, hint, [&](int holder, range part) {
                auto const& places = holder == rank ? own : foreign;
                if (holder != rank) {
                    index const covered = foreign.empty() ? part.first : std::max(part.first, foreign.back().rows.last);
                    range const fresh{covered, std::max(covered, part.last)};
                    if (!fresh.empty()) {
                        receives.add(holder, p.target_rows, fresh);
                        foreign.push_back({fresh, p.target_rows});
                        p.target_rows += fresh.size();
                    }
                }
                while (!part.empty()) {
                    auto const& place = detail::find(places, part.first);
                    range const known = intersect(part, place.rows);
                    p.histories.push_back({holder != rank, place.local + known.first - place.rows.first, known.size()});
                    part.first = known.last;
                }
            });
        p.begin.push_back(p.histories.size());
        own.push_back({{start, start + s.count}, s.row});
        p.source_rows += s.count;
    }
    p.receives = receives.finish();

    // What others need of this rank: rows within `before` of a segment of theirs that begins after the row.
    detail::message_list sends(sharding.ranks());
    for (segment const& s : p.segments) {
        index const first = batch.offset(s.sequence) + s.token, last = first + s.count;
        range const reach{last, std::min(batch.offset(s.sequence + 1), last + before)};
        int previous = rank;
        if (!reach.empty())
            sharding.for_each_holder(reach, hint, [&](int holder, range part) {
                if (holder != previous && holder != rank) {
                    range const needed{std::max({first, part.first - before, sends.end(holder)}), last};
                    if (!needed.empty()) sends.add(holder, s.row + needed.first - first, needed);
                }
                previous = holder;
            });
    }
    p.sends = sends.finish();
    return p;
}

} // namespace cpx
