// SPDX-License-Identifier: Apache-2.0
// Convolutions of all ranks on one GPU, and what they are to give.
#pragma once

#include <cpx/cuda/causal_conv1d.hpp>
#include <cpx/ops/local/causal_conv.hpp>

#include <doctest/doctest.h>

#include "convolution.hpp"

#include <mutex>

namespace convolution {

/// Runs forward and backward on all ranks, each a thread with a stream, their halos exchanged on the host. Y: the type
/// of the result, and of its gradient.
template <class Y, class T, class W, cpx::any_sharding S>
results run_to(problem<T, W> const& p, S const& sharding, placement at = {}, form const& of = {}) {
    auto const all = static_cast<std::size_t>(p.batch.tokens() * p.channels);
    results r{std::vector<double>(all, NAN), std::vector<double>(all, NAN),
              std::vector<double>(static_cast<std::size_t>(p.channels * p.taps)), std::vector<double>(p.bias.size())};
    std::vector<cpx::section> const channels{{p.channels, 1}};
    std::vector<rank_sums> sums(static_cast<std::size_t>(sharding.ranks()));
    std::mutex device; // ranks take turns: racecheck loses track of kernels that several threads launch at a time
    cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
        std::unique_lock turn(device);
        int const rank = comm.rank();
        auto const before = cpx::halo(sharding, rank, p.taps - 1);
        cpx::cuda::conv_plan const plan(before, cpx::halo(sharding, rank, p.taps - 1, cpx::side::after));
        cpx::cuda::stream const stream;
        auto const moved = [&]<class U>(cpx::plan const& by, std::vector<U> const& from) {
            std::vector<U> to(static_cast<std::size_t>(by.target_rows * p.channels));
            turn.unlock();
            cpx::exchange(by, rows<U const>(from, p.channels), rows<U>(to, p.channels), comm);
            turn.lock();
            return to;
        };
        auto const local = [&]<class U>(std::vector<U> const& tensor) {
            auto const own = on_ranks::take(tensor, channels, sharding, rank);
            return std::vector<U>(own.data().data(), own.data().data() + own.data().count() * p.channels);
        };
        auto const x_host = local(p.x);
        device_rows<T> const x(x_host, p.channels, at), halo_x(moved(before, x_host), p.channels, at),
            dx(plan.rows(), p.channels, at);
        device_result<Y> const dy(local(convert<Y>(p.dy)), p.channels, at, of), y(plan.rows(), p.channels, at, of);
        device_rows<W> const weight(p.weight, p.taps, at);
        cpx::cuda::buffer<W> const bias{std::span<W const>(p.bias)};
        std::span<W const> const bias_view(bias.data(), p.bias.size());
        rows<T const> const in_x = x;
        rows<W const> const in_weight = weight;
        y.template as<Y>([&](auto const& out) {
            cpx::cuda::causal_conv1d(plan, in_x, halo_x, in_weight, bias_view, p.act, out, stream);
        });

        device_rows<float> const edge(plan.edge_rows(), p.channels, at);
        dy.template as<Y const>([&](auto const& given) {
            cpx::cuda::causal_conv1d_backward_edge(plan, in_x, halo_x, in_weight, bias_view, p.act, given, edge.view(),
                                                   stream);
        });
        device_rows<float> const dz(moved(plan.edge_exchange(), edge.read()), p.channels, at);
        device_rows<float> const dweight(std::vector<float>(p.weight.size()), p.taps, at);
        cpx::cuda::buffer<float> const dbias{std::span<float const>(std::vector<float>(p.bias.size()))};
        std::vector<float> const nothing(static_cast<std::size_t>(cpx::cuda::causal_conv1d_workspace(plan, p.channels)),
                                         NAN);
        cpx::cuda::buffer<float> const workspace{std::span<float const>(nothing)};
        dy.template as<Y const>([&](auto const& given) {
            cpx::cuda::causal_conv1d_backward(
                plan, in_x, halo_x, in_weight, bias_view, p.act, given, edge, dz,
                {dx, dweight, std::span(dbias.data(), p.bias.size()), std::span(workspace.data(), nothing.size())},
                stream);
        });
        place(y.read(), sharding, rank, p.channels, r.y);
        place(dx.read(), sharding, rank, p.channels, r.dx);
        sums[static_cast<std::size_t>(rank)] = {dweight.read(), dbias.read()};
    });
    add_sums(r, sums);
    return r;
}
template <class T, class W, cpx::any_sharding S>
results run(problem<T, W> const& p, S const& sharding, placement at = {}, form const& of = {}) {
    return run_to<T>(p, sharding, at, of);
}

/// The host's operators in double, sequence by sequence. `dy`: the gradient of the result, if it is not the problem's.
template <class T, class W>
results on_host(problem<T, W> const& p, std::vector<double> dy = {}) {
    if (dy.empty()) dy = convert<double>(p.dy);
    auto const x = convert<double>(p.x), weight = convert<double>(p.weight), bias = convert<double>(p.bias);
    results r{std::vector<double>(x.size()), std::vector<double>(x.size()), std::vector<double>(weight.size()),
              std::vector<double>(bias.size())};
    std::vector<double> dz(x.size());
    rows<double const> const w(weight, p.taps);
    double const* const b = bias.empty() ? nullptr : bias.data();
    for (index_t s = 0; s < p.batch.sequences(); ++s) {
        auto const of = [&](auto& values) {
            return rows(values, p.channels).sub(p.batch.offset(s), p.batch.length(s));
        };
        cpx::convolve_segment<double>({}, of(x), w, b, p.act, of(r.y));
        cpx::convolve_segment_backward_sums<double>({}, of(x), w, b, p.act, of(dy), of(dz));
        cpx::convolve_segment_backward_input<double>(of(dz), {}, w, of(r.dx));
        cpx::convolve_segment_backward_weight<double>({}, of(x), of(dz), rows<double>(r.dweight, p.taps),
                                                      bias.empty() ? nullptr : r.dbias.data());
    }
    return r;
}

} // namespace convolution
