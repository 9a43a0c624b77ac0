// SPDX-License-Identifier: Apache-2.0
// The halo plans of a causal convolution, in the form that its kernels read.
#pragma once

#include <cpx/cuda/write_numbers.hpp>
#include <cpx/plan/edges.hpp>

#include <cpx/causal_conv1d.cuh>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

namespace cpx::cuda {

/// The most rows and segments of a rank; and whether sequences go on, see `rows_before`.
struct conv_room {
    index_t rows = 0, segments = 0;
    bool go_on = false;
};

/// Where a rank's segments begin, and which rows stand beside them: made once a batch, or once for all batches.
///
/// Belongs to the device on which it is made: operators refuse it on another. The backward does not store dz. A row of
/// it that another segment needs, on this rank or elsewhere, is an edge row: `causal_conv1d_backward_edge` computes
/// those alone, `edge_exchange()` brings them to other ranks.
class conv_plan {
public:
    /// `before` is `halo(sharding, rank, taps - 1)`; `after`, for the backward, too, the same with `side::after`. Also
    /// for plans that come later, if there is room for any.
    ///
    /// Throws `cpx::error` on other plans, more than 8 taps, and errors of the device. Cost: one upload of a number for
    /// each segment and row beside it.
    template <any_sharding S>
    explicit conv_plan(halo_plan<S> const& before, halo_plan<S> const* after = nullptr, conv_room most = {},
                       caller here = caller::here())
        : reach_(before.reach), for_backward_(after != nullptr), has_backward_(for_backward_), go_on_(most.go_on),
          most_(std::max(most.rows, before.source_rows)) {
        // refuses what does not fit also where there is no device
        now_ = conv_batch_of(where, before, kernels::conv_max_taps, go_on_, here);
        if (after) {
            require(after->sharding == before.sharding && after->rank == before.rank, where, "plan of rows after",
                    "the sharding and the rank of that of rows before", "another", here);
            add_rows_after(where, now_, *after, reach_, here);
        }
        auto& tables = now_.tables;
        device_ = current_device();
        multiprocessors_ = device_attribute(cudaDevAttrMultiProcessorCount, here);
        // a row after a segment of another one is an edge row, of as many places as there are taps
        index_t const a_segment = 1 + reach_ + (after ? reach_ + reach_ * taps() : 0);
        tables.resize(static_cast<std::size_t>(std::max(std::ssize(tables), most.segments * a_segment + 1)));
        tables_ = buffer<index_t>(std::span<index_t const>(tables), here);
        room_ = most.segments > 0;
        if (room_) load_write_numbers(here);
    }

    template <any_sharding S>
    conv_plan(halo_plan<S> const& before, halo_plan<S> const& after, caller here = caller::here())
        : conv_plan(before, &after, conv_room(), here) {}

    /// Replaces the plan of rows before, in the order of the stream of `by`, which writes tables: no memory is
    /// allocated, and nothing waits. That of rows after, if there is one, is none until it is set. Throws `cpx::error`
    /// if there is no room.
    template <any_sharding S>
    void set(halo_plan<S> const& before, detail::batch_tables& by, caller here = caller::here()) {
        require(room_ && before.reach == reach_, where, "plan to set",
                "one of the taps of the first, and room for others", "another", here);
        write(conv_batch_of(where, before, kernels::conv_max_taps, go_on_, here), 0, before.batch, by, here);
        has_backward_ = false;
    }
    /// Sets the plan of rows after of the batch that was set, if the first one had such a plan. As `set`.
    template <any_sharding S>
    void set_after(halo_plan<S> const& after, detail::batch_tables& by, caller here = caller::here()) {
        require(room_ && for_backward_, where, "plan of rows after to set", "none, where the first had none", "one",
                here);
        auto next = now_;
        auto const forward = static_cast<std::size_t>(this->after() - first());
        next.tables.resize(forward);
        add_rows_after(where, next, after, reach_, here);
        write(std::move(next), forward, after.batch, by, here);
        has_backward_ = true;
    }

    index_t rows() const { return now_.rows; }
    /// Returns the most rows that there is room for.
    index_t most_rows() const { return most_; }
    /// Returns the rows that an exchange with the plan of rows before brings.
    index_t halo_rows() const { return now_.halo_rows; }
    index_t taps() const { return reach_ + 1; }

    /// Whether there is a plan of rows after, of this batch.
    bool has_backward() const { return has_backward_; }
    /// Returns the plan that brings edge rows, its source, to the ranks whose segments they follow, its target.
    plan const& edge_exchange() const { return now_.edge_exchange; }
    index_t edge_rows() const { return now_.edge_exchange.source_rows; }
    index_t dz_halo_rows() const { return now_.edge_exchange.target_rows; }

    index_t segments() const { return now_.segments; }
    int device() const { return device_; }
    int multiprocessors() const { return multiprocessors_; }
    /// Returns, in device memory, the tables of the kernels (see kernels/cpx/causal_conv1d.cuh).
    index_t const* first() const { return tables_.data(); }
    index_t const* before() const { return first() + now_.segments + 1; }
    index_t const* after() const { return before() + now_.segments * reach_; }
    index_t const* edge_places() const { return after() + now_.segments * reach_; }

private:
    static constexpr char const* where = "cuda::conv_plan";

    /// Takes tables in place of those that are there, and lets those from number `first` on be written.
    void write(conv_batch next, std::size_t first, thd const& batch, detail::batch_tables& by, caller here) {
        auto const& tables = next.tables;
        require(next.rows <= most_ && std::ssize(tables) <= tables_.size(), where, "rows and numbers of the plan",
                cpx::detail::in_words("at most ", most_, ", ", tables_.size()),
                cpx::detail::in_words(next.rows, ", ", tables.size()), here);
        std::span<index_t const> const numbers = std::span(tables).subspan(first);
        cpx::detail::lane_work work;
        work.put(tables_.data() + first, numbers);
        if (!by.add(batch, std::move(work), here))
            write_numbers(numbers, tables_.data() + first, by.stream(), here); // which are too many for one launch
        now_ = std::move(next);
    }

    int device_ = 0, multiprocessors_ = 1;
    index_t reach_;
    bool for_backward_, has_backward_, go_on_; ///< whether the first plan was one for both, and this one is
    index_t most_;
    conv_batch now_;
    buffer<index_t> tables_; ///< one behind the other
    bool room_ = false;      ///< for other plans
};

} // namespace cpx::cuda
