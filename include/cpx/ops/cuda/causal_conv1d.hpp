// SPDX-License-Identifier: Apache-2.0
// The causal convolution of tensors on devices, called as that of tensors on the host.
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

/// Runs a convolution of tensors on devices, which checks it, too; see `causal_conv1d`.
template <class T, any_sharding S>
void convolve(convolution<T, S, cuda::memory> const& of, cuda::communicator& comm, caller here) {
    require(of.x.memory() == comm.memory(), "causal_conv1d", "memory of x", "the communicator's, in its stream",
            "another", here);
    auto by = std::make_unique<cuda::conv_exchange<T, S>>(of.plan, of.x.data().width(), comm,
                                                          options_of_call(of.x, of.act, of.bias), here);
    cuda::causal_conv1d(*by, of.x, of.weight, of.bias, of.act, of.y, here);
    comm.keep(std::move(by), here);
}

} // namespace detail

/// Computes `y_t = activation(bias + sum_j weight_j x_{t-K+1+j})` of tensors on devices, in the communicator's stream.
///
/// Arguments as for tensors on the host; weight: rows, bias: a list in device memory, of x's elements. Sequences begin
/// here: there are no states. Prepares itself for this one call, which is collective on the host; `cuda::conv_exchange`
/// is prepared once for every layer, and may have weights of other elements.
///
/// Throws `cpx::error` as the operator with a `conv_exchange` does.
template <any_sharding S, sharded_like<cuda::memory> X, sharded_like<cuda::memory> Y>
void causal_conv1d(halo_plan<S> const& plan, X const& x, rows<element_of<Y> const> weight,
                   std::span<element_of<Y> const> bias, activation act, Y&& y, cuda::communicator& comm,
                   caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<S, X, Y>, writes = detail::writes<Y, X>;
    static_assert(fits, "cpx: causal_conv1d of tensors that are not sharded as the plan; make the plan with "
                        "halo(x.sharding(), ...) and y of the same sharding");
    static_assert(writes, "cpx: causal_conv1d wants x of y's elements, and a y that is not const and has a name");
    if constexpr (fits && writes) {
        detail::convolution<element_of<Y>, S, cuda::memory> const given{plan, x.view(), weight, bias, act, y.view()};
        detail::convolve(given, comm, here);
    }
}

namespace detail {

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
    require(x.memory() == comm.memory(), where, "memory of x", "the communicator's, in its stream", "another", here);
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

/// Computes the gradients of `causal_conv1d` of tensors on devices, in the communicator's stream; sums are in float.
///
/// Arguments, costs and errors as in the forward and for tensors on the host. In the order of the batch a thread adds
/// up a tap of a channel, over all tokens: for training that must be reproduced, not for speed.
template <any_sharding S, any_sharding A, sharded_like<cuda::memory> X, sharded_like<cuda::memory> Dy,
          std::derived_from<cuda::communicator> Comm, class T = element_of<X>, any_sharding G = S>
void causal_conv1d_backward(halo_plan<S> const& before, halo_plan<A> const& after, X const& x,
                            rows<std::type_identity_t<T> const> weight, std::span<std::type_identity_t<T> const> bias,
                            activation act, Dy const& dy, causal_conv1d_gradients<T, G, cuda::memory> const& to,
                            Comm& comm, caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<S, X, Dy> && std::same_as<A, S> && std::same_as<G, S>;
    constexpr bool same = std::same_as<element_of<X>, T> && std::same_as<element_of<Dy>, T>;
    static_assert(fits, "cpx: causal_conv1d_backward of tensors that are not sharded as the plans; make both plans "
                        "with halo(x.sharding(), ...) and dy and dx of the same sharding");
    static_assert(same, "cpx: causal_conv1d_backward wants x and dy of the gradients' elements");
    if constexpr (fits && same) {
        detail::convolution_backward<T, S, cuda::memory> const given{
            before,   after,   x.view(), weight, bias, act, dy.view(), to.dx, to.dweight.of_width(before.reach + 1),
            to.dbias, to.order};
        detail::convolve_backward(given, comm, here);
    }
}

} // namespace cpx
