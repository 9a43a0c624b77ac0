// SPDX-License-Identifier: Apache-2.0
// Rank r owns the r-th of W chunks.
#pragma once

#include <cpx/layout/concept.hpp>

namespace cpx {

/// W chunks; rank r owns chunk r. Wanted by recurrences. Over the batch: flash-linear-attention's context parallelism.
template <int W = dynamic>
struct sequential : private extent<W> {
    constexpr sequential() = default;
    CPX_HOST_DEVICE constexpr explicit sequential(int ranks, caller here = caller::here())
        : extent<W>(detail::ranks_with(1, ranks, "sequential", here)) {}
    template <class X = void>
    constexpr explicit sequential(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: sequential wants the number of its ranks alone: sequential<>(4); "
                                        "shard(batch, sequential<4>{}) shards");
    }

    CPX_HOST_DEVICE constexpr int ranks() const { return this->get(); }
    CPX_HOST_DEVICE constexpr int chunks() const { return ranks(); }
    CPX_HOST_DEVICE constexpr int owner(int chunk) const { return chunk; }
    CPX_HOST_DEVICE constexpr int chunks(int) const { return 1; }
    CPX_HOST_DEVICE constexpr int chunk(int rank, int) const { return rank; }
    friend constexpr bool operator==(sequential const&, sequential const&) = default;
};

} // namespace cpx
