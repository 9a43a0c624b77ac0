// SPDX-License-Identifier: Apache-2.0
// Projection of rows by a weight, one token independent of the others.
#pragma once

#include <cpx/ops/local/lanes.hpp>
#include <cpx/ops/local/shape.hpp>

#include <algorithm>
#include <array>
#include <iterator>

namespace cpx {
namespace detail {

/// Rows of x and rows of the weight whose products one pass over the channels computes.
inline constexpr std::size_t linear_rows = 4, linear_outputs = 2;

/// Returns all `linear_rows * linear_outputs` products of a row of x and a row of the weight.
///
/// A product is the sum over lanes of partial sums over ascending channels. Every product takes this one path: what
/// the rows beside it hold, and whether they are there at all, cannot change its bits.
template <class T>
std::array<T, linear_rows * linear_outputs> products(std::array<T const*, linear_rows> x,
                                                     std::array<T const*, linear_outputs> weight, index_t channels) {
    index_t const whole = channels / lane_count<T> * lane_count<T>;
    lanes<T> sums[linear_rows][linear_outputs] = {};
    lanes<T> tails[linear_rows + linear_outputs];
    // First the whole lanes, then copies of the last ones: one loop, so that both are rounded alike.
    for (bool const last : {false, true}) {
        if (last) {
            if (channels == whole) break;
            auto const fill = [=](T const*& row, lanes<T>& tail) {
                load<T>(row + whole, channels - whole, tail);
                row = reinterpret_cast<T const*>(&tail);
            };
            for (std::size_t i = 0; i < linear_rows; ++i) fill(x[i], tails[i]);
            for (std::size_t j = 0; j < linear_outputs; ++j) fill(weight[j], tails[linear_rows + j]);
        }
        for (index_t channel = 0; channel < (last ? 1 : whole); channel += lane_count<T>) {
            lanes<T> of_x[linear_rows];
            unroll<linear_rows>([&](auto i) { load<T>(x[i] + channel, of_x[i]); });
            unroll<linear_outputs>([&](auto j) {
                lanes<T> of_weight;
                load<T>(weight[j] + channel, of_weight);
                unroll<linear_rows>([&](auto i) { sums[i][j] += of_x[i] * of_weight; });
            });
        }
    }
    std::array<T, linear_rows * linear_outputs> result;
    unroll<result.size()>([&](auto i) { result[i] = sum<T>(sums[i / linear_outputs][i % linear_outputs]); });
    return result;
}

/// Computes `target_r += factors(r, j) * terms_j` for every row r, one term j after the other.
///
/// factors: (rows of target, terms). Bits as in `accumulate`; every element of target takes this one path.
template <class T>
void add_products(rows<T const> factors, rows<T const> terms, rows<T> target) {
    constexpr std::size_t at_once = 2;
    constexpr index_t block = static_cast<index_t>(lanes_in_flight) * lane_count<T>, tile = 256;
    padded<T> sums(static_cast<index_t>(at_once), block);
    for (index_t begin = 0; begin < terms.count(); begin += tile)
        for (index_t column = 0; column < target.width(); column += block) {
            index_t const count = std::min(tile, terms.count() - begin),
                          width = std::min(block, target.width() - column);
            padded<T> const panel(terms.sub(begin, count).columns(column, width)); // stays in the cache
            for (index_t row = 0; row < target.count(); row += index_t{at_once}) {
                index_t const valid = std::min<index_t>(at_once, target.count() - row);
                for (index_t i = 0; i < valid; ++i) std::copy_n(target.row(row + i) + column, width, sums.row(i));
                lanes<T> held[at_once][lanes_in_flight];
                T const* from[at_once];
                unroll<at_once>([&](auto i) {
                    from[i] = factors.row(row + std::min<index_t>(i, valid - 1)) + begin;
                    unroll<lanes_in_flight>([&](auto c) { load<T>(sums.row(i) + c * lane_count<T>, held[i][c]); });
                });
                for (index_t j = 0; j < count; ++j)
                    unroll<lanes_in_flight>([&](auto c) {
                        lanes<T> values;
                        load<T>(panel.row(j) + c * lane_count<T>, values);
                        unroll<at_once>([&](auto i) { held[i][c] += from[i][j] * values; });
                    });
                unroll<at_once>([&](auto i) {
                    unroll<lanes_in_flight>([&](auto c) { store<T>(held[i][c], sums.row(i) + c * lane_count<T>); });
                });
                for (index_t i = 0; i < valid; ++i) std::copy_n(sums.row(i), width, target.row(row + i) + column);
            }
        }
}

/// As `linear`, `linear_backward_input` and `linear_backward_weight`, of arguments that fit.
template <class T>
void project(rows<T const> x, rows<T const> weight, rows<T> y) {
    constexpr index_t at_once = linear_rows, outputs = linear_outputs;
    // The rows of x pass over a tile of the weight that stays in the cache.
    index_t const tile = std::max<index_t>(32, (index_t{1} << 15) / std::max<index_t>(x.width(), 1));
    for (index_t begin = 0; begin < weight.count(); begin += tile) {
        index_t const end = std::min(begin + tile, weight.count());
        for (index_t row = 0; row < x.count(); row += at_once) {
            std::array<T const*, linear_rows> from;
            for (index_t i = 0; T const*& each : from) each = x.row(std::min(row + i++, x.count() - 1));
            for (index_t out = begin; out < end; out += outputs) {
                std::array<T const*, linear_outputs> w;
                for (index_t j = 0; T const*& each : w) each = weight.row(std::min(out + j++, end - 1));
                auto const result = products(from, w, x.width());
                for (index_t i = 0; i < std::min(at_once, x.count() - row); ++i)
                    for (index_t j = 0; j < std::min(outputs, end - out); ++j)
                        y(row + i, out + j) = result[static_cast<std::size_t>(i * outputs + j)];
            }
        }
    }
}
template <class T>
void project_backward_input(rows<T const> dy, rows<T const> weight, rows<T> dx) {
    for (index_t row = 0; row < dx.count(); ++row) std::fill_n(dx.row(row), dx.width(), T(0));
    add_products<T>(dy, weight, dx);
}
template <class T>
void project_backward_weight(rows<T const> dy, rows<T const> x, rows<T> dweight) {
    constexpr index_t tile = 256;
    for (index_t begin = 0; begin < dy.count(); begin += tile) {
        index_t const count = std::min(tile, dy.count() - begin);
        padded<T> turned(dy.width(), count);
        for (index_t row = 0; row < count; ++row)
            for (index_t out = 0; out < dy.width(); ++out) turned(out, row) = dy(begin + row, out);
        add_products<T>(turned.view(), x.sub(begin, count), dweight);
    }
}

} // namespace detail

/// Computes `y = x W^T`.
///
/// x: (rows, in), weight: (out, in), y: (rows, out), not overlapping x or weight. An element of y is a function of
/// its row of x and its row of the weight alone, bit for bit.
/// Cost: rows * out * in multiplications, rounded up to 4 rows; allocates nothing.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void linear(rows<T const> x, rows<T const> weight, rows<T> y, caller here = caller::here()) {
    detail::require_shape("linear", "weight", weight, weight.count(), x.width(), here);
    detail::require_shape("linear", "y", y, x.count(), weight.count(), here);
    detail::require_apart("linear", {{"y", y}}, {{"x", x}, {"weight", weight}}, here);
    detail::project(x, weight, y);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T>), X...>)
