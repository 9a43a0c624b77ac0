// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norms of rows, whole or head by head.
#pragma once

#include <cpx/ops/local/activation.hpp>
#include <cpx/ops/local/lanes.hpp>
#include <cpx/ops/local/shape.hpp>

#include <cmath>
#include <span>

namespace cpx {
namespace detail {

/// Calls `each(row, column, normed)` with `x / sqrt(mean x^2 + eps)` for every element; the mean is over heads of
/// `head_dim` neighbouring columns.
template <class T, class F>
void normalize_heads(rows<T const> x, index head_dim, T eps, F each) {
    for (index i = 0; i < x.count(); ++i)
        for (index head = 0; head < x.width(); head += head_dim) {
            T const mean = sum_of_squares(x.row(i) + head, head_dim) / static_cast<T>(head_dim);
            T const factor = 1 / std::sqrt(mean + eps);
            for (index j = head; j < head + head_dim; ++j) each(i, j, x(i, j) * factor);
        }
}

/// Throws `cpx::error` unless rows of `width` elements are whole heads of `weight`.
inline void require_heads(char const* where, index width, index weight) {
    require(weight > 0 && width % weight == 0, where, "width of x",
            "a multiple of the size of weight, " + std::to_string(weight), width);
}

} // namespace detail

/// Computes `y = x / sqrt(mean x^2 + eps) * (gain_offset + weight)`.
///
/// x, y: (rows, heads * weight.size()), y may be x. Each head has its own mean; the heads share the weight.
/// `gain_offset` is 1 for Qwen3.5's zero-centred norms and 0 for plain ones.
/// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.
///
/// Throws `cpx::error` if the shapes do not fit.
template <class T>
void rms_norm(rows<T const> x, std::span<T const> weight, T eps, T gain_offset, rows<T> y) {
    auto const size = static_cast<index>(weight.size());
    detail::require_heads("rms_norm", x.width(), size);
    detail::require_shape("rms_norm", "y", y, x.count(), x.width());
    detail::normalize_heads(x, size, eps, [&](index i, index j, T normed) {
        y(i, j) = normed * (gain_offset + weight[static_cast<std::size_t>(j % size)]);
    });
}

/// Computes `y = x / sqrt(mean x^2 + eps) * weight * silu(z)`, the norm of a gated delta net's output.
///
/// x, z, y: (rows, heads * weight.size()), y may be x or z. Throws `cpx::error` if the shapes do not fit.
template <class T>
void gated_rms_norm(rows<T const> x, rows<T const> z, std::span<T const> weight, T eps, rows<T> y) {
    auto const size = static_cast<index>(weight.size());
    detail::require_heads("gated_rms_norm", x.width(), size);
    detail::require_shape("gated_rms_norm", "z", z, x.count(), x.width());
    detail::require_shape("gated_rms_norm", "y", y, x.count(), x.width());
    detail::normalize_heads(x, size, eps, [&](index i, index j, T normed) {
        y(i, j) = normed * weight[static_cast<std::size_t>(j % size)] * silu(z(i, j));
    });
}

} // namespace cpx
