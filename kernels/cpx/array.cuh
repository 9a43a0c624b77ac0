// SPDX-License-Identifier: Apache-2.0
// Arrays whose sizes a template has as int, as threads number elements.
#pragma once

#include <cpx/cuda/nvcc.hpp>

#include <cstddef>

namespace cpx::kernels {

namespace detail {
template <class T, int N, int... Inner>
struct array_of {
    using type = typename array_of<T, Inner...>::type[std::size_t{N}];
};
template <class T, int N>
struct array_of<T, N> {
    using type = T[std::size_t{N}];
};
} // namespace detail

/// T[N][Inner]...; in its place g++ warns of an int that becomes a size.
template <class T, int... N>
using array = typename detail::array_of<T, N...>::type;

} // namespace cpx::kernels
