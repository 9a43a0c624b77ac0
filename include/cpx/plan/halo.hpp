// SPDX-License-Identifier: Apache-2.0
// The plan that brings every segment the rows before it.
#pragma once

#include <cpx/plan/message_list.hpp>
#include <cpx/plan/segments.hpp>

namespace cpx {

/// Rows beside a segment: `count` rows from `first` on, of the halo rows or of the rank's own.
struct halo_run {
    bool halo = false;
    index_t first = 0;
    index_t count = 0;
    friend constexpr bool operator==(halo_run, halo_run) = default;
};

/// Brings the rows beside a rank's segments: source, its rows; target, the halo rows, each of them once.
///
/// The `reach` rows beside segment i are, in order, `runs[begin[i]] .. runs[begin[i + 1]]`; fewer only where
/// the sequence begins or ends. Rows that the rank holds itself are named, not copied. The transposed plan carries the
/// gradients of halo rows home and adds them in rank order.
template <class S>
struct halo_plan : plan {
    S sharding;
    index_t reach = 0;
    side where = side::before;
    std::vector<segment> segments;
    std::vector<halo_run> runs;
    std::vector<std::size_t> begin;
};
template <class S>
    requires(!any_sharding<S>)
struct halo_plan<S> {
    static_assert(detail::never<S>, "cpx: a halo_plan is what halo(sharding, rank, reach) returns");
    template <class... X>
    halo_plan(X const&...) {}
};
template <class X = detail::any>
halo_plan(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) -> halo_plan<detail::any>;

namespace detail {

/// Global rows, and the local row at which the first of them stands.
struct placed_range {
    range rows;
    index_t local = 0;
};

/// The rows of a rank's segments.
struct own_ranges {
    thd const& batch;
    std::vector<segment> const& segments;

    std::size_t size() const { return segments.size(); }
    placed_range operator[](std::size_t i) const {
        segment const& s = segments[i];
        index_t const first = batch.offset(s.sequence) + s.token;
        return {{first, first + s.count}, s.row};
    }
};

/// Returns the range that holds global row `row`, among ranges that ascend.
template <class Ranges>
placed_range find(Ranges const& ranges, index_t row) {
    auto const first = [&](std::size_t i) { return ranges[i].rows.first; };
    return ranges[last_at_or_before(row, ranges.size(), first)];
}

/// Returns the rows of the sequence within reach of `rows`, on one side of them.
template <any_sharding S>
range beside(halo_plan<S> const& p, range rows, index_t sequence, side which) {
    thd const& batch = p.batch;
    index_t const reach = p.reach;
    if (which == side::before) return {std::max(batch.offset(sequence), rows.first - reach), rows.first};
    return {rows.last, std::min(batch.offset(sequence + 1), rows.last + reach)};
}

/// Returns what the rank needs, and writes down where it will find it.
template <any_sharding S>
std::vector<message> take_beside(halo_plan<S>& p) {
    own_ranges const own{p.batch, p.segments};
    std::vector<placed_range> foreign; // windows ascend, so the last row of these tells what is on its way already
    index_t hint = 0;
    message_list receives(p.sharding.ranks(), p.segments.size());
    for (std::size_t i = 0; i < p.segments.size(); ++i) {
        range const window = beside(p, own[i].rows, p.segments[i].sequence, p.where);
        if (!window.empty() && !S::every_row) // where every rank holds every row, segments are whole sequences
            p.sharding.for_each_holder(window, hint, [&](int holder, range held) {
                if (holder != p.rank) {
                    index_t const covered =
                        foreign.empty() ? held.first : std::max(held.first, foreign.back().rows.last);
                    range const fresh{covered, std::max(covered, held.last)};
                    if (!fresh.empty()) {
                        receives.add(holder, p.target_rows, fresh);
                        foreign.push_back({fresh, p.target_rows});
                        p.target_rows += fresh.size();
                    }
                }
                while (!held.empty()) {
                    auto const place = holder == p.rank ? find(own, held.first) : find(foreign, held.first);
                    range const known = intersect(held, place.rows);
                    p.runs.push_back({holder != p.rank, place.local + known.first - place.rows.first, known.size()});
                    held.first = known.last;
                }
            });
        p.begin.push_back(p.runs.size());
    }
    return receives.finish();
}

/// Returns what others need of the rank: its rows beside a segment of theirs that lies within reach, on the other side.
template <any_sharding S>
std::vector<message> give_beside(halo_plan<S> const& p) {
    own_ranges const own{p.batch, p.segments};
    side const other = p.where == side::before ? side::after : side::before;
    index_t hint = 0;
    message_list sends(p.sharding.ranks(), p.segments.size());
    for (std::size_t i = 0; i < p.segments.size(); ++i) {
        range const mine = own[i].rows;
        index_t const sequence = p.segments[i].sequence;
        range const near = beside(p, mine, sequence, other);
        if (near.empty() || S::every_row) continue;
        int peer = p.rank;
        range theirs{near.first, near.first}; // the rows of one segment of theirs, as far as they lie in `near`
        auto const give = [&] {
            if (peer == p.rank || theirs.empty()) return;
            range const needed = intersect(mine, beside(p, theirs, sequence, p.where));
            index_t const from = std::max(needed.first, sends.end(peer));
            if (from < needed.last) sends.add(peer, p.segments[i].row + from - mine.first, {from, needed.last});
        };
        p.sharding.for_each_holder(near, hint, [&](int holder, range held) {
            if (holder == peer) {
                theirs.last = held.last;
                return;
            }
            give();
            peer = holder;
            theirs = held;
        });
        give();
    }
    return sends.finish();
}

} // namespace detail

/// Returns the plan by which `rank` gets the `reach` rows beside each of its segments, and gives its own to others.
///
/// A halo may come from several ranks, when segments are shorter than `reach`. Each halo row is received once, even if
/// several segments need it. Pure: no communication. Cost: O(pieces).
///
/// Throws `cpx::error` if `rank` is not one of the sharding's, or `reach` is negative or no size.
template <any_sharding S>
halo_plan<S> halo(S const& sharding, int rank, index_t reach, side where = side::before, caller here = caller::here()) {
    detail::require_rank("halo", rank, sharding.ranks(), here);
    detail::product("halo", "rows beside a segment", {reach}, here);
    require(where == side::before || where == side::after, "halo", "side", "before or after", static_cast<int>(where),
            here);
    thd const& batch = sharding.batch();
    halo_plan<S> p{{}, sharding, reach, where, segments(sharding, rank), {}, {0}};
    p.rank = rank;
    p.batch = batch;
    auto const end = detail::end_of(sharding);
    p.id = detail::identify(where == side::before ? "halo" : "halo after", end, end, sharding.ranks(), batch, reach);
    p.source_settings = p.target_settings = end.all;
    p.kind = flow::copies;
    p.local = S::every_row;

    p.begin.reserve(p.segments.size() + 1);
    p.runs.reserve(p.segments.size());
    if (!p.segments.empty()) p.source_rows = p.segments.back().row + p.segments.back().count;
    p.receives = detail::take_beside(p);
    p.sends = detail::give_beside(p);
    return p;
}
template <class X = detail::any>
detail::refused halo(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: halo(sharding, rank, reach) wants a sharding, such as shard(batch, zigzag<4>{}) returns, this "
                  "rank and a number of rows, and then perhaps side::after");
    return {};
}

} // namespace cpx
