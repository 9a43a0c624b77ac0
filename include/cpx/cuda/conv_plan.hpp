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
        : reach_(before.reach), has_backward_(after != nullptr), go_on_(most.go_on),
          most_(std::max(most.rows, before.source_rows)) {
        // refuses what does not fit also where there is no device
        now_ = conv_batch_of("cuda::conv_plan", before, after, kernels::conv_max_taps, go_on_, here);
        auto& tables = now_.tables;
        device_ = current_device();
        check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device_),
              "cudaDeviceGetAttribute", here);
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

    /// Replaces the plans in stream order: without allocation or a wait. Throws `cpx::error` if there is no room.
    template <any_sharding S>
    void set(halo_plan<S> const& before, halo_plan<S> const* after, cudaStream_t in, caller here = caller::here()) {
        char const* const where = "cuda::conv_plan";
        require(room_ && before.reach == reach_ && (after != nullptr) == has_backward_, where, "plan to set",
                "one of the taps and sides of the first, and room for others", "another", here);
        auto next = conv_batch_of(where, before, after, kernels::conv_max_taps, go_on_, here);
        auto const& tables = next.tables;
        require(next.rows <= most_ && std::ssize(tables) <= tables_.size(), where, "rows and numbers of the plan",
                cpx::detail::in_words("at most ", most_, ", ", tables_.size()),
                cpx::detail::in_words(next.rows, ", ", tables.size()), here);
        write_numbers(tables, tables_.data(), in, here);
        now_ = std::move(next);
    }

    index_t rows() const { return now_.rows; }
    /// Returns the most rows that there is room for.
    index_t most_rows() const { return most_; }
    /// Returns the rows that an exchange with the plan of rows before brings.
    index_t halo_rows() const { return now_.halo_rows; }
    index_t taps() const { return reach_ + 1; }

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
    int device_ = 0, multiprocessors_ = 1;
    index_t reach_;
    bool has_backward_, go_on_;
    index_t most_;
    conv_batch now_;
    buffer<index_t> tables_; ///< one behind the other
    bool room_ = false;      ///< for other plans
};

} // namespace cpx::cuda
