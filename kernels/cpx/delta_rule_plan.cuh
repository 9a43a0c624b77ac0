// SPDX-License-Identifier: Apache-2.0
// What the kernels of the gated delta rule are given, and where the chunks and stretches of a packed batch lie.
#pragma once

#include <cpx/core/search.hpp>

#include <cpx/previous_kernel.cuh>

#include <cstdint>
#include <initializer_list>

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

/// Channels of a key head and of a value head.
struct delta_dims {
    int key, value;

    /// Returns an element of a state of these, key channels first; zero beyond them.
    __device__ __forceinline__ float read(float const* state, int of_key, int of_value) const {
        return of_key < key && of_value < value ? state[of_key * value + of_value] : 0.0f;
    }
};

/// A segment of a sequence. Its chunk c is rows [origin + 64 c, origin + 64 c + 64), as far as they are its own.
struct delta_sequence {
    int begin, end; ///< rows
    int origin;     ///< the row, perhaps before `begin`, at which chunk 0 begins
    int chunks, first_chunk, stretches, first_stretch;

    bool operator==(delta_sequence const&) const = default;
    __device__ __forceinline__ int chunk_begin(int c) const { return max(begin, origin + c * delta_chunk); }
    __device__ __forceinline__ int chunk_end(int c) const { return min(end, origin + (c + 1) * delta_chunk); }
};

/// Stretch `number` of sequence `sequence`, which is `of`: a block that begins reads one place of memory, not two.
struct delta_stretch {
    int sequence, number; ///< sequence: -1 of none
    delta_sequence of;
};

/// Chunks of a stretch that no sequence is longer than.
inline constexpr int delta_uncut = 1 << 24;

/// How sequences are cut into stretches, whose outputs are computed beside each other while walks with nothing but the
/// state go on; a chunk's outputs take about three steps of a walk. No bit depends on it, unless by scan.
struct delta_cut {
    static constexpr int short_chunks = 16;

    int chunks;     ///< of a stretch, but for the last ones of a sequence
    int shorts = 0; ///< stretches of `short_chunks` before a sequence's last one: what ends last is to be short
    int multiprocessors = 0; ///< that share the work; 0: last stretches are not longer
    int heads = 1;           ///< value heads
    int walks = 1;           ///< multiprocessors that walk along one sequence and head

    /// What a batch makes of it.
    struct shares {
        float steps; ///< of a walk, after which all is done
        float pace;  ///< chunks whose outputs are computed during a step, of every sequence and head
    };
    __device__ __forceinline__ shares share(int all_chunks, int longest) const {
        float const all = static_cast<float>(multiprocessors), length = static_cast<float>(max(longest, 1));
        float const chains = static_cast<float>(heads) * fmaxf(static_cast<float>(all_chunks), 1.0f) / length;
        float const walking = fminf(static_cast<float>(walks) * chains, all);
        // A last stretch of so much of the longest sequence ends with everything else, if that is evenly distributed
        float const last = (walking + 3 * chains - all) / (2 * all + walking);
        return {length * (1 + 2 * fminf(fmaxf(last, 0.0f), 1.0f)), (all - walking) / (3 * chains)};
    }
    /// Returns how many stretches a sequence has. No walk goes past the beginning of the last one: the longer that one
    /// is, the less is to be done; it is as long as it can be and not end after all others.
    __device__ __forceinline__ int stretches(shares const& s, int of_chunks) const {
        int last = chunks;
        if (multiprocessors > 0)
            last = max(last, min(of_chunks, static_cast<int>((s.steps - static_cast<float>(of_chunks)) / 2)));
        if (of_chunks <= last) return 1;
        bool const longer = last > chunks; // then the others are as many as come nearest to it
        int const before = longer ? of_chunks - last : of_chunks - 1, in_longer = before - shorts * short_chunks;
        auto const count = [&](int n, int of) { return (longer ? n + of / 2 : n) / of; };
        return 1 + (in_longer < 0 ? count(before, short_chunks) : shorts + count(in_longer, chunks));
    }
    /// Returns the chunk with which a stretch begins, of so many.
    __device__ __forceinline__ int begin(int number, int stretches) const {
        int const longer = min(number, max(stretches - 1 - shorts, 0));
        return longer * chunks + (number - longer) * short_chunks;
    }
    /// Returns how many chunks a walk goes from the beginning of a stretch to that of the next one, if there is one.
    __device__ __forceinline__ int length(int number, int stretches) const {
        if (number + 1 >= stretches) return delta_uncut;
        return begin(number + 1, stretches) - begin(number, stretches);
    }
    /// Returns how many stretches, the last one aside, begin before a chunk.
    __device__ __forceinline__ int begun(int chunk, int stretches) const {
        int const longer = max(stretches - 1 - shorts, 0), further = chunk - longer * chunks;
        int const number =
            further <= 0 ? (chunk + chunks - 1) / chunks : longer + (further + short_chunks - 1) / short_chunks;
        return min(number, stretches - 1);
    }
    /// Returns before which chunk's stretch the last one of so many comes: outputs have come to that when the state has
    /// come to the last one's beginning, or are a tenth behind.
    __device__ __forceinline__ int turn_of_last(shares const& s, int stretches) const {
        int const last = begin(stretches - 1, stretches);
        if (multiprocessors == 0) return last;
        return static_cast<int>(fminf(1.1f * s.pace, 1.0f) * static_cast<float>(last));
    }
};

