// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism beside context parallelism: a rank's rows cut once more, for the ranks that share its heads.
#pragma once

#include <cpx/layout/piecewise.hpp>

#include <algorithm>

namespace cpx {

/// What gives rows to ranks of CP x TP, see `sequence_parallel`.
template <any_sharding S>
struct sequence_parallel_of {};

/// Returns the sharding over TP ranks for each of the given one's: rank tp + TP cp holds the tp-th of TP shares of the
/// rows of rank cp, in their order. Shares are equal where TP divides the rows, else they differ by one row.
///
/// As any other, so that one relayout leads from the rows of TP x CP ranks to those of another sharding over as many.
/// Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv 2205.05198,
/// whose sequence parallelism Megatron-LM has within the rows of a CP rank.
/// Throws `cpx::error` if TP is below 1 or there are too many ranks. Cost: O(P log P) for P pieces.
template <any_sharding S>
piecewise<sequence_parallel_of<S>> sequence_parallel(S const& sharding, int tp, caller here = caller::here()) {
    constexpr bool fits = !S::every_row;
    static_assert(fits, "cpx: sequence_parallel of a sharding by which every rank holds every row; give one by tokens");
    require(tp > 0 && tp <= most_ranks / sharding.ranks(), "sequence_parallel", "tp",
            "1 to " + std::to_string(most_ranks / sharding.ranks()), tp, here);
    detail::product("sequence_parallel", "rows times tp", {sharding.batch().tokens(), tp}, here);
    std::vector<owned_piece> pieces;
    for (int cp = 0; cp < sharding.ranks(); ++cp) {
        index_t const count = sharding.rows(cp);
        index_t row = 0; // of rank cp
        int share = 0;
        sharding.for_each_piece(cp, [&](range piece) {
            while (!piece.empty()) {
                while (row >= count * (share + 1) / tp) ++share;
                index_t const taken = std::min(piece.size(), count * (share + 1) / tp - row);
                pieces.push_back({{piece.first, piece.first + taken}, share + tp * cp});
                piece.first += taken;
                row += taken;
            }
        });
    }
    std::ranges::sort(pieces, {}, [](owned_piece const& p) { return p.rows.first; });
    return piecewise<sequence_parallel_of<S>>(tp * sharding.ranks(), sharding.batch(), pieces, here);
}
template <class X = detail::any>
detail::refused sequence_parallel(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: sequence_parallel(sharding, tp) wants a sharding, such as shard(batch, zigzag<4>{}) returns");
    return {};
}

} // namespace cpx
