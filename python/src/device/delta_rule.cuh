// SPDX-License-Identifier: Apache-2.0
// The gated delta rule on elements of one type, on a device.
#pragma once

#include "group.hpp"

#include <cpx/ops/cuda/gated_delta_rule.hpp>

#include <tuple>

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
void with_states(device_group& g, carry_value const& carry, delta_rule_call const& c, F&& f) {
    auto& comm = g.comm();
    std::visit(
        [&]<class How, class S>(cpx::carry_plan<How, S> const& plan) {
            call_kind const kind{number_of(carry.sharding.text()), carry.serial,
                                 static_cast<std::uint64_t>(c.value_heads), static_cast<std::uint64_t>(c.key_dim),
                                 static_cast<std::uint64_t>(c.value_dim)};
            auto& by = g.find<cuda::state_exchange>(
                c.where, kind, plan.id.fingerprint(), [&] { return capacity_for(plan.sharding); },
                [&](cpx::capacity const& most) { return std::make_unique<cuda::state_exchange>(comm, most); },
                [](cuda::state_exchange&) {}); // the operator sets it
            f(plan, by, [&](auto const& rows) { return cpx::sharded(rows, plan.sharding, plan.rank, comm.memory()); });
        },
        carry.real);
}

/// Returns the tensors of a call, of which `saved` goes to the backward.
template <class T, class S, class On>
cpx::delta_rule_tensors<T, S, cuda::memory> tensors_of(delta_rule_call const& c, On const& on, tensor const& o,
                                                       cpx::delta_rule_saved<T, cuda::memory>* saved) {
    return {on(rows_of<T>(c.x[0])),
            on(rows_of<T>(c.x[1])),
            on(rows_of<T>(c.x[2])),
            on(rows_of<float>(c.x[3])),
            on(rows_of<float>(c.x[4])),
            on(rows_to<T>(o)),
            cpx::rows<float const>(states_in<float>(c.initial)),
            states_in<float>(c.final),
            saved};
}

inline std::pair<cpx::delta_rule_heads, cpx::delta_rule_options> parameters_of(delta_rule_call const& c) {
    cpx::delta_rule_options options;
    options.chunk = c.chunk, options.scale = c.scale, options.qk_l2norm = c.qk_l2norm;
    return {{c.key_heads, c.value_heads, c.key_dim, c.value_dim}, options};
}

template <class T>
void delta_rule(device_group& g, carry_value const& carry, delta_rule_call const& c) {
    auto const [heads, options] = parameters_of(c);
    auto const starts = list_to<float>(c.starts), maps = list_to<float>(c.maps);
    with_states(g, carry, c, [&]<class P>(P const& plan, cuda::state_exchange& by, auto const& on) {
        using S = std::remove_cvref_t<decltype(plan.sharding)>;
        cpx::delta_rule_saved<T, cuda::memory> saved;
        cpx::gated_delta_rule(plan, tensors_of<T, S>(c, on, c.o, c.starts ? &saved : nullptr), heads, options, by);
        if (!c.starts) return;
        for (auto const& [to, from] : {std::pair(starts, &saved.starts), std::pair(maps, &saved.maps)}) {
            cpx::require(std::ssize(to) == from->size(), c.where, "numbers of saved states", from->size(), to.size());
            if (!to.empty())
                cuda::check(
                    cudaMemcpyAsync(to.data(), from->data(), to.size_bytes(), cudaMemcpyDeviceToDevice, by.stream()),
                    "cudaMemcpyAsync");
        }
    });
}

template <class T>
void delta_rule_backward(device_group& g, carry_value const& carry, delta_rule_call const& c) {
    auto const [heads, options] = parameters_of(c);
    auto const starts = list_to<float>(c.starts), maps = list_to<float>(c.maps);
    with_states(g, carry, c, [&]<class P>(P const& plan, cuda::state_exchange& by, auto const& on) {
        using S = std::remove_cvref_t<decltype(plan.sharding)>;
        lent_memory of_starts(starts.data()), of_maps(maps.data());
        cpx::delta_rule_saved<T, cuda::memory> saved{cuda::block<float>(std::ssize(starts), of_starts, by.stream()),
                                                     cuda::block<float>(std::ssize(maps), of_maps, by.stream())};
        auto const dout = on(rows_of<T>(c.dout));
        cpx::delta_rule_gradient_tensors<T, S, cuda::memory> const to{
            dout,
            on(rows_to<T>(c.dx[0])),
            on(rows_to<T>(c.dx[1])),
            on(rows_to<T>(c.dx[2])),
            on(rows_to<float>(c.dx[3])),
            on(rows_to<float>(c.dx[4])),
            cpx::rows<float const>(states_in<float>(c.dfinal)),
            states_in<float>(c.dinitial)};
        // The forward's result is not read: its gradient stands in its place.
        cpx::gated_delta_rule_backward(plan, tensors_of<T, S>(c, on, c.dout, &saved), to, heads, options, by);
    });
}

} // namespace binding
