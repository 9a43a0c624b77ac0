// SPDX-License-Identifier: Apache-2.0
// A barrier between the same block of every rank's kernel, which gives up instead of hanging.
#pragma once

#include <cstdint>

namespace cpx::kernels {

inline constexpr int most_ranks = 8; // of one NVLink domain

/// Where ranks leave word for each other. All flags begin with 0.
///
/// `flags[r]`: rank r's words, in its own memory as this rank reaches it, one for each block and rank, then one a rank
/// that says that this rank has given up; `epochs`: this rank's, one a block, then whether one has given up; `missing`:
/// in host memory that the device can write, a bit for each rank that did not come. Every rank launches the same number
/// of blocks, all of them resident, in the same order of kernels.
struct meeting {
    std::uint32_t* flags[most_ranks];
    std::uint32_t* epochs;
    std::uint32_t* missing;
    std::uint64_t patience; ///< nanoseconds
    int rank, ranks;
};

namespace detail {

__device__ __forceinline__ std::uint64_t nanoseconds() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
__device__ __forceinline__ void store_release(std::uint32_t* to, std::uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ std::uint32_t load_acquire(std::uint32_t const* from) {
    std::uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

} // namespace detail

/// Tells every rank that this block has come to `epoch`. Called by all threads; what they wrote before is seen by
/// whoever has met this block.
__device__ inline void arrive(meeting const& m, std::uint32_t epoch) {
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x < static_cast<unsigned>(m.ranks))
        detail::store_release(m.flags[threadIdx.x] + blockIdx.x * m.ranks + m.rank, epoch);
}

/// Waits until this block of every rank has come to `epoch`. Returns false, on all threads, if one did not in time.
__device__ inline bool await(meeting const& m, std::uint32_t epoch) {
    bool here = true;
    if (threadIdx.x < static_cast<unsigned>(m.ranks)) {
        std::uint32_t const* const word = m.flags[m.rank] + blockIdx.x * m.ranks + threadIdx.x;
        std::uint64_t const end = detail::nanoseconds() + m.patience;
        // epochs wrap around: what counts is the difference
        while (here && static_cast<std::int32_t>(detail::load_acquire(word) - epoch) < 0)
            here = detail::nanoseconds() < end;
        if (!here) atomicOr_system(m.missing, 1u << threadIdx.x);
    }
    bool const all = __syncthreads_and(here);
    if (!all && threadIdx.x < static_cast<unsigned>(m.ranks)) { // nobody is to store here any more, nor this rank there
        m.epochs[gridDim.x] = 1;
        detail::store_release(m.flags[threadIdx.x] + gridDim.x * m.ranks + m.rank, 1);
    }
    return all;
}

/// Returns whether this rank or another has given up, on all threads; then `m.missing` names who was missed or who gave
/// up. Asked before a kernel meets others.
__device__ inline bool given_up(meeting const& m) {
    bool up = false;
    if (threadIdx.x < static_cast<unsigned>(m.ranks)) {
        up = m.epochs[gridDim.x] != 0; // then those whom this rank missed are named already
        if (!up && detail::load_acquire(m.flags[m.rank] + gridDim.x * m.ranks + threadIdx.x) != 0) {
            up = true;
            atomicOr_system(m.missing, 1u << threadIdx.x);
        }
    }
    return __syncthreads_or(up);
}

} // namespace cpx::kernels
