// SPDX-License-Identifier: Apache-2.0
// Rows beside segments as numbers, and the rows that segments elsewhere need without the rest of their rank's.
#pragma once

#include <cpx/plan/capacity.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace cpx {

/// Returns `number(row, in the halo)` of the rows beside each of a rank's segments, (segments, reach) in token order;
/// -1 where there is none.
template <any_sharding S, class F>
std::vector<index_t> rows_beside(halo_plan<S> const& p, F&& number) {
    std::vector<index_t> list(p.segments.size() * static_cast<std::size_t>(p.reach), -1);
    for (std::size_t i = 0; i < p.segments.size(); ++i) {
        index_t count = 0;
        for (std::size_t k = p.begin[i]; k < p.begin[i + 1]; ++k) count += p.runs[k].count;
        auto to = list.begin() + static_cast<index_t>(i) * p.reach + (p.where == side::before ? p.reach - count : 0);
        for (std::size_t k = p.begin[i]; k < p.begin[i + 1]; ++k)
            for (index_t row = p.runs[k].first; row < p.runs[k].first + p.runs[k].count; ++row)
                *to++ = number(row, p.runs[k].halo);
    }
    return list;
}

/// The rows of one rank that stand beside segments, side by side in a buffer of their own.
struct edge_rows {
    std::vector<index_t> rows;   ///< numbers among the rank's rows, ascending
    std::vector<index_t> beside; ///< of its segments: edge rows by their number, then those of the halo; see above
    plan exchange;               ///< brings them, its source, where the halo's plan brings rows
};

/// Returns the edge rows of a plan of rows after segments.
template <any_sharding S>
edge_rows edges_of(halo_plan<S> const& p) {
    edge_rows edges;
    // A row that another segment of this rank needs is among those that are sent, because the rank that holds the rows
    // between needs it, too.
    for (message const& m : p.sends)
        for (run const r : m.rows)
            for (index_t row = r.first; row < r.first + r.count; ++row) edges.rows.push_back(row);
    std::ranges::sort(edges.rows);
    edges.rows.erase(std::unique(edges.rows.begin(), edges.rows.end()), edges.rows.end());
    auto const place = [&](index_t row) -> index_t {
        return std::ranges::lower_bound(edges.rows, row) - edges.rows.begin();
    };
    edges.exchange = p;
    edges.exchange.source_rows = std::ssize(edges.rows);
    for (message& m : edges.exchange.sends)
        for (run& r : m.rows) r.first = place(r.first); // its rows follow one another among the edge rows, too
    edges.beside =
        rows_beside(p, [&](index_t row, bool halo) { return halo ? std::ssize(edges.rows) + row : place(row); });
    return edges;
}
template <class X = detail::any>
edge_rows edges_of(X const& = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: edges_of wants a plan of rows after segments: "
                                    "halo(sharding, rank, reach, side::after)");
    return {};
}

/// Returns the lanes of the edge rows' exchange, of every batch; none where those of rows after segments are none.
template <any_sharding S>
std::vector<lane_plan> edge_lanes(halo_plan<S> const& p) {
    auto list = detail::moved<halo_plan<S>>::lanes(p, 0, false);
    for (lane_plan& l : list) std::erase_if(l.sends, [](lane const& rows) { return rows.peer < 0; }); // no edge rows
    return list;
}

/// Returns the rows before each segment of a plan of such rows, (segments, reach): those of the halo are numbered after
/// the rank's own. -1: none; or, of sequences that go on, rows of their states, numbered after the halo's: the newest
/// reach + 1 rows of each, in token order.
template <any_sharding S>
std::vector<index_t> rows_before(halo_plan<S> const& p, bool go_on) {
    auto list = rows_beside(p, [&](index_t row, bool halo) { return row + (halo ? p.source_rows : 0); });
    index_t const states = p.source_rows + p.target_rows, window = p.reach + 1;
    for (std::size_t i = 0; go_on && i < p.segments.size(); ++i)
        for (index_t token = p.segments[i].token - p.reach; token < 0; ++token)
            list[static_cast<std::size_t>((static_cast<index_t>(i) + 1) * p.reach + token - p.segments[i].token)] =
                states + (p.segments[i].sequence + 1) * window + token;
    return list;
}

