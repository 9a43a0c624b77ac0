// SPDX-License-Identifier: Apache-2.0
// Heads divided by their lengths, and the gradient: a warp for each head of each row.
#pragma once

#include <cpx/pack.cuh>

#include <cstdint>

namespace cpx::kernels {

/// Returns the sum of `f(d)` over the channels of a head, on every lane, always added in the same order.
template <class F>
__device__ __forceinline__ float sum_over_head(int dim, F&& f) {
    float sum = 0;
    for (int d = static_cast<int>(threadIdx.x); d < dim; d += 32) sum += f(d);
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

/// `y = x / sqrt(sum x^2 + 1e-6)` or, with `back`, y is the gradient of that and becomes the one of x. Blocks of (32,
/// 8) threads; strides: from row to row.
template <class T>
__global__ void __launch_bounds__(256) normalise_heads(T const* x, std::int64_t x_stride, T* y, std::int64_t y_stride,
                                                       std::int64_t rows, int heads, int dim, bool back) {
    std::int64_t const step = std::int64_t{gridDim.x} * 8;
    for (std::int64_t i = std::int64_t{blockIdx.x} * 8 + threadIdx.y; i < rows * heads; i += step) {
        T const* const from = x + i / heads * x_stride + i % heads * dim;
        T* const to = y + i / heads * y_stride + i % heads * dim;
        float const squares = sum_over_head(dim, [&](int d) { return widen(from[d]) * widen(from[d]); });
        float const factor = 1 / sqrtf(squares + 1e-6f);
        float const along = back ? sum_over_head(dim, [&](int d) { return widen(from[d]) * widen(to[d]); }) : 0.0f;
        for (int d = static_cast<int>(threadIdx.x); d < dim; d += 32) {
            float const value = widen(from[d]);
            float const made = back ? widen(to[d]) - value * (factor * factor * along) : value;
            to[d] = static_cast<T>(factor * made);
        }
    }
}

} // namespace cpx::kernels
