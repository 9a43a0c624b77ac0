// SPDX-License-Identifier: Apache-2.0
// Products of matrices by a plain kernel.
#pragma once

#include <cpx/core/elements.hpp>
#include <cpx/core/rows.hpp>

#include <type_traits>

namespace qwen::gpu {

using cpx::index_t, cpx::rows;

/// A matrix or its transpose.
template <class T>
struct factor {
    rows<T const> data;
    bool turned;
    __device__ float operator()(index_t i, index_t k) const { return cpx::widen(turned ? data(k, i) : data(i, k)); }
};
template <class T>
factor(rows<T>, bool) -> factor<std::remove_const_t<T>>;
inline constexpr auto plain = [](auto const& x) { return factor{x, false}; };
inline constexpr auto transposed = [](auto const& x) { return factor{x, true}; };

/// An element is one sum in the order of k, in float, rounded once: it has the same bits whatever other rows and
/// columns there are.
template <class T, class Out>
struct fixed_product {
    factor<T> a, b;
    index_t inner;
    float before;
    rows<Out> c;
    __device__ void operator()(index_t i, index_t j) const {
        float sum = before == 0 ? 0 : cpx::widen(c(i, j));
        for (index_t k = 0; k < inner; ++k) sum += a(i, k) * b(j, k);
        c(i, j) = static_cast<Out>(sum);
    }
};
template <class T, class Out> // for clang++ before 17
fixed_product(factor<T>, factor<T>, index_t, float, rows<Out>) -> fixed_product<T, Out>;

} // namespace qwen::gpu
