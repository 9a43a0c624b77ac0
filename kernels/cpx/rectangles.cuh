// SPDX-License-Identifier: Apache-2.0
// Copies and adds rectangles of rows and columns, many in one launch.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/core/search.hpp>
#include <cpx/plan/rectangles.hpp>

#include <cpx/neighbours.cuh>
#include <cpx/previous_kernel.cuh>

#include <cstddef>
#include <cstdint>

namespace cpx::kernels {

using cpx::detail::rectangle;

/// Rectangles that one launch moves, `count` from `first` on, each with the slices of these before it.
struct list_part {
    std::int32_t first, count, slices;
};

/// The rectangles of one launch. `back`: from their targets to their sources.
struct rectangle_list {
    rectangle const* list;
    std::int32_t count = 0, slices = 0;
    bool back = false, early = false; ///< `early`: no kernel that has just been launched writes the list, or parts
    /// Null, or in device memory, as the list is: what the launch moves instead of `count` rectangles, one part and
    /// another behind it, which may be null.
    list_part const *part = nullptr, *next = nullptr;
};

/// What ranks compare, where messages bring it: a word of every rank, which are to be this rank's own.
struct word_check {
    std::uint64_t const* own; ///< null: nothing is compared
    std::uint64_t const* words;
    std::int32_t ranks;
    std::uint32_t* others; ///< set to 1 for ranks with another word, in memory that the host reads
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

/// Calls `f(rectangle)` with the slices that are this block's, of whole elements of so many bytes, once the kernel
/// before has ended. The list is fetched meanwhile, if it may be.
template <std::size_t Element = 1, class F>
__device__ __forceinline__ void for_each_slice(rectangle_list const& all, F&& f) {
    static_assert(sizeof(rectangle) % sizeof(std::uint64_t) == 0);
    constexpr int words = 1 << 11;
    __shared__ std::uint64_t held[words]; // all of a short list, of a longer one what is searched in
    if (!all.early) wait_for_previous_kernel();
    list_part const one = all.part ? *all.part : list_part{0, all.count, all.slices};
    list_part const more = all.next ? *all.next : list_part{};
    rectangle const* const given = all.list + one.first;
    int const count = one.count + more.count, slices = one.slices + more.slices;
    int const list_words = count * static_cast<int>(sizeof(rectangle) / sizeof(std::uint64_t));
    bool const whole = list_words <= words, firsts = !whole && count <= 2 * words;
    auto* const first = reinterpret_cast<std::int32_t*>(held);
    for (int i = static_cast<int>(threadIdx.x); whole && i < list_words; i += static_cast<int>(blockDim.x))
        held[i] = reinterpret_cast<std::uint64_t const*>(given)[i];
    for (int i = static_cast<int>(threadIdx.x); firsts && i < count; i += static_cast<int>(blockDim.x))
        first[i] = given[i].first;
    __syncthreads();
    auto const* const list = whole ? reinterpret_cast<rectangle const*>(held) : given;
    if (all.early) wait_for_previous_kernel();
    let_next_kernel_come();
    for (int s = static_cast<int>(blockIdx.x); s < slices; s += static_cast<int>(gridDim.x)) {
        auto const begin = [&](int i) {
            return (firsts ? first[i] : list[i].first) + (i >= one.count ? one.slices : 0);
        };
        int const which = last_at_or_before(s, count, begin);
        rectangle r = list[which];
        r.first = begin(which);
        if (all.back)
            r = {r.target,        r.source,        r.target_pitch, r.source_pitch, r.rows, r.bytes,
                 r.target_buffer, r.source_buffer, r.vector,       r.unused,       r.first};
        r.take_slice(s - r.first, static_cast<std::int32_t>(Element));
        f(r);
    }
}

} // namespace detail

/// Copies all rectangles, and compares the words that have come. Any grid, any block.
template <class = void>
__global__ void copy_rectangles(__grid_constant__ rectangle_list const all,
                                __grid_constant__ rectangle_buffers const buffers,
                                __grid_constant__ word_check const check) {
    detail::for_each_slice(all, [&](rectangle const& r) {
        char const* const source = buffers.base[r.source_buffer] + r.source;
        char* const target = buffers.base[r.target_buffer] + r.target;
        with_bytes<1>(r.vector, [&](auto bytes) { detail::copy_rectangle<bytes_at_once<bytes>>(r, source, target); });
    });
    if (check.own && blockIdx.x == 0)
        for (int r = static_cast<int>(threadIdx.x); r < check.ranks; r += static_cast<int>(blockDim.x))
            if (check.words[r] != *check.own) check.others[r] = 1;
}

/// Adds all rectangles of elements T to their targets. No two of a launch may share a target.
template <class T>
__global__ void add_rectangles(__grid_constant__ rectangle_list const all,
                               __grid_constant__ rectangle_buffers const buffers) {
    detail::for_each_slice<sizeof(T)>(all, [&](rectangle const& r) {
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

} // namespace cpx::kernels
