// SPDX-License-Identifier: Apache-2.0
// The maximal runs of consecutive tokens of one sequence among a rank's rows.
#pragma once

#include <cpx/plan/global_rows.hpp>

#include <vector>

namespace cpx {

/// Tokens `token .. token + count` of `sequence`, in local rows `row .. row + count`.
struct segment {
    index_t sequence = 0;
    index_t token = 0;
    index_t row = 0;
    index_t count = 0;
    friend constexpr bool operator==(segment, segment) = default;
};

/// From where in its sequence a segment needs something: from before it, as in a forward, or from after it, as in its
/// backward.
enum class side { before, after };

constexpr side opposite(side where) { return where == side::before ? side::after : side::before; }

/// Returns the segments of `rank`, ascending; every row lies in exactly one. Throws `cpx::error` if there is no such
/// rank. Cost: O(pieces + sequences touched).
template <any_sharding S>
std::vector<segment> segments(S const& s, int rank, caller here = caller::here()) {
    detail::require_rank("segments", rank, s.ranks(), here);
    std::vector<segment> list;
    thd const& batch = s.batch();
    list.reserve(static_cast<std::size_t>(batch.sequences()));
    index_t row = 0, sequence = 0;
    s.for_each_piece(rank, [&](range piece) {
        while (!piece.empty()) {
            while (batch.offset(sequence + 1) <= piece.first) ++sequence;
            range const common = intersect(piece, {batch.offset(sequence), batch.offset(sequence + 1)});
            index_t const token = common.first - batch.offset(sequence);
            if (!list.empty() && list.back().sequence == sequence && list.back().token + list.back().count == token)
                list.back().count += common.size();
            else
                list.push_back({sequence, token, row, common.size()});
            row += common.size();
            piece.first = common.last;
        }
    });
    return list;
}
template <class X = detail::any>
std::vector<segment> segments(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: segments(sharding, rank) wants a sharding, such as shard(batch, zigzag<4>{}) "
                                    "returns, and a rank");
    return {};
}

/// Returns the local cu_seqlens of a rank: where its segments begin, and its number of rows at the end.
inline std::vector<index_t> offsets(std::vector<segment> const& segments) {
    std::vector<index_t> list{0};
    list.reserve(segments.size() + 1);
    for (segment const& s : segments) list.push_back(s.row + s.count);
    return list;
}
template <class X = detail::any>
std::vector<index_t> offsets(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: offsets(segments) wants segments(sharding, rank)");
    return {};
}

/// Returns the token of every row: its position in its sequence, as rotary embeddings want it.
inline std::vector<index_t> positions(std::vector<segment> const& segments, caller here = caller::here()) {
    index_t count = 0;
    for (segment const& s : segments) count += s.count;
    auto list = detail::zeros<index_t>("positions", {count}, here);
    auto next = list.begin();
    for (segment const& s : segments)
        for (index_t i = 0; i < s.count; ++i) *next++ = s.token + i;
    return list;
}
template <class X = detail::any>
std::vector<index_t> positions(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: positions wants segments: positions(segments(sharding, rank))");
    return {};
}

} // namespace cpx
