// SPDX-License-Identifier: Apache-2.0
// Moves rows between ranks that store to each other's memory, from any memory to any: each packs into rings in its
// peers' memory, and unpacks what has come into its own.
#pragma once

#include <cpx/core/search.hpp>
#include <cpx/plan/channel_table.hpp>

#include <cpx/copy_units.cuh>
#include <cpx/meeting.cuh>
#include <cpx/previous_kernel.cuh>

#include <cstdint>

namespace cpx::kernels {

inline constexpr int channel_depth = 4; // chunks of a ring

/// What one rank moves: the lists of a `channel_table`, and its rows. `back`: from the table's targets to its sources.
struct channel_rows {
    cpx::detail::channel_message const* messages;
    cpx::detail::channel_column const* columns;
    cpx::detail::channel_run const* runs;
    char const* source;
    char* target;
    std::uint32_t word;    ///< stands for the plan
    std::uint32_t* others; ///< set to 1 for ranks with another word, in memory that the host reads
    bool back;
};

/// Memory of every rank, as this one reaches it; it begins with zeros. A block is a channel; `slot`: bytes of a chunk.
///
/// First counts, four lists of (channels, ranks): `sent` to the memory's owner and `taken` by others of what it sent,
/// which others write; then `given` and `got`, its own, of what it has sent and taken before. Then rings, (channels,
/// ranks that send, depth) of slots.
struct channel_memory {
    enum list { sent, taken, given, got };

    char* base[most_ranks];
    std::int64_t slot;
    meeting all;

    static constexpr std::int64_t head(int channels, int ranks) {
        return (4 * static_cast<std::int64_t>(sizeof(std::uint64_t)) * channels * ranks + 255) / 256 * 256;
    }
    static constexpr std::int64_t bytes(int channels, int ranks, std::int64_t slot) {
        return head(channels, ranks) + slot * channel_depth * channels * ranks;
    }
    /// Returns the count of this block and of rank `of` in the memory of rank `in`.
    __device__ std::uint64_t* count(list which, int in, int of) const {
        auto const lists = static_cast<int>(gridDim.x) * static_cast<int>(which) + static_cast<int>(blockIdx.x);
        return reinterpret_cast<std::uint64_t*>(base[in]) + lists * all.ranks + of;
    }
    /// Returns where chunk `number` of this block's goes from rank `from` to rank `to`.
    __device__ char* place(int to, int from, std::uint64_t number) const {
        std::int64_t const ring = static_cast<std::int64_t>(blockIdx.x) * all.ranks + from;
        auto const slots = ring * channel_depth + static_cast<std::int64_t>(number % channel_depth);
        return base[to] + head(static_cast<int>(gridDim.x), all.ranks) + slots * slot;
    }
};

/// What the threads of a block share.
struct channel_block {
    cpx::detail::channel_message messages[2 * most_ranks + 1]; ///< to ranks, from ranks, what stays
    std::uint64_t before[2][most_ranks];                       ///< chunks given to ranks, and got from them
    int stays;                                                 ///< the next chunk of what stays
    int taken[2];                                              ///< the one that a half has
};

namespace detail {

/// The half of a block's threads that sends, 0, or the one that receives, 1; `thread` of `threads`.
struct half_block {
    int which, thread, threads;

