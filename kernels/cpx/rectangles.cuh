// SPDX-License-Identifier: Apache-2.0
// Copies and adds rectangles of rows and columns, many in one launch.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/neighbours.cuh>
#include <cpx/previous_kernel.cuh>

#include <cstdint>

namespace cpx::kernels {

/// Some rows of `bytes` bytes each, from one of a launch's buffers to another; `vector` is the largest power of two up
/// to 16 that divides both places, both pitches and `bytes`. A block takes a slice of it at a time.
struct rectangle {
    std::int64_t source, target;             ///< bytes from the buffers' beginnings
    std::int64_t source_pitch, target_pitch; ///< bytes from row to row
    std::int32_t rows, bytes;
    std::int16_t source_buffer, target_buffer, vector, unused;
    std::int32_t first; ///< slices of the launch before this one's

    /// Returns the rows of a slice: 32 KiB, or one.
    CPX_HOST_DEVICE std::int32_t slice() const { return bytes < (1 << 15) ? (1 << 15) / (bytes > 0 ? bytes : 1) : 1; }
    CPX_HOST_DEVICE std::int32_t slices() const { return (rows + slice() - 1) / slice(); }
};

/// The rectangles of one launch.
struct rectangle_list {
    rectangle const* list;
    std::int32_t count, slices;
};

/// The buffers of a launch: where rows come from, where they go to, and what goes through the wire.
struct rectangle_buffers {
    char* base[4];
};

namespace detail {

template <class Vector>
__device__ __forceinline__ void copy_rectangle(rectangle const& r, char const* source, char* target) {
    constexpr int unroll = 4;
    std::uint32_t const per_row = static_cast<std::uint32_t>(r.bytes) / sizeof(Vector);
    std::uint32_t const total = per_row * static_cast<std::uint32_t>(r.rows);
    for (std::uint32_t first = threadIdx.x; first < total; first += unroll * blockDim.x) {
        Vector held[unroll];
#pragma unroll
        for (int i = 0; i < unroll; ++i)
            if (std::uint32_t const u = first + i * blockDim.x; u < total)
                held[i] = reinterpret_cast<Vector const*>(source + u / per_row * r.source_pitch)[u % per_row];
#pragma unroll
        for (int i = 0; i < unroll; ++i)
            if (std::uint32_t const u = first + i * blockDim.x; u < total)
                reinterpret_cast<Vector*>(target + u / per_row * r.target_pitch)[u % per_row] = held[i];
    }
}

/// Calls `f(rectangle)` with the slices that are this block's.
template <class F>
__device__ __forceinline__ void for_each_slice(rectangle_list const& all, F&& f) {
    constexpr int most = 2048;
    __shared__ std::int32_t firsts[most]; // of the rectangles, to search in
    bool const near = all.count <= most;
    for (int i = static_cast<int>(threadIdx.x); near && i < all.count; i += static_cast<int>(blockDim.x))
        firsts[i] = all.list[i].first;
    __syncthreads();
    for (int s = static_cast<int>(blockIdx.x); s < all.slices; s += static_cast<int>(gridDim.x)) {
        int low = 0, high = all.count;
        while (low + 1 < high) {
            int const middle = (low + high) / 2;
            ((near ? firsts[middle] : all.list[middle].first) <= s ? low : high) = middle;
        }
        rectangle r = all.list[low];
        std::int32_t const rows = r.slice(), row = (s - r.first) * rows;
        r.source += row * r.source_pitch;
        r.target += row * r.target_pitch;
        r.rows = min(rows, r.rows - row);
        f(r);
    }
}

} // namespace detail

/// Copies all rectangles. Any grid, any block.
template <class = void>
__global__ void copy_rectangles(__grid_constant__ rectangle_list const all,
                                __grid_constant__ rectangle_buffers const buffers) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    detail::for_each_slice(all, [&](rectangle const& r) {
        char const* const source = buffers.base[r.source_buffer] + r.source;
        char* const target = buffers.base[r.target_buffer] + r.target;
        with_bytes<1>(r.vector, [&](auto bytes) { detail::copy_rectangle<bytes_at_once<bytes>>(r, source, target); });
    });
}

/// Adds all rectangles of elements T to their targets. No two of a launch may share a target.
template <class T>
__global__ void add_rectangles(__grid_constant__ rectangle_list const all,
                               __grid_constant__ rectangle_buffers const buffers) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    detail::for_each_slice(all, [&](rectangle const& r) {
        std::uint32_t const per_row = static_cast<std::uint32_t>(r.bytes) / sizeof(T);
        std::uint32_t const total = per_row * static_cast<std::uint32_t>(r.rows);
        for (std::uint32_t u = threadIdx.x; u < total; u += blockDim.x) {
            T const* const source =
                reinterpret_cast<T const*>(buffers.base[r.source_buffer] + r.source + u / per_row * r.source_pitch) +
                u % per_row;
            T* const target =
                reinterpret_cast<T*>(buffers.base[r.target_buffer] + r.target + u / per_row * r.target_pitch) +
                u % per_row;
            *target = static_cast<T>(*target + *source);
        }
    });
}

/// Makes the words of all ranks this rank's own, before those of ranks that send arrive.
template <class = void>
__global__ void fill_words(std::int64_t const* own, std::int64_t* words, int ranks) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    for (int r = static_cast<int>(threadIdx.x); r < ranks; r += static_cast<int>(blockDim.x)) words[r] = *own;
}

/// Notes, in memory that the host reads, the ranks whose words are others.
template <class = void>
__global__ void compare_words(std::int64_t const* own, std::int64_t const* words, int ranks, std::uint32_t* others) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    for (int r = static_cast<int>(threadIdx.x); r < ranks; r += static_cast<int>(blockDim.x))
        if (words[r] != *own) others[r] = 1;
}

} // namespace cpx::kernels
