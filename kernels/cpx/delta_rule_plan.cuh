// SPDX-License-Identifier: Apache-2.0
// What the kernels of the gated delta rule are given, and where the chunks and stretches of a packed batch lie.
#pragma once

#include <cpx/core/search.hpp>

#include <cpx/previous_kernel.cuh>

#include <cstdint>

namespace cpx::kernels {

/// Tokens of a chunk, which begins at a multiple of them in its sequence.
inline constexpr int delta_chunk = 64;

/// Rows of a launch: row i begins `i * stride` elements after `data`.
template <class T>
struct delta_rows {
    T* data;
    std::int64_t stride;
    __device__ __forceinline__ T* at(std::int64_t row) const { return data + row * stride; }
};

/// A segment of a sequence. Its chunk c is rows [origin + 64 c, origin + 64 c + 64), as far as they are its own.
struct delta_sequence {
    int begin, end; ///< rows
    int origin;     ///< the row, perhaps before `begin`, at which chunk 0 begins
    int chunks, first_chunk, stretches, first_stretch;

    __device__ __forceinline__ int chunk_begin(int c) const { return max(begin, origin + c * delta_chunk); }
    __device__ __forceinline__ int chunk_end(int c) const { return min(end, origin + (c + 1) * delta_chunk); }
};

/// Stretch `number` of sequence `sequence`.
struct delta_stretch {
    int sequence, number;
};

/// The batch as it is in device memory during a call; `totals`: chunks, stretches, and tasks that have been begun.
struct delta_plan {
    delta_sequence* sequences;
    delta_stretch* stretches; ///< in order of time: all first stretches, all second ones, ...
    int* totals;
    int* flags; ///< (stretches, value heads, 2): whether the state before a stretch has been written, for each half; of
                ///< the backward's walks (sequences, value heads, 2, 2): chunks whose states and gradients have been
    std::int64_t flag_count;
    int count;          ///< sequences
    int stretch_chunks; ///< of every stretch but a sequence's last
};

/// Returns the sequence of a chunk.
__device__ __forceinline__ int delta_sequence_of(delta_plan const& plan, int chunk) {
    return last_at_or_before(chunk, plan.count, [&](int s) { return plan.sequences[s].first_chunk; });
}

/// Writes the plan of segments at `offsets`; `first`: the tokens of their sequences that they begin with, null for 0;
/// `counts`: their rows, null: up to the next segment. One block.
static __global__ void __launch_bounds__(1024) delta_rule_plan(std::int64_t const* offsets, std::int64_t const* first,
                                                               std::int64_t const* counts, delta_plan plan) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const thread = static_cast<int>(threadIdx.x);
    if (thread < 32) {
        int chunks = 0, stretches = 0;
        for (int s0 = 0; s0 < plan.count; s0 += 32) {
            int const s = s0 + thread;
            delta_sequence sequence{};
            if (s < plan.count) {
                sequence.begin = static_cast<int>(offsets[s]);
                sequence.end = static_cast<int>(counts ? offsets[s] + counts[s] : offsets[s + 1]);
                sequence.origin = sequence.begin - (first ? static_cast<int>(first[s] % delta_chunk) : 0);
                if (sequence.end > sequence.begin)
                    sequence.chunks = (sequence.end - sequence.origin + delta_chunk - 1) / delta_chunk;
                sequence.stretches = max(1, (sequence.chunks + plan.stretch_chunks - 1) / plan.stretch_chunks);
            }
            int chunks_before = sequence.chunks, stretches_before = sequence.stretches;
            for (int apart = 1; apart < 32; apart *= 2) {
                int const c = __shfl_up_sync(~0u, chunks_before, apart),
                          p = __shfl_up_sync(~0u, stretches_before, apart);
                if (thread >= apart) chunks_before += c, stretches_before += p;
            }
            sequence.first_chunk = chunks + chunks_before - sequence.chunks;
            sequence.first_stretch = stretches + stretches_before - sequence.stretches;
            if (s < plan.count) plan.sequences[s] = sequence;
            chunks += __shfl_sync(~0u, chunks_before, 31);
            stretches += __shfl_sync(~0u, stretches_before, 31);
        }
        if (thread == 0) plan.totals[0] = chunks, plan.totals[1] = stretches, plan.totals[2] = 0;
    }
    for (std::int64_t i = thread; i < plan.flag_count; i += 1024) plan.flags[i] = 0;
    __syncthreads();
    int const stretches = plan.totals[1];
    for (int i = thread; i < stretches; i += 1024) {
        int const s = last_at_or_before(i, plan.count, [&](int other) { return plan.sequences[other].first_stretch; });
        int const stretch = i - plan.sequences[s].first_stretch;
        int place = 0; // the stretches before it in time, and those of its time in sequences before
        for (int other = 0; other < plan.count; ++other)
            place += min(plan.sequences[other].stretches, stretch + (other < s ? 1 : 0));
        plan.stretches[place] = {s, stretch};
    }
}

} // namespace cpx::kernels
