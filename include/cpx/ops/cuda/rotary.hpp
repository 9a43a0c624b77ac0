// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of tensors on devices, on any sharding.
#pragma once

#include <cpx/core/refused.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/cuda/rotary.hpp>
#include <cpx/layout/sharded.hpp>

namespace cpx::cuda {

/// Rotates a tensor on any sharding, as the host's `rotary` does.
///
/// x, y: (rows, heads * head_dim) of this rank, y may be x. positions: those of its rows, such as a table of
/// `segments(x.sharding(), rank)`, made once a batch. In the stream of x. No communication. Bitwise the same on every
/// sharding; all else as in the `rotary` of rows. Throws `cpx::error` if shapes or shardings do not fit, before
/// anything is launched.
template <sharded_like<memory> X, sharded_like<memory> Y>
void rotary(X const& x, index_t head_dim, rotary_pairs const& pairs, rotary_positions const& positions, Y&& y,
            caller here = caller::here()) {
    constexpr bool fits = cpx::detail::sharded_as<sharding_of<X>, Y>, writes = cpx::detail::writes<Y, X>;
    static_assert(fits, "cpx: cuda::rotary of x and y on two shardings; make y of x's sharding");
    static_assert(!fits || writes,
                  "cpx: cuda::rotary wants x of y's elements, and a y that is not const and has a name");
    if constexpr (fits && writes) {
        cpx::detail::require_place("cuda::rotary", "y", y.view(), x.view(), "that of x", here);
        detail::require_stream("cuda::rotary", "y", y.view(), x.view(), here);
        rotated<element_of<Y>> const tensor{x.view().data(), y.view().data()};
        rotary<element_of<Y>>(std::span(&tensor, 1), head_dim, pairs, positions, x.view().memory().stream(), here);
    }
}
template <class X = cpx::detail::any>
cpx::detail::refused rotary(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {},
                            cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {}) {
    static_assert(cpx::detail::never<X>,
                  "cpx: cuda::rotary(x, head_dim, pairs, positions, y) wants tensors of cuda::memory, whose stream it "
                  "takes, and rotary_positions of their rows on the device; of the host's, call cpx::rotary");
    return {};
}

/// Computes dx from dy, the gradients of `rotary`. Arguments and errors as there; dx may be dy.
template <sharded_like<memory> X, sharded_like<memory> Y>
void rotary_backward(X const& dy, index_t head_dim, rotary_pairs const& pairs, rotary_positions const& positions,
                     Y&& dx, caller here = caller::here()) {
    constexpr bool fits = cpx::detail::sharded_as<sharding_of<X>, Y>, writes = cpx::detail::writes<Y, X>;
    static_assert(fits, "cpx: cuda::rotary_backward of dy and dx on two shardings; make dx of dy's sharding");
    static_assert(!fits || writes,
                  "cpx: cuda::rotary_backward wants dy of dx's elements, and a dx that is not const and has a "
                  "name");
    if constexpr (fits && writes) {
        cpx::detail::require_place("cuda::rotary_backward", "dx", dx.view(), dy.view(), "that of dy", here);
        detail::require_stream("cuda::rotary_backward", "dx", dx.view(), dy.view(), here);
        rotated<element_of<Y>> const tensor{dy.view().data(), dx.view().data()};
        rotary_backward<element_of<Y>>(std::span(&tensor, 1), head_dim, pairs, positions, dy.view().memory().stream(),
                                       here);
    }
}
template <class X = cpx::detail::any>
cpx::detail::refused rotary_backward(X const& = {}, cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {},
                                     cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {}) {
    static_assert(
        cpx::detail::never<X>,
        "cpx: cuda::rotary_backward(dy, head_dim, pairs, positions, dx) wants tensors of cuda::memory, whose stream it "
        "takes, and rotary_positions of their rows on the device; of the host's, call cpx::rotary_backward");
    return {};
}

} // namespace cpx::cuda
