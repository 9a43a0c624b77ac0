// SPDX-License-Identifier: Apache-2.0
// Random rows in awkward places, and comparisons of results bit by bit and with a reference.
#pragma once

#include <cpx/core/rows.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace bits {

using cpx::rows;
using size = cpx::index_t;

/// splitmix64
struct random {
    std::uint64_t state = 0;
    std::uint64_t next() {
        std::uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    /// Returns a number in [-1, 1).
    double unit() { return static_cast<double>(next() >> 11) * 0x1p-52 - 1; }
};

/// Rows that begin `shift` elements after an aligned address, `gap` elements of NaN between them.
template <class T>
class scattered {
public:
    scattered(size count, size width, size gap = 0, size shift = 0)
        : count_(count), width_(width), stride_(width + gap), shift_(shift),
          values_(static_cast<std::size_t>(shift + count * stride_), std::numeric_limits<T>::quiet_NaN()) {}
    scattered(rows<T const> source, size gap, size shift) : scattered(source.count(), source.width(), gap, shift) {
        for (size i = 0; i < count_; ++i) std::copy_n(source.row(i), width_, view().row(i));
    }
    rows<T> view() { return {values_.data() + shift_, count_, width_, stride_}; }
    rows<T const> view() const { return {values_.data() + shift_, count_, width_, stride_}; }
    operator rows<T const>() const { return view(); }

private:
    size count_, width_, stride_, shift_;
    std::vector<T> values_;
};

template <class T>
scattered<T> uniform(size count, size width, std::uint64_t seed, double scale = 1) {
    scattered<T> result(count, width);
    random source{seed};
    for (size i = 0; i < count; ++i)
        for (size j = 0; j < width; ++j) result.view()(i, j) = static_cast<T>(scale * source.unit());
    return result;
}

template <class T>
bool same(rows<T const> a, rows<T const> b) {
    if (a.count() != b.count() || a.width() != b.width()) return false;
    for (size i = 0; i < a.count(); ++i)
        if (std::memcmp(a.row(i), b.row(i), static_cast<std::size_t>(a.width()) * sizeof(T)) != 0) return false;
    return true;
}

/// Returns the norm of the difference over the norm of the reference.
template <class T, class R>
double relative_error(rows<T const> got, rows<R const> reference) {
    REQUIRE(got.count() == reference.count());
    REQUIRE(got.width() == reference.width());
    double difference = 0, norm = 0;
    for (size i = 0; i < got.count(); ++i)
        for (size j = 0; j < got.width(); ++j) {
            double const expected = static_cast<double>(reference(i, j));
            difference += std::pow(static_cast<double>(got(i, j)) - expected, 2);
            norm += expected * expected;
        }
    return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

/// Checks that rows computed alone and in batches of up to 20, in buffers of several strides and alignments, have
/// the bits they have among all rows of `x`.
///
/// `run(first, x, y)` computes rows of `width` elements; `first` is the row of all rows that `x` begins with.
template <class T, class F>
void check_rows_are_independent(rows<T const> x, size width, F run) {
    scattered<T> all(x.count(), width);
    run(size{0}, x, all.view());
    for (size i = 0; i < x.count(); ++i)
        for (size j = 0; j < width; ++j) REQUIRE(std::isfinite(all.view()(i, j)));
    for (size count = 1; count <= std::min<size>(20, x.count()); ++count)
        for (size first = 0; first + count <= x.count(); first += count > 3 ? 5 : 1) {
            size const shift = (first + count) % 9, gap = (3 * first + count) % 7;
            CAPTURE(count);
            CAPTURE(first);
            scattered<T> const some(x.sub(first, count), gap, shift);
            scattered<T> y(count, width, (gap + 2) % 5, (shift + 3) % 8);
            run(first, some.view(), y.view());
            CHECK(same<T>(y.view(), all.view().sub(first, count)));
        }
}

} // namespace bits
