// SPDX-License-Identifier: Apache-2.0
// The causal convolution of tensors on devices, called as that of tensors on the host.
#pragma once

#include <cpx/cuda/communicator.hpp>
#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/cuda/conv_exchange.hpp>

#include <memory>
#include <utility>

namespace cpx {

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
        auto const from = x.view();
        require(from.memory() == comm.memory(), "causal_conv1d", "memory of x", "the communicator's, in its stream",
                "another", here);
        auto by = std::make_unique<cuda::conv_exchange<element_of<Y>, S>>(
            plan, from.data().width(), comm.nccl_communicator(), from.data().stride(), capacity{}, here);
        cuda::causal_conv1d(*by, from, weight, bias, act, y, here);
        comm.keep(std::move(by), here);
    }
}

/// Computes the gradients of `causal_conv1d` of tensors on devices, in the communicator's stream; sums are in float.
///
/// Arguments, costs and errors as in the forward and for tensors on the host.
template <any_sharding S, any_sharding A, sharded_like<cuda::memory> X, sharded_like<cuda::memory> Dy,
          class T = element_of<X>, any_sharding G = S>
void causal_conv1d_backward(halo_plan<S> const& before, halo_plan<A> const& after, X const& x,
                            rows<std::type_identity_t<T> const> weight, std::span<std::type_identity_t<T> const> bias,
                            activation act, Dy const& dy, causal_conv1d_gradients<T, G, cuda::memory> const& to,
                            cuda::communicator& comm, caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<S, X, Dy> && std::same_as<A, S> && std::same_as<G, S>;
    constexpr bool same = std::same_as<element_of<X>, T> && std::same_as<element_of<Dy>, T>;
    static_assert(fits, "cpx: causal_conv1d_backward of tensors that are not sharded as the plans; make both plans "
                        "with halo(x.sharding(), ...) and dy and dx of the same sharding");
    static_assert(same, "cpx: causal_conv1d_backward wants x and dy of the gradients' elements");
    if constexpr (fits && same) {
        auto const from = x.view();
        require(from.memory() == comm.memory(), "causal_conv1d_backward", "memory of x",
                "the communicator's, in its stream", "another", here);
        auto by = std::make_unique<cuda::conv_exchange<T, S>>(
            before, after, from.data().width(), comm.nccl_communicator(), from.data().stride(), capacity{}, here);
        cuda::causal_conv1d_backward(*by, from, weight, bias, act, dy.view(),
                                     {to.dx, to.dweight.of_width(before.reach + 1), to.dbias}, here);
        comm.keep(std::move(by), here);
    }
}

} // namespace cpx
