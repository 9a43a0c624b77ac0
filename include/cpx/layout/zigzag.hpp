// SPDX-License-Identifier: Apache-2.0
// Rank r owns the r-th chunk from the front and the r-th chunk from the back.
#pragma once

#include <cpx/layout/concept.hpp>

namespace cpx {

/// 2W chunks; rank r owns chunks r and 2W-1-r, so that causal attention costs every rank the same.
///
/// Over sequences: Transformer Engine's THD partition and miles; over the batch: Megatron's dense rows.
template <int W = dynamic>
struct zigzag : private extent<W> {
    constexpr zigzag() = default;
    CPX_HOST_DEVICE constexpr explicit zigzag(int ranks, caller here = caller::here())
        : extent<W>(detail::ranks_with(2, ranks, "zigzag", here)) {}
    template <class X = void>
    constexpr explicit zigzag(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: zigzag wants the number of its ranks alone: zigzag<>(4); shard(batch, "
                                        "zigzag<4>{}) shards");
    }

    CPX_HOST_DEVICE constexpr int ranks() const { return this->get(); }
    CPX_HOST_DEVICE constexpr int chunks() const { return 2 * ranks(); }
    CPX_HOST_DEVICE constexpr int owner(int chunk) const { return chunk < ranks() ? chunk : 2 * ranks() - 1 - chunk; }
    CPX_HOST_DEVICE constexpr int chunks(int) const { return 2; }
    CPX_HOST_DEVICE constexpr int chunk(int rank, int i) const { return i == 0 ? rank : 2 * ranks() - 1 - rank; }
    friend constexpr bool operator==(zigzag const&, zigzag const&) = default;
};

} // namespace cpx
