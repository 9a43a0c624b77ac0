// SPDX-License-Identifier: Apache-2.0
// Packs the messages of an exchange where its peers unpack them: every rank stores into the others' memory.
#pragma once

#include <cpx/meeting.cuh>
#include <cpx/rectangles.cuh>

#include <cstdint>

namespace cpx::kernels {

/// A message to, or from, a rank as it is packed: from where on and how much, in units of `message_unit` bytes.
struct packed_message {
    std::int32_t begin, units;
};
inline constexpr int message_unit = 256;

/// One plan of an exchange, as kernels know it: a batch that comes later is brought by other numbers in its place.
///
/// Sizes of lists are those of one launch each: rectangles that pack, that move what stays, that unpack, and that add
/// the rows of a rank. Rows of the target (or, of a call back, of the source) that are 0 unless something comes.
struct message_plan {
    list_part pack, keep, unpack, add[most_ranks];
    std::int32_t zeros, zeros_back;
    std::int32_t unused;
    packed_message sends[most_ranks], receives[most_ranks];
};
static_assert(sizeof(message_plan) % sizeof(std::int64_t) == 0);

/// What one rank packs for its peers, and where they pack for it. The source's rectangles are packed; `back`: the
/// target's are, that are unpacked else.
struct message_push {
    message_plan const* plan;
    rectangle const* list;
    std::uint64_t const* word; ///< stands for the plans, see `word_check`
    char const* source;        ///< the caller's buffer
    char* target;
    std::int64_t target_pitch;
    std::int32_t target_bytes, target_vector; ///< of a row that may become 0, and what is stored at once
    std::int64_t landing;                     ///< bytes before the place of what comes, in this rank's memory
    char* base[most_ranks];                   ///< of the peers' memory
    std::uint32_t* others;                    ///< see `word_check`
    bool back;
};

namespace detail {

/// Makes rows 0 that may get nothing.
__device__ inline void store_zeros(message_push const& p, std::int32_t rows) {
    with_bytes<1>(p.target_vector, [&](auto bytes) {
        using vector = bytes_at_once<bytes>;
        std::int64_t const per_row = p.target_bytes / static_cast<int>(sizeof(vector)), total = per_row * rows;
        std::int64_t const stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
        for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += stride)
            reinterpret_cast<vector*>(p.target + i / per_row * p.target_pitch)[i % per_row] = vector{};
    });
}

} // namespace detail

/// Packs every message of this rank where its receiver unpacks it.
///
/// One launch on every rank, with equal grids of resident blocks, also of those that neither send nor receive. Begins
/// when all ranks have come, so that no message is overwritten while it is unpacked; ends when all that come have
/// arrived. Each rank tells each other one where it wants what comes. Sizes are read from device memory: a captured
/// graph may be replayed with another plan in the same place. `others` says which ranks have another plan than this
/// one; then no rank stores anything. If a rank does not come in time, `m.found` says so, and see `relayout_push`.
template <class = void>
__global__ void __launch_bounds__(512, 1)
    push_messages(__grid_constant__ message_push const p, __grid_constant__ meeting const m) {
    __shared__ message_plan plan;
    __shared__ char* targets[most_ranks]; // of the first byte of what is packed for a rank
    wait_for_previous_kernel();
    constexpr int numbers = sizeof(message_plan) / sizeof(std::int64_t);
    for (int i = static_cast<int>(threadIdx.x); i < numbers; i += static_cast<int>(blockDim.x))
        reinterpret_cast<std::int64_t*>(&plan)[i] = reinterpret_cast<std::int64_t const*>(p.plan)[i];
    std::uint64_t const plans = *p.word;
    std::uint32_t const epoch = m.epochs[blockIdx.x];
    bool const up = given_up(m);
    if (__syncthreads_or(up)) return;

    int const peer = static_cast<int>(threadIdx.x);
    packed_message const *const sends = p.back ? plan.receives : plan.sends, *const receives =
                                                                                 p.back ? plan.sends : plan.receives;
    auto const word = static_cast<std::uint32_t>(plans ^ plans >> 32) | 1;
    std::uint64_t number = 0;
    if (peer < m.ranks) // where in units, and how many
        number = static_cast<std::uint64_t>(receives[peer].units) << 32 |
                 static_cast<std::uint64_t>(p.landing / message_unit + receives[peer].begin);
    arrive(m, epoch + 1, word, number);
    if (std::int32_t const rows = p.back ? plan.zeros_back : plan.zeros; rows > 0) detail::store_zeros(p, rows);
    std::uint32_t said = 0;
    if (!await(m, epoch + 1, said, number)) return;
    bool same = true;
    if (peer < m.ranks) {
        same = said == word && static_cast<std::int32_t>(number >> 32) == sends[peer].units;
        if (!same && blockIdx.x == 0) p.others[peer] = 1;
        targets[peer] = p.base[peer] + static_cast<std::int64_t>(number & 0xffffffff) * message_unit;
    }
    if (__syncthreads_and(same)) { // nothing moves anywhere unless all ranks mean the same
        list_part const& part = p.back ? plan.unpack : plan.pack;
        detail::for_each_slice({p.list + part.first, part.count, part.slices, p.back, true}, [&](rectangle const& r) {
            int to = 0;
            auto const after = [&] { return r.target - std::int64_t{sends[to].begin} * message_unit; };
            while (after() < 0 || after() >= std::int64_t{sends[to].units} * message_unit) ++to;
            char const* const source = p.source + r.source;
            char* const target = targets[to] + after();
            with_bytes<1>(r.vector,
                          [&](auto bytes) { detail::copy_rectangle<bytes_at_once<bytes>>(r, source, target); });
        });
    }
    arrive(m, epoch + 2, word);
    if (!await(m, epoch + 2, said, number)) return;
    if (threadIdx.x == 0) m.epochs[blockIdx.x] = epoch + 2;
}

} // namespace cpx::kernels
