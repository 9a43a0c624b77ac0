// SPDX-License-Identifier: Apache-2.0
// What follows from a layout and a cut, for one run of n tokens: chunk, slot, token, rows.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/core/search.hpp>
#include <cpx/layout/concept.hpp>
#include <cpx/layout/cut.hpp>

namespace cpx {

/// Returns the chunk that holds token `t` of a run of `n`, `0 <= t < n`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr int chunk_of(P const& policy, index_t t, index_t n, C const& cut = {}) {
    int const chunks = layout_at(policy, n).chunks();
    if constexpr (requires { cut.chunk(t, chunks, n); })
        return cut.chunk(t, chunks, n);
    else
        return last_at_or_before(t, chunks, balanced{}.chunk(t, chunks, n),
                                 [&](int c) { return cut.snap(cut.begin(c, chunks, n), n); });
}

/// Returns the tokens of chunk `c` in a run of `n`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr range tokens_of(P const& policy, int c, index_t n, C const& cut = {}) {
    int const chunks = layout_at(policy, n).chunks();
    auto const begin = [&](int chunk) { return chunk == chunks ? n : cut.snap(cut.begin(chunk, chunks, n), n); };
    return {begin(c), begin(c + 1)};
}

/// Calls `f(chunk)` for the chunks of `rank`, ascending. Cost: O(chunks), of a `listed_layout` O(chunks of the rank).
CPX_CALLS_BACK
template <layout L, class F>
CPX_HOST_DEVICE constexpr void for_each_chunk(L const& l, int rank, F&& f) {
    if constexpr (listed_layout<L>) {
        for (int i = 0, count = l.chunks(rank); i < count; ++i) f(l.chunk(rank, i));
    } else {
        for (int c = 0, count = l.chunks(); c < count; ++c)
            if (l.owner(c) == rank) f(c);
    }
}

/// Returns where token `t` of a run of `n` lives. Law: `token(p, locate(p, t, n), n) == t`. Cost: as `for_each_chunk`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr slot locate(P const& policy, index_t t, index_t n, C const& cut = {}) {
    auto const l = layout_at(policy, n);
    int const chunk = chunk_of(policy, t, n, cut);
    slot place{l.owner(chunk), t - tokens_of(policy, chunk, n, cut).first};
    for_each_chunk(l, place.rank, [&](int c) {
        if (c < chunk) place.row += tokens_of(policy, c, n, cut).size();
    });
    return place;
}

/// Returns how many of `n` tokens `rank` holds. Cost: as `for_each_chunk`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr index_t rows_of(P const& policy, int rank, index_t n, C const& cut = {}) {
    index_t rows = 0;
    for_each_chunk(layout_at(policy, n), rank, [&](int c) { rows += tokens_of(policy, c, n, cut).size(); });
    return rows;
}

/// Returns the token that lives at `place` in a run of `n`, or -1 if that rank has no such row. Cost: as
/// `for_each_chunk`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr index_t token(P const& policy, slot place, index_t n, C const& cut = {}) {
    index_t found = -1;
    for_each_chunk(layout_at(policy, n), place.rank, [&](int c) {
        if (found >= 0) return;
        range const tokens = tokens_of(policy, c, n, cut);
        if (place.row < tokens.size()) found = tokens.first + place.row;
        place.row -= tokens.size();
    });
    return found;
}

/// Returns whether every token of a run of `n` has exactly one slot and every slot exactly one token.
///
/// A constant expression, so that a layout can prove it where it is defined:
/// `static_assert(cpx::is_partition(my_layout{}, 64));`. Cost: O(n) times `for_each_chunk`.
template <layout_policy P, cut C = balanced>
CPX_HOST_DEVICE constexpr bool is_partition(P const& policy, index_t n, C const& cut = {}) {
    index_t rows = 0;
    for (int rank = 0; rank < policy.ranks(); ++rank) rows += rows_of(policy, rank, n, cut);
    for (index_t t = 0; t < n; ++t) {
        slot const place = locate(policy, t, n, cut);
        if (place.rank < 0 || place.rank >= policy.ranks() || token(policy, place, n, cut) != t) return false;
    }
    return rows == n;
}

} // namespace cpx
