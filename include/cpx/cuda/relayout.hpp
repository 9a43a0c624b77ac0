// SPDX-License-Identifier: Apache-2.0
// A relayout in one kernel, where every rank's memory can be stored to by the others.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/peer_memory.hpp>
#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/sharded.hpp>
#include <cpx/plan/relayout.hpp>

#include <cpx/relayout.cuh>

#include <array>
#include <type_traits>
#include <vector>

namespace cpx::cuda {

namespace detail {

/// Whether addresses of a sharding can be computed on a device.
template <any_sharding S>
inline constexpr bool computed_on_device = S::every_row;
template <layout_policy P, scope Scope, cut Cut>
inline constexpr bool computed_on_device<sharding<P, Scope, Cut>> =
    layout<P> && std::is_trivially_copyable_v<P> && std::is_trivially_copyable_v<Cut>;

template <layout_policy P, scope Scope, cut Cut>
auto device_side(sharding<P, Scope, Cut> const& s) {
    static_assert(computed_on_device<sharding<P, Scope, Cut>>,
                  "cpx: the one-kernel relayout computes addresses on the device and wants layouts and cuts without "
                  "memory of their own (zigzag, sequential, striped; balanced, aligned); move by send and receive");
    return kernels::token_side<P, Scope, Cut>{s.policy(), s.cut()};
}
template <any_sharding S>
    requires S::every_row
kernels::every_row_side device_side(S const&) {
    return {};
}
/// Returns what kernels know of a sharding, by `device_side` above or beside the type of the sharding.
template <any_sharding S>
auto side_of(S const& s) {
    return device_side(s);
}
template <any_sharding S>
using device_side_of = decltype(side_of(std::declval<S const&>()));

} // namespace detail

/// Moves tensors of elements T between two shardings in one kernel: no staging, no table of rows, no wait of the host.
///
/// Addresses follow from the policies and from cu_seqlens in device memory, so that a call can be captured in a CUDA
/// graph and replayed with other offsets. Offsets with which rows do not fit a buffer, or that differ between ranks,
/// are noticed by the kernel; see `kernels::faults`. Source and targets do not overlap. Rows for ranks that this device
/// does not reach are left out. Made by every rank for itself; calls are collective, in the same order on all ranks
/// that reach each other, and end, in stream order, when all their rows have arrived.
template <class T, any_sharding From, any_sharding To>
class relayout {
public:
    /// `width`: elements of a row, unless there are sections. Throws `cpx::error` of a plan that the kernel cannot run.
    relayout(relayout_plan<From, To> const& plan, index_t width, caller here = caller::here())
        : from_(detail::side_of(plan.from)), to_(detail::side_of(plan.to)), rank_(plan.rank) {
        require(plan.kind != flow::sums, "cuda::relayout", "plan", "one that moves rows", "one that adds them", here);
        require(plan.from.batch().tokens() < index_t{1} << 31, "cuda::relayout", "rows of the batch", "less than 2^31",
                plan.from.batch().tokens(), here);
        auto const sections = plan.from.sections().empty() ? plan.to.sections() : plan.from.sections();
        constexpr section whole;
        auto const groups = sections.empty() ? std::span(&whole, 1) : sections;
        require(std::ssize(groups) <= kernels::most_sections, "cuda::relayout", "sections",
                detail::in_words("at most ", kernels::most_sections), groups.size(), here);
        detail::load(kernels::relayout_push<source_side, target_side>, here);
        index_t const element = static_cast<index_t>(sizeof(T));
        source_width_ = sections.empty() ? width : plan.source_width;
        runs_ = static_cast<int>(groups.size());
        cpx::detail::head_shares const held(plan.from, groups), needed(plan.to, groups);
        for (int rank = 0; rank < plan.ranks(); ++rank) {
            index_t const target_width = sections.empty() ? width : cpx::detail::local_width(plan.to, rank, sections);
            require(std::max(source_width_, target_width) * element < index_t{1} << 31, "cuda::relayout",
                    "bytes of a row", "less than 2^31", std::max(source_width_, target_width) * element, here);
            peer_target& p = targets_.emplace_back();
            p.pitch = target_width * element;
            auto const out = cpx::detail::shipped_columns(held, needed, rank_, rank, held, rank_),
                       in = cpx::detail::shipped_columns(held, needed, rank_, rank, needed, rank);
            for (std::size_t i = 0; i < out.size(); ++i) // of sections of which nothing is shipped there is none
                p.columns[i] = {out[i].first * element, in[i].first * element,
                                (sections.empty() ? width : out[i].count) * element};
        }
        set(plan.from, plan.to);
    }

    /// Moves tensors of other shardings from now on, of as many ranks and the same sections.
    void set(From const& from, To const& to) {
        using cpx::detail::mix, cpx::detail::mix_all, cpx::detail::sharding_hash, cpx::detail::sharding_name;
        static std::uint64_t const types[] = {mix_all(0, sharding_name<From>()), mix_all(0, sharding_name<To>())};
        std::uint64_t const source = mix(types[0], sharding_hash(from)), target = mix(types[1], sharding_hash(to)),
                            plan = mix(mix(from.batch().hash(), source), target);
        auto const word = [](std::uint64_t hash) { return static_cast<std::uint32_t>(hash); };
        set(from, to, {word(plan), word(source), word(target)});
    }
    /// The same; `words` stand for both, and the plan's for what else ranks are to have in common.
    void set(From const& from, To const& to, kernels::relayout_words const& words) {
        from_ = detail::side_of(from);
        to_ = detail::side_of(to);
        source_rows_ = from.rows(rank_);
        target_rows_ = to.rows(rank_);
        words_ = words;
    }

