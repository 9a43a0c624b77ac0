// SPDX-License-Identifier: Apache-2.0
// The causal convolution of tensors on devices, in the stream of their communicator.
//
// A call prepares itself, which is collective on the host; `cuda::conv_exchange` is prepared once for every layer, and
// may have weights of other elements. Sums are in float. In the order of the batch a thread adds up a tap of a channel,
// over all tokens: for training that must be reproduced, not for speed.
#pragma once

#include <cpx/cuda/communicator.hpp>
#include <cpx/cuda/elements.hpp>
#include <cpx/cuda/write_numbers.hpp>
#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/cuda/conv_exchange.hpp>
#include <cpx/ops/cuda/operands.hpp>

#include <concepts>
#include <memory>
#include <utility>

namespace cpx {

namespace detail {

/// Returns what is known of a convolution that prepares itself for one call.
template <class X, class T>
cuda::conv_exchange_options options_of_call(X const& x, activation act, std::span<T const> bias) {
    return {.x_stride = x.data().stride(), .alike = convolution_arguments(act, bias)};
}

template <std::derived_from<cuda::communicator> Comm>
inline constexpr bool convolves_by<cuda::memory, Comm> = true;

/// Copies newest rows of sequences to their states; `list`: see `newest_rows`.
template <class T>
struct keep_newest {
    rows<T const> x, halo; ///< the halo's rows, and those of the states before
    index_t const* list;
    rows<T> to;
    __device__ void operator()(index_t i, index_t channel) const {
        index_t const row = list[2 * i], from = list[2 * i + 1], taps = to.width() / x.width();
        to(row / taps, row % taps * x.width() + channel) =
            from < x.count() ? x(from, channel) : halo(from - x.count(), channel);
    }
};

/// Runs a convolution of tensors on devices of which all fits.
template <class T, any_sharding S>
void convolve(convolution<T, S, cuda::memory> const& of, cuda::communicator& comm, caller here) {
    auto const& [initial, final, end] = of.states;
    rows<T const> const x = of.x.data();
    auto options = options_of_call(of.x, of.act, of.bias);
    options.go_on = initial.data() || final.data();
    auto by = std::make_unique<cuda::conv_exchange<T, S>>(of.plan, x.width(), comm, options, here);
    auto const states = by->states();
    if (initial.data())
        for_each_element(comm.memory(), states.count(), states.width(), rowwise::copy<T>{initial, states}, here);
    else
        for_each_element(comm.memory(), states.count(), states.width(), rowwise::clear<T>{states}, here);
    cuda::detail::convolved<T, T> const given{x, by->halo(), of.weight, of.bias, of.act};
    rows<T> const y = of.y.data();
    run_convolution(cuda::detail::device_convolution<T, S, T, rows<T>>{*by, given, y}, here);
    auto const list = final.data() && x.width() > 0 ? newest_rows(of.plan) : std::vector<index_t>();
    if (!list.empty()) {
        auto const there = cuda::numbers_on_device(comm.memory(), list, here);
        rows<T const> const beside(by->halo().data(), by->halo().count() + states.count() * of.weight.width(),
                                   x.width());
        for_each_element(comm.memory(), std::ssize(list) / 2, x.width(), keep_newest<T>{x, beside, there.data(), final},
                         here);
    }
    comm.keep(std::move(by), here);
}

/// Adds the terms of whole sequences, of which x and dy have some channels, in their order.
template <class T, any_sharding S>
void add_in_order(convolution_backward<T, S, cuda::memory> const& to, rows<T const> x, rows<T const> dy, caller here) {
    thd const& batch = to.x.sharding().batch();
    auto const offsets = cuda::numbers_on_device(to.x.memory(), batch.offsets(), here);
    kernels::conv_weight_sums<T> const sum{x,
                                           dy,
                                           to.weight,
                                           to.bias.empty() ? nullptr : to.bias.data(),
                                           to.act == activation::silu,
                                           offsets.data(),
                                           batch.sequences(),
                                           to.dweight,
                                           to.dbias.empty() ? nullptr : to.dbias.data()};
    for_each_element(to.x.memory(), x.width(), to.weight.width() + (to.dbias.empty() ? 0 : 1), sum, here);
}

/// Runs the rest of a backward of tensors on devices of which all fits.
template <class T, any_sharding S, class F>
void convolve_backward_by_rank(convolution_backward<T, S, cuda::memory> const& to, cuda::communicator& comm,
                               caller here, F&& more) {
    auto by = std::make_unique<cuda::conv_exchange<T, S>>(to.before, to.after, to.x.data().width(), comm,
                                                          options_of_call(to.x, to.act, to.bias), here);
    cuda::detail::convolved<T, T> const given{to.x.data(), by->halo(), to.weight, to.bias, to.act};
    rows<T const> const dy = to.dy.data();
    more(); // ranks have compared what they run, and no exchange of the halo is pending yet
    run_convolution_backward(
        cuda::detail::device_convolution_backward<T, S, T, rows<T const>>{
            *by, given, dy, {to.dx.data(), to.dweight, to.dbias, by->workspace()}},
        here, [] {});
    comm.keep(std::move(by), here);
}

} // namespace detail

} // namespace cpx
