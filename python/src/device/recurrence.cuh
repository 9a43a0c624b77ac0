// SPDX-License-Identifier: Apache-2.0
// Recurrences on elements of one type, on a device.
#pragma once

#include "group.hpp"

#include <cpx/ops/cuda/recurrence.hpp>

#include <concepts>

namespace binding {

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

/// Returns what a forward leaves to its backward, in the tensors of a call, or found there. Without one for maps all is
/// in the other: starts, maps, and what is left is for what kernels keep, of which `bytes(segments, tokens)` is how
/// much those of one call do. Throws `cpx::error` if there is not as much.
template <class T, cpx::carry_kind How, cpx::any_sharding S, class Bytes>
cpx::recurrence_saved<T, cuda::memory> saved_in(state_call const& c, cpx::carry_plan<How, S> const& plan, index_t state,
                                                index_t map, Bytes&& bytes) {
    auto const first = list_to<float>(c.starts), second = list_to<float>(c.maps);
    index_t starts = std::ssize(plan.segments) * state, maps = 0;
    if constexpr (std::same_as<How, cpx::scan>) maps = cpx::detail::inner_segments(plan.links) * map;
    index_t const least = c.maps ? starts : starts + maps;
    cpx::require(std::ssize(first) >= least && (!c.maps || (std::ssize(first) == starts && std::ssize(second) == maps)),
                 c.where, "numbers of saved states", starts + maps, std::ssize(first) + std::ssize(second));
    auto const rest = first.subspan(static_cast<std::size_t>(least));
    cpx::recurrence_saved<T, cuda::memory> saved;
    saved.starts = {first.data(), starts}, saved.maps = {c.maps ? second.data() : first.data() + starts, maps};
    saved.keeps = !rest.empty();
    if (!saved.keeps) return saved;
    index_t at = 0;
    for (auto& group : cpx::detail::run_together(plan, cpx::side::before)) {
        index_t tokens = 0;
        for (std::size_t const i : group) tokens += plan.segments[i].count;
        index_t const size = bytes(std::ssize(group), tokens);
        saved.kept.push_back({std::move(group), {reinterpret_cast<char*>(rest.data()) + at, size}});
        at += (size + 255) / 256 * 256;
    }
    cpx::require(at <= static_cast<index_t>(rest.size_bytes()), c.where, "bytes for what is kept", at,
                 rest.size_bytes());
    return saved;
}

} // namespace binding
