// SPDX-License-Identifier: Apache-2.0
// Positions of text, images and videos on devices, on any sharding: ranks exchange the numbers of their placeholders.
#pragma once

#include <cpx/cuda/memory.hpp>
#include <cpx/cuda/mrope.hpp>
#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/transport/movement.hpp>

#include <optional>
#include <type_traits>

namespace cpx::cuda {

namespace detail {

/// Gives as many rows of every rank to all of them, in rank order; prepared once.
template <class T, device_transport Comm>
class gathered_rows {
    using own_rows = sharding<sequential<>>;

public:
    gathered_rows(Comm& comm, index_t count, index_t width, caller here)
        : batch_(std::vector<index_t>{0, comm.ranks() * count}), own_(batch_, sequential<>(comm.ranks())),
          all_(comm.ranks(), batch_, here),
          move_(make_movement<T>(own_, all_, width, {comm.ranks() * count, 1}, comm, here)),
          from_(move_.make_tensor(own_, here)), to_(move_.make_tensor(all_, here)) {}

    T* from() { return from_.data().data(); }
    rows<T const> operator()(caller here) {
        move_(from_, to_, here);
        return to_.data();
    }

private:
    thd batch_;
    own_rows own_;
    replicated<> all_;
    movement<T, relayout_plan<own_rows, replicated<>>, Comm> move_;
    decltype(std::declval<movement<T, relayout_plan<own_rows, replicated<>>, Comm> const&>().make_tensor(
        std::declval<own_rows const&>())) from_;
    decltype(std::declval<movement<T, relayout_plan<own_rows, replicated<>>, Comm> const&>().make_tensor(
        std::declval<replicated<> const&>())) to_;
};

} // namespace detail

/// Computes positions of this rank's rows on the device: those of the host's `mrope_positions`, on any sharding.
///
/// Made once, by all ranks, for every batch that fits; then `set` says which batch, and a call computes its positions,
/// both in the stream of the transport, without allocation or a wait for the device. Every rank tells every other the
/// numbers of placeholders of its segments, two int32 each; a call without grids, or of a sharding by which every rank
/// has every row, sends nothing. A graph of both, captured with a `set` by offsets on the device, works on whatever
/// ids, grids and offsets are there when it is launched.
template <device_transport Comm>
class mrope_positions {
public:
    /// `most`, `of`: the same on all ranks; `of` without seconds, which come with the grids. Collective. Throws
    /// `cpx::error` if they are none.
    explicit mrope_positions(Comm& comm, mrope_capacity most, media_options const& of = {},
                             caller here = caller::here())
        : comm_(comm), most_(most), own_(most, comm.rank(), comm.ranks(), of, here) {
        if (comm.ranks() == 1 || most.images + most.videos == 0) return;
        if (most.segments > 0) counts_.emplace(comm, most.segments, 2, here);
        if (of.rule == mrope_rule::qwen2_5_vl_spatial_advance && most.sequences > 0)
            deltas_.emplace(comm, most.sequences, 1, here);
    }
    template <class X = void>
    explicit mrope_positions(cpx::detail::any = {}, cpx::detail::any = {}, cpx::detail::any = {})
        : mrope_positions(cpx::detail::lacking<Comm&>(), mrope_capacity()) {
        static_assert(cpx::detail::never<X>,
                      "cpx: cuda::mrope_positions(comm, most, of) wants a cpx::device_transport, such as a "
                      "cuda::communicator, and an mrope_capacity; on the host, call cpx::mrope_positions");
    }

    /// Says how the next batch is sharded. Throws `cpx::error` if it does not fit the capacity.
    template <any_sharding S>
    void set(S const& of, caller here = caller::here()) {
        own_.set(of, stream(), here);
    }
    /// The same from cu_seqlens in the device's memory: of physical rows, and of valid ones if there is padding.
    template <layout_policy P, cut Cut, row_number I>
    void set(sharding<P, scope::sequence, Cut> const& of, std::span<I const> offsets, std::span<I const> valid = {},
             caller here = caller::here()) {
        own_.set(of, offsets, valid, stream(), here);
    }

    /// Computes the positions of the rows whose ids these are, in the device's memory: token ids, or kinds with
    /// `token_types`. Collective. Throws `cpx::error` if sizes do not fit, before anything is launched, and of what an
    /// earlier batch was found to lack.
    template <row_number I>
    void operator()(std::span<I const> ids, media_tokens tokens, device_grids const& grids,
                    caller here = caller::here()) {
        auto const range = named_range<"cpx mrope_positions">();
        bool const text = grids.images.empty() && grids.videos.empty();
        own_.count(ids, tokens, grids, stream(), here);
        rows<std::int32_t const> counts = own_.counts();
        if (counts_ && !text && !own_.alone()) {
            copy(counts.data(), counts_->from(), counts.count() * 2, here);
            counts = (*counts_)(here);
        }
        own_.place(ids, tokens, counts, stream(), here);
        if (!deltas_ || text || own_.alone()) return;
        auto const mine = own_.deltas();
        copy(mine.data(), deltas_->from(), std::ssize(mine), here);
        auto const all = (*deltas_)(here);
        int const count = static_cast<int>(std::ssize(mine)), threads = kernels::media_threads;
        launch_early(kernels::greatest_deltas<>, static_cast<unsigned>((count + threads - 1) / threads), threads, 0,
                     stream(), "cuda::mrope_positions", here, all.data(), comm_.ranks(), count, mine.data());
    }

    /// Returns (3, rows), as `rotary_positions` takes it: the axes time, height and width.
    rows<std::int32_t const> axes() const { return own_.axes(); }
    /// Returns as many numbers as rows: those that hold placeholders of a kind, ascending, as the rank's rows of
    /// features, then -1, as `scatter_rows` takes them.
    std::span<std::int32_t const> placeholders(media_kind kind) const { return own_.placeholders(kind); }
    /// Returns for every sequence by how much the position of a token that is decoded behind it differs from the
    /// token's number in it.
    std::span<index_t const> deltas() const { return own_.deltas(); }

    /// Throws `cpx::error` of what the device has found wrong so far, which the caller has waited for: grids that fit
    /// no merge size, placeholders that are not as many as rows of features, or items that text interrupts. The next
    /// call would throw it, too.
    void check(caller here = caller::here()) const { own_.check(here); }

private:
    cudaStream_t stream() const { return comm_.memory().stream(); }
    template <class T>
    void copy(T const* from, T* to, index_t count, caller here) const {
        cuda::check(
            cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof(T), cudaMemcpyDeviceToDevice, stream()),
            "cudaMemcpyAsync", here);
    }

    Comm& comm_;
    mrope_capacity most_;
    rank_positions own_;
    std::optional<detail::gathered_rows<std::int32_t, Comm>> counts_;
    std::optional<detail::gathered_rows<index_t, Comm>> deltas_;
};

} // namespace cpx::cuda
