// SPDX-License-Identifier: Apache-2.0
// Sums over rows whose bits do not depend on shapes, strides, alignment or neighbours.
#pragma once

#include <cpx/core/rows.hpp>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace cpx::detail {

/// The bytes of one vector register, and the elements it holds.
inline constexpr index_t lane_bytes = __BIGGEST_ALIGNMENT__;
template <class T>
inline constexpr index_t lane_count = lane_bytes / static_cast<index_t>(sizeof(T));

template <class T>
struct lanes_of {
    typedef T type __attribute__((vector_size(lane_bytes)));
};

/// A register's worth of neighbouring columns; a type of gcc and clang with elementwise arithmetic.
///
/// Loops over the columns of a row step by whole lanes and fill the last ones with zeros. So there is no scalar
/// remainder that a compiler may round in another way (by fusing a multiplication with an addition, say), and the
/// bits of an element do not depend on the column it stands in.
template <class T>
using lanes = typename lanes_of<T>::type;

/// Reads the elements at `from`, which need not be aligned.
template <class T>
void load(T const* from, lanes<T>& to) {
    std::memcpy(&to, from, sizeof to);
}

/// Reads the first `valid` elements, zeros after them.
template <class T>
void load(T const* from, index_t valid, lanes<T>& to) {
    if (valid >= lane_count<T>) return load<T>(from, to);
    to = lanes<T>{};
    std::memcpy(&to, from, static_cast<std::size_t>(valid) * sizeof(T));
}

/// Writes the first `valid` elements.
template <class T>
void store(lanes<T> const& from, T* to, index_t valid = lane_count<T>) {
    if (valid >= lane_count<T>)
        std::memcpy(to, &from, sizeof from);
    else
        std::memcpy(to, &from, static_cast<std::size_t>(valid) * sizeof(T));
}

/// Returns the sum of all lanes, the first one first.
template <class T>
T sum(lanes<T> const& values) {
    T result = 0;
    for (index_t lane = 0; lane < lane_count<T>; ++lane) result += values[lane];
    return result;
}

/// Returns the sum of the squares of `width` elements.
template <class T>
T sum_of_squares(T const* row, index_t width) {
    lanes<T> squares{};
    for (index_t column = 0; column < width; column += lane_count<T>) {
        lanes<T> values;
        load<T>(row + column, width - column, values);
        squares += values * values;
    }
    return sum<T>(squares);
}

/// Returns the sum of the products of `width` elements.
template <class T>
T dot(T const* a, T const* b, index_t width) {
    lanes<T> products{};
    for (index_t column = 0; column < width; column += lane_count<T>) {
        lanes<T> of_a, of_b;
        load<T>(a + column, width - column, of_a);
        load<T>(b + column, width - column, of_b);
        products += of_a * of_b;
    }
    return sum<T>(products);
}

/// Calls `f` with 0, 1, ..., N - 1 as compile-time constants, which keeps arrays of lanes in registers.
template <std::size_t N, class F>
constexpr void unroll(F&& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
        (f(std::integral_constant<std::size_t, I>{}), ...);
    }(std::make_index_sequence<N>{});
}

/// The lanes of a row that `combine` sums at a time.
inline constexpr std::size_t lanes_in_flight = 4;

/// A (count, width) matrix, every row filled with zeros to whole blocks of `lanes_in_flight` lanes.
template <class T>
class padded {
public:
    padded() = default;
    /// All zeros.
    padded(index_t count, index_t width) : count_(count), width_(width) {
        constexpr index_t block = static_cast<index_t>(lanes_in_flight) * lane_count<T>;
        stride_ = (width + block - 1) / block * block;
        values_.resize(static_cast<std::size_t>(count * stride_));
    }
    /// A copy of `source`.
    explicit padded(rows<T const> source) : padded(source.count(), source.width()) {
        for (index_t i = 0; i < count_; ++i) std::copy_n(source.row(i), width_, row(i));
    }

    index_t count() const { return count_; }
    index_t width() const { return width_; }
    /// Returns the elements from row to row, the zeros at the end included.
    index_t stride() const { return stride_; }
    T* row(index_t i) { return values_.data() + i * stride_; }
    T const* row(index_t i) const { return values_.data() + i * stride_; }
    T& operator()(index_t i, index_t j) { return row(i)[j]; }
    T operator()(index_t i, index_t j) const { return row(i)[j]; }
    rows<T> view() { return {values_.data(), count_, width_, stride_}; }
    rows<T const> view() const { return {values_.data(), count_, width_, stride_}; }

private:
    index_t count_ = 0, width_ = 0, stride_ = 0;
    std::vector<T> values_;
};

/// Computes `target = scale * target + sum_j factors[j] * source_j` over the first `count` rows of `source`.
///
/// The sum starts at zero and runs over ascending j, so a factor of zero changes no bit (unless its row holds an
/// infinity or a NaN). `target` has the stride of `source` and is none of the rows summed.
template <class T>
void combine(T const* factors, index_t count, padded<T> const& source, T scale, T* target) {
    constexpr index_t step = lane_count<T>;
    for (index_t column = 0; column < source.stride(); column += static_cast<index_t>(lanes_in_flight) * step) {
        lanes<T> sums[lanes_in_flight] = {};
        for (index_t j = 0; j < count; ++j) {
            T const* const from = source.row(j) + column;
            T const factor = factors[j];
            unroll<lanes_in_flight>([&](auto c) {
                lanes<T> values;
                load<T>(from + c * step, values);
                sums[c] += factor * values;
            });
        }
        unroll<lanes_in_flight>([&](auto c) {
            lanes<T> values;
            load<T>(target + column + c * step, values);
            store<T>(scale * values + sums[c], target + column + c * step);
        });
    }
}

/// Computes `target += factors[j] * source_j`, one row j of `[first, last)` after the other.
///
/// So these rows may be split between calls, in order, without changing a bit. `target` has the stride of `source` and
/// is none of the rows added.
template <class T>
void accumulate(T const* factors, index_t first, index_t last, padded<T> const& source, T* target) {
    constexpr index_t step = lane_count<T>;
    for (index_t column = 0; column < source.stride(); column += static_cast<index_t>(lanes_in_flight) * step) {
        lanes<T> sums[lanes_in_flight];
        unroll<lanes_in_flight>([&](auto c) { load<T>(target + column + c * step, sums[c]); });
        for (index_t j = first; j < last; ++j) {
            T const* const from = source.row(j) + column;
            T const factor = factors[j];
            unroll<lanes_in_flight>([&](auto c) {
                lanes<T> values;
                load<T>(from + c * step, values);
                sums[c] += factor * values;
            });
        }
        unroll<lanes_in_flight>([&](auto c) { store<T>(sums[c], target + column + c * step); });
    }
}

} // namespace cpx::detail
