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

/// The most rows and segments of a rank.
struct conv_room {
    index_t rows = 0, segments = 0;
};

/// Where one rank's segments begin, and which rows stand beside them: made once a batch, used by every layer, or once
/// for all batches.
///
/// Belongs to the device on which it is made: operators refuse it on another. The backward does not store dz. A row of
/// it that another segment needs, on this rank or elsewhere, is an edge row: `causal_conv1d_backward_edge` computes
/// those alone, `edge_exchange()` brings them to other ranks.
class conv_plan {
public:
    /// For the forward. `before` is `halo(sharding, rank, taps - 1)`.
    ///
    /// Throws `cpx::error` on other plans, more than 8 taps, and errors of the device. Cost: one upload of a number for
    /// each segment and row beside it.
    template <any_sharding S>
    explicit conv_plan(halo_plan<S> const& before, caller here = caller::here())
        : conv_plan(before, static_cast<halo_plan<S> const*>(nullptr), conv_room(), here) {}

    /// Also for the backward. `after` is `halo(sharding, rank, taps - 1, side::after)`.
    template <any_sharding S>
    conv_plan(halo_plan<S> const& before, halo_plan<S> const& after, caller here = caller::here())
        : conv_plan(before, &after, conv_room(), here) {}

    /// Also for plans that come later, if there is room for any; without `after`, for the forward alone.
    template <any_sharding S>
    conv_plan(halo_plan<S> const& before, halo_plan<S> const* after, conv_room most, caller here = caller::here())
        : reach_(before.reach), has_backward_(after != nullptr), most_(std::max(most.rows, before.source_rows)) {
        std::vector<index_t> tables;
        now_ = make(before, after, tables, here); // refuses what does not fit also where there is no device
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

    /// Replaces the plans, in the order of the stream: allocates no device memory, and does not wait. Throws
    /// `cpx::error` if there is no room for them.
    template <any_sharding S>
    void set(halo_plan<S> const& before, halo_plan<S> const* after, cudaStream_t in, caller here = caller::here()) {
        char const* const where = "cuda::conv_plan";
        require(room_ && before.reach == reach_ && (after != nullptr) == has_backward_, where, "plan to set",
                "one of the taps and sides of the first, and room for others", "another", here);
        std::vector<index_t> tables;
        auto next = make(before, after, tables, here);
        require(next.rows <= most_ && std::ssize(tables) <= tables_.size(), where, "rows and numbers of the plan",
                "at most " + std::to_string(most_) + ", " + std::to_string(tables_.size()),
                std::to_string(next.rows) + ", " + std::to_string(tables.size()), here);
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
    struct batch {
        index_t rows = 0, halo_rows = 0, segments = 0;
        plan edge_exchange;
    };

    /// Adds to `tables` where segments begin, then (segments, reach) rows before. Rows of the halo are numbered after
    /// the rank's own; -1: none. Then (segments, reach) rows after, those of the halo after the edge rows, and what
    /// edge rows are computed from.
    template <any_sharding S>
    batch make(halo_plan<S> const& p, halo_plan<S> const* after, std::vector<index_t>& tables, caller here) const {
        require(p.where == side::before, "cuda::conv_plan", "side of the halo", "before", "after", here);
        require(p.reach < kernels::conv_max_taps, "cuda::conv_plan", "taps",
                "at most " + std::to_string(kernels::conv_max_taps), p.reach + 1, here);
        require(std::ssize(p.segments) < index_t{1} << 31, "cuda::conv_plan", "segments", "less than 2^31",
                p.segments.size(), here);
        batch made{p.source_rows, p.target_rows, std::ssize(p.segments), {}};
        auto const add = [&](std::vector<index_t> const& list) {
            tables.insert(tables.end(), list.begin(), list.end());
        };
        tables = offsets(p.segments);
        auto const before = rows_beside(p, [&](index_t row, bool halo) { return row + (halo ? made.rows : 0); });
        add(before);
        if (!after) return made;
        require(after->sharding == p.sharding && after->rank == p.rank, "cuda::conv_plan", "plan of rows after",
                "the sharding and the rank of that of rows before", "another", here);
        require(after->where == side::after && after->reach == p.reach, "cuda::conv_plan",
                "rows after a segment in the plan", p.reach, after->where == side::after ? after->reach : 0, here);
        auto edges = edges_of(*after);
        add(edges.beside);
        made.edge_exchange = std::move(edges.exchange);

        std::size_t s = 0; // (edge rows, taps): what each is computed from
        for (index_t const row : edges.rows) {
            while (p.segments[s].row + p.segments[s].count <= row) ++s;
            for (index_t from = row - reach_; from <= row; ++from) {
                index_t const token = from - p.segments[s].row;
                tables.push_back(
                    token >= 0 ? from
                               : before[(s + 1) * static_cast<std::size_t>(reach_) - static_cast<std::size_t>(-token)]);
            }
        }
        return made;
    }

    int device_ = 0, multiprocessors_ = 1;
    index_t reach_;
    bool has_backward_;
    index_t most_;
    batch now_;
    buffer<index_t> tables_; ///< one behind the other
    bool room_ = false;      ///< for other plans
};

} // namespace cpx::cuda
