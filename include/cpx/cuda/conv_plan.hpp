// SPDX-License-Identifier: Apache-2.0
// The halo plans of a causal convolution, in the form that its kernels read.
#pragma once

#include <cpx/cuda/runtime.hpp>
#include <cpx/plan/halo.hpp>

#include <cpx/causal_conv1d.cuh>

#include <algorithm>

namespace cpx::cuda {

/// Where one rank's segments begin, and which rows stand beside them: made once a batch, used by every layer.
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
    explicit conv_plan(halo_plan<S> const& before, caller here = caller::here()) {
        set_before(before, here);
    }

    /// Also for the backward. `after` is `halo(sharding, rank, taps - 1, side::after)`.
    template <any_sharding S>
    conv_plan(halo_plan<S> const& before, halo_plan<S> const& after, caller here = caller::here()) {
        auto const beside = set_before(before, here);
        require(after.sharding == before.sharding && after.rank == before.rank, "cuda::conv_plan", "plan of rows after",
                "the sharding and the rank of that of rows before", "another", here);
        require(after.where == side::after && after.reach == before.reach, "cuda::conv_plan",
                "rows after a segment in the plan", before.reach, after.where == side::after ? after.reach : 0, here);
        set_after(after, before.segments, beside, here);
    }

    index_t rows() const { return rows_; }
    /// Returns the rows that an exchange with the plan of rows before brings.
    index_t halo_rows() const { return halo_rows_; }
    index_t taps() const { return reach_ + 1; }

    bool has_backward() const { return has_backward_; }
    /// Returns the plan that brings edge rows, its source, to the ranks whose segments they follow, its target.
    plan const& edge_exchange() const { return edge_exchange_; }
    index_t edge_rows() const { return edge_exchange_.source_rows; }
    index_t dz_halo_rows() const { return edge_exchange_.target_rows; }

    index_t segments() const { return first_.size() - 1; }
    int device() const { return device_; }
    int multiprocessors() const { return multiprocessors_; }
    /// Returns, in device memory, the tables of the kernels (see kernels/cpx/causal_conv1d.cuh).
    index_t const* first() const { return first_.data(); }
    index_t const* before() const { return before_.data(); }
    index_t const* after() const { return after_.data(); }
    index_t const* edge_places() const { return edge_places_.data(); }

private:
    static buffer<index_t> upload(std::vector<index_t> const& values, caller here) {
        return buffer<index_t>(std::span(values), here);
    }

    /// Returns the table of rows before: (segments, reach). Rows of the halo are numbered after the rank's own; -1:
    /// none.
    template <any_sharding S>
    std::vector<index_t> set_before(halo_plan<S> const& p, caller here) {
        require(p.where == side::before, "cuda::conv_plan", "side of the halo", "before", "after", here);
        require(p.reach < kernels::conv_max_taps, "cuda::conv_plan", "taps",
                "at most " + std::to_string(kernels::conv_max_taps), p.reach + 1, here);
        require(std::ssize(p.segments) < index_t{1} << 31, "cuda::conv_plan", "segments", "less than 2^31",
                p.segments.size(), here);
        rows_ = p.source_rows;
        halo_rows_ = p.target_rows;
        reach_ = p.reach;
        device_ = current_device();
        check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device_),
              "cudaDeviceGetAttribute", here);
        std::vector<index_t> table(p.segments.size() * static_cast<std::size_t>(reach_), -1);
        for (std::size_t i = 0; i < p.segments.size(); ++i) {
            auto to = table.begin() + static_cast<index_t>(i + 1) * reach_;
            for (std::size_t k = p.begin[i + 1]; k-- > p.begin[i];)
                for (index_t row = p.runs[k].count; row-- > 0;)
                    *--to = p.runs[k].first + row + (p.runs[k].halo ? rows_ : 0);
        }
        first_ = upload(offsets(p.segments), here);
        before_ = upload(table, here);
        return table;
    }

    template <any_sharding S>
    void set_after(halo_plan<S> const& p, std::vector<segment> const& segments, std::vector<index_t> const& before,
                   caller here) {
        // Own rows, ascending. A row that another segment of this rank needs is among those that are sent, because the
        // rank that holds the rows between needs it, too.
        std::vector<index_t> edge;
        for (message const& m : p.sends)
            for (run const r : m.rows)
                for (index_t row = r.first; row < r.first + r.count; ++row) edge.push_back(row);
        std::ranges::sort(edge);
        edge.erase(std::ranges::unique(edge).begin(), edge.end());
        auto const place = [&](index_t row) -> index_t { return std::ranges::lower_bound(edge, row) - edge.begin(); };

        has_backward_ = true;
        edge_exchange_ = p;
        edge_exchange_.source_rows = std::ssize(edge);
        for (message& m : edge_exchange_.sends)
            for (run& r : m.rows) r.first = place(r.first); // its rows follow one another among the edge rows, too

        std::vector<index_t> table(segments.size() * static_cast<std::size_t>(reach_), -1);
        for (std::size_t i = 0; i < segments.size(); ++i) {
            auto to = table.begin() + static_cast<index_t>(i) * reach_;
            for (std::size_t k = p.begin[i]; k < p.begin[i + 1]; ++k)
                for (index_t row = p.runs[k].first; row < p.runs[k].first + p.runs[k].count; ++row)
                    *to++ = p.runs[k].halo ? std::ssize(edge) + row : place(row);
        }

        std::vector<index_t> places; // (edge rows, taps): what each is computed from
        index_t s = 0;
        for (index_t const row : edge) {
            while (segments[static_cast<std::size_t>(s)].row + segments[static_cast<std::size_t>(s)].count <= row) ++s;
            for (index_t from = row - reach_; from <= row; ++from) {
                index_t const token = from - segments[static_cast<std::size_t>(s)].row;
                places.push_back(token >= 0 ? from : before[static_cast<std::size_t>((s + 1) * reach_ + token)]);
            }
        }
        after_ = upload(table, here);
        edge_places_ = upload(places, here);
    }

    index_t rows_ = 0, halo_rows_ = 0, reach_ = 0;
    int device_ = 0, multiprocessors_ = 1;
    bool has_backward_ = false;
    plan edge_exchange_;
    buffer<index_t> first_, before_, after_, edge_places_;
};

} // namespace cpx::cuda