    /// Returns the bytes of this rank's target. Of the others the kernel knows.
    index_t target_bytes() const { return target_rows_ * targets_[static_cast<std::size_t>(rank_)].pitch; }

    /// Stores this rank's rows of `from` into the targets of the ranks of the memory; this rank's begins `offset` bytes
    /// from the beginning of its memory. The arguments are such that `check_call` passes.
    ///
    /// from: (rows, width), any stride, memory of this device. Rows of the targets are dense. batch: cu_seqlens on the
    /// device, of as many sequences as are to be read. Calls on one memory are in one stream, or ordered by events.
    void operator()(rows<T const> from, peer_memory const& memory, index_t offset, std::span<index_t const> batch,
                    cudaStream_t stream, caller here = caller::here()) const {
        kernels::relayout_rows const r = arguments(from, memory, offset, batch);
        auto const range = named_range<"cpx relayout, one kernel">();
        auto const kernel = kernels::relayout_push<source_side, target_side>;
        launch_early(kernel, detail::dims(memory.blocks), 512, tables(memory, batch), stream, "relayout_push", here,
                     from_, to_, r, memory.meeting);
    }

    /// Throws `cpx::error` if the buffers of a call do not fit.
    void check_call(rows<T const> from, peer_memory const& memory, index_t offset, std::span<index_t const> batch,
                    caller here = caller::here()) const {
        char const* const where = "cuda::relayout";
        require(current_device() == memory.device, where, "current device", memory.device, current_device(), here);
        require(from.width() == source_width_, where, "width of the source", source_width_, from.width(), here);
        require(from.count() >= source_rows_, where, "rows of the source", source_rows_, from.count(), here);
        int const peers = memory.meeting.ranks, ranks = static_cast<int>(targets_.size());
        cpx::detail::require_own(where, "ranks of the memory", memory.first + memory.meeting.rank,
                                 std::max(ranks, memory.first + peers), rank_, ranks, here);
        require(offset % 16 == 0, where, "alignment of the target", "16 bytes", offset % 16, here);
        require(offset >= 0 && offset + target_bytes() <= memory.bytes, where, "bytes of the target",
                detail::in_words("at most those after the offset, ", memory.bytes - offset), target_bytes(), here);
        detail::require_memory(where, {{"source", from}, {"offsets", batch}}, here);
        std::span const target(memory.base[memory.meeting.rank] + offset, static_cast<std::size_t>(target_bytes()));
        detail::require_apart(where, {{"target", target}}, {{"source", from}, {"offsets", batch}}, here);
        int const most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, here);
        require(tables(memory, batch) + 1024 <= static_cast<std::size_t>(most), where, "sequences",
                detail::in_words("few enough for tables of ", most - 1024, " bytes"), std::ssize(batch) - 1, here);
    }

    /// Returns what the kernel is told of the rows of a call; see there.
    kernels::relayout_rows arguments(rows<T const> from, peer_memory const& memory, index_t offset,
                                     std::span<index_t const> batch) const {
        kernels::relayout_rows r{};
        r.offsets = batch.data(), r.sequences = static_cast<int>(std::ssize(batch)) - 1;
        r.words = words_, r.runs = runs_;
        r.target = {offset, memory.bytes}, r.first = memory.first;
        r.source = reinterpret_cast<char const*>(from.data()), r.source_rows = from.count();
        r.source_pitch = from.stride() * static_cast<index_t>(sizeof(T));
        index_t widest = 0; // of what a peer gets of a row; a thread is to hold 8 vectors of it at a time
        for (int peer = 0; peer < memory.meeting.ranks; ++peer) {
            peer_target const& p = targets_[static_cast<std::size_t>(memory.first + peer)];
            r.base[peer] = memory.base[peer];
            r.target_pitch[peer] = p.pitch;
            index_t all_bytes = 0;
            for (int i = 0; i < runs_; ++i) {
                column_run const& c = p.columns[i];
                int const vector = detail::vector_bytes({detail::address(r.source), detail::address(r.base[peer]),
                                                         r.source_pitch, p.pitch, c.source, c.target, c.bytes});
                r.columns[peer][i] = {c.source, c.target, static_cast<std::int32_t>(c.bytes / vector), vector};
                all_bytes += c.bytes;
            }
            widest = std::max(widest, all_bytes);
        }
        r.lanes = 32;
        while (r.lanes > 4 && r.lanes / 2 * 8 * 16 >= widest) r.lanes /= 2;
        return r;
    }
    detail::device_side_of<From> const& source() const { return from_; }
    detail::device_side_of<To> const& target() const { return to_; }

private:
    using source_side = detail::device_side_of<From>;
    using target_side = detail::device_side_of<To>;
    static std::size_t tables(peer_memory const& memory, std::span<index_t const> batch) {
        return kernels::relayout_memory<source_side, target_side>(static_cast<int>(std::ssize(batch)) - 1,
                                                                  memory.meeting.ranks);
    }
    struct column_run {
        index_t source, target, bytes; ///< from the beginnings of rows
    };
    /// What one rank gets of this one's rows.
    struct peer_target {
        index_t pitch; ///< of its target, bytes
        std::array<column_run, kernels::most_sections> columns;
    };

    detail::device_side_of<From> from_;
    detail::device_side_of<To> to_;
    int rank_, runs_ = 0;
    kernels::relayout_words words_ = {};
    index_t source_rows_, target_rows_, source_width_ = 0;
    std::vector<peer_target> targets_; ///< of every rank
};

} // namespace cpx::cuda
