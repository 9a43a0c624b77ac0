// SPDX-License-Identifier: Apache-2.0
// A relayout in one kernel, where every rank's memory can be stored to by the others.
#pragma once

#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/runtime.hpp>
#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/sharded.hpp>
#include <cpx/plan/relayout.hpp>

#include <cpx/relayout.cuh>

#include <numeric>
#include <type_traits>

namespace cpx::cuda {

/// The batch in device memory: cu_seqlens, `sequences` + 1 offsets from 0, ascending.
struct packed_offsets {
    template <class Integer>
        requires std::same_as<Integer, std::int32_t> || std::same_as<Integer, std::int64_t>
    packed_offsets(Integer const* device, int count)
        : offsets(device), sequences(count), wide(sizeof(Integer) == sizeof(std::int64_t)) {}

    void const* offsets;
    int sequences;
    bool wide;
};

/// Memory of every rank as this device reaches it, and where their kernels meet; see `nccl_window`.
struct peer_memory {
    char* base[kernels::most_ranks]; ///< of the same place in every rank's memory
    index bytes = 0;                 ///< from there on, the same on every rank
    kernels::meeting meeting;
    int blocks = 128; ///< a launch, the same on every rank, all of them resident
};

namespace detail {

template <layout_policy P, scope Scope, cut Cut>
auto device_side(sharding<P, Scope, Cut> const& s) {
    static_assert(layout<P> && std::is_trivially_copyable_v<P> && std::is_trivially_copyable_v<Cut>,
                  "cpx: the one-kernel relayout computes addresses on the device and wants layouts and cuts without "
                  "memory of their own (zigzag, sequential, striped; balanced, aligned); use cuda::exchange");
    return kernels::token_side<P, Scope, Cut>{s.policy(), s.cut()};
}
template <any_sharding S>
    requires S::every_row
kernels::every_row_side device_side(S const&) {
    return {};
}
template <any_sharding S>
using device_side_of = decltype(device_side(std::declval<S const&>()));

} // namespace detail

/// Moves tensors of elements T between two shardings in one kernel: no staging, no table of rows, no host
/// synchronisation.
///
/// Addresses follow from the policies and from cu_seqlens in device memory, so that a call can be captured in a CUDA
/// graph and replayed with other offsets, as long as every rank's rows fit its buffers.
/// Made by every rank for itself; calls are collective, in the same order on all ranks, and end, in stream order, when
/// all rows have arrived.
template <class T, any_sharding From, any_sharding To>
class relayout {
public:
    /// `width`: elements of a row, unless the plan has sections. Throws `cpx::error` if the kernel cannot run this
    /// plan.
    relayout(relayout_plan<From, To> const& plan, index width, caller here = caller::here())
        : from_(detail::device_side(plan.from)), to_(detail::device_side(plan.to)), rank_(plan.rank),
          ranks_(plan.ranks()), source_rows_(plan.source_rows) {
        require(plan.kind != flow::sums, "cuda::relayout", "plan", "one that moves rows", "one that adds them", here);
        require(ranks_ <= kernels::most_ranks, "cuda::relayout", "ranks",
                "at most " + std::to_string(kernels::most_ranks), ranks_, here);
        require(plan.from.batch().tokens() < index{1} << 31, "cuda::relayout", "rows of the batch", "less than 2^31",
                plan.from.batch().tokens(), here);
        auto const sections = plan.from.sections().empty() ? plan.to.sections() : plan.from.sections();
        constexpr section whole;
        auto const parts = sections.empty() ? std::span(&whole, 1) : sections;
        require(std::ssize(parts) <= kernels::most_sections, "cuda::relayout", "sections",
                "at most " + std::to_string(kernels::most_sections), parts.size(), here);
        index const element = static_cast<index>(sizeof(T));
        source_width_ = sections.empty() ? width : plan.source_width;
        rows_.pieces = static_cast<int>(parts.size());
        for (int peer = 0; peer < ranks_; ++peer) {
            index const target_width = sections.empty() ? width : cpx::detail::local_width(plan.to, peer, sections);
            rows_.target_pitch[peer] = target_width * element;
            require(std::max(source_width_, target_width) * element < index{1} << 31, "cuda::relayout",
                    "bytes of a row", "less than 2^31", std::max(source_width_, target_width) * element, here);
            most_rows_[peer] = plan.to.rows(peer);
            auto const out = columns(plan, peer, parts, plan.from, rank_),
                       in = columns(plan, peer, parts, plan.to, peer);
            for (std::size_t i = 0; i < out.size(); ++i) {
                bool const some = out[i].count > 0;
                widths_[peer][i] = sections.empty() ? (some ? width * element : 0) : out[i].count * element;
                rows_.piece[peer][i].source = out[i].first * element;
                rows_.piece[peer][i].target = in[i].first * element;
            }
        }
    }

    /// Returns the bytes that `rank` needs for its part of the target.
    index target_bytes(int rank) const { return most_rows_[rank] * rows_.target_pitch[rank]; }

