// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of rows that hold heads side by side.
#pragma once

#include <cpx/core/rotary_axes.hpp>
#include <cpx/ops/local/lanes.hpp>
#include <cpx/ops/local/shape.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <span>
#include <utility>
#include <vector>

namespace cpx {

struct rotary_options {
    double theta = 10000;
    index_t rotary_dim = 0; ///< channels at the front of each head that are rotated; even
};

/// Returns `theta^(-2 i / rotary_dim)` for `i < rotary_dim / 2`, computed in T as transformers does.
///
/// Throws `cpx::error` if `rotary_dim` is odd or negative, or `theta` is not a positive number.
template <class T>
std::vector<T> rotary_frequencies(rotary_options options, caller here = caller::here()) {
    index_t const dim = options.rotary_dim;
    require(dim >= 0 && dim % 2 == 0, "rotary_frequencies", "rotary_dim", "0, 2, 4 or another even number", dim, here);
    require(options.theta > 0 && std::isfinite(options.theta), "rotary_frequencies", "theta", "a positive number",
            options.theta, here);
    auto result = detail::zeros<T>("rotary_frequencies", {dim / 2}, here);
    for (index_t i = 0; i < dim; i += 2)
        result[static_cast<std::size_t>(i / 2)] =
            1 / std::pow(static_cast<T>(options.theta), static_cast<T>(i) / static_cast<T>(dim));
    return result;
}
template <class T = void, class X = detail::any>
detail::refused rotary_frequencies(X const& = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: rotary_frequencies<T>(options) wants the type of the numbers and "
                                    "rotary_options: rotary_frequencies<float>({.rotary_dim = 64})");
    return {};
}
template <class T = void>
    requires std::same_as<T, void>
detail::refused rotary_frequencies(rotary_options) {
    static_assert(detail::never<T>, "cpx: rotary_frequencies<T>(options) wants the type of the numbers, as well: "
                                    "rotary_frequencies<float>({.rotary_dim = 64})");
    return {};
}

/// What turns the pairs of every head, made once a model. T: that of the elements, float for elements of 16 bits.
template <class T>
struct rotary_pairs {
    /// Radians from one position to the next, such as `rotary_frequencies` or a model's own. Channel i of a head is
    /// paired with i + frequencies.size().
    std::vector<T> frequencies;
    std::vector<int> axes; ///< a pair, of `rotary_axes`; none: all turn by the first axis
    rounding how = rounding::fp32_inside;

    rotary_pairs() = default;
    rotary_pairs(std::vector<T> f, std::vector<int> a = {}, rounding r = rounding::fp32_inside)
        : frequencies(std::move(f)), axes(std::move(a)), how(r) {}
    template <class X = void>
    explicit rotary_pairs(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: rotary_pairs<T>{frequencies, axes, how} wants a vector of T, such as "
                                        "rotary_frequencies<T>(options), axes of int, and a rounding");
    }
};
template <class X>
rotary_pairs(X const&, detail::any = {}, detail::any = {}, detail::any = {}) -> rotary_pairs<detail::refused>;

namespace detail {

/// The numbers in which elements T are turned.
template <class T>
using rotary_number = std::conditional_t<sizeof(T) < sizeof(float), float, T>;

inline void require_axes(char const* where, std::span<int const> axes, index_t pairs, index_t axis_count, caller here) {
    require(axes.empty() || std::ssize(axes) == pairs, where, "number of axes, which the sections make together",
            "one a pair, " + std::to_string(pairs), axes.size(), here);
    for (int const axis : axes)
        require(axis >= 0 && axis < axis_count, where, "axis", "one of " + std::to_string(axis_count), axis, here);
}

inline void require_positions(char const* where, rows<index_t const> positions, index_t count, caller here) {
    index_t const axes = positions.count(), width = positions.width();
    if ((axes == 1 || axes == 3) && width == count) return;
    auto const shape = [](index_t n, index_t w) { return '(' + std::to_string(n) + ", " + std::to_string(w) + ')'; };
    bool const turned = axes == count && (width == 1 || width == 3);
    throw error(where, turned ? "shape of positions, whose rows are in the wrong dimension" : "shape of positions",
                shape(1, count) + " or " + shape(3, count), shape(axes, width), here);
}

/// As `rotary_table`, of arguments that fit.
template <class T>
void fill_rotary_table(rows<index_t const> positions, std::span<int const> axes, std::span<T const> frequencies,
                       rows<T> cos, rows<T> sin) {
    bool const by_time = axes.empty() || positions.count() == 1;
    for (index_t row = 0; row < cos.count(); ++row)
        for (index_t i = 0; i < cos.width(); ++i) {
            auto const pair = static_cast<std::size_t>(i);
            T const angle = static_cast<T>(positions(by_time ? 0 : axes[pair], row)) * frequencies[pair];
            cos(row, i) = std::cos(angle);
            sin(row, i) = std::sin(angle);
        }
}

} // namespace detail

