// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding on any sharding.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/ops/local/rotary.hpp>
#include <cpx/plan/segments.hpp>

namespace cpx {

/// Rotates every row by its token: positions begin at 0 in every sequence, wherever the row lives.
///
/// x, y: (rows, heads * head_dim) on any sharding, y may be x. No communication: a rank knows the tokens of its rows.
/// Bitwise the same on every sharding. See the local `rotary` for the pairing of channels and the source.
///
/// Throws `cpx::error` if shapes or shardings do not fit, or if y overlaps x in another way.
template <sharded_like X, sharded_like Y>
void rotary(int rank, X const& x, index_t head_dim, rotary_options options, Y&& y, caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<sharding_of<X>, Y>, writes = detail::writes<Y, X>;
    static_assert(fits, "cpx: rotary of x and y on two shardings; make y of x's sharding");
    static_assert(writes, "cpx: rotary wants x of y's elements, and a y that is not const and has a name");
    if constexpr (fits && writes) {
        auto const from = x.view();
        auto const to = y.view();
        require(to.sharding() == from.sharding(), "rotary", "sharding of y", "that of x", "another", here);
        auto const tokens = positions(segments(from.sharding(), rank, here), here);
        detail::require_shape("rotary", "x", from.data(), std::ssize(tokens), from.data().width(), here);
        rotary<element_of<Y>>(from.data(), head_dim, tokens, options, to.data(), here);
    }
}

/// Computes dx from dy, the gradients of `rotary`: rotates back. Arguments and errors as there; dx may be dy.
template <sharded_like X, sharded_like Y>
void rotary_backward(int rank, X const& dy, index_t head_dim, rotary_options options, Y&& dx,
                     caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<sharding_of<X>, Y>, writes = detail::writes<Y, X>;
    static_assert(fits, "cpx: rotary_backward of dy and dx on two shardings; make dx of dy's sharding");
    static_assert(writes, "cpx: rotary_backward wants dy of dx's elements, and a dx that is not const and has a name");
    if constexpr (fits && writes) {
        auto const from = dy.view();
        auto const to = dx.view();
        require(to.sharding() == from.sharding(), "rotary_backward", "sharding of dx", "that of dy", "another", here);
        auto const tokens = positions(segments(from.sharding(), rank, here), here);
        detail::require_shape("rotary_backward", "dy", from.data(), std::ssize(tokens), from.data().width(), here);
        rotary_backward<element_of<Y>>(from.data(), head_dim, tokens, options, to.data(), here);
    }
}

} // namespace cpx
