// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norms of rows, whole or head by head.
#pragma once

#include <cpx/core/elements.hpp>
#include <cpx/ops/local/activation.hpp>
#include <cpx/ops/local/lanes.hpp>
#include <cpx/ops/local/shape.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

namespace cpx {
namespace detail {

/// Calls `each(row, column, normed)` with `x / sqrt(mean x^2 + eps)` for every element; the mean is over heads of
/// `head_dim` neighbouring columns.
template <class T, class F>
void normalize_heads(rows<T const> x, index_t head_dim, T eps, F each) {
    for (index_t i = 0; i < x.count(); ++i)
        for (index_t head = 0; head < x.width(); head += head_dim) {
            T const mean = sum_of_squares(x.row(i) + head, head_dim) / static_cast<T>(head_dim);
            T const factor = 1 / std::sqrt(mean + eps);
            for (index_t j = head; j < head + head_dim; ++j) each(i, j, x(i, j) * factor);
        }
}

/// The backward of norms, head after head.
///
/// `each(row, column, j, normed)` returns the gradient of a normed element and the term that it adds to `dweight[j]`.
/// dx and dweight are left out where they are empty.
template <class T, class F>
void normalize_heads_backward(rows<T const> x, index_t head_dim, T eps, rows<T> dx, std::span<T> dweight, F each) {
    padded<T> scratch(3, head_dim), sums(1, head_dim);
    T *const normed = scratch.row(0), *const pulled = scratch.row(1), *const terms = scratch.row(2);
    std::copy(dweight.begin(), dweight.end(), sums.row(0));
    for (index_t i = 0; i < x.count(); ++i)
        for (index_t head = 0; head < x.width(); head += head_dim) {
            T const mean = sum_of_squares(x.row(i) + head, head_dim) / static_cast<T>(head_dim);
            T const factor = 1 / std::sqrt(mean + eps);
            for (index_t j = 0; j < head_dim; ++j) {
                normed[j] = x(i, head + j) * factor;
                std::tie(pulled[j], terms[j]) = each(i, head + j, j, normed[j]);
            }
            if (!dweight.empty())
                for (index_t j = 0; j < head_dim; ++j) sums(0, j) += terms[j];
            if (dx.data() == nullptr) continue;
            T const inner = dot(pulled, normed, head_dim) / static_cast<T>(head_dim);
            for (index_t j = 0; j < head_dim; j += lane_count<T>) {
                lanes<T> of_normed, of_pulled;
                load<T>(normed + j, of_normed);
                load<T>(pulled + j, of_pulled);
                store<T>(factor * (of_pulled - inner * of_normed), dx.row(i) + head + j, head_dim - j);
            }
        }
    std::copy_n(sums.row(0), dweight.size(), dweight.begin());
}

/// Throws `cpx::error` unless rows of `width` elements are whole heads of `weight`.
inline void require_heads(char const* where, index_t width, index_t weight, caller here) {
    require(weight > 0 && width % weight == 0, where, "width of x",
            "a multiple of the size of weight, " + std::to_string(weight), width, here);
}

/// Throws `cpx::error` unless the arguments of a backward fit; dweight: a list, or a row for each of x.
template <class T>
void require_norm_backward(char const* where, rows<T const> x, rows<T const> weight, rows<T const> dy, rows<T> dx,
                           rows<T> dweight, caller here) {
    require_heads(where, x.width(), weight.width(), here);
    require_shape(where, "dy", dy, x.count(), x.width(), here);
    if (dx.data() != nullptr) require_shape(where, "dx", dx, x.count(), x.width(), here);
    if (dweight.width() > 0)
        require(dweight.width() == weight.width(), where, "size of dweight", weight.width(), dweight.width(), here);
    require_apart(where, {{"dx", dx}}, {{"x", x}, {"dy", dy}}, here, in_place::yes);
    require_apart(where, {{"dx", dx}, {"dweight", dweight}}, {{"weight", weight}}, here);
    require_apart(where, {{"dweight", dweight}}, {{"x", x}, {"dy", dy}}, here);
}
template <class T>
void require_gated_norm_backward(char const* where, rows<T const> x, rows<T const> z, rows<T const> weight,
                                 rows<T const> dy, rows<T> dx, rows<T> dz, rows<T> dweight, caller here) {
    require_norm_backward(where, x, weight, dy, dx, dweight, here);
    require_shape(where, "z", z, x.count(), x.width(), here);
    if (dz.data() != nullptr) require_shape(where, "dz", dz, x.count(), x.width(), here);
    require_apart(where, {{"dx", dx}, {"dz", dz}}, {{"x", x}, {"z", z}, {"dy", dy}}, here, in_place::yes);
    require_apart(where, {{"dz", dz}, {"dweight", dweight}}, {{"weight", weight}}, here);
    require_apart(where, {{"dweight", dweight}}, {{"z", z}, {"dx", dx}}, here);
}

/// As `rms_norm_backward` and `gated_rms_norm_backward`, of arguments that fit.
template <class T>
void differentiate_norm(rows<T const> x, std::span<T const> weight, T eps, T gain_offset, rows<T const> dy, rows<T> dx,
                        std::span<T> dweight) {
    normalize_heads_backward(
        x, std::ssize(weight), eps, dx, dweight, [&](index_t i, index_t column, index_t j, T normed) {
            T const gradient = dy(i, column);
            return std::pair(gradient * (gain_offset + weight[static_cast<std::size_t>(j)]), gradient * normed);
        });
}
template <class T>
void differentiate_gated_norm(rows<T const> x, rows<T const> z, std::span<T const> weight, T eps, rows<T const> dy,
                              rows<T> dx, rows<T> dz, std::span<T> dweight) {
    normalize_heads_backward(
        x, std::ssize(weight), eps, dx, dweight, [&](index_t i, index_t column, index_t j, T normed) {
            T const gradient = dy(i, column), gate = z(i, column), gain = weight[static_cast<std::size_t>(j)];
            T const opened = gradient * silu(gate);
            if (dz.data() != nullptr) dz(i, column) = silu_backward(gate, gradient * (normed * gain));
            return std::pair(opened * gain, opened * normed);
        });
}

} // namespace detail

/// Computes `y = x / sqrt(mean x^2 + eps) * (gain_offset + weight)`.
///
/// x, y: (rows, heads * weight.size()), y may be x. Each head has its own mean; the heads share the weight.
/// `gain_offset` is 1 for Qwen3.5's zero-centred norms and 0 for plain ones.
/// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps in another way.
template <class T>
void rms_norm(rows<T const> x, std::span<T const> weight, T eps, T gain_offset, rows<T> y,
              caller here = caller::here()) {
    auto const size = static_cast<index_t>(weight.size());
    detail::require_heads("rms_norm", x.width(), size, here);
    detail::require_shape("rms_norm", "y", y, x.count(), x.width(), here);
    detail::require_apart("rms_norm", {{"y", y}}, {{"x", x}}, here, detail::in_place::yes);
    detail::require_apart("rms_norm", {{"y", y}}, {{"weight", weight}}, here);
    detail::normalize_heads(x, size, eps, [&](index_t i, index_t j, T normed) {
        y(i, j) = normed * (gain_offset + weight[static_cast<std::size_t>(j % size)]);
    });
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, std::span<T const>, T, T, rows<T>), X...>)
detail::refused rms_norm(X&&...) {
    static_assert(detail::never<X...>, "cpx: rms_norm<T>(x, weight, eps, gain_offset, y) wants rows and spans of "
                                       "T, not const where they are written; take rows with view() or data()");
    return {};
}