/// The batch as it is in device memory during a call; `totals`: chunks, stretches, and tasks that have been begun, of a
/// first launch and of a second one.
struct delta_plan {
    static constexpr int most_ordered = 256; ///< sequences

    delta_sequence* sequences;
    delta_stretch* stretches; ///< in order of the chunks with which they begin, last ones earlier, or of many sequences
                              ///< one after the other; then none, up to `most_stretches`
    int* totals;
    int* flags; ///< (stretches, value heads, 2): whether the state before a stretch has been written, for each half; of
                ///< the backward's walks (sequences, value heads, 2, 2): chunks whose states and gradients have been
    std::int64_t flag_count;
    int count; ///< sequences
    delta_cut cut;
    std::int64_t rows, most_chunks, most_stretches; ///< for which there is room: a batch that has more traps

    /// Returns the chunk after a stretch's last one.
    __device__ __forceinline__ int end_of(delta_sequence const& sequence, int stretch) const {
        return stretch + 1 == sequence.stretches ? sequence.chunks : cut.begin(stretch + 1, sequence.stretches);
    }
};

/// Some of a batch's stretches, in the plan's order, or of a backward's tasks: from one share of all of them up to
/// another, in 256ths.
struct delta_share {
    static constexpr int all = 256;
    int first = 0, last = all;

    /// Returns how many stretches come before a share's end: one at least, unless the share is none.
    __device__ __forceinline__ static int stretches(delta_plan const& plan, int share) {
        return share == 0 ? 0 : max(1, static_cast<int>(std::int64_t{plan.totals[1]} * share / all));
    }
    /// The same of tasks, a chunk and key head each.
    __device__ __forceinline__ static int tasks(delta_plan const& plan, int key_heads, int share) {
        return static_cast<int>(std::int64_t{plan.totals[0]} * key_heads * share / all);
    }
};

/// Returns the sequence of a chunk.
__device__ __forceinline__ int delta_sequence_of(delta_plan const& plan, int chunk) {
    return last_at_or_before(chunk, plan.count, [&](int s) { return plan.sequences[s].first_chunk; });
}

/// Where segments lie, as a call is given it: at `offsets`; `first`: the tokens of their sequences that they begin
/// with, null for 0; `counts`: their rows, null: up to the next segment.
struct delta_segments {
    static constexpr int few = 32; ///< that a warp looks at together

    std::int64_t const *offsets, *first, *counts;
};

/// Returns a segment's rows and chunks.
__device__ __forceinline__ delta_sequence delta_rows_of(delta_segments const& of, int s) {
    auto const& [offsets, first, counts] = of;
    delta_sequence sequence{};
    sequence.begin = static_cast<int>(offsets[s]);
    sequence.end = static_cast<int>(counts ? offsets[s] + counts[s] : offsets[s + 1]);
    sequence.origin = sequence.begin - (first ? static_cast<int>(first[s] % delta_chunk) : 0);
    if (sequence.end > sequence.begin)
        sequence.chunks = (sequence.end - sequence.origin + delta_chunk - 1) / delta_chunk;
    return sequence;
}

/// Returns the sequence of a chunk before the plan is there, by a warp, of `delta_segments::few` at most, but for its
/// stretches; without chunks, if there is no such chunk. Of a batch at which the plan's kernel traps nothing is found
/// that has no room or no rows.
__device__ __forceinline__ delta_sequence delta_sequence_at(delta_segments const& of, delta_plan const& plan,
                                                            int chunk) {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    delta_sequence own{};
    if (lane < plan.count) own = delta_rows_of(of, lane);
    if (own.begin < 0 || own.end > plan.rows) own = {};
    int end = own.chunks;
    for (int apart = 1; apart < 32; apart *= 2) {
        int const others = __shfl_up_sync(~0u, end, apart);
        if (lane >= apart) end += others;
    }
    own.first_chunk = end - own.chunks;
    int const before = __popc(__ballot_sync(~0u, end <= chunk)); // as many end before it
    delta_sequence found{};
    for (int delta_sequence::*const of_it : {&delta_sequence::begin, &delta_sequence::end, &delta_sequence::origin,
                                             &delta_sequence::chunks, &delta_sequence::first_chunk})
        found.*of_it = __shfl_sync(~0u, own.*of_it, min(before, 31));
    return before < plan.count && chunk < plan.most_chunks ? found : delta_sequence{};
}

