// SPDX-License-Identifier: Apache-2.0
// States of recurrences in device memory, handed on between GPUs.
#pragma once

#include <cpx/cuda/carried_states.hpp>
#include <cpx/cuda/communicator.hpp>
#include <cpx/ops/carried_states.hpp>

#include <optional>
#include <span>

namespace cpx::cuda {

/// What recurrences need to hand states on between GPUs: made once, for every layer and batch of one kind of carry.
///
/// An operator that is given one instead of a communicator only enqueues its work, from its second call on. Belongs to
/// the communicator, which outlives it; calls are collective, in the same order on all ranks.
class state_exchange {
public:
    template <class T>
    using buffer = block<T>;

    /// `segments`: the most that a rank has of any batch; 0: as many as of the first.
    explicit state_exchange(communicator& comm, index_t segments = 0) : comm_(comm), most_(segments) {}

    cuda::memory const& memory() const { return comm_.memory(); }
    cudaStream_t stream() const { return comm_.stream(); }

    /// Gets ready for the exchanges of a plan, unless that has been done. Collective the first time: ranks compare the
    /// plans and connect. Throws `cpx::error` if they differ, and if plan and communicator do not fit.
    template <carry_kind How, any_sharding S>
    void prepare(carry_plan<How, S> const& plan, state_shape const& shape, caller here = caller::here()) {
        require(plan.sharding.ranks() == comm_.ranks() && plan.rank == comm_.rank(), "cuda::state_exchange",
                "rank of the plan", std::to_string(comm_.rank()) + " of " + std::to_string(comm_.ranks()),
                std::to_string(plan.rank) + " of " + std::to_string(plan.sharding.ranks()), here);
        if (plan.steps == 0 || move_) return;
        bool constexpr scans = std::same_as<How, scan>;
        index_t const state = shape.state_width(), map = scans ? shape.map_width() : 0;
        index_t const width = scans ? carry_plan<scan, S>::row_width(state, map) : state;
        auto const step = [&](index_t k, side from) {
            if constexpr (scans)
                return plan.step(k, from, state, map);
            else
                return plan.step(k, from);
        };
        index_t rows = most_ * ((state + map) / width), runs = 2 * most_;
        for (index_t k = 0; k < plan.steps; ++k)
            for (int back = 0; back < 2; ++back) {
                auto const p = step(k, back ? side::after : side::before);
                index_t of_step = 0;
                for (auto const* messages : {&p.sends, &p.receives})
                    for (message const& m : *messages) of_step += std::ssize(m.rows);
                rows = std::max({rows, p.source_rows, p.target_rows});
                runs = std::max(runs, of_step);
            }
        cpx::plan const first = step(0, side::before);
        index_t const bytes = rows * width * static_cast<index_t>(sizeof(float)) + 256 * comm_.ranks();
        move_.emplace(std::span(&first, 1), width, comm_.nccl_communicator(),
                      exchange_room{2 * (runs + comm_.ranks()), bytes}, index_t{0}, range{}, here);
    }

    template <class T>
    block<T> zeros(char const* where, std::initializer_list<index_t> counts, caller here) const {
        return memory().template zeros<T>(where, counts, here);
    }
    /// Returns numbers of the host in device memory.
    block<index_t> numbers(std::span<index_t const> list, caller here) const {
        auto made = memory().template room<index_t>(std::ssize(list));
        write_numbers(list, made.data(), stream(), here);
        return made;
    }
    void copy(std::vector<cpx::detail::copied<float>> const& list) const {
        std::vector<kernels::state_copy> copies;
        for (auto const& c : list) copies.push_back({c.from, c.to, c.count});
        copy_states(copies, stream());
    }
    void transpose(state_shape const& shape, std::vector<cpx::detail::copied<float>> const& list) const {
        if (shape.map != map_kind::matrix) return copy(list);
        std::vector<kernels::state_copy> copies;
        for (auto const& c : list) copies.push_back({c.from, c.to, c.count});
        transpose_maps(shape.heads, shape.keys, copies, stream());
    }
    void join(state_shape const& shape, index_t count, index_t width,
              std::vector<cpx::detail::joined<float>> const& list) const {
        std::vector<kernels::state_join> joins;
        for (auto const& j : list) joins.push_back({j.map, j.x, j.sum});
        join_states(shape.heads, count, width, shape.map_rows(), shape.map_columns(), joins, stream());
    }
    void exchange(plan const& p, rows<float const> from, rows<float> to, caller here) {
        move_->set({&p, 1}, stream(), here);
        (*move_)(from, to, stream(), 0, here);
    }

private:
    communicator& comm_;
    index_t most_;
    std::optional<cuda::exchange<float>> move_;
};

} // namespace cpx::cuda
