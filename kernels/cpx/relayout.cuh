// SPDX-License-Identifier: Apache-2.0
// Moves a tensor between two shardings in one kernel: every rank stores its rows where they belong in its peers'
// memory.
#pragma once

#include <cpx/layout/algorithm.hpp>
#include <cpx/layout/sharding.hpp>

#include <cpx/copy_units.cuh>
#include <cpx/meeting.cuh>
#include <cpx/neighbours.cuh>
#include <cpx/previous_kernel.cuh>

#include <cstddef>

namespace cpx::kernels {

inline constexpr int most_sections = 8;

/// Rows sharded by tokens, as a kernel knows them: policies, no batch.
template <layout P, scope Scope, cut Cut>
struct token_side {
    static constexpr bool every_row = false, by_sequence = Scope == scope::sequence;
    P policy;
    Cut cut;
};

/// The same where what is cut is known when it runs: the `whole` batch, by a cut that moves no place, or each sequence.
template <layout_policy P, cut Cut>
struct any_token_side {
    static constexpr bool every_row = false, by_sequence = true;
    P policy;
    Cut cut;
    bool whole;
};

/// Every row on every rank, in sequence order: by heads, or replicated.
struct every_row_side {
    static constexpr bool every_row = true, by_sequence = false;
};

/// Columns that go to one peer: `units` of `vector` bytes from byte `source` of a row to byte `target` of the peer's.
struct column_run {
    std::int64_t source, target;
    std::int32_t units, vector;
};

/// Returns what offset i adds to the digest. The sum over all offsets, made odd, tells them from other offsets.
CPX_HOST_DEVICE inline std::uint32_t offset_digest(std::int64_t i, std::int64_t offset) {
    std::uint64_t mixed = (static_cast<std::uint64_t>(i) << 32 ^ static_cast<std::uint64_t>(offset)) + 1;
    mixed *= 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ mixed >> 32) * 0xbf58476d1ce4e5b9ull;
    return static_cast<std::uint32_t>(mixed >> 32);
}

/// In what two ranks differ that mean to relay out together.
enum class relayout_field : std::uint8_t { offsets = 1, source, target, other };

/// What stands for a plan, its source sharding and its target sharding.
struct relayout_words {
    std::uint32_t plan, source = 0, target = 0;

    CPX_HOST_DEVICE std::uint64_t shardings() const { return std::uint64_t{source} << 32 | target; }
};

/// Where a target begins and ends in a rank's memory, multiples of 16 bytes: what each rank tells of its own.
struct target_place {
    std::int64_t first, last;

    CPX_HOST_DEVICE std::uint64_t number() const {
        return static_cast<std::uint64_t>(last) / 16 << 32 | static_cast<std::uint64_t>(first) / 16;
    }
    CPX_HOST_DEVICE static target_place of(std::uint64_t number) {
        return {static_cast<std::int64_t>(number & 0xffffffff) * 16, static_cast<std::int64_t>(number >> 32) * 16};
    }
};

/// What one rank moves, `lanes` threads a row. `offsets`: cu_seqlens in device memory, `sequences` + 1 of them, at
/// least one sequence for an `any_token_side`. Peers are the ranks that meet, from `first` on.
struct relayout_rows {
    std::int64_t const* offsets;
    int sequences;
    relayout_words words;
    int first;
    int runs, lanes;
    char const* source;
    std::int64_t source_pitch, source_rows; ///< rows: at most
    target_place target;                    ///< of this rank
    char* base[most_ranks];                 ///< of the peers' memory
    std::int64_t target_pitch[most_ranks];
    column_run columns[most_ranks][most_sections];
};

namespace detail {

/// The sequences of the batch: `offsets[0] .. offsets[count]`, in shared memory.
struct sequences {
    std::int32_t const* offsets;
    int count;

    __device__ std::int32_t tokens() const { return offsets[count]; }
    __device__ std::int32_t offset(int s) const { return offsets[s]; }
    __device__ std::int32_t length(int s) const { return offsets[s + 1] - offsets[s]; }
    /// Returns the sequence that holds row `row`; never an empty one.
    __device__ int sequence(std::int32_t row) const { return last_not_above(offsets, row); }
    /// Returns the last sequence s with `ascending[s] <= value`.
    __device__ int last_not_above(std::int32_t const* ascending, std::int32_t value) const {
        return last_at_or_before(value, count, [=](int s) { return ascending[s]; });
    }
};

/// Cuts the whole batch where `Cut` would cut the sequence that holds the place.
template <class Cut>
struct batch_cut {
    Cut cut;
    sequences all;

