// SPDX-License-Identifier: Apache-2.0
// Sums over rows whose bits do not depend on shapes, strides, alignment or neighbours.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/ops/eigen.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace cpx::detail {

/// The bytes of one vector register, and the elements it holds.
inline constexpr index lane_bytes = std::max(EIGEN_MAX_ALIGN_BYTES, 16);
template <class T>
inline constexpr index lane_count = lane_bytes / static_cast<index>(sizeof(T));

template <class T>
struct lanes_of {
    typedef T type __attribute__((vector_size(lane_bytes)));
};

/// A register's worth of neighbouring columns: a vector type of gcc and clang, because an array of fixed size is kept
/// in memory by gcc -O2.
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

/// Reads the `valid` elements at `from`, then zeros.
template <class T>
void load(T const* from, index valid, lanes<T>& to) {
    to = lanes<T>{};
    std::memcpy(&to, from, static_cast<std::size_t>(std::min(valid, lane_count<T>)) * sizeof(T));
}

/// Writes the first `valid` elements to `to`.
template <class T>
void store(lanes<T> const& from, T* to, index valid = lane_count<T>) {
    std::memcpy(to, &from, static_cast<std::size_t>(std::min(valid, lane_count<T>)) * sizeof(T));
}

/// Calls `f` with 0, 1, ..., N - 1, as compile-time constants: the loops around accumulators must leave no index
/// at run time, or the accumulators do not stay in registers.
template <std::size_t N, class F>
constexpr void unroll(F&& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
        (f(std::integral_constant<std::size_t, I>{}), ...);
    }(std::make_index_sequence<N>{});
}

/// The lanes that `combine` keeps in registers at a time; rows of `padded` are whole numbers of these.
inline constexpr std::size_t lanes_in_flight = 4;

/// A (count, width) copy of rows in aligned memory, every row filled with zeros to whole blocks of lanes.
template <class T>
class padded {
public:
    padded() = default;
    padded(index count, index width) : width_(width) {
        constexpr index block = static_cast<index>(lanes_in_flight) * lane_count<T>;
        values_.setZero(count, (width + block - 1) / block * block);
    }
    explicit padded(rows<T const> source) : padded(source.count(), source.width()) {
        for (index i = 0; i < source.count(); ++i) std::copy_n(source.row(i), source.width(), row(i));
    }

    index count() const { return values_.rows(); }
    index width() const { return width_; }
    /// Returns the elements from row to row, the zeros at the end included.
    index stride() const { return values_.cols(); }
    T* row(index i) { return values_.data() + i * stride(); }
    T const* row(index i) const { return values_.data() + i * stride(); }
    T& operator()(index i, index j) { return row(i)[j]; }
    T operator()(index i, index j) const { return row(i)[j]; }
    operator rows<T>() { return {values_.data(), count(), width_, stride()}; }
    operator rows<T const>() const { return {values_.data(), count(), width_, stride()}; }

private:
    index width_ = 0;
    matrix<T> values_;
};

/// Computes `target = scale * target + sum_j factors[j] * source_j` over the rows `j < count` of `source`.
///
/// The sum runs over ascending j from zero, so rows with factor zero change no bit. `target` has the stride of
/// `source` and is not one of its first `count` rows.
template <class T>
void combine(T const* factors, index count, padded<T> const& source, T scale, T* target) {
    constexpr index step = lane_count<T>;
    for (index column = 0; column < source.stride(); column += static_cast<index>(lanes_in_flight) * step) {
        std::array<lanes<T>, lanes_in_flight> sums;
        unroll<lanes_in_flight>([&](auto c) { sums[c] = lanes<T>::Zero(); });
        for (index j = 0; j < count; ++j) {
            T const* const from = source.row(j) + column;
            unroll<lanes_in_flight>([&](auto c) { sums[c] += factors[j] * load(from + c * step); });
        }
        unroll<lanes_in_flight>([&](auto c) {
            T* const to = target + column + static_cast<index>(c) * step;
            store<T>(scale * load(to) + sums[c], to);
        });
    }
}

} // namespace cpx::detail
