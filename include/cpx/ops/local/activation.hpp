// SPDX-License-Identifier: Apache-2.0
// Activations, element by element.
#pragma once

#include <cpx/ops/local/shape.hpp>

#include <algorithm>
#include <cmath>

namespace cpx {

/// Which function follows a linear operator.
enum class activation { none, silu };

template <class T>
T sigmoid(T x) {
    return 1 / (1 + std::exp(-x));
}

/// Returns `x * sigmoid(x)`, for every finite x.
template <class T>
T silu(T x) {
    return x / (1 + std::exp(-x));
}

/// Returns `log(1 + exp(x))` without overflow. Exact also above 20, where torch returns x itself.
template <class T>
T softplus(T x) {
    return std::max(x, T(0)) + std::log1p(std::exp(-std::abs(x)));
}

/// Computes `y = silu(gate) * up`. All are (rows, width); y may be one of the others.
///
/// Throws `cpx::error` if the shapes differ.
template <class T>
void silu_mul(rows<T const> gate, rows<T const> up, rows<T> y) {
    detail::require_shape("silu_mul", "up", up, gate.count(), gate.width());
    detail::require_shape("silu_mul", "y", y, gate.count(), gate.width());
    for (index i = 0; i < y.count(); ++i)
        for (index j = 0; j < y.width(); ++j) y(i, j) = silu(gate(i, j)) * up(i, j);
}

} // namespace cpx
