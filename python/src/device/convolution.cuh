// SPDX-License-Identifier: Apache-2.0
// The causal convolution on elements of one type, on a device.
#pragma once

#include "group.hpp"

#include <cpx/ops/cuda/conv_exchange.hpp>

namespace binding {

/// Calls `f(conv_exchange, on)` with what is prepared for the batch of a plan, forward and backward.
template <class T, class F>
void with_convolution(char const* where, device_group& g, halo_value const& before, index_t channels, F&& f) {
    auto& comm = g.comm();
    std::visit(
        [&]<class S>(cpx::halo_plan<S> const& plan) {
            using prepared = cuda::conv_exchange<T, S>;
            cpx::require(plan.where == cpx::side::before, where, "plan", "a halo of rows before", "after");
            call_kind const kind{number_of(before.sharding.text()), static_cast<std::uint64_t>(plan.reach),
                                 static_cast<std::uint64_t>(channels)};
            auto& by = g.find<prepared>(
                where, kind, plan.id.fingerprint(), [&] { return capacity_for(plan.sharding); },
                [&](cpx::capacity const& most) {
                    auto const after = cpx::halo(plan.sharding, plan.rank, plan.reach, cpx::side::after);
                    return std::make_unique<prepared>(plan, after, channels, comm,
                                                      cuda::conv_exchange_options{.most = most});
                },
                [&](prepared& made) { made.set(plan); });
            f(by, [&](auto const& rows) { return cpx::sharded(rows, plan.sharding, plan.rank, comm.memory()); });
        },
        before.real);
}

template <class T>
void convolve(device_group& g, halo_value const& before, convolution_call const& c) {
    auto const x = rows_of<T>(c.x), weight = rows_of<T>(c.weight);
    auto const y = rows_to<T>(c.y);
    auto const bias = list_to<T>(c.bias);
    with_convolution<T>(c.x.where, g, before, x.width(), [&](auto& by, auto const& on) {
        auto to = on(y);
        cuda::causal_conv1d(by, on(x), weight, std::span<T const>(bias), c.act, to);
    });
}

template <class T>
void convolve_backward(device_group& g, halo_value const& before, halo_value const& after, convolution_call const& c) {
    auto const x = rows_of<T>(c.x), weight = rows_of<T>(c.weight), dy = rows_of<T>(c.dy);
    auto const dx = rows_to<T>(c.dx);
    auto const dweight = rows_to<float>(c.dweight);
    auto const bias = list_to<T>(c.bias);
    auto const dbias = list_to<float>(c.dbias);
    with_convolution<T>(c.x.where, g, before, x.width(), [&]<class S>(cuda::conv_exchange<T, S>& by, auto const& on) {
        by.set_backward(std::get<cpx::halo_plan<S>>(after.real));
        cuda::causal_conv1d_gradients<T, S> const to{on(dx), dweight, dbias};
        cuda::causal_conv1d_backward(by, on(x), weight, std::span<T const>(bias), c.act, on(dy), to);
    });
}

} // namespace binding
