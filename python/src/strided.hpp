// SPDX-License-Identifier: Apache-2.0
// How arrays of whatever memory are rows, and the names of their elements.
#pragma once

#include <cpx/core/element_name.hpp>
#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>

#include <string>
#include <string_view>

namespace binding {

using cpx::index_t;

/// An element of an array of booleans, which is moved and never added.
struct boolean {
    unsigned char value = 0;
};

/// Kinds of numbers, as DLPack has them.
enum class number_kind { integer = 0, natural = 1, floating = 2, bfloat = 4, complex = 5, boolean = 6 };

/// Returns "float32", "bfloat16", "int64".
inline std::string number_name(int kind, int bits) {
    std::string const size = std::to_string(bits);
    switch (static_cast<number_kind>(kind)) {
    case number_kind::integer: return "int" + size;
    case number_kind::natural: return "uint" + size;
    case number_kind::floating: return "float" + size;
    case number_kind::bfloat: return "bfloat" + size;
    case number_kind::complex: return "complex" + size;
    case number_kind::boolean: return "bool";
    default: return "another";
    }
}

/// How an array is rows: its first dimension counts them, all others make up one row, side by side.
struct row_shape {
    index_t count = 0, width = 1, stride = 1;
};

/// Throws `cpx::error` if an array has no dimension or if its rows are not side by side.
template <class A>
row_shape rows_in(A const& a) {
    index_t const dimensions = a.dimensions();
    if (dimensions == 0) throw cpx::error(a.where, std::string("shape of ") + a.name, "rows", "a number");
    row_shape r;
    r.count = a.size(0);
    bool dense = true; // what makes up a row, which of single and of no elements any stride is
    for (index_t i = dimensions - 1; i > 0; --i) {
        dense = dense && (a.size(i) < 2 || a.stride(i) == r.width);
        r.width *= a.size(i);
    }
    r.stride = r.count > 1 && r.width > 0 ? a.stride(0) : r.width;
    if (a.elements() > 0 && (!dense || r.stride < r.width))
        throw cpx::error(a.where, std::string("memory of ") + a.name,
                         "rows of elements side by side, one after the other", "other strides; copy it first");
    return r;
}

/// Throws `cpx::error` unless all elements are side by side, and as many as that, if it is not negative.
template <class A>
void require_list(A const& a, index_t size) {
    index_t next = 1;
    for (index_t i = a.dimensions() - 1; i >= 0; --i) {
        if (a.elements() > 0 && a.size(i) > 1 && a.stride(i) != next)
            throw cpx::error(a.where, std::string("memory of ") + a.name, "elements side by side",
                             "other strides; copy it first");
        next *= a.size(i);
    }
    if (size >= 0 && a.elements() != size)
        throw cpx::error(a.where, std::string("size of ") + a.name, std::to_string(size), std::to_string(a.elements()));
}

} // namespace binding

template <>
inline constexpr std::string_view cpx::element_name<binding::boolean> = "bool";