/// Computes the cosine and sine of the angles `position * frequency`, the angle rounded to T.
///
/// positions: (1, rows), or (3, rows) for axes time, height and width, of which pair i takes `axes[i]`; no axes: the
/// first. cos, sin: (rows, frequencies.size()). Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void rotary_table(rows<index_t const> positions, std::span<int const> axes, std::span<T const> frequencies, rows<T> cos,
                  rows<T> sin, caller here = caller::here()) {
    index_t const count = cos.count(), half = std::ssize(frequencies);
    detail::require_positions("rotary_table", positions, count, here);
    detail::require_axes("rotary_table", axes, half, positions.count() == 1 ? 3 : positions.count(), here);
    detail::require_shape("rotary_table", "cos", cos, count, half, here);
    detail::require_shape("rotary_table", "sin", sin, count, half, here);
    detail::require_apart("rotary_table", {{"cos", cos}, {"sin", sin}},
                          {{"positions", positions}, {"frequencies", frequencies}}, here);
    detail::fill_rotary_table(positions, axes, frequencies, cos, sin);
}

template <class T>
void rotary_table(std::span<index_t const> positions, std::span<T const> frequencies, rows<T> cos, rows<T> sin,
                  caller here = caller::here()) {
    rotary_table<T>({positions.data(), 1, std::ssize(positions)}, {}, frequencies, cos, sin, here);
}
template <class T = detail::refused, class... X>
    requires(
        !detail::takes<void(rows<index_t const>, std::span<int const>, std::span<T const>, rows<T>, rows<T>), X...> &&
        !detail::takes<void(std::span<index_t const>, std::span<T const>, rows<T>, rows<T>), X...>)
detail::refused rotary_table(X&&...) {
    static_assert(detail::never<X...>, "cpx: rotary_table<T>(positions, axes, frequencies, cos, sin) wants rows "
                                       "or a span of index_t, a span of int, one of T, and rows of T");
    return {};
}