    __device__ index_t begin(int c, int chunks, index_t n) const {
        return snap_in_batch(cut, all, cut.begin(c, chunks, n));
    }
    __device__ index_t snap(index_t t, index_t) const { return t; }
};

/// Where rows stand under one sharding. By sequence, `bases` holds for `tables` ranks, from `lowest` on, the rows
/// before each sequence.
template <class Side>
struct placement {
    static constexpr bool every_row = Side::every_row;
    Side side;
    sequences all;
    std::int32_t const* bases; ///< (tables, count + 1)
    int lowest, tables;

    __device__ auto cut() const { return batch_cut<decltype(side.cut)>{side.cut, all}; }

    /// Returns the global row of `row` of `rank`, the lowest.
    __device__ std::int32_t global(int rank, std::int32_t row) const {
        if constexpr (Side::every_row) {
            return row;
        } else if constexpr (!Side::by_sequence) {
            return static_cast<std::int32_t>(token(side.policy, slot{rank, row}, all.tokens(), cut()));
        } else {
            int const s = all.last_not_above(bases, row);
            return all.offset(s) +
                   static_cast<std::int32_t>(token(side.policy, slot{rank, row - bases[s]}, all.length(s), side.cut));
        }
    }
    /// Returns how many rows `rank` has.
    __device__ std::int32_t rows(int rank) const {
        if constexpr (Side::every_row)
            return all.tokens();
        else if constexpr (!Side::by_sequence)
            return all.tokens() == 0 ? 0 : static_cast<std::int32_t>(rows_of(side.policy, rank, all.tokens(), cut()));
        else
            return bases[(rank - lowest) * (all.count + 1) + all.count];
    }
    /// Returns the slot of global row `row`. For ranks that `bases` does not hold, only the rank of the slot is right.
    __device__ slot place(std::int32_t row) const {
        if constexpr (!Side::by_sequence) {
            return locate(side.policy, row, all.tokens(), cut());
        } else {
            int const s = all.sequence(row);
            slot at = locate(side.policy, row - all.offset(s), all.length(s), side.cut);
            if (int const table = at.rank - lowest; table >= 0 && table < tables)
                at.row += bases[table * (all.count + 1) + s];
            return at;
        }
    }