/// Computes `y = x / sqrt(mean x^2 + eps) * weight * silu(z)`, the norm of a gated delta net's output.
///
/// x, z, y: (rows, heads * weight.size()), y may be x or z.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps in another way.
template <class T>
void gated_rms_norm(rows<T const> x, rows<T const> z, std::span<T const> weight, T eps, rows<T> y,
                    caller here = caller::here()) {
    auto const size = static_cast<index_t>(weight.size());
    detail::require_heads("gated_rms_norm", x.width(), size, here);
    detail::require_shape("gated_rms_norm", "z", z, x.count(), x.width(), here);
    detail::require_shape("gated_rms_norm", "y", y, x.count(), x.width(), here);
    detail::require_apart("gated_rms_norm", {{"y", y}}, {{"x", x}, {"z", z}}, here, detail::in_place::yes);
    detail::require_apart("gated_rms_norm", {{"y", y}}, {{"weight", weight}}, here);
    detail::normalize_heads(x, size, eps, [&](index_t i, index_t j, T normed) {
        y(i, j) = normed * weight[static_cast<std::size_t>(j % size)] * silu(z(i, j));
    });
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, std::span<T const>, T, rows<T>), X...>)
detail::refused gated_rms_norm(X&&...) {
    static_assert(detail::never<X...>, "cpx: gated_rms_norm<T>(x, z, weight, eps, y) wants rows and spans of T, "
                                       "not const where they are written; take rows with view() or data()");
    return {};
}

/// Computes `dx` and adds to `dweight`, the gradients of `rms_norm`.
///
/// dy, dx: as y and x, dx may be dy or x; dweight: as weight. Either result is left out where it is empty.
/// A row of dx is a function of its rows of x and dy, bit for bit. The terms of dweight are added row after row and
/// head after head, so rows may be split between calls, in order, without changing a bit.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps in another way.
template <class T>
void rms_norm_backward(rows<T const> x, std::span<T const> weight, T eps, T gain_offset, rows<T const> dy, rows<T> dx,
                       std::span<T> dweight, caller here = caller::here()) {
    detail::require_norm_backward<T>("rms_norm_backward", x, {weight, std::ssize(weight)}, dy, dx,
                                     {dweight, std::ssize(dweight)}, here);
    detail::differentiate_norm<T>(x, weight, eps, gain_offset, dy, dx, dweight);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, std::span<T const>, T, T, rows<T const>, rows<T>, std::span<T>), X...>)