/// What all segments make of the cut, by a warp.
__device__ __forceinline__ delta_cut::shares delta_shares_of(delta_segments const& of, delta_plan const& plan) {
    if (plan.cut.multiprocessors == 0) return {};
    int all = 0, longest = 0;
    for (int s = static_cast<int>(threadIdx.x) % 32; s < plan.count; s += 32) {
        int const chunks = delta_rows_of(of, s).chunks;
        all += chunks, longest = max(longest, chunks);
    }
    for (int apart = 1; apart < 32; apart *= 2) {
        all += __shfl_xor_sync(~0u, all, apart);
        longest = max(longest, __shfl_xor_sync(~0u, longest, apart));
    }
    return plan.cut.share(all, longest);
}

/// Writes the plan of segments. One block. Traps where one begins before the first row or ends beyond the last one or
/// before its beginning, and where all have more tokens than there are rows, so that some overlap. What came before has
/// ended when the next kernel comes, early: that may read what a call is given before it waits for the plan.
static __global__ void __launch_bounds__(1024, 1) delta_rule_plan(delta_segments of, delta_plan plan) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const thread = static_cast<int>(threadIdx.x);
    __shared__ delta_cut::shares shares;
    if (thread < 32) {
        int chunks = 0, stretches = 0;
        std::int64_t tokens = 0;
        delta_cut::shares const own = delta_shares_of(of, plan);
        if (thread == 0) shares = own;
        for (int s0 = 0; s0 < plan.count; s0 += 32) {
            int const s = s0 + thread;
            delta_sequence sequence{};
            if (s < plan.count) {
                auto const& [offsets, first, counts] = of;
                std::int64_t const end = counts ? offsets[s] + counts[s] : offsets[s + 1];
                if (offsets[s] < 0 || end < offsets[s] || end > plan.rows || (first && first[s] < 0)) __trap();
                tokens += end - offsets[s];
                sequence = delta_rows_of(of, s);
                sequence.stretches = plan.cut.stretches(own, sequence.chunks);
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
        for (int apart = 1; apart < 32; apart *= 2) tokens += __shfl_xor_sync(~0u, tokens, apart);
        if (tokens > plan.rows || chunks > plan.most_chunks || stretches > plan.most_stretches) __trap();
        if (thread == 0) plan.totals[0] = chunks, plan.totals[1] = stretches, plan.totals[2] = plan.totals[3] = 0;
    }
    for (std::int64_t i = thread; i < plan.flag_count; i += 1024) plan.flags[i] = 0;
    __syncthreads();
    int const stretches = plan.totals[1];
    for (std::int64_t i = stretches + thread; i < plan.most_stretches; i += 1024) plan.stretches[i] = {-1, 0, {}};
    bool const whole = stretches == plan.count; // a sequence has one at least
    if (whole)
        for (int i = thread; i < stretches; i += 1024) plan.stretches[i] = {i, 0, plan.sequences[i]};
    bool const ordered = plan.count <= delta_plan::most_ordered; // of more it takes long, and matters little
    for (int i = thread; !whole && i < stretches; i += 1024) {
        int const s = last_at_or_before(i, plan.count, [&](int other) { return plan.sequences[other].first_stretch; });
        int const stretch = i - plan.sequences[s].first_stretch;
        if (!ordered) {
            plan.stretches[i] = {s, stretch, plan.sequences[s]};
            continue;
        }
        // Last stretches have even times, the others odd ones; at one time the sequences' order counts.
        auto const time_of_last = [&](int stretches) { return 2 * plan.cut.turn_of_last(shares, stretches); };
        int const own = plan.sequences[s].stretches;
        int const time = stretch + 1 == own ? time_of_last(own) : 2 * plan.cut.begin(stretch, own) + 1;
        int place = 0;
        for (int other = 0; other < plan.count; ++other) {
            int const stretches = plan.sequences[other].stretches, first_of_time = other < s ? 1 : 0;
            place += plan.cut.begun(time / 2 + (time % 2 ? first_of_time : 0), stretches);
            place += time_of_last(stretches) < time + first_of_time ? 1 : 0;
        }
        plan.stretches[place] = {s, stretch, plan.sequences[s]};
    }
}

} // namespace cpx::kernels
