// SPDX-License-Identifier: Apache-2.0
// The causal convolution of tensors on devices, in the stream of their communicator.
//
// A call prepares itself, which is collective on the host; `cuda::conv_exchange` is prepared once for every layer, and
// may have weights of other elements. Sums are in float. In the order of the batch a thread adds up a tap of a channel,
// over all tokens: for training that must be reproduced, not for speed.
#pragma once

#include <cpx/cuda/communicator.hpp>
#include <cpx/cuda/conv_weight_sums.hpp>
#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/cuda/conv_exchange.hpp>

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

/// Runs a convolution of tensors on devices, which checks it, too; see `causal_conv1d`.
template <class T, any_sharding S>
void convolve(convolution<T, S, cuda::memory> const& of, cuda::communicator& comm, caller here) {
    require(!of.states.initial.data() && !of.states.final.data(), of.where, "states", "none, of tensors on devices",
            "some", here);
    require_in_memory("causal_conv1d", "x", of.x, comm.memory(), "the communicator's", here);
    auto by = std::make_unique<cuda::conv_exchange<T, S>>(of.plan, of.x.data().width(), comm,
                                                          options_of_call(of.x, of.act, of.bias), here);
    cuda::causal_conv1d(*by, of.x, of.weight, of.bias, of.act, of.y, here);
    comm.keep(std::move(by), here);
}

/// Adds to dweight and dbias, which have been checked, in the order of the batch. Collective: of whole sequences of x
/// and dy some channels go to every rank.
template <class T, any_sharding S, class Comm>
void convolve_backward_by_row(sharded<T const, S, cuda::memory> const& x, rows<T const> weight, std::span<T const> bias,
                              activation act, sharded<T const, S, cuda::memory> const& dy, rows<float> dweight,
                              std::span<float> dbias, Comm& comm, caller here) {
    index_t const channels = x.data().width();
    weight_sums const sums(x.sharding(), sum_order::by_row, comm, here);
    auto const all_x = sums.share(x, channels, here), all_dy = sums.share(dy, channels, here);
    range const own = all_x.share;
    if (own.empty()) return;
    auto const of_own = [&](auto const& list) {
        return list.empty() ? list
                            : list.subspan(static_cast<std::size_t>(own.first), static_cast<std::size_t>(own.size()));
    };
    cuda::add_conv_weight_sums<T>(comm.memory(), all_x.data, all_dy.data, weight.sub(own.first, own.size()),
                                  of_own(bias), act, x.sharding().batch(),
                                  dweight.data() ? dweight.sub(own.first, own.size()) : dweight, of_own(dbias), here);
}

/// Runs the backward of a convolution of tensors on devices, which checks it, too.
template <class T, any_sharding S, std::derived_from<cuda::communicator> Comm>
void convolve_backward(convolution_backward<T, S, cuda::memory> const& to, Comm& comm, caller here) {
    auto const& [before, after, x, weight, bias, act, dy, dx, dweight, dbias, order, where] = to;
    require_in_memory(where, "x", x, comm.memory(), "the communicator's", here);
    auto by = std::make_unique<cuda::conv_exchange<T, S>>(before, after, x.data().width(), comm,
                                                          options_of_call(x, act, bias), here);
    auto checked = cuda::detail::check_convolve_backward(*by, x, weight, bias, act, dy, {dx, dweight, dbias}, here);
    if (order == sum_order::by_row && (dweight.data() || !dbias.empty())) {
        convolve_backward_by_row<T, S>(x, weight, bias, act, dy, dweight, dbias, comm, here);
        checked.leave_out_sums();
    }
    cuda::detail::convolve_backward(*by, x.data(), act, checked, here);
    comm.keep(std::move(by), here);
}

} // namespace detail

} // namespace cpx