detail::refused rms_norm_backward(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: rms_norm_backward<T>(x, weight, eps, gain_offset, dy, dx, dweight) wants rows and spans of T, "
                  "not const where they are written; take rows with view() or data()");
    return {};
}

/// Computes `dx` and `dz` and adds to `dweight`, the gradients of `gated_rms_norm`, each unless it is empty.
///
/// dz may be z or dy; otherwise as in `rms_norm_backward`.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps in another way.
template <class T>
void gated_rms_norm_backward(rows<T const> x, rows<T const> z, std::span<T const> weight, T eps, rows<T const> dy,
                             rows<T> dx, rows<T> dz, std::span<T> dweight, caller here = caller::here()) {
    detail::require_gated_norm_backward<T>("gated_rms_norm_backward", x, z, {weight, std::ssize(weight)}, dy, dx, dz,
                                           {dweight, std::ssize(dweight)}, here);
    detail::differentiate_gated_norm<T>(x, z, weight, eps, dy, dx, dz, dweight);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, std::span<T const>, T, rows<T const>, rows<T>, rows<T>,
                                 std::span<T>),
                            X...>)
detail::refused gated_rms_norm_backward(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: gated_rms_norm_backward<T>(x, z, weight, eps, dy, dx, dz, dweight) wants rows and spans of T, "
                  "not const where they are written; take rows with view() or data()");
    return {};
}

/// A norm of heads as wide as the weight, in any memory: `rms_norm`, or with z `gated_rms_norm`, whose gain has no
/// offset. X: the elements of x; on devices perhaps others than those of all else, see `cuda::norm_input`.
template <class T, class X = T>
struct head_norm {
    rows<X const> x;         ///< (rows, heads * weight.width())
    rows<T const> z, weight; ///< as x, or empty; (1, channels of a head)
    wide<T> eps, gain_offset;

    std::span<T const> gain() const { return {weight.data(), static_cast<std::size_t>(weight.width())}; }
};

namespace detail {

template <class X>
inline constexpr bool is_head_norm = false;
template <class T>
inline constexpr bool is_head_norm<head_norm<T>> = true;

} // namespace detail

/// Computes y, of rows in the memory given: the host's, or with `ops/cuda/norm.hpp` a `cuda::memory`. Shapes, overlap
/// and errors as in `rms_norm` and `gated_rms_norm`.
template <class T>
void normalise(host_memory, head_norm<T> const& n, std::type_identity_t<rows<T>> y, caller here = caller::here()) {
    if (n.z.data())
        gated_rms_norm<T>(n.x, n.z, n.gain(), n.eps, y, here);
    else
        rms_norm<T>(n.x, n.gain(), n.eps, n.gain_offset, y, here);
}
template <class M, class X>
    requires(!detail::is_head_norm<X>)
detail::refused normalise(M const&, X const&, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: normalise(memory, norm, y) wants a memory, a head_norm<T>{x, z, weight, eps, "
                                    "gain_offset}, and rows of T to write; of a tensor its data()");
    return {};
}
/// Computes the gradients of x and, with z, of z, and adds to each row of `terms` what that row adds to the weight's.
/// terms: (rows, channels of a head); all else as in `rms_norm_backward` and `gated_rms_norm_backward`.
template <class T>
void normalise_backward(host_memory, head_norm<T> const& n, std::type_identity_t<rows<T const>> dy,
                        std::type_identity_t<rows<T>> dx, std::type_identity_t<rows<T>> dz,
                        std::type_identity_t<rows<T>> terms, caller here = caller::here()) {
    detail::require_shape("normalise_backward", "terms", terms, n.x.count(), n.weight.width(), here);
    if (n.z.data())
        detail::require_gated_norm_backward<T>("gated_rms_norm_backward", n.x, n.z, n.weight, dy, dx, dz, terms, here);
    else
        detail::require_norm_backward<T>("rms_norm_backward", n.x, n.weight, dy, dx, terms, here);
    for (index_t row = 0; row < n.x.count(); ++row) {
        auto const of = [&](auto const& all) { return all.data() ? all.sub(row, 1) : all; };
        std::span<T> const sums(terms.row(row), static_cast<std::size_t>(terms.width()));
        if (n.z.data())
            detail::differentiate_gated_norm<T>(of(n.x), of(n.z), n.gain(), n.eps, of(dy), of(dx), of(dz), sums);
        else
            detail::differentiate_norm<T>(of(n.x), n.gain(), n.eps, n.gain_offset, of(dy), of(dx), sums);
    }
}

} // namespace cpx
