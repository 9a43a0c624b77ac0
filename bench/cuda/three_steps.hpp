// SPDX-License-Identifier: Apache-2.0
// Relayouts between tokens and heads in three steps, as Megatron-LM makes them: the columns of each rank's heads to
// stand side by side, an all-to-all, the rows from zigzag to the batch's order; and back, the other way round.
#pragma once

#include <cpx/cuda/row_gather.hpp>
#include <cpx/transport/nccl.hpp>

#include "../../harness/whole.hpp"

#include <cstdint>
#include <numeric>
#include <vector>

namespace three_steps {

using cpx::index_t;

/// Where a vector of the whole row stands in the ranks' shares, end to end: of row i at first + i * pitch.
struct alignas(8) place {
    std::int32_t first, pitch; ///< in vectors
};

/// Rows of whole width and the ranks' shares of them, of which one is copied to the other.
template <class Vector>
struct columns {
    Vector const* from;
    Vector* to;
    place const* places;         ///< of every vector of a whole row
    std::uint32_t rows, vectors; ///< vectors: of a whole row
};

constexpr std::uint32_t rows_at_once = 8; // so many loads are in flight for one look at the list of places

/// Copies one vector of `rows_at_once` neighbouring rows.
template <bool ToShares, class Vector>
__device__ __forceinline__ void move_unit(columns<Vector> const& a, std::uint32_t unit) {
    std::uint32_t const row = unit / a.vectors * rows_at_once, v = unit % a.vectors;
    if (row >= a.rows) return;
    place const p = a.places[v];
    index_t const whole = index_t{row} * a.vectors + v, own = p.first + index_t{row} * p.pitch;
    index_t const from_pitch = ToShares ? a.vectors : p.pitch, to_pitch = ToShares ? p.pitch : a.vectors;
    Vector const* const from = a.from + (ToShares ? whole : own);
    Vector* const to = a.to + (ToShares ? own : whole);
    Vector held[rows_at_once];
#pragma unroll
    for (std::uint32_t k = 0; k < rows_at_once; ++k)
        if (row + k < a.rows) held[k] = from[k * from_pitch];
#pragma unroll
    for (std::uint32_t k = 0; k < rows_at_once; ++k)
        if (row + k < a.rows) to[k * to_pitch] = held[k];
}

/// A thread a unit: neighbouring threads have neighbouring vectors of a row.
template <bool ToShares, class Vector>
__global__ void __launch_bounds__(256) move_columns(__grid_constant__ columns<Vector> const a) {
    cpx::kernels::wait_for_previous_kernel();
    cpx::kernels::let_next_kernel_come();
    move_unit<ToShares>(a, blockIdx.x * blockDim.x + threadIdx.x);
}

/// Bytes that go to, or come from, a rank in the all-to-all.
struct wire {
    std::size_t first, bytes;
};

/// What one rank does, on the host.
struct tables {
    index_t tokens = 0, rows = 0; ///< of all ranks, of this one
    index_t width = 0, share = 0; ///< elements of a whole row, of a rank's share of it
    bool equal = false;           ///< all ranks have as many rows, so that all wires are equal
    int vector_bytes = 0;         ///< that are copied at once; they divide every section's share
    std::vector<place> places;
    std::vector<std::int32_t> list; ///< of the step by rows: row i of its target is row list[i] of its source
    std::vector<wire> sends, receives;
};

/// Returns whether every section has equally many heads for each rank, without which there are no three steps.
template <class Heads>
bool possible(Heads const& heads) {
    return std::ranges::all_of(heads.sections(), [&](cpx::section s) { return s.heads % heads.ranks() == 0; });
}

/// Returns what `rank` does for elements of `element` bytes, between a sharding of tokens and one of heads that is
/// `possible`.
template <class Tokens, class Heads>
tables make_tables(Tokens const& tokens, Heads const& heads, int rank, bool to_heads, index_t element) {
    std::vector<cpx::section> const sections(heads.sections().begin(), heads.sections().end());
    index_t const ranks = heads.ranks();
    tables t;
    t.tokens = heads.batch().tokens();
    t.rows = tokens.rows(rank);
    index_t bytes = 16;
    for (cpx::section const& s : sections) {
        t.width += s.heads * s.width;
        bytes = std::gcd(bytes, s.heads / ranks * s.width * element);
    }
    t.share = t.width / ranks;
    t.vector_bytes = static_cast<int>(bytes);

    index_t const at_once = bytes / element;
    t.places.resize(static_cast<std::size_t>(t.width / at_once));
    for (int r = 0; r < ranks; ++r) {
        auto const held = whole::columns(heads, r, sections);
        for (index_t c = 0; c < t.share; c += at_once)
            t.places[static_cast<std::size_t>(held[static_cast<std::size_t>(c)] / at_once)] = {
                static_cast<std::int32_t>((r * t.rows * t.share + c) / at_once),
                static_cast<std::int32_t>(t.share / at_once)};
    }

    t.list.resize(static_cast<std::size_t>(t.tokens));
    t.equal = true;
    index_t all = 0; // rows of the ranks before this one
    for (int r = 0; r < ranks; ++r) {
        index_t const first = all, rows = tokens.rows(r);
        tokens.for_each_piece(r, [&](cpx::range piece) {
            for (index_t token = piece.first; token < piece.last; ++token, ++all)
                t.list[static_cast<std::size_t>(to_heads ? token : all)] =
                    static_cast<std::int32_t>(to_heads ? all : token);
        });
        auto const size = [&](index_t n) { return static_cast<std::size_t>(n * t.share * element); };
        wire const columns_of_rank{size(r * t.rows), size(t.rows)}, rows_of_rank{size(first), size(rows)};
        t.sends.push_back(to_heads ? columns_of_rank : rows_of_rank);
        t.receives.push_back(to_heads ? rows_of_rank : columns_of_rank);
        t.equal = t.equal && rows == tokens.rows(0);
    }
    return t;
}

/// A relayout of elements T, made ready. Each step is one launch; the all-to-all, in which a rank's own share is as
/// others', is NCCL's where all shares are equal, else a group of sends and receives.
template <class T, class From, class To>
    requires(From::every_row != To::every_row)
class relayout {
public:
    static constexpr bool to_heads = To::every_row;

