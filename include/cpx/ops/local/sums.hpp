// SPDX-License-Identifier: Apache-2.0
// Copies and sums of elements, in any memory.
#pragma once

#include <cpx/core/elements.hpp>
#include <cpx/core/rows.hpp>

namespace cpx::rowwise {

template <class T>
struct copy {
    rows<T const> from;
    rows<T> to;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const { to(row, j) = from(row, j); }
};

template <class T>
struct clear {
    rows<T> to;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const { to(row, j) = T(0); }
};

/// Adds the terms of a row: one, or several side by side, such as of its choices, one after the other.
template <class T>
struct add {
    rows<T const> terms;
    rows<T> to;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        wide<T> sum = widen(to(row, j));
        for (index_t first = 0; first < terms.width(); first += to.width()) sum += widen(terms(row, first + j));
        to(row, j) = static_cast<T>(sum);
    }
};

/// Adds rows to those of a list. A column's rows in order: called for every column, of row 0.
template <class T, class To = T>
struct add_rows {
    rows<T const> from;
    index_t const* list;
    rows<To> to;
    CPX_HOST_DEVICE void operator()(index_t, index_t j) const {
        for (index_t row = 0; row < from.count(); ++row) {
            index_t const place = list[row];
            to(place, j) = static_cast<To>(widen(to(place, j)) + widen(from(row, j)));
        }
    }
};

/// Adds every `block` rows, the last time what is left, to one. A column's rows in order, of which some are asked for
/// at a time: a device waits for memory, not for sums.
template <class T>
struct add_blocks {
    rows<T const> from;
    index_t block;
    rows<T> to;
    CPX_HOST_DEVICE void operator()(index_t i, index_t j) const {
        constexpr index_t at_once = 32;
        index_t row = i * block, last = row + block < from.count() ? row + block : from.count();
        T sum = to(i, j);
        for (; row + at_once <= last; row += at_once) {
            T some[at_once];
            for (index_t k = 0; k < at_once; ++k) some[k] = from(row + k, j);
            for (index_t k = 0; k < at_once; ++k) sum = static_cast<T>(widen(sum) + widen(some[k]));
        }
        for (; row < last; ++row) sum = static_cast<T>(widen(sum) + widen(from(row, j)));
        to(i, j) = sum;
    }
};

} // namespace cpx::rowwise