namespace detail {

/// Which of the two functions was called, what it calls its rows, and the sign of the angles.
struct turn {
    char const *where, *from, *width, *to;
    int sign;
};
inline constexpr turn turn_forth{"rotary", "x", "width of x", "y", 1},
    turn_back{"rotary_backward", "dy", "width of dy", "dx", -1};

/// Throws unless x is whole heads, and y as large.
template <class T>
void require_turned(rows<T const> x, index_t head_dim, turn const& way, rows<T> y, caller here) {
    require(head_dim > 0 && x.width() % head_dim == 0, way.where, way.width,
            "a multiple of head_dim, " + std::to_string(head_dim), x.width(), here);
    require_shape(way.where, way.to, y, x.count(), x.width(), here);
    require_apart(way.where, {{way.to, y}}, {{way.from, x}}, here, in_place::yes);
}

/// Rotates by cosines and sines, of arguments that fit.
template <class T>
void turn_rows(rows<T const> x, index_t head_dim, rows<rotary_number<T> const> cos, rows<rotary_number<T> const> sin,
               rounding how, turn const& way, rows<T> y) {
    index_t const half = cos.width();
    auto const direction = static_cast<rotary_number<T>>(way.sign);
    auto const rotate_head = [&](T const* from, T* to, auto const* c, auto const* s) {
        if constexpr (sizeof(T) < sizeof(float)) {
            auto const rounded = [&](float value) {
                return how == rounding::round_each_op ? static_cast<float>(static_cast<T>(value)) : value;
            };
            for (index_t i = 0; i < half; ++i) {
                float const cosine = rounded(c[i]), sine = direction * rounded(s[i]);
                float const low = static_cast<float>(from[i]), high = static_cast<float>(from[half + i]);
                to[i] = static_cast<T>(rounded(low * cosine) - rounded(high * sine));
                to[half + i] = static_cast<T>(rounded(high * cosine) + rounded(low * sine));
            }
        } else {
            for (index_t i = 0; i < half; i += lane_count<T>) {
                index_t const valid = half - i;
                lanes<T> cosine, sine, low, high;
                load<T>(c + i, valid, cosine);
                load<T>(s + i, valid, sine);
                load<T>(from + i, valid, low);
                load<T>(from + half + i, valid, high);
                sine *= direction;
                store<T>(low * cosine - high * sine, to + i, valid);
                store<T>(high * cosine + low * sine, to + half + i, valid);
            }
        }
    };
    for (index_t row = 0; row < x.count(); ++row)
        for (index_t head = 0; head < x.width(); head += head_dim) {
            T const* const from = x.row(row) + head;
            T* const to = y.row(row) + head;
            rotate_head(from, to, cos.row(row), sin.row(row));
            if (from != to) std::copy(from + 2 * half, from + head_dim, to + 2 * half);
        }
}

/// Rotates by a table, or by positions, in one of the two directions.
template <class T>
void rotate(rows<T const> x, index_t head_dim, rows<rotary_number<T> const> cos, rows<rotary_number<T> const> sin,
            rounding how, turn const& way, rows<T> y, caller here) {
    index_t const half = cos.width();
    require_turned(x, head_dim, way, y, here);
    require(2 * half <= head_dim, way.where, "width of cos", "at most head_dim / 2", half, here);
    require_shape(way.where, "cos", cos, x.count(), half, here);
    require_shape(way.where, "sin", sin, x.count(), half, here);
    require_apart(way.where, {{way.to, y}}, {{"cos", cos}, {"sin", sin}}, here);
    turn_rows<T>(x, head_dim, cos, sin, how, way, y);
}
template <class T>
void rotate(rows<T const> x, index_t head_dim, rows<index_t const> positions,
            rotary_pairs<rotary_number<T>> const& pairs, turn const& way, rows<T> y, caller here) {
    using number = rotary_number<T>;
    index_t const count = x.count(), half = std::ssize(pairs.frequencies);
    require_positions(way.where, positions, count, here);
    require_axes(way.where, pairs.axes, half, 3, here);
    require(2 * half <= head_dim, way.where, "rotary_dim", "at most head_dim, " + std::to_string(head_dim), 2 * half,
            here);
    require_turned(x, head_dim, way, y, here);
    auto cos = zeros<number>(way.where, {count, half}, here), sin = cos;
    rows<number> const c(cos.data(), count, half), s(sin.data(), count, half);
    fill_rotary_table<number>(positions, pairs.axes, pairs.frequencies, c, s);
    turn_rows<T>(x, head_dim, c, s, pairs.how, way, y);
}

} // namespace detail

/// Rotates channel i of every head with channel i + D by the angle i of its row, D = cos.width():
///
///     y_i = x_i cos_i - x_{i+D} sin_i,    y_{i+D} = x_{i+D} cos_i + x_i sin_i
///
/// x, y: (rows, heads * head_dim), y may be x; cos, sin: (rows, D) with 2 D <= head_dim. Other channels pass through.
/// Elements of 16 bits have tables of float, and are rounded as `how` says.
/// Source: Su, Lu, Pan, Murtadha, Wen, Liu, "RoFormer", 2021, arXiv 2104.09864, section 3.4.2. The paper pairs
/// channels 2 i and 2 i + 1, here they come from the two halves of the rotated channels, as in the checkpoints of Qwen.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps in another way.
template <class T>
void rotary(rows<T const> x, index_t head_dim, rows<detail::rotary_number<T> const> cos,
            rows<detail::rotary_number<T> const> sin, rows<T> y, rounding how = rounding::fp32_inside,
            caller here = caller::here()) {
    detail::rotate<T>(x, head_dim, cos, sin, how, detail::turn_forth, y, here);
}

/// Computes `dx` from `dy`: rotates back, by the angles negated. Arguments as in `rotary`; dx may be dy.
template <class T>
void rotary_backward(rows<T const> dy, index_t head_dim, rows<detail::rotary_number<T> const> cos,
                     rows<detail::rotary_number<T> const> sin, rows<T> dx, rounding how = rounding::fp32_inside,
                     caller here = caller::here()) {
    detail::rotate<T>(dy, head_dim, cos, sin, how, detail::turn_back, dx, here);
}

