// SPDX-License-Identifier: Apache-2.0
// Chunks dealt to the ranks in turn.
#pragma once

#include <cpx/layout/concept.hpp>

namespace cpx {

/// `W * Stripes` chunks; rank r owns chunks r, r + W, r + 2W, ... as cards are dealt.
///
/// Source: Brandon et al., "Striped Attention", 2023, arXiv 2311.09431, with stripes of many tokens instead of one.
template <int W = dynamic, int Stripes = 4>
struct striped : private extent<W> {
    static_assert(Stripes > 0, "cpx: striped needs at least 1 stripe a rank");
    constexpr striped() = default;
    CPX_HOST_DEVICE constexpr explicit striped(int ranks, caller here = caller::here())
        : extent<W>(detail::ranks_with(Stripes, ranks, "striped", here)) {}
    template <class X = void>
    constexpr explicit striped(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: striped wants the number of its ranks alone: striped<>(4); shard(batch, "
                                        "striped<4>{}) shards");
    }

    CPX_HOST_DEVICE constexpr int ranks() const { return this->get(); }
    CPX_HOST_DEVICE constexpr int chunks() const { return Stripes * ranks(); }
    CPX_HOST_DEVICE constexpr int owner(int chunk) const { return chunk % ranks(); }
    CPX_HOST_DEVICE constexpr int chunks(int) const { return Stripes; }
    CPX_HOST_DEVICE constexpr int chunk(int rank, int i) const { return rank + i * ranks(); }
    friend constexpr bool operator==(striped const&, striped const&) = default;
};

} // namespace cpx
