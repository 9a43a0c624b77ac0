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

/// Returns what a convolution has to fit. Throws if the plan is another rank's, as it would where it is prepared.
template <any_sharding S>
cuda::detail::conv_sizes conv_sizes_of(halo_plan<S> const& plan, cuda::communicator const& comm, caller here) {
    require_own("cuda::conv_exchange", "rank of the plan", plan.rank, plan.ranks(), comm.rank(), comm.ranks(), here);
    return {plan.source_rows, plan.reach + 1, 0, comm.nccl_communicator().device(), true};
}
template <any_sharding S, class A>
void require_of(char const* where, char const* what, halo_plan<S> const& plan, index_t channels,
                sharded<A, S, cuda::memory> const& tensor, cuda::communicator const& comm, caller here) {
    cuda::detail::require_of(where, what, plan.sharding, plan.rank, comm.stream(), channels, tensor, here);
}

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

/// Throws unless a convolution of tensors on devices fits.
template <class T, any_sharding S>
void check_convolution(convolution<T, S, cuda::memory> const& of, cuda::communicator const& comm, caller here) {
    char const* const where = "cuda::causal_conv1d";
    require_in_memory("causal_conv1d", "x", of.x, comm.memory(), "the communicator's", here);
    auto const fit = conv_sizes_of(of.plan, comm, here);
    index_t const channels = of.x.data().width();
    require_of(where, "x", of.plan, channels, of.x, comm, here);
    require_of(where, "y", of.plan, channels, of.y, comm, here);
    cuda::detail::convolved<T, T> const given{of.x.data(), {}, of.weight, of.bias, of.act};
    cuda::detail::check_convolution(given, fit, of.y.data(), here);
    check_states(of, here);
    rows<T const> const all_states[] = {of.states.initial, of.states.final};
    for (rows<T const> const& states : all_states)
        if (states.data()) cuda::detail::require_memory(of.where, {{"states", states}}, here);
}

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
    cuda::detail::convolve(*by, given, of.y.data(), here);
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

/// Throws unless a backward of tensors on devices fits.
template <class T, any_sharding S>
void check_convolution_backward(convolution_backward<T, S, cuda::memory> const& of, cuda::communicator const& comm,
                                caller here) {
    char const* const where = "cuda::causal_conv1d_backward";
    require_in_memory(of.where, "x", of.x, comm.memory(), "the communicator's", here);
    auto const fit = conv_sizes_of(of.before, comm, here);
    index_t const channels = of.x.data().width();
    require_of(where, "dy", of.before, channels, of.dy, comm, here);
    require_of(where, "x", of.before, channels, of.x, comm, here);
    require_of(where, "dx", of.before, channels, of.dx, comm, here);
    cuda::detail::convolved<T, T> const given{of.x.data(), {}, of.weight, of.bias, of.act};
    cuda::detail::check_backward(given, fit, of.dy.data(), {of.dx.data(), of.dweight, of.dbias}, here);
}

/// Runs a backward of tensors on devices of which all fits.
template <class T, any_sharding S, std::derived_from<cuda::communicator> Comm>
void convolve_backward(convolution_backward<T, S, cuda::memory> const& to, Comm& comm, caller here) {
    auto const& [before, after, x, weight, bias, act, dy, dx, dweight, dbias, order, where] = to;
    auto by = std::make_unique<cuda::conv_exchange<T, S>>(before, after, x.data().width(), comm,
                                                          options_of_call(x, act, bias), here);
    bool const by_row = order == sum_order::by_row && (dweight.data() || !dbias.empty());
    cuda::causal_conv1d_gradients<T, S> sums{dx};
    if (by_row)
        convolve_backward_by_row<T, S>(x, weight, bias, act, dy, dweight, dbias, comm, here);
    else
        sums.dweight = dweight, sums.dbias = dbias;
    cuda::detail::convolved<T, T> const given{x.data(), by->halo(), weight, bias, act};
    cuda::detail::convolve_backward(*by, given, dy.data(), sums, here);
    comm.keep(std::move(by), here);
}

} // namespace detail

} // namespace cpx
