// SPDX-License-Identifier: Apache-2.0
// Heads divided by their lengths, and the gradient; how lanes share heads.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/pack.cuh>

#include <algorithm>
#include <bit>
#include <cstddef>
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

/// How the lanes of a warp share heads: each has 16 bytes of elements side by side, or `steps` times so many, and
/// `lanes` of them a head. `whole`: rows of everything begin at multiples of 16 bytes; bits do not depend on it.
struct norm_lanes {
    int lanes, steps;
    bool whole;
};
/// Returns how they share heads of `dim` elements: none a head if they cannot.
template <class T>
norm_lanes norm_lanes_of(index_t dim, bool whole) {
    index_t const packs = dim * static_cast<index_t>(sizeof(T)) / 16;
    bool const fits = dim * static_cast<index_t>(sizeof(T)) % 16 == 0 &&
                      (packs % 32 == 0 || (packs < 32 && std::has_single_bit(static_cast<std::size_t>(packs))));
    if (!fits) return {0, 0, false};
    index_t const lanes = std::min<index_t>(packs, 32);
    return {static_cast<int>(lanes), static_cast<int>(packs / lanes), whole};
}

namespace norm {

/// Adds up over lanes that are `from` apart or more, below `lanes`; every one of them gets the sum.
__device__ __forceinline__ float sum_over(float sum, int from, int lanes) {
    for (int apart = lanes / 2; apart >= from; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

} // namespace norm

/// `y = x / sqrt(sum x^2 + 1e-6)` or, with `back`, y is the gradient of that and becomes the one of x. A warp for each
/// row, whose heads its groups of lanes take in turn. Blocks of (32, 8) threads; strides: from row to row.
template <class T>
__global__ void __launch_bounds__(256)
    normalise_heads(T const* x, std::int64_t x_stride, T* y, std::int64_t y_stride, std::int64_t rows,
                    std::int64_t width, int dim, bool back, norm_lanes by) {
    constexpr int count = 16 / sizeof(T);
    std::int64_t const row = std::int64_t{blockIdx.x} * 8 + threadIdx.y;
    if (row >= rows) return;
    int const lane = static_cast<int>(threadIdx.x), across = by.lanes * count, group = lane / by.lanes * dim;
    T const* const from = x + row * x_stride;
    T* const to = y + row * y_stride;
    for (std::int64_t first = group; first - group < width; first += 32 / by.lanes * dim) {
        bool const there = first < width; // else for the others' sums
        std::int64_t const column = (there ? first : 0) + lane % by.lanes * count;
        array<float, count> value, d = {};
        float squares = 0, along = 0;
        auto const load_all = [&](int step) {
            load<T, count>(from + column + step * across, by.whole, value);
            if (back && there) load<T, count>(to + column + step * across, by.whole, d);
        };
        for (int step = 0; step < by.steps; ++step) {
            load_all(step);
#pragma unroll
            for (int i = 0; i < count; ++i) {
                squares += value[i] * value[i];
                along += value[i] * d[i];
            }
        }
        squares = norm::sum_over(squares, 1, by.lanes);
        if (back) along = norm::sum_over(along, 1, by.lanes);
        if (!there) continue;
        float const factor = 1 / sqrtf(squares + 1e-6f), pulled = factor * factor * along;
        for (int step = 0; step < by.steps; ++step) {
            if (by.steps > 1) load_all(step);
#pragma unroll
            for (int i = 0; i < count; ++i) value[i] = factor * (back ? d[i] - value[i] * pulled : value[i]);
            store<T, count>(value, by.whole, to + column + step * across);
        }
    }
}

/// The same of heads of other sizes: a warp for each head of each row, element by element.
template <class T>
__global__ void __launch_bounds__(256)
    normalise_any_heads(T const* x, std::int64_t x_stride, T* y, std::int64_t y_stride, std::int64_t rows, int heads,
                        int dim, bool back) {
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
