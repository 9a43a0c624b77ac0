// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding on any sharding.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/ops/local/rotary.hpp>
#include <cpx/ops/mrope.hpp>
#include <cpx/plan/segments.hpp>

#include <concepts>

namespace cpx {

/// Rotates every row by its token: positions begin at 0 in every sequence, wherever the row lives.
///
/// x, y: (rows, heads * head_dim) on any sharding, y may be x. No communication: a rank knows the tokens of its rows.
/// Bitwise the same on every sharding. See the local `rotary` for the pairing of channels and the source.
///
/// Throws `cpx::error` if shapes or shardings do not fit, or if y overlaps x in another way.
template <sharded_like X, sharded_like Y>
void rotary(X const& x, index_t head_dim, rotary_options options, Y&& y, caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<sharding_of<X>, Y>, writes = detail::writes<Y, X>;
    constexpr bool real = !std::integral<element_of<Y>>;
    static_assert(fits, "cpx: rotary of x and y on two shardings; make y of x's sharding");
    static_assert(!fits || writes, "cpx: rotary wants x of y's elements, and a y that is not const and has a name");
    static_assert(!fits || !writes || real, "cpx: rotary of whole numbers; use float or double");
    if constexpr (fits && writes && real) {
        auto const from = x.view();
        auto const to = y.view();
        detail::require_place("rotary", "y", to, from, "that of x", here);
        auto const tokens = positions(segments(from.sharding(), from.rank(), here), here);
        detail::require_shape("rotary", "x", from.data(), std::ssize(tokens), from.data().width(), here);
        rotary<element_of<Y>>(from.data(), head_dim, tokens, options, to.data(), here);
    }
}

/// Computes dx from dy, the gradients of `rotary`: rotates back. Arguments and errors as there; dx may be dy.
template <sharded_like X, sharded_like Y>
void rotary_backward(X const& dy, index_t head_dim, rotary_options options, Y&& dx, caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<sharding_of<X>, Y>, writes = detail::writes<Y, X>;
    constexpr bool real = !std::integral<element_of<Y>>;
    static_assert(fits, "cpx: rotary_backward of dy and dx on two shardings; make dx of dy's sharding");
    static_assert(!fits || writes,
                  "cpx: rotary_backward wants dy of dx's elements, and a dx that is not const and has a name");
    static_assert(!fits || !writes || real, "cpx: rotary_backward of whole numbers; use float or double");
    if constexpr (fits && writes && real) {
        auto const from = dy.view();
        auto const to = dx.view();
        detail::require_place("rotary_backward", "dx", to, from, "that of dy", here);
        auto const tokens = positions(segments(from.sharding(), from.rank(), here), here);
        detail::require_shape("rotary_backward", "dy", from.data(), std::ssize(tokens), from.data().width(), here);
        rotary_backward<element_of<Y>>(from.data(), head_dim, tokens, options, to.data(), here);
    }
}

namespace detail {

template <bool Back, class X, class Y, class S, class Pairs>
void rotate_sharded(sharded_positions<S> const& positions, X const& x, index_t head_dim, Pairs const& pairs, Y&& y,
                    caller here) {
    constexpr bool fits = sharded_as<S, X, Y>, writes = detail::writes<Y, X>;
    constexpr bool real = !std::integral<element_of<Y>>;
    static_assert(fits, "cpx: rotary by positions of another sharding than that of x and y; compute positions from ids "
                        "that are sharded as x");
    static_assert(!fits || writes, "cpx: rotary wants x of y's elements, and a y that is not const and has a name");
    static_assert(!fits || !writes || real, "cpx: rotary of whole numbers; use float or double");
    if constexpr (fits && writes && real) {
        auto const from = x.view();
        auto const to = y.view();
        turn const& way = Back ? turn_back : turn_forth;
        std::string const same = std::string("that of ") + way.from;
        require_place(way.where, way.to, to, from, same.c_str(), here);
        require(positions.sharding() == from.sharding(), way.where, "sharding of the positions", same, "another", here);
        require(positions.rank() == from.rank(), way.where, "rank of the positions", from.rank(), positions.rank(),
                here);
        using T = element_of<Y>;
        if constexpr (Back)
            rotary_backward<T>(from.data(), head_dim, positions.axes(), pairs, to.data(), here);
        else
            rotary<T>(from.data(), head_dim, positions.axes(), pairs, to.data(), here);
    }
}

} // namespace detail

/// Rotates every row by its position on three axes, as `mrope_positions` has computed them on the sharding of x. The
/// pairs have axes, of `rotary_axes`. All else as above; the sums of sections and frequencies must fit.
template <any_sharding S, sharded_like X, sharded_like Y>
void rotary(sharded_positions<S> const& positions, X const& x, index_t head_dim,
            rotary_pairs<detail::rotary_number<element_of<X>>> const& pairs, Y&& y, caller here = caller::here()) {
    detail::rotate_sharded<false>(positions, x, head_dim, pairs, std::forward<Y>(y), here);
}
template <class X = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused rotary(X const& = {}, detail::any = {}, detail::any = {}, Y1 const& = {}, Y2 const& = {},
                       detail::any = {}) {
    static_assert(detail::never<X, Y1, Y2>,
                  "cpx: rotary(x, head_dim, options, y) wants tensors x and y and rotary_options, and "
                  "rotary(positions, x, head_dim, pairs, y) sharded_positions first; view other memory as "
                  "sharded(rows, sharding, rank)");
    return {};
}
template <class X, class Y, class O = rotary_options>
    requires std::same_as<O, rotary_options>
detail::refused rotary(X const& x, detail::any, O const&, Y const& y, detail::any = {}) {
    return rotary(x, detail::any(), detail::any(), y);
}

/// Computes dx from dy, the gradients of `rotary`: rotates back. Arguments and errors as there; dx may be dy.
template <any_sharding S, sharded_like X, sharded_like Y>
void rotary_backward(sharded_positions<S> const& positions, X const& dy, index_t head_dim,
                     rotary_pairs<detail::rotary_number<element_of<X>>> const& pairs, Y&& dx,
                     caller here = caller::here()) {
    detail::rotate_sharded<true>(positions, dy, head_dim, pairs, std::forward<Y>(dx), here);
}
template <class X = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused rotary_backward(X const& = {}, detail::any = {}, detail::any = {}, Y1 const& = {}, Y2 const& = {},
                                detail::any = {}) {
    static_assert(detail::never<X, Y1, Y2>,
                  "cpx: rotary_backward(dy, head_dim, options, dx) wants tensors dy and dx and rotary_options, and "
                  "rotary_backward(positions, dy, head_dim, pairs, dx) sharded_positions first; view other memory as "
                  "sharded(rows, sharding, rank)");
    return {};
}
template <class X, class Y, class O = rotary_options>
    requires std::same_as<O, rotary_options>
detail::refused rotary_backward(X const& x, detail::any, O const&, Y const& y, detail::any = {}) {
    return rotary_backward(x, detail::any(), detail::any(), y);
}

} // namespace cpx
