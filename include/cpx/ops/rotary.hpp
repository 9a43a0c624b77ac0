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
/// Throws `cpx::error` if the shapes or shardings do not fit.
template <class T, any_sharding S, elements_of<T> A>
void rotary(int rank, sharded<A, S> const& x, index_t head_dim, rotary_options options, sharded<T, S> const& y,
            caller here = caller::here()) {
    require(y.sharding() == x.sharding(), "rotary", "sharding of y", "that of x", "another", here);
    auto const tokens = positions(segments(x.sharding(), rank, here), here);
    detail::require_shape("rotary", "x", x.data(), std::ssize(tokens), x.data().width(), here);
    rotary<T>(x.data(), head_dim, tokens, options, y.data(), here);
}

/// Computes dx from dy, the gradients of `rotary`: rotates back. Arguments and errors as there; dx may be dy.
template <class T, any_sharding S, elements_of<T> A>
void rotary_backward(int rank, sharded<A, S> const& dy, index_t head_dim, rotary_options options,
                     sharded<T, S> const& dx, caller here = caller::here()) {
    require(dx.sharding() == dy.sharding(), "rotary_backward", "sharding of dx", "that of dy", "another", here);
    auto const tokens = positions(segments(dy.sharding(), rank, here), here);
    detail::require_shape("rotary_backward", "dy", dy.data(), std::ssize(tokens), dy.data().width(), here);
    rotary_backward<T>(dy.data(), head_dim, tokens, options, dx.data(), here);
}

} // namespace cpx
