// SPDX-License-Identifier: Apache-2.0
// Rows beside segments as numbers, and the rows that segments elsewhere need without the rest of their rank's.
#pragma once

#include <cpx/plan/halo.hpp>

#include <algorithm>
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

} // namespace cpx
