// SPDX-License-Identifier: Apache-2.0
// Recurrences on elements of one type, on a device.
#pragma once

#include "group.hpp"

#include <cpx/ops/cuda/recurrence.hpp>

#include <utility>

namespace binding {

/// Lends memory that is there to blocks, which give it back to nobody.
class lent_memory final : public cuda::memory_resource {
public:
    explicit lent_memory(void* memory) : memory_(memory) {}
    void* allocate(std::size_t, cudaStream_t) override { return memory_; }
    void deallocate(void*, std::size_t, cudaStream_t) noexcept override {}

private:
    void* memory_;
};

/// Calls `f(plan, state_exchange, on)` with what is prepared for the states of a call.
template <class F>
void with_states(device_group& g, carry_value const& carry, state_call const& c, F&& f) {
    auto& comm = g.comm();
    std::visit(
        [&]<class How, class S>(cpx::carry_plan<How, S> const& plan) {
            call_kind const kind{number_of(carry.sharding.text()),          carry.serial,
                                 static_cast<std::uint64_t>(c.value_heads), static_cast<std::uint64_t>(c.key_dim),
                                 static_cast<std::uint64_t>(c.value_dim),   c.x.size()};
            auto& by = g.find<cuda::state_exchange>(
                c.where, kind, plan.id.fingerprint(), [&] { return capacity_for(plan.sharding); },
                [&](cpx::capacity const& most) { return std::make_unique<cuda::state_exchange>(comm, most); },
                [](cuda::state_exchange&) {}); // the operator sets it
            f(plan, by, [&](auto const& rows) { return cpx::sharded(rows, plan.sharding, plan.rank, comm.memory()); });
        },
        carry.real);
}

/// Calls `f(saved)` with what takes what the backward needs, or null, and copies it to the tensors of the call.
template <class T, class F>
void saving(state_call const& c, cudaStream_t stream, F&& f) {
    auto const starts = list_to<float>(c.starts), maps = list_to<float>(c.maps);
    cpx::recurrence_saved<T, cuda::memory> saved;
    f(c.starts ? &saved : nullptr);
    if (!c.starts) return;
    for (auto const& [to, from] : {std::pair(starts, &saved.starts), std::pair(maps, &saved.maps)}) {
        cpx::require(std::ssize(to) == from->size(), c.where, "numbers of saved states", from->size(), to.size());
        if (!to.empty())
            cuda::check(cudaMemcpyAsync(to.data(), from->data(), to.size_bytes(), cudaMemcpyDeviceToDevice, stream),
                        "cudaMemcpyAsync");
    }
}

/// Calls `f(saved)` with what a forward has saved.
template <class T, class F>
void with_saved(state_call const& c, cudaStream_t stream, F&& f) {
    auto const starts = list_to<float>(c.starts), maps = list_to<float>(c.maps);
    lent_memory of_starts(starts.data()), of_maps(maps.data());
    cpx::recurrence_saved<T, cuda::memory> saved{cuda::block<float>(std::ssize(starts), of_starts, stream),
                                                 cuda::block<float>(std::ssize(maps), of_maps, stream)};
    f(&saved);
}

} // namespace binding