    /// The shardings are `possible`, of no replicated one. Made by all ranks of `comm`.
    relayout(From const& from, To const& to, cpx::nccl& comm)
        : comm_(comm), t_(make(from, to, comm.rank())), places_(std::span<place const>(t_.places)),
          list_(std::span<std::int32_t const>(t_.list)), out_(to_heads ? t_.rows * t_.width : t_.tokens * t_.share),
          in_(to_heads ? t_.tokens * t_.share : t_.rows * t_.width) {}

    /// from, to: dense, their beginnings multiples of 16 bytes. Collective, without host synchronisation.
    void operator()(cpx::rows<T const> from, cpx::rows<T> to, cudaStream_t stream) const {
        std::span<std::int32_t const> const list(list_.data(), t_.list.size());
        if constexpr (to_heads) {
            permute_columns(from.data(), out_.data(), stream);
            all_to_all(stream);
            cpx::cuda::gather_rows(cpx::rows<T const>(in_.data(), t_.tokens, t_.share), list, to, stream);
        } else {
            cpx::cuda::gather_rows(from, list, cpx::rows<T>(out_.data(), t_.tokens, t_.share), stream);
            all_to_all(stream);
            permute_columns(in_.data(), to.data(), stream);
        }
    }

private:
    static tables make(From const& from, To const& to, int rank) {
        if constexpr (to_heads)
            return make_tables(from, to, rank, true, sizeof(T));
        else
            return make_tables(to, from, rank, false, sizeof(T));
    }

    void permute_columns(T const* from, T* to, cudaStream_t stream) const {
        if (t_.rows == 0) return;
        cpx::kernels::with_bytes<sizeof(T)>(t_.vector_bytes, [&](auto size) {
            using vector = cpx::kernels::bytes_at_once<size>;
            columns<vector> const a{reinterpret_cast<vector const*>(from), reinterpret_cast<vector*>(to),
                                    places_.data(), static_cast<std::uint32_t>(t_.rows),
                                    static_cast<std::uint32_t>(t_.places.size())};
            std::uint32_t const units = (a.rows + rows_at_once - 1) / rows_at_once * a.vectors;
            cpx::cuda::launch_early(move_columns<to_heads, vector>, (units + 255) / 256, 256, 0, stream, "move_columns",
                                    cpx::caller::here(), a);
        });
    }

    void all_to_all(cudaStream_t stream) const {
        auto const* out = reinterpret_cast<char const*>(out_.data());
        auto* in = reinterpret_cast<char*>(in_.data());
        if (t_.equal)
            return comm_.call("ncclAlltoAll",
                              [&] { return ncclAlltoAll(out, in, t_.sends[0].bytes, ncclInt8, comm_.get(), stream); });
        comm_.call("ncclSend and ncclRecv", [&] {
            static_cast<void>(ncclGroupStart()); // what fails between is told by the end
            for (int peer = 0; peer < comm_.ranks(); ++peer) {
                wire const& s = t_.sends[static_cast<std::size_t>(peer)];
                wire const& r = t_.receives[static_cast<std::size_t>(peer)];
                static_cast<void>(ncclSend(out + s.first, s.bytes, ncclInt8, peer, comm_.get(), stream));
                static_cast<void>(ncclRecv(in + r.first, r.bytes, ncclInt8, peer, comm_.get(), stream));
            }
            return ncclGroupEnd();
        });
    }

    cpx::nccl& comm_;
    tables t_;
    cpx::cuda::buffer<place> places_;
    cpx::cuda::buffer<std::int32_t> list_;
    cpx::cuda::buffer<T> out_, in_; ///< of the all-to-all
};

} // namespace three_steps
