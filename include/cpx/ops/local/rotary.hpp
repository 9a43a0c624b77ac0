// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of rows that hold heads side by side.
#pragma once

#include <cpx/ops/local/lanes.hpp>
#include <cpx/ops/local/shape.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace cpx {

struct rotary_options {
    double theta = 10000;
    index_t rotary_dim = 0; ///< channels at the front of each head that are rotated; even
};

/// Returns `theta^(-2 i / rotary_dim)` for `i < rotary_dim / 2`, computed in T as transformers does.
///
/// Throws `cpx::error` if `rotary_dim` is odd or negative.
template <class T>
std::vector<T> rotary_frequencies(rotary_options options, caller here = caller::here()) {
    index_t const dim = options.rotary_dim;
    require(dim >= 0 && dim % 2 == 0, "rotary_frequencies", "rotary_dim", "an even number", dim, here);
    auto result = detail::zeros<T>("rotary_frequencies", {dim / 2}, here);
    for (index_t i = 0; i < dim; i += 2)
        result[static_cast<std::size_t>(i / 2)] =
            1 / std::pow(static_cast<T>(options.theta), static_cast<T>(i) / static_cast<T>(dim));
    return result;
}

/// Computes the cosine and sine of the angles `position * frequency`, the angle rounded to T.
///
/// cos, sin: (positions.size(), frequencies.size()). Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void rotary_table(std::span<index_t const> positions, std::span<T const> frequencies, rows<T> cos, rows<T> sin,
                  caller here = caller::here()) {
    auto const count = static_cast<index_t>(positions.size()), half = static_cast<index_t>(frequencies.size());
    detail::require_shape("rotary_table", "cos", cos, count, half, here);
    detail::require_shape("rotary_table", "sin", sin, count, half, here);
    detail::require_apart("rotary_table", {{"cos", cos}, {"sin", sin}},
                          {{"positions", positions}, {"frequencies", frequencies}}, here);
    for (index_t row = 0; row < count; ++row)
        for (index_t i = 0; i < half; ++i) {
            T const angle =
                static_cast<T>(positions[static_cast<std::size_t>(row)]) * frequencies[static_cast<std::size_t>(i)];
            cos(row, i) = std::cos(angle);
            sin(row, i) = std::sin(angle);
        }
}

/// Rotates channel i of every head with channel i + D by the angle i of its row, D = cos.width():
///
///     y_i = x_i cos_i - x_{i+D} sin_i,    y_{i+D} = x_{i+D} cos_i + x_i sin_i
///
/// x, y: (rows, heads * head_dim), y may be x; cos, sin: (rows, D) with 2 D <= head_dim. Other channels pass through.
/// Source: Su, Lu, Pan, Murtadha, Wen, Liu, "RoFormer", 2021, arXiv 2104.09864, section 3.4.2. The paper pairs
/// channels 2 i and 2 i + 1, here they come from the two halves of the rotated channels, as in the checkpoints of Qwen.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps in another way.
template <class T>
void rotary(rows<T const> x, index_t head_dim, rows<T const> cos, rows<T const> sin, rows<T> y,
            caller here = caller::here()) {
    index_t const half = cos.width();
    require(head_dim > 0 && x.width() % head_dim == 0, "rotary", "width of x",
            "a multiple of head_dim, " + std::to_string(head_dim), x.width(), here);
    require(2 * half <= head_dim, "rotary", "width of cos", "at most head_dim / 2", half, here);
    detail::require_shape("rotary", "cos", cos, x.count(), half, here);
    detail::require_shape("rotary", "sin", sin, x.count(), half, here);
    detail::require_shape("rotary", "y", y, x.count(), x.width(), here);
    detail::require_apart("rotary", {{"y", y}}, {{"x", x}}, here, detail::in_place::yes);
    detail::require_apart("rotary", {{"y", y}}, {{"cos", cos}, {"sin", sin}}, here);
    for (index_t row = 0; row < x.count(); ++row)
        for (index_t head = 0; head < x.width(); head += head_dim) {
            T const* const from = x.row(row) + head;
            T* const to = y.row(row) + head;
            for (index_t i = 0; i < half; i += detail::lane_count<T>) {
                index_t const valid = half - i;
                detail::lanes<T> c, s, low, high;
                detail::load<T>(cos.row(row) + i, valid, c);
                detail::load<T>(sin.row(row) + i, valid, s);
                detail::load<T>(from + i, valid, low);
                detail::load<T>(from + half + i, valid, high);
                detail::store<T>(low * c - high * s, to + i, valid);
                detail::store<T>(high * c + low * s, to + half + i, valid);
            }
            if (from != to) std::copy(from + 2 * half, from + head_dim, to + 2 * half);
        }
}

/// Computes the same with ordinary positions, one a row.
template <class T>
void rotary(rows<T const> x, index_t head_dim, std::span<index_t const> positions, rotary_options options, rows<T> y,
            caller here = caller::here()) {
    require(options.rotary_dim <= head_dim, "rotary", "rotary_dim", "at most head_dim, " + std::to_string(head_dim),
            options.rotary_dim, here);
    auto const frequencies = rotary_frequencies<T>(options, here);
    index_t const count = std::ssize(positions), half = std::ssize(frequencies);
    auto cos = detail::zeros<T>("rotary", {count, half}, here), sin = cos;
    rows<T> const c(cos.data(), count, half), s(sin.data(), count, half);
    rotary_table<T>(positions, frequencies, c, s, here);
    rotary<T>(x, head_dim, c, s, y, here);
}

/// Computes `dx` from `dy`: rotates back, by the angles negated. Arguments as in `rotary`; dx may be dy.
template <class T>
void rotary_backward(rows<T const> dy, index_t head_dim, rows<T const> cos, rows<T const> sin, rows<T> dx,
                     caller here = caller::here()) {
    auto negated = detail::zeros<T>("rotary_backward", {sin.count(), sin.width()}, here);
    rows<T> const back(negated.data(), sin.count(), sin.width());
    for (index_t row = 0; row < sin.count(); ++row)
        for (index_t i = 0; i < sin.width(); ++i) back(row, i) = -sin(row, i);
    rotary<T>(dy, head_dim, cos, back, dx, here);
}

/// Computes the same with ordinary positions, one a row.
template <class T>
void rotary_backward(rows<T const> dy, index_t head_dim, std::span<index_t const> positions, rotary_options options,
                     rows<T> dx, caller here = caller::here()) {
    std::vector<index_t> negated(positions.begin(), positions.end());
    for (index_t& position : negated) position = -position;
    rotary<T>(dy, head_dim, std::span<index_t const>(negated), options, dx, here);
}

} // namespace cpx
