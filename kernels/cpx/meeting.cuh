// SPDX-License-Identifier: Apache-2.0
// A barrier between the same block of every rank's kernel, which gives up instead of hanging.
#pragma once

#include <cpx/system_scope.cuh>

#include <cstdint>

namespace cpx::kernels {

inline constexpr int most_ranks = 8; // of one NVLink domain

/// What kernels have found of each rank that they met; 0: nothing. Bytes, for a device need not be able to change a
/// word of the host atomically.
struct faults {
    std::uint8_t missing[most_ranks]; ///< has not come in time, or gave up before
    std::uint8_t differs[most_ranks]; ///< has another plan: in which field, see `relayout_field`
    std::uint8_t refused[most_ranks]; ///< has offsets that do not ascend from 0, or more rows than its buffers
};

/// Where ranks leave word for each other. All flags begin with 0.
///
/// `flags[r]`: rank r's, in its own memory as this rank reaches it, `count` of them: two for each block and rank (an
/// epoch, and in the upper half what else is to be said), as many numbers that go with those, then one a rank that says
/// that this rank has given up;
/// `epochs`: this rank's, one a block, then whether one has given up or the host wants all to; `found`: in host memory
/// that the device can write. Every rank launches the same number of blocks, all of them resident, in the same order of
/// kernels.
struct meeting {
    std::uint64_t* flags[most_ranks];
    std::uint32_t* epochs;
    faults* found;
    std::uint64_t patience; ///< nanoseconds
    int rank, ranks;

    static constexpr int count(int blocks, int ranks) { return (4 * blocks + 1) * ranks; }
    /// Returns which flag `from` sets at `epoch`. Who has come to an epoch may come to the next one before what it said
    /// is read, so odd and even ones have flags of their own.
    __device__ int place(std::uint32_t epoch, int from) const {
        return static_cast<int>(blockIdx.x * 2 + epoch % 2) * ranks + from;
    }
    /// Returns which flag is the number that goes with flag `place`.
    __device__ int number(int place) const { return 2 * static_cast<int>(gridDim.x) * ranks + place; }
    /// Returns which flag says that `from` has given up.
    __device__ int end(int from) const { return count(static_cast<int>(gridDim.x), ranks) - ranks + from; }
};

/// Tells every rank that this block has come to `epoch`, `word`, and `number`. Called by all threads; what they wrote
/// before is seen by whoever has met this block.
__device__ inline void arrive(meeting const& m, std::uint32_t epoch, std::uint32_t word, std::uint64_t number = 0) {
    __syncthreads(); // a release is cumulative: it covers what this thread knows to have been written before
    if (threadIdx.x < static_cast<unsigned>(m.ranks)) {
        int const place = m.place(epoch, m.rank);
        std::uint64_t* const flags = m.flags[threadIdx.x];
        detail::store_relaxed(flags + m.number(place), number);
        detail::store_release(flags + place, static_cast<std::uint64_t>(word) << 32 | epoch);
    }
}

namespace detail {

/// Waits until `reached(*flag)`, which `rank` is to bring about; `found` becomes what the flag is. Returns false if
/// that takes too long, for which it names the rank, or if this rank has given up meanwhile.
template <class F>
__device__ bool wait_for(meeting const& m, int rank, std::uint64_t const* flag, std::uint64_t& found, F&& reached) {
    bool here = true;
    std::uint64_t end = 0;
    for (int i = 0;; ++i) {
        found = load_acquire(flag);
        if (!here || reached(found)) return here;
        if (i % 16 != 15) continue; // a look at the clock takes longer than one at the flag
        std::uint64_t const now = nanoseconds();
        if (end == 0) end = now + m.patience;
        if (now >= end) m.found->missing[rank] = 1;
        here = now < end && load_relaxed(m.epochs + gridDim.x) == 0;
    }
}

/// Says that this rank gives up: nobody is to store here any more, nor this rank there. Called for every rank.
__device__ inline void give_up(meeting const& m, int rank) {
    m.epochs[gridDim.x] = 1;
    store_release(m.flags[rank] + m.end(m.rank), 1);
}

} // namespace detail

/// Waits until this block of every rank has come to `epoch`; `said` and `number` become those of rank threadIdx.x.
/// Returns false, on all threads, if one did not come in time.
__device__ inline bool await(meeting const& m, std::uint32_t epoch, std::uint32_t& said, std::uint64_t& number) {
    bool here = true;
    int const rank = static_cast<int>(threadIdx.x);
    if (rank < m.ranks) {
        std::uint64_t found = 0;
        int const place = m.place(epoch, rank);
        here = detail::wait_for(m, rank, m.flags[m.rank] + place, found, [=](std::uint64_t flag) {
            // epochs wrap around: what counts is the difference
            return static_cast<std::int32_t>(static_cast<std::uint32_t>(flag) - epoch) >= 0;
        });
        said = static_cast<std::uint32_t>(found >> 32);
        number = detail::load_relaxed(m.flags[m.rank] + m.number(place));
    }
    bool const all = __syncthreads_and(here);
    if (!all && rank < m.ranks) detail::give_up(m, rank);
    return all;
}

/// Returns whether this rank or rank threadIdx.x has given up; then `m.found` names who was missed or who gave up.
/// Asked before a kernel meets others.
__device__ inline bool given_up(meeting const& m) {
    if (threadIdx.x >= static_cast<unsigned>(m.ranks)) return false;
    bool const there = detail::load_relaxed(m.flags[m.rank] + m.end(static_cast<int>(threadIdx.x))) != 0;
    bool const here =
        detail::load_relaxed(m.epochs + gridDim.x) != 0; // then those whom this rank missed are named already
    if (there && !here) m.found->missing[threadIdx.x] = 1;
    return here || there;
}

} // namespace cpx::kernels