/// Computes the same with positions, (1, rows), or (3, rows) for pairs that have axes.
template <class T>
void rotary(rows<T const> x, index_t head_dim, rows<index_t const> positions,
            rotary_pairs<detail::rotary_number<T>> const& pairs, rows<T> y, caller here = caller::here()) {
    detail::rotate<T>(x, head_dim, positions, pairs, detail::turn_forth, y, here);
}
template <class T>
void rotary_backward(rows<T const> dy, index_t head_dim, rows<index_t const> positions,
                     rotary_pairs<detail::rotary_number<T>> const& pairs, rows<T> dx, caller here = caller::here()) {
    detail::rotate<T>(dy, head_dim, positions, pairs, detail::turn_back, dx, here);
}

/// Computes the same with ordinary positions, one a row.
template <class T>
void rotary(rows<T const> x, index_t head_dim, std::span<index_t const> positions, rotary_options options, rows<T> y,
            caller here = caller::here()) {
    require(options.rotary_dim <= head_dim, "rotary", "rotary_dim", "at most head_dim, " + std::to_string(head_dim),
            options.rotary_dim, here);
    detail::rotate<T>(x, head_dim, {positions.data(), 1, std::ssize(positions)},
                      {rotary_frequencies<detail::rotary_number<T>>(options, here)}, detail::turn_forth, y, here);
}
template <class T>
void rotary_backward(rows<T const> dy, index_t head_dim, std::span<index_t const> positions, rotary_options options,
                     rows<T> dx, caller here = caller::here()) {
    require(options.rotary_dim <= head_dim, "rotary_backward", "rotary_dim",
            "at most head_dim, " + std::to_string(head_dim), options.rotary_dim, here);
    detail::rotate<T>(dy, head_dim, {positions.data(), 1, std::ssize(positions)},
                      {rotary_frequencies<detail::rotary_number<T>>(options, here)}, detail::turn_back, dx, here);
}

namespace detail {

/// Whether the functions above take X: tables, positions with pairs, or ordinary positions.
template <class T, class... X>
inline constexpr bool takes_rotary =
    takes<void(rows<T const>, index_t, rows<rotary_number<T> const>, rows<rotary_number<T> const>, rows<T>), X...> ||
    takes<void(rows<T const>, index_t, rows<rotary_number<T> const>, rows<rotary_number<T> const>, rows<T>, rounding),
          X...> ||
    takes<void(rows<T const>, index_t, rows<index_t const>, rotary_pairs<rotary_number<T>> const&, rows<T>), X...> ||
    takes<void(rows<T const>, index_t, std::span<index_t const>, rotary_options, rows<T>), X...>;

} // namespace detail

template <class T, class... X>
    requires(!detail::takes_rotary<T, X...>)
detail::refused rotary(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: rotary<T>(x, head_dim, cos, sin, y), (.., positions, pairs, y) and (.., positions, options, y) "
                  "want rows of T, not const where they are written; take rows with view() or data()");
    return {};
}
template <class T> // with lists in braces
detail::refused rotary(detail::any, detail::any, detail::any, detail::any, detail::any, detail::any = {}) {
    return rotary<T>(detail::any());
}
template <class T, class O = rotary_options>
    requires std::same_as<O, rotary_options>
detail::refused rotary(detail::any, detail::any, detail::any, O const&, detail::any, detail::any = {}) {
    return rotary<T>(detail::any());
}
template <class T, class... X>
    requires(!detail::takes_rotary<T, X...>)
detail::refused rotary_backward(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: rotary_backward<T>(dy, head_dim, cos, sin, dx), (.., positions, pairs, dx) and (.., positions, "
                  "options, dx) want rows of T, not const where they are written; take rows with view() or data()");
    return {};
}
template <class T>
detail::refused rotary_backward(detail::any, detail::any, detail::any, detail::any, detail::any, detail::any = {}) {
    return rotary_backward<T>(detail::any());
}
template <class T, class O = rotary_options>
    requires std::same_as<O, rotary_options>
detail::refused rotary_backward(detail::any, detail::any, detail::any, O const&, detail::any, detail::any = {}) {
    return rotary_backward<T>(detail::any());
}

} // namespace cpx
