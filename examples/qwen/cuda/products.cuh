// SPDX-License-Identifier: Apache-2.0
// Products of matrices by a plain kernel.
#pragma once

#include <cpx/core/rows.hpp>

namespace qwen::gpu {

using cpx::index_t, cpx::rows;

/// A matrix or its transpose.
struct factor {
    rows<float const> data;
    bool turned;
    __device__ float operator()(index_t i, index_t k) const { return turned ? data(k, i) : data(i, k); }
};
inline factor plain(rows<float const> x) { return {x, false}; }
inline factor transposed(rows<float const> x) { return {x, true}; }

/// An element is one sum in the order of k: it has the same bits whatever other rows and columns there are.
struct fixed_product {
    factor a, b;
    index_t inner;
    float before;
    rows<float> c;
    __device__ void operator()(index_t i, index_t j) const {
        float sum = before == 0 ? 0 : c(i, j);
        for (index_t k = 0; k < inner; ++k) sum += a(i, k) * b(j, k);
        c(i, j) = sum;
    }
};

} // namespace qwen::gpu