    /// Writes the rows of `rank` before each sequence. Called by one warp.
    __device__ void fill(int rank, std::int32_t* base) const {
        if constexpr (Side::by_sequence) {
            int const lane = static_cast<int>(threadIdx.x % 32);
            std::int32_t before = 0;
            for (int first = 0; first <= all.count; first += 32) {
                int const s = first + lane;
                std::int32_t const n = s < all.count ? all.length(s) : 0;
                std::int32_t const own = n > 0 ? static_cast<std::int32_t>(rows_of(side.policy, rank, n, side.cut)) : 0;
                std::int32_t sum = own;
                for (int step = 1; step < 32; step *= 2) {
                    std::int32_t const left = __shfl_up_sync(~0u, sum, step);
                    if (lane >= step) sum += left;
                }
                if (s <= all.count) base[s] = before + sum - own;
                before += __shfl_sync(~0u, sum, 31);
            }
        }
    }
};

/// Copies the columns of one row that go to one peer. Called by `lanes` neighbouring threads.
__device__ inline void copy_columns(column_run const* columns, int count, char const* source, char* target, int lanes) {
    for (int i = 0; i < count; ++i) {
        column_run const p = columns[i];
        if (p.units == 0) continue;
        char const* const from = source + p.source;
        char* const to = target + p.target;
        with_bytes<1>(p.vector, [&](auto bytes) { copy_units<8, bytes_at_once<bytes>>(from, to, p.units, lanes); });
    }
}

/// Reads cu_seqlens into shared memory and adds to `digest` what tells them from others. Returns whether this thread's
/// begin with 0, ascend and fit 31 bits.
__device__ inline bool read_offsets(relayout_rows const& r, std::int32_t* offsets, std::uint32_t& digest) {
    bool ascend = true;
    std::uint32_t sum = 0;
    for (int i = static_cast<int>(threadIdx.x); i <= r.sequences; i += static_cast<int>(blockDim.x)) {
        std::int64_t const here = r.offsets[i], before = i > 0 ? r.offsets[i - 1] : 0;
        ascend = ascend && (i > 0 ? before <= here : here == 0) && here <= INT32_MAX;
        offsets[i] = static_cast<std::int32_t>(here);
        sum += offset_digest(i, here);
    }
    if (static_cast<int>(threadIdx.x / 32 * 32) <= r.sequences) {
        sum = __reduce_add_sync(~0u, sum);
        if (threadIdx.x % 32 == 0) atomicAdd(&digest, sum);
    }
    return ascend;
}

/// Stores the rows of one rank that belong to the ranks that meet.
template <class Source, class Target>
__device__ void store_to_peers(Source const& source, Target const& target, relayout_rows const& r, meeting const& m,
                               column_run const* columns, char* const* targets) {
    // Takes rows from many places of the source in turn, so that not all ranks store to one peer at once; from more
    // places where all ranks walk along the same rows. More than needed are slower: 1 to 8 % from 32 on.
    constexpr unsigned places = Source::every_row || Target::every_row ? 32 : 8;
    auto const rank = static_cast<unsigned>(m.rank), lanes = static_cast<unsigned>(r.lanes);
    auto const rows = static_cast<unsigned>(source.rows(r.first + m.rank)); // less than 2^31, so that no sum overflows
    unsigned const shares = places * static_cast<unsigned>(m.ranks), share_rows = (rows + shares - 1) / shares;
    unsigned const stride = gridDim.x * (blockDim.x / lanes);
    for (unsigned item = threadIdx.x / lanes * gridDim.x + blockIdx.x; item < shares * share_rows; item += stride) {
        unsigned const row = (item + rank) % shares * share_rows + item / shares;
        if (row >= rows) continue;
        std::int32_t const global = source.global(r.first + m.rank, static_cast<std::int32_t>(row));
        char const* const at = r.source + row * r.source_pitch;
        auto const store = [&](int peer, std::int64_t place) {
            copy_columns(columns + peer * most_sections, r.runs, at, targets[peer] + place * r.target_pitch[peer],
                         r.lanes);
        };
        if constexpr (Target::every_row) {
            for (int i = 0; i < m.ranks; ++i)
                store(static_cast<int>((static_cast<unsigned>(i) + row + rank) % static_cast<unsigned>(m.ranks)),
                      global);
        } else {
            slot const place = target.place(global);
            int const peer = place.rank - r.first;
            if (peer >= 0 && peer < m.ranks) store(peer, place.row);
        }
    }
}

} // namespace detail

/// Returns the bytes of shared memory that `relayout_push` wants for a batch of `sequences`.
template <class From, class To>
constexpr std::size_t relayout_memory(int sequences, int ranks) {
    std::size_t const tables =
        1 + (From::by_sequence ? 1 : 0) + (To::by_sequence ? static_cast<std::size_t>(ranks) : 0);
    return tables * (static_cast<std::size_t>(sequences) + 1) * sizeof(std::int32_t) +
           sizeof(column_run) * most_ranks * most_sections;
}