    /// Waits for the half's threads, which then see what the others wrote. Returns whether all say yes.
    __device__ bool together(bool mine = true) const {
        int all = 0;
        asm volatile("{\n\t.reg .pred p, q;\n\t"
                     "setp.ne.s32 p, %1, 0;\n\t"
                     "barrier.cta.red.and.pred q, %2, %3, p;\n\t"
                     "selp.s32 %0, 1, 0, q;\n\t}"
                     : "=r"(all)
                     : "r"(static_cast<int>(mine)), "r"(which + 1), "r"(threads)
                     : "memory");
        return all != 0;
    }
};

/// Copies chunk `number` of a message; `source` and `target`: of byte 0 of the message where a side is packed, else the
/// beginnings of rows. Called by a half, whose groups of lanes take rows in turn, or parts of long ones: 4 vectors of
/// 16 bytes a thread. Not inline: its callers would not leave it enough registers.
__device__ __noinline__ inline void copy_chunk(channel_rows const& r, cpx::detail::channel_message const& m,
                                               std::int64_t number, char const* source, char* target,
                                               half_block const& half) {
    std::int64_t const begin = number * m.chunk;
    int const bytes = static_cast<int>(min(static_cast<std::int64_t>(m.chunk), m.bytes() - begin));
    int const lanes = m.lanes, row_bytes = m.row_bytes, runs = m.runs;
    int const part_bytes = lanes * 4 * 16, parts = (row_bytes + part_bytes - 1) / part_bytes;
    int const first_row = static_cast<int>(begin / row_bytes);
    std::int64_t const before = begin - static_cast<std::int64_t>(first_row) * row_bytes; // bytes of that row
    int const items = static_cast<int>((before + bytes + row_bytes - 1) / row_bytes) * parts;
    std::int64_t const source_pitch = r.back ? m.target_pitch : m.source_pitch,
                       target_pitch = r.back ? m.source_pitch : m.target_pitch;
    auto const* const list = r.runs + m.first_run;
    int guess = 0;
    for (int item = half.thread / lanes; item < items; item += half.threads / lanes) {
        int const k = item / parts, row = first_row + k;
        std::int64_t const part = static_cast<std::int64_t>(item - k * parts) * part_bytes,
                           place = k * static_cast<std::int64_t>(row_bytes) - before; // of the row, in the chunk
        // Of the row's bytes, those of the part that are in the chunk:
        int const low = static_cast<int>(max(part, -place)),
                  high = static_cast<int>(
                      min(min(part + part_bytes, bytes - place), static_cast<std::int64_t>(row_bytes)));
        if (low >= high) continue;
        guess = last_at_or_before(row, runs, guess, [=](int i) { return list[i].first; });
        cpx::detail::channel_run const run = list[guess];
        char const* const from = source + (r.back ? run.target : run.source) + (row - run.first) * source_pitch;
        char* const to = target + (r.back ? run.source : run.target) + (row - run.first) * target_pitch;
        for (int c = 0; c < m.columns; ++c) {
            cpx::detail::channel_column const column = r.columns[m.first_column + c];
            int const skipped = max(low - column.place, 0), last = min(high - column.place, column.bytes);
            if (skipped >= last) continue;
            char const* const a = from + (r.back ? column.target : column.source) + skipped;
            char* const b = to + (r.back ? column.source : column.target) + skipped;
            with_bytes<1>(column.vector, [&](auto vector) {
                copy_units<4, bytes_at_once<vector>>(a, b, (last - skipped) / vector, lanes);
            });
        }
    }
}

/// Copies a chunk of what stays, if the block has one left. Returns whether it had.
__device__ inline bool copy_what_stays(channel_rows const& r, channel_block& s, int ranks, half_block const& half) {
    cpx::detail::channel_message const& m = s.messages[2 * ranks];
    if (half.thread == 0) s.taken[half.which] = atomicAdd(&s.stays, 1);
    half.together();
    int const next = s.taken[half.which];
    half.together(); // before it is written again
    if (next >= m.chunks(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x))) return false;
    copy_chunk(r, m, static_cast<std::int64_t>(next) * gridDim.x + blockIdx.x, r.source, r.target, half);
    return true;
}

/// Sends, or receives, this block's chunks of all messages, one of every peer at a time, and copies what stays. Ends
/// early if a rank was missed.
__device__ inline void run_half(channel_rows const& r, channel_memory const& m, channel_block& s,
                                half_block const& half) {
    meeting const& all = m.all;
    bool const sends = half.which == 0;
    int const channel = static_cast<int>(blockIdx.x), channels = static_cast<int>(gridDim.x), peer = half.thread;
    auto const* const messages = s.messages + (sends ? 0 : all.ranks);
    std::uint64_t const* const before = s.before[half.which];
    int const own = peer < all.ranks ? messages[peer].chunks(channel, channels) : 0;
    int most = 0;
    for (int rank = 0; rank < all.ranks; ++rank) most = max(most, messages[rank].chunks(channel, channels));
    // Waits, for each rank that has `some` thing to wait for, until `chunks` of its chunks of this call have come, or
    // have been taken.
    auto const come = [&](bool some, int chunks) {
        bool here = true;
        if (some) {
            std::uint64_t const* const flag = m.count(sends ? m.taken : m.sent, all.rank, peer);
            std::uint64_t const wanted = before[peer] + channel_depth + chunks; // + depth: less than 0 may be wanted
            std::uint64_t found = 0;
            here =
                wait_for(all, peer, flag, found, [=](std::uint64_t count) { return count + channel_depth >= wanted; });
        }
        bool const all_here = half.together(here);
        if (!all_here && peer < all.ranks) give_up(all, peer);
        return all_here;
    };
    for (int k = 0; k < most; ++k) {
        if (!sends) copy_what_stays(r, s, all.ranks, half); // while chunks are on their way
        if (!come(k < own, sends ? k + 1 - channel_depth : k + 1)) return;
        for (int i = 1; i < all.ranks; ++i) { // not all ranks store to the same one at once
            int const rank = (all.rank + i) % all.ranks;
            auto const& message = messages[rank];
            if (k >= message.chunks(channel, channels)) continue;
            std::int64_t const number = static_cast<std::int64_t>(k) * channels + channel;
            std::int64_t const begin = number * message.chunk; // bytes of the message before those in the place
            char* const packed = m.place(sends ? rank : all.rank, sends ? all.rank : rank, before[rank] + k) - begin;
            copy_chunk(r, message, number, sends ? r.source : packed, sends ? packed : r.target, half);
        }
        half.together();
        if (k < own) // a release is cumulative: it covers what this thread knows to have been written before
            store_release(m.count(sends ? m.sent : m.taken, peer, all.rank), before[peer] + k + 1);
    }
    while (copy_what_stays(r, s, all.ranks, half)) {
    }
    if (sends && !come(own > 0, own)) return; // nobody writes here any more once this kernel has ended
    if (own > 0) *m.count(sends ? m.given : m.got, all.rank, peer) = before[peer] + static_cast<std::uint64_t>(own);
}

} // namespace detail

