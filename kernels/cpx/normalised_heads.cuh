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

/// What of a whole head each of its elements is computed by: the factor, and how far its gradient goes along it.
struct head_sums {
    float factor, along;
};

/// What a lane reads of a head: N matrices' elements of its own, as they are in memory.
template <class T, int N>
struct lane_packs {
    array<pack<T, 16 / sizeof(T)>, N> of;
};

/// Calls `f(column, packs)` for the heads of a row that a lane's group takes in turn, where each lane has its elements
/// at once: `column` is its first one's, below 0 where there is no such head and only others' sums want this lane. What
/// the next head's elements are is on its way meanwhile. `from`: where the row begins in N matrices.
template <class T, int N, class F>
__device__ __forceinline__ void for_each_head(array<T const*, N> const& from, int width, int dim, norm_lanes by,
                                              F&& f) {
    constexpr int count = 16 / sizeof(T);
    int const lane = static_cast<int>(threadIdx.x), across = 32 / by.lanes * dim;
    auto const load_head = [&](int column) {
        lane_packs<T, N> packs;
#pragma unroll
        for (int i = 0; i < N; ++i) packs.of[i] = load<T, count>(from[i] + (column < width ? column : 0), by.whole);
        return packs;
    };
    int column = lane / by.lanes * dim + lane % by.lanes * count;
    auto next = load_head(column);
    for (int left = width; left > 0; left -= across, column += across) { // the columns from the first lane's on
        auto const packs = next;
        if (left > across) next = load_head(column + across);
        f(column < width ? column : -1, packs);
    }
}

/// `y = x / sqrt(sum x^2 + 1e-6)` or, Back, y is the gradient of that and becomes the one of x. A warp for each row,
/// whose heads its groups of lanes take in turn. Blocks of (32, 8) threads; strides: from row to row.
template <class T, bool Back>
__global__ void __launch_bounds__(256, 4)
    normalise_heads(T const* x, std::int64_t x_stride, T* y, std::int64_t y_stride, std::int64_t rows, int width,
                    int dim, norm_lanes by) {
    constexpr int count = 16 / sizeof(T);
    std::int64_t const row = std::int64_t{blockIdx.x} * 8 + threadIdx.y;
    if (row >= rows) return;
    int const lane = static_cast<int>(threadIdx.x);
    array<T const*, 2> const from = {x + row * x_stride, Back ? y + row * y_stride : x + row * x_stride};
    T* const to = y + row * y_stride;
    array<float, count> value, d;
    float squares = 0, along = 0;
    auto const add_sums = [&] {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            squares += value[i] * value[i];
            if constexpr (Back) along += value[i] * d[i];
        }
    };
    auto const finish_sums = [&] {
        squares = norm::sum_over(squares, 1, by.lanes);
        if constexpr (Back) along = norm::sum_over(along, 1, by.lanes);
        float const factor = 1 / sqrtf(squares + 1e-6f);
        head_sums const sums{factor, factor * factor * along};
        squares = along = 0;
        return sums;
    };
    auto const write = [&](head_sums sums, int column) {
#pragma unroll
        for (int i = 0; i < count; ++i) value[i] = sums.factor * (Back ? d[i] - value[i] * sums.along : value[i]);
        store<T, count>(value, by.whole, to + column);
    };
    if (by.steps == 1) {
        for_each_head<T, 2>(from, width, dim, by, [&](int column, lane_packs<T, 2> const& packs) {
            widen<T, count>(packs.of[0], value);
            if constexpr (Back) widen<T, count>(packs.of[1], d);
            add_sums();
            auto const sums = finish_sums();
            if (column >= 0) write(sums, column);
        });
        return;
    }
    auto const load_all = [&](int column) {
        load<T, count>(from[0] + column, by.whole, value);
        if constexpr (Back) load<T, count>(from[1] + column, by.whole, d);
    };
    for (int first = 0; first < width; first += dim) {
        for (int j = lane * count; j < dim; j += 32 * count) load_all(first + j), add_sums();
        auto const sums = finish_sums();
        for (int j = lane * count; j < dim; j += 32 * count) load_all(first + j), write(sums, first + j);
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
