// SPDX-License-Identifier: Apache-2.0
// The tokens of a segment in chunks, and rows divided by their lengths.
#pragma once

#include <cpx/ops/local/lanes.hpp>

#include <algorithm>
#include <cmath>
#include <optional>

namespace cpx::detail {

/// Calls `f(row, n)` for the chunks of a segment in turn, whose row 0 is token `first` of its sequence; chunks begin at
/// multiples of `chunk` tokens, so that the first and the last one may be shorter.
template <class F>
void for_each_chunk(index_t count, index_t first, index_t chunk, F&& f) {
    for (index_t row = 0, n = 0; row < count; row += n) {
        n = std::min(chunk - (first + row) % chunk, count - row);
        f(row, n);
    }
}

/// The same, the last one first.
template <class F>
void for_each_chunk_reversed(index_t count, index_t first, index_t chunk, F&& f) {
    for (index_t end = count, row = 0; end > 0; end = row) {
        row = std::max<index_t>((first + end - 1) / chunk * chunk - first, 0);
        f(row, end - row);
    }
}

/// Returns x, each row divided by its length if `l2norm`, times `scale`.
template <class T>
padded<T> scaled_rows(rows<T const> x, bool l2norm, T scale) {
    padded<T> result(x);
    for (index_t i = 0; i < x.count(); ++i) {
        T const factor = l2norm ? scale / std::sqrt(sum_of_squares(x.row(i), x.width()) + T(1e-6)) : scale;
        for (index_t d = 0; d < x.width(); ++d) result(i, d) *= factor;
    }
    return result;
}

/// Adds the gradient of x to `dx`, given that of `y = scaled_rows(x, l2norm, 1)`.
template <class T>
void scaled_rows_backward(rows<T const> x, padded<T> const& y, padded<T> const& dy, bool l2norm, rows<T> dx) {
    for (index_t i = 0; i < x.count(); ++i) {
        T const factor = l2norm ? 1 / std::sqrt(sum_of_squares(x.row(i), x.width()) + T(1e-6)) : 1;
        T const inner = l2norm ? dot(y.row(i), dy.row(i), x.width()) : 0;
        for (index_t d = 0; d < x.width(); d += lane_count<T>) {
            lanes<T> of_y, of_dy, of_dx;
            load<T>(y.row(i) + d, of_y);
            load<T>(dy.row(i) + d, of_dy);
            load<T>(dx.row(i) + d, x.width() - d, of_dx);
            store<T>(of_dx + factor * (of_dy - inner * of_y), dx.row(i) + d, x.width() - d);
        }
    }
}

/// Returns the factor of queries of `dim` channels; no `scale`: 1 / sqrt(dim).
template <class T>
T query_scale(std::optional<double> scale, index_t dim) {
    return static_cast<T>(scale ? *scale : 1 / std::sqrt(static_cast<double>(dim)));
}

template <class T>
void fill(rows<T> to, T value) {
    for (index_t i = 0; i < to.count(); ++i) std::fill_n(to.row(i), to.width(), value);
}

template <class T>
void copy_out(padded<T> const& from, rows<T> to) {
    for (index_t i = 0; i < to.count(); ++i) std::copy_n(from.row(i), to.width(), to.row(i));
}

} // namespace cpx::detail
