// SPDX-License-Identifier: Apache-2.0
// Moves rows by a list of rows, as bytes, and adds rows in a fixed order.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/neighbours.cuh>
#include <cpx/previous_kernel.cuh>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace cpx::kernels {

/// Rows that go from one buffer to another; `list` holds their rows in the buffer that is not read or written in order.
template <class I>
struct listed_rows {
    char const* from;
    char* to;
    I const* list;       ///< a negative number: no row
    I const* order;      ///< of `add_rows`: the row of `from` that goes to list[i], null: row i
    index_t count;       ///< numbers in `list`
    index_t limit;       ///< rows of the buffer that `list` speaks of
    index_t width;       ///< bytes of a row, of `add_rows` elements
    index_t from_stride; ///< bytes from row to row
    index_t to_stride;
};

/// Ends the kernel with an error if a row of a list lies behind the end of its buffer.
__device__ __forceinline__ void require_row(index_t row, index_t limit) {
    if (row >= limit) __trap();
}

/// Copies row list[i] of `from` to row i of `to`, zeros if list[i] < 0 or there is no list; with `Scatter` row i of
/// `from` to row list[i] of `to`, nothing if list[i] < 0.
///
/// `Vector`: divides both buffers' beginnings and strides. Block (columns, rows), grid (rows, columns), any size.
template <bool Scatter, class Vector, class I>
__global__ void __launch_bounds__(256, 4) move_rows(__grid_constant__ listed_rows<I> const a) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    constexpr int unroll = 4;
    index_t const i = static_cast<index_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (i >= a.count) return;
    index_t const row = a.list ? static_cast<index_t>(a.list[i]) : -1;
    require_row(row, a.limit);
    if (Scatter && row < 0) return;
    bool const zero = row < 0;
    char const* const from = a.from + (Scatter ? i : zero ? 0 : row) * a.from_stride;
    char* const to = a.to + (Scatter ? row : i) * a.to_stride;
    auto const* const source = reinterpret_cast<Vector const*>(from);
    auto* const target = reinterpret_cast<Vector*>(to);

    index_t const vectors = a.width / static_cast<index_t>(sizeof(Vector));
    index_t const step = static_cast<index_t>(gridDim.y) * blockDim.x * unroll;
#pragma unroll 1
    for (index_t first = static_cast<index_t>(blockIdx.y) * blockDim.x * unroll + threadIdx.x; first < vectors;
         first += step) {
        Vector const* const x = source + first;
        Vector* const y = target + first;
        index_t const left = vectors - first;
        Vector held[unroll] = {};
#pragma unroll
        for (int k = 0; k < unroll; ++k)
            if (k * blockDim.x < left && !zero) held[k] = x[k * blockDim.x];
#pragma unroll
        for (int k = 0; k < unroll; ++k)
            if (k * blockDim.x < left) y[k * blockDim.x] = held[k];
    }
    if (blockIdx.y > 0) return;
#pragma unroll 1
    for (index_t byte = vectors * static_cast<index_t>(sizeof(Vector)) + threadIdx.x; byte < a.width;
         byte += blockDim.x)
        to[byte] = zero ? char{} : from[byte];
}

/// Adds rows `order[i]` of `from` to row list[i] of `to`: in float, i ascending, rounded to T once.
///
/// Equal numbers of `list` stand next to each other: the first of them adds all. `N`: elements at once; N * sizeof(T)
/// divides both buffers' beginnings and strides. Block (columns, rows), grid (rows, columns), any size.
template <class T, int N, class I>
__global__ void __launch_bounds__(256, 4) add_rows(__grid_constant__ listed_rows<I> const a) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    index_t const i = static_cast<index_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (i >= a.count) return;
    index_t const row = a.list[i];
    require_row(row, a.limit);
    if (row < 0 || (i > 0 && a.list[i - 1] == row)) return;
    index_t last = i + 1;
    while (last < a.count && a.list[last] == row) ++last;
    T* const to = reinterpret_cast<T*>(a.to + row * a.to_stride);
    auto const source = [&](index_t j) {
        index_t const from = a.order ? static_cast<index_t>(a.order[j]) : j;
        if (from < 0 || from >= a.count) __trap();
        return reinterpret_cast<T const*>(a.from + from * a.from_stride);
    };

    index_t const vectors = a.width / N, step = static_cast<index_t>(gridDim.y) * blockDim.x;
    for (index_t v = static_cast<index_t>(blockIdx.y) * blockDim.x + threadIdx.x; v < vectors; v += step) {
        auto* const target = reinterpret_cast<neighbours<T, N>*>(to) + v;
        neighbours<T, N> const before = *target;
        float sum[N];
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] = static_cast<float>(before.element[k]);
#pragma unroll 4
        for (index_t j = i; j < last; ++j) {
            neighbours<T, N> const more = reinterpret_cast<neighbours<T, N> const*>(source(j))[v];
#pragma unroll
            for (int k = 0; k < N; ++k) sum[k] += static_cast<float>(more.element[k]);
        }
        neighbours<T, N> after;
#pragma unroll
        for (int k = 0; k < N; ++k) after.element[k] = static_cast<T>(sum[k]);
        *target = after;
    }
    if (blockIdx.y > 0) return;
#pragma unroll 1
    for (index_t c = vectors * N + threadIdx.x; c < a.width; c += blockDim.x) {
        float sum = static_cast<float>(to[c]);
#pragma unroll 1
        for (index_t j = i; j < last; ++j) sum += static_cast<float>(source(j)[c]);
        to[c] = static_cast<T>(sum);
    }
}

} // namespace cpx::kernels
