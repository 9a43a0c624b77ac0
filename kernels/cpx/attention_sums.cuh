// SPDX-License-Identifier: Apache-2.0
// Sums beside attention, a warp for each head of each row: of o dout, and over the readers of a head.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/normalised_heads.cuh>

#include <cstdint>

namespace cpx::kernels {

/// Calls `f(row, head)` with all that this warp is to do. Blocks of (32, 8) threads.
template <class F>
__device__ void each_head(std::int64_t count, std::int64_t heads, F&& f) {
    std::int64_t const step = std::int64_t{gridDim.x} * blockDim.y;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y; i < count * heads; i += step)
        f(i / heads, i % heads);
}

/// delta = sum over a head of o dout. o, dout: (rows, heads * dim), delta: (rows, heads).
template <class T>
__global__ void __launch_bounds__(256)
    attention_delta(rows<T const> const o, rows<T const> const dout, int dim, rows<float> const delta) {
    each_head(delta.count(), delta.width(), [&](std::int64_t row, std::int64_t head) {
        T const *const x = o.row(row) + head * dim, *const y = dout.row(row) + head * dim;
        float const sum = sum_over_head(dim, [&](int d) { return widen(x[d]) * widen(y[d]); });
        if (threadIdx.x == 0) delta(row, head) = sum;
    });
}

/// sum = sum over the readers of a head, ascending, rounded once. terms: (rows, heads * group * width).
template <class T>
__global__ void __launch_bounds__(256)
    add_readers(rows<float const> const terms, std::int64_t group, std::int64_t width, rows<T> const sum) {
    each_head(sum.count(), sum.width() / width, [&](std::int64_t row, std::int64_t head) {
        float const* const from = terms.row(row) + head * group * width;
        for (std::int64_t d = threadIdx.x; d < width; d += 32) {
            float all = from[d];
            for (std::int64_t reader = 1; reader < group; ++reader) all += from[reader * width + d];
            sum(row, head * width + d) = static_cast<T>(all);
        }
    });
}

} // namespace cpx::kernels