/// Stores every row of one rank where it belongs in its peers' targets: the work of one block of `relayout_push`.
template <class From, class To>
__device__ void store_rows(From const& from, To const& to, relayout_rows const& r, meeting const& m) {
    extern __shared__ column_run columns[]; // (ranks, sections), then the tables of offsets
    __shared__ std::uint32_t digest;        // of the offsets, never 0
    __shared__ char* targets[most_ranks];
    __shared__ std::int32_t ends[2]; // of the batch as one sequence
    auto* const offsets = reinterpret_cast<std::int32_t*>(columns + most_ranks * most_sections);
    int const n = r.sequences, warp = static_cast<int>(threadIdx.x / 32), warps = static_cast<int>(blockDim.x / 32);
    int const rank = r.first + m.rank;
    if (threadIdx.x == 0) digest = 0;
    __syncthreads();
    // what is read first is all asked for at once
    std::uint32_t const epoch = m.epochs[blockIdx.x];
    bool const up = given_up(m);
    bool const ascend = detail::read_offsets(r, offsets, digest);
    if (__syncthreads_or(up)) return;
    bool fits = __syncthreads_and(ascend);
    std::uint32_t const word = fits ? (digest + r.words.plan) | 1 : 0;
    arrive(m, epoch + 1, word, r.target.number());

    for (int i = static_cast<int>(threadIdx.x); i < most_ranks * most_sections; i += static_cast<int>(blockDim.x))
        columns[i] = r.columns[i / most_sections][i % most_sections];
    detail::sequences const all{offsets, fits ? n : 0};
    if (threadIdx.x == 0) ends[0] = 0, ends[1] = fits ? all.tokens() : 0;
    __syncthreads();
    auto const cut_by = [&](auto const& side) {
        if constexpr (requires { side.whole; })
            if (side.whole) return detail::sequences{ends, 1};
        return all;
    };
    std::int32_t *const of_source = offsets + n + 1, *const of_target = of_source + (From::by_sequence ? n + 1 : 0);
    detail::placement<From> const source{from, cut_by(from), of_source, rank, 1};
    detail::placement<To> const target{to, cut_by(to), of_target, r.first, m.ranks};
    for (int i = warp; i <= m.ranks; i += warps) {
        if (i == m.ranks)
            source.fill(rank, of_source);
        else
            target.fill(r.first + i, of_target + i * (target.all.count + 1));
    }
    std::uint32_t said = 0;
    std::uint64_t number = 0;
    if (!await(m, epoch + 1, said, number)) return;
    let_next_kernel_come(); // not before: it could take the room of kernels that other ranks wait for
    int const peer = static_cast<int>(threadIdx.x);
    bool same = fits, other = false;
    if (peer < m.ranks) {
        if (said == 0) m.found->refused[peer] = 1;
        other = fits && said != 0 && said != word;
        same = fits && said == word;
        auto const at = target_place::of(number);
        targets[peer] = r.base[peer] + at.first;
        fits = same && target.rows(r.first + peer) * r.target_pitch[peer] <= at.last - at.first;
        if (same && !fits) m.found->refused[peer] = 1;
    }
    same = __syncthreads_and(same); // nothing moves anywhere unless all ranks mean the same
    bool const held = source.rows(rank) <= r.source_rows;
    fits = __syncthreads_and(fits);
    if (fits && held) detail::store_to_peers(source, target, r, m, columns, targets);

    // Ranks that differ learn in what. The lowest bit of the offsets' digest says whether the source has its rows.
    std::uint32_t const offsets_and_held = (digest & ~1u) | held;
    arrive(m, epoch + 2, offsets_and_held, r.words.shardings());
    if (!await(m, epoch + 2, said, number)) return;
    if (same && peer < m.ranks && said % 2 == 0) m.found->refused[peer] = 1;
    if (other) {
        using field = relayout_field;
        std::uint64_t const shardings = number ^ r.words.shardings();
        field const in = (said ^ offsets_and_held) > 1                ? field::offsets
                         : shardings >> 32 != 0                       ? field::source
                         : static_cast<std::uint32_t>(shardings) != 0 ? field::target
                                                                      : field::other;
        m.found->differs[peer] = static_cast<std::uint8_t>(in);
    }
    if (threadIdx.x == 0) m.epochs[blockIdx.x] = epoch + 2;
}

/// Stores every row of this rank where it belongs in its peers' targets.
///
/// One launch on every rank, with equal grids of resident blocks. Begins when all ranks have come, so that a target is
/// not overwritten while an earlier kernel of its rank reads it; ends when all rows of all ranks have arrived. Some
/// threads move a row to one peer; neighbouring ones take rows that lie far apart, so that no peer is stored to by all
/// at once. Addresses follow from the policies and from cu_seqlens in device memory: a captured graph may be replayed
/// with other offsets in the same place. Each rank tells where its own target is. `m.found` says which ranks have other
/// offsets or another plan than this one, and in what it differs, offsets that do not ascend from 0, or a target too
/// small: then no rank stores anything. It says, too, which ranks store nothing because their source has too few rows.
/// If a rank does not come in time, it says so as well, this rank stores nothing from then on, and later kernels end at
/// once, here and on the ranks that come late.
template <class From, class To>
__global__ void __launch_bounds__(512, 1)
    relayout_push(From from, To to, __grid_constant__ relayout_rows const r, __grid_constant__ meeting const m) {
    wait_for_previous_kernel();
    store_rows(from, to, r, m);
}

} // namespace cpx::kernels