    /// Stores this rank's rows of `from` into every rank's target at `offset` bytes of the memory.
    ///
    /// from: (rows, width), any stride, memory of this device. Rows of the targets are dense.
    /// Throws `cpx::error` before anything is enqueued if the buffers do not fit.
    void operator()(rows<T const> from, peer_memory const& memory, index offset, packed_offsets batch,
                    cudaStream_t stream, caller here = caller::here()) const {
        char const* const where = "cuda::relayout";
        require(from.width() == source_width_, where, "width of the source", source_width_, from.width(), here);
        require(from.count() >= source_rows_, where, "rows of the source", source_rows_, from.count(), here);
        require(memory.meeting.rank == rank_ && memory.meeting.ranks == ranks_, where, "ranks of the memory",
                std::to_string(rank_) + " of " + std::to_string(ranks_),
                std::to_string(memory.meeting.rank) + " of " + std::to_string(memory.meeting.ranks), here);
        for (int peer = 0; peer < ranks_; ++peer)
            require(offset >= 0 && offset + target_bytes(peer) <= memory.bytes, where,
                    ("bytes of rank " + std::to_string(peer) + "'s target").c_str(),
                    "at most those after the offset, " + std::to_string(memory.bytes - offset), target_bytes(peer),
                    here);
        require(from.count() == 0 || from.width() == 0 || device_of(from.data()) == current_device(), where, "source",
                "memory of the current device", device_of(from.data()), here);

        require(device_of(batch.offsets) == current_device(), where, "offsets", "memory of the current device",
                device_of(batch.offsets), here);
        kernels::relayout_rows const r = arguments(from, memory, offset, batch);
        named_range const range(names::relayout());
        using A = detail::device_side_of<From>;
        using B = detail::device_side_of<To>;
        auto const kernel = kernels::relayout_push<A, B>;
        std::size_t const shared = kernels::relayout_memory<A, B>(batch.sequences, ranks_);
        require(shared <= most_shared, where, "sequences",
                "few enough for tables of " + std::to_string(most_shared) + " bytes", batch.sequences, here);
        if (shared > 48 * 1024)
            check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
                  "cudaFuncSetAttribute", here);
        kernel<<<static_cast<unsigned>(memory.blocks), 512, shared, stream>>>(from_, to_, r, memory.meeting);
        check(cudaGetLastError(), "relayout_push", here);
    }

    /// Returns what the kernel is told of the rows of a call; see there.
    kernels::relayout_rows arguments(rows<T const> from, peer_memory const& memory, index offset,
                                     packed_offsets batch) const {
        kernels::relayout_rows r = rows_;
        r.offsets = batch.offsets;
        r.sequences = batch.sequences;
        r.wide = batch.wide;
        r.source = reinterpret_cast<char const*>(from.data());
        r.source_pitch = from.stride() * static_cast<index>(sizeof(T));
        index widest = 0; // of what a peer gets of a row; a thread is to hold 8 vectors of it at a time
        for (auto const& of_peer : widths_)
            widest = std::max(widest, std::accumulate(of_peer, of_peer + r.pieces, index{0}));
        r.lanes = 32;
        while (r.lanes > 4 && r.lanes / 2 * 8 * 16 >= widest) r.lanes /= 2;
        for (int peer = 0; peer < ranks_; ++peer) {
            r.target[peer] = memory.base[peer] + offset;
            for (int i = 0; i < r.pieces; ++i) {
                auto& piece = r.piece[peer][i];
                index const width = widths_[peer][static_cast<std::size_t>(i)];
                auto const places =
                    reinterpret_cast<std::uintptr_t>(r.source) | reinterpret_cast<std::uintptr_t>(r.target[peer]);
                index const all = static_cast<index>(places & 15) | r.source_pitch | r.target_pitch[peer] |
                                  piece.source | piece.target | width | 16;
                piece.vector = static_cast<std::int32_t>(all & -all);
                piece.units = static_cast<std::int32_t>(width / piece.vector);
            }
        }
        return r;
    }
    detail::device_side_of<From> const& source() const { return from_; }
    detail::device_side_of<To> const& target() const { return to_; }

private:
    static constexpr std::size_t most_shared = 227 * 1024;

    /// Returns the columns that this rank ships to `peer`, one run a section, as places of `holder` on `rank`.
    template <any_sharding Holder>
    static std::vector<run> columns(relayout_plan<From, To> const& plan, int peer, std::span<section const> parts,
                                    Holder const& holder, int rank) {
        std::vector<run> list;
        index first = 0;
        for (section const& s : parts) {
            range const share = holder.heads(rank, s.heads);
            range const heads = cpx::detail::shipped_heads(plan.from, plan.to, plan.rank, peer, s.heads);
            list.push_back(heads.empty() ? run{}
                                         : run{first + (heads.first - share.first) * s.width, heads.size() * s.width});
            first += share.size() * s.width;
        }
        return list;
    }

    detail::device_side_of<From> from_;
    detail::device_side_of<To> to_;
    int rank_, ranks_;
    index source_rows_, source_width_ = 0;
    index most_rows_[kernels::most_ranks] = {};
    index widths_[kernels::most_ranks][kernels::most_sections] = {};
    kernels::relayout_rows rows_{};
};

/// Returns the relayout of a plan: `make_relayout<float>(cpx::relayout(from, to, rank), width)`.
template <class T, any_sharding From, any_sharding To>
relayout<T, From, To> make_relayout(relayout_plan<From, To> const& plan, index width, caller here = caller::here()) {
    return {plan, width, here};
}

} // namespace cpx::cuda