/// The work of one block of `exchange_by_channels`, of two equal halves of whole warps.
__device__ inline void run_channel(channel_rows const& r, channel_memory const& m, channel_block& s) {
    meeting const& all = m.all;
    int const thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    std::uint32_t const epoch = all.epochs[blockIdx.x];
    if (__syncthreads_or(given_up(all))) return;
    arrive(all, epoch + 1, r.word);
    for (int i = thread; i < 2 * all.ranks + 1; i += threads) {
        int const other = i < all.ranks ? i + all.ranks : i - all.ranks;
        s.messages[i] = r.messages[r.back && i < 2 * all.ranks ? other : i];
    }
    if (thread < all.ranks) {
        s.before[0][thread] = *m.count(m.given, all.rank, thread);
        s.before[1][thread] = *m.count(m.got, all.rank, thread);
    }
    if (thread == 0) s.stays = 0;
    std::uint32_t said = 0;
    if (!await(all, epoch + 1, said)) return;
    let_next_kernel_come(); // not before: it could take the room of kernels that other ranks wait for
    if (thread == 0) all.epochs[blockIdx.x] = epoch + 1;
    bool const differs = thread < all.ranks && said != r.word;
    if (differs) r.others[thread] = 1;
    if (__syncthreads_or(differs)) return; // on all ranks: nothing moves anywhere unless all mean the same
    int const which = thread < threads / 2 ? 0 : 1;
    detail::half_block const half{which, thread - which * (threads / 2), threads / 2};
    detail::run_half(r, m, s, half);
}

/// Moves the rows of a plan that does not add between ranks whose memory each of them reaches.
///
/// One launch on every rank, with equal grids of resident blocks of 1024 threads and no shared memory of the launch.
/// A message is cut into chunks, which its channels take in turn. Half of a block packs chunks into the peers' rings,
/// as far as places are free there, and says so; the other half unpacks what has come, and copies what stays meanwhile.
/// So the wire is busy while memory is read and written; every row is written to memory and read once more than if it
/// went to its place at once. Begins when all ranks have come with the same word, ends when this rank's rows have come
/// and the others have taken theirs. If a rank does not come in time, `all.found` says so, and this rank stores nothing
/// from then on.
template <class = void>
__global__ void __launch_bounds__(1024, 1)
    exchange_by_channels(__grid_constant__ channel_rows const r, __grid_constant__ channel_memory const m) {
    __shared__ channel_block block;
    wait_for_previous_kernel();
    run_channel(r, m, block);
}

} // namespace cpx::kernels
