// SPDX-License-Identifier: Apache-2.0
// What is computed element by element or row by row, in any memory.
#pragma once

#include <cpx/core/config.hpp>
#include <cpx/core/memory.hpp>

#include <type_traits>

namespace cpx {

/// In what functions of elements of T compute: in T, or in float where T has 16 bits and is no type of the language.
template <class T>
using wide = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

template <class T>
CPX_HOST_DEVICE wide<T> widen(T x) {
    return static_cast<wide<T>>(x);
}

/// Calls `f(row, column)` for all of `count` rows of `width` columns; one column, where a call computes a whole row.
///
/// On the host one after the other. With `cuda/elements.hpp` a `cuda::memory` in place of the host's calls it on the
/// device, each in a thread of its own: what is marked for both, such as the functions in `rowwise`, is written once.
template <class F>
void for_each_element(host_memory, index_t count, index_t width, F const& f, caller = caller::here()) {
    for (index_t row = 0; row < count; ++row)
        for (index_t column = 0; column < width; ++column) f(row, column);
}

} // namespace cpx