detail::refused linear(X&&...) {
    static_assert(detail::never<X...>, "cpx: linear<T>(x, weight, y) wants rows of T, not const where they are "
                                       "written; take rows with view() or data()");
    return {};
}

/// Computes `dx = dy W`, the gradient of the input of `linear`.
///
/// dy: (rows, out), weight: (out, in), dx: (rows, in), not overlapping dy or weight. An element of dx is a function of
/// its row of dy and its column of the weight alone, bit for bit: the sum over ascending outputs.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void linear_backward_input(rows<T const> dy, rows<T const> weight, rows<T> dx, caller here = caller::here()) {
    detail::require_shape("linear_backward_input", "weight", weight, dy.width(), weight.width(), here);
    detail::require_shape("linear_backward_input", "dx", dx, dy.count(), weight.width(), here);
    detail::require_apart("linear_backward_input", {{"dx", dx}}, {{"dy", dy}, {"weight", weight}}, here);
    detail::project_backward_input(dy, weight, dx);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T>), X...>)
detail::refused linear_backward_input(X&&...) {
    static_assert(detail::never<X...>, "cpx: linear_backward_input<T>(dy, weight, dx) wants rows of T, not const "
                                       "where they are written; take rows with view() or data()");
    return {};
}

/// Computes `dweight += dy^T x`, the gradient of the weight of `linear`.
///
/// dy: (rows, out), x: (rows, in), dweight: (out, in) or some rows of it with the same columns of dy. An element is a
/// function of what it holds and of its columns of dy and x alone, bit for bit. Rows are added one after the other, so
/// they may be split between calls, in order, without changing a bit.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void linear_backward_weight(rows<T const> dy, rows<T const> x, rows<T> dweight, caller here = caller::here()) {
    detail::require_shape("linear_backward_weight", "x", x, dy.count(), x.width(), here);
    detail::require_shape("linear_backward_weight", "dweight", dweight, dy.width(), x.width(), here);
    detail::require_apart("linear_backward_weight", {{"dweight", dweight}}, {{"dy", dy}, {"x", x}}, here);
    detail::project_backward_weight(dy, x, dweight);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T>), X...>)
detail::refused linear_backward_weight(X&&...) {
    static_assert(detail::never<X...>, "cpx: linear_backward_weight<T>(dy, x, dweight) wants rows of T, not "
                                       "const where they are written; take rows with view() or data()");
    return {};
}

} // namespace cpx
