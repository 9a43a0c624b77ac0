// SPDX-License-Identifier: Apache-2.0
// Which rows of a batch a rank holds, and where the rows of a batch are: for loaders, and for what comes after.
#pragma once

#include <cpx/layout/sharding.hpp>

#include <vector>

namespace cpx {

/// Returns the global rows that a rank holds, as pieces in its local order: to copy them needs one call a piece.
///
/// Where every rank holds every row (`head_sharded`, `replicated`), all rows: of heads, each rank takes its columns.
/// Throws `cpx::error` if there is no such rank. Cost: O(pieces).
template <any_sharding S>
std::vector<range> pieces(S const& sharding, int rank, caller here = caller::here()) {
    detail::require_rank("pieces", rank, sharding.ranks(), here);
    std::vector<range> list;
    list.reserve(static_cast<std::size_t>(sharding.batch().sequences()));
    sharding.for_each_piece(rank, [&](range piece) { list.push_back(piece); });
    return list;
}
template <class X = detail::any>
detail::refused pieces(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: pieces(sharding, rank) wants a sharding, such as shard(batch, zigzag<4>{}) returns");
    return {};
}

/// Returns the global row of every local row of a rank: its rows of a batch that the loader has whole, as gathers and
/// scatters by index want them. Local row i is row `global_rows(sharding, rank)[i]` of the batch.
///
/// Of a padded tensor, row i is row `packing.rows()[global_rows(sharding, rank)[i]]`.
/// Throws as `pieces` does, and if there is not the memory. Cost: O(rows).
template <any_sharding S>
std::vector<index_t> global_rows(S const& sharding, int rank, caller here = caller::here()) {
    detail::require_rank("global_rows", rank, sharding.ranks(), here);
    auto list = detail::zeros<index_t>("global_rows", {sharding.rows(rank)}, here);
    auto next = list.begin();
    sharding.for_each_piece(rank, [&](range piece) {
        for (index_t row = piece.first; row < piece.last; ++row) *next++ = row;
    });
    return list;
}
template <class X = detail::any>
std::vector<index_t> global_rows(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: global_rows(sharding, rank) wants a sharding, such as shard(batch, zigzag<4>{}) returns");
    return {};
}

/// Returns the way back: for every global row the rank that holds it and its local row there. Where every rank holds
/// every row, the slot is that of rank 0, and the local row the same on all.
///
/// Throws `cpx::error` if there is not the memory. Cost: O(tokens + W runs).
template <any_sharding S>
std::vector<slot> slots(S const& sharding, caller here = caller::here()) {
    auto list = detail::zeros<slot>("slots", {sharding.batch().tokens()}, here);
    for (int rank = 0; rank < (S::every_row ? 1 : sharding.ranks()); ++rank) {
        index_t local = 0;
        sharding.for_each_piece(rank, [&](range piece) {
            for (index_t row = piece.first; row < piece.last; ++row)
                list[static_cast<std::size_t>(row)] = {rank, local++};
        });
    }
    return list;
}
template <class X, class... Rest>
    requires(!any_sharding<X> || sizeof...(Rest) > 0)
std::vector<slot> slots(X const&, Rest const&...) {
    static_assert(detail::never<X>, "cpx: slots(sharding) wants a sharding, such as shard(batch, zigzag<4>{}) returns, "
                                    "and no rank: it tells of all");
    return {};
}

} // namespace cpx