/// Returns the newest reach + 1 rows of sequences that end on this rank, oldest first, each as the row of the states
/// that it becomes and the row, numbered as above, that it is. A sequence without tokens ends on rank 0.
template <any_sharding S>
std::vector<index_t> newest_rows(halo_plan<S> const& p) {
    std::vector<index_t> list;
    auto const before = rows_before(p, true);
    index_t const states = p.source_rows + p.target_rows, window = p.reach + 1;
    thd const& batch = p.sharding.batch();
    auto const add = [&](index_t sequence, auto const& row_of) {
        for (index_t back = window; back > 0; --back)
            list.insert(list.end(), {(sequence + 1) * window - back, row_of(back)});
    };
    for (std::size_t i = 0; i < p.segments.size(); ++i) {
        segment const& s = p.segments[i];
        if (s.token + s.count == batch.length(s.sequence))
            add(s.sequence, [&](index_t back) { // a row before the segment is within reach, for it has one itself
                auto const place = static_cast<index_t>(i + 1) * p.reach + s.count - back;
                return back <= s.count ? s.row + s.count - back : before[static_cast<std::size_t>(place)];
            });
    }
    for (index_t s = 0; s < batch.sequences(); ++s)
        if (batch.length(s) == 0 && (S::every_row || p.rank == 0))
            add(s, [&](index_t back) { return states + (s + 1) * window - back; });
    return list;
}

/// What a causal convolution reads beside a rank's own rows.
struct conv_batch {
    index_t rows = 0, halo_rows = 0, segments = 0;
    std::vector<index_t> tables; ///< as `conv_batch_of` and `add_rows_after` say
    plan edge_exchange;          ///< brings edge rows to the ranks whose segments they follow
};

/// Returns the rows of a convolution, of at most `most_taps`. Tables: where segments begin, then rows before, see
/// `rows_before`. Throws `cpx::error` on other plans.
template <any_sharding S>
conv_batch conv_batch_of(char const* where, halo_plan<S> const& p, index_t most_taps, bool go_on,
                         caller here = caller::here()) {
    require(p.where == side::before, where, "side of the halo", "before", "after", here);
    require(
        p.reach < most_taps, where, "taps", [&] { return "at most " + std::to_string(most_taps); }, p.reach + 1, here);
    require(std::ssize(p.segments) < index_t{1} << 31, where, "segments", "less than 2^31", p.segments.size(), here);
    conv_batch made{p.source_rows, p.target_rows, std::ssize(p.segments), offsets(p.segments), {}};
    auto const before = rows_before(p, go_on);
    made.tables.insert(made.tables.end(), before.begin(), before.end());
    return made;
}

/// Adds what the backward of such a convolution reads, by the plan of rows after, of the sharding and rank of that of
/// the `reach` rows before. Tables: (segments, reach) rows after, those of the halo after the edge rows, and what edge
/// rows are computed from. Throws `cpx::error` on other plans.
template <any_sharding S>
void add_rows_after(char const* where, conv_batch& to, halo_plan<S> const& p, index_t reach,
                    caller here = caller::here()) {
    require(p.where == side::after && p.reach == reach, where, "rows after a segment in the plan", reach,
            p.where == side::after ? p.reach : 0, here);
    require(p.source_rows == to.rows && std::ssize(p.segments) == to.segments, where, "plan of rows after",
            "the sharding and the rank of that of rows before", "another", here);
    auto edges = edges_of(p);
    to.tables.insert(to.tables.end(), edges.beside.begin(), edges.beside.end());
    to.edge_exchange = std::move(edges.exchange);

    std::size_t s = 0; // (edge rows, taps): what each is computed from
    for (index_t const row : edges.rows) {
        while (p.segments[s].row + p.segments[s].count <= row) ++s;
        for (index_t from = row - reach; from <= row; ++from) {
            index_t const token = from - p.segments[s].row; // rows before stand behind where segments begin
            index_t const place = to.segments + 1 + (static_cast<index_t>(s) + 1) * reach + token;
            to.tables.push_back(token >= 0 ? from : to.tables[static_cast<std::size_t>(place)]);
        }
    }
}

} // namespace cpx
