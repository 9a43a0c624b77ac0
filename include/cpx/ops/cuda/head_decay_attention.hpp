// SPDX-License-Identifier: Apache-2.0
// Linear attention with a decay a head of tensors on devices, on any sharding, by `recur` as on the host.
#pragma once

#include <cpx/ops/cuda/device_rule.hpp>
#include <cpx/ops/local/linear_attention.hpp>

namespace cpx {

/// The tensors of a `head_decay_attention` on one rank's device, as in `recurrence_tensors`; g and states are float.
/// On tensor cores states and gradients are operands of T, too, see `cuda::gated_delta_rule`: of half those beyond
/// 65504 make results infinite or NaN, and those below 6e-5 lose bits.
///
/// q, k: (rows, key heads * key_dim), v, o: (rows, value heads * value_dim), g: (rows, value heads), never positive.
/// States: (sequences, value heads * key_dim * value_dim).
template <class T, any_sharding S>
struct head_decay_tensors {
    sharded_field<T const, S, cuda::memory> q, k, v;
    sharded_field<float const, S, cuda::memory> g;
    sharded_field<T, S, cuda::memory> o;
    field<rows<float const>> initial = {};
    field<rows<float>> final = {};
    field<recurrence_saved<T, cuda::memory>*> saved = nullptr;
    detail::no_more end = {};
};

/// What goes into and comes out of its backward, as in `recurrence_gradients`.
template <class T, any_sharding S>
struct head_decay_gradient_tensors {
    sharded_field<T const, S, cuda::memory> dout;
    sharded_field<T, S, cuda::memory> dq, dk, dv;
    sharded_field<float, S, cuda::memory> dg;
    field<rows<float const>> dfinal = {};
    field<rows<float>> dinitial = {};
    detail::no_more end = {};
};

namespace detail {

template <class T>
using device_head_decay = device_rule<T, cuda::erases::no, head_decay_attention>;

template <class T, any_sharding S>
auto head_decay_given(head_decay_tensors<T, S> const& t) {
    return cuda::recurrence_tensors{std::tuple(t.q.view(), t.k.view(), t.v.view(), t.g.view()), t.o.view(), t.initial,
                                    t.final, t.saved};
}

} // namespace detail

/// Runs a decay a head of tensors on devices in the communicator's stream, as `recur` of tensors on the host.
///
/// `by`: a `cuda::state_exchange`, made once; or a communicator, which prepares itself for this one call. Elements,
/// heads and errors as of `gated_delta_rule` of tensors on devices.
template <carry_kind How, any_sharding S, class T, any_sharding X, detail::carries_states By>
void recur(carry_plan<How, S> const& plan, head_decay_attention const& r, head_decay_tensors<T, X> const& t, By& by,
           caller here = caller::here()) {
    constexpr bool fits = std::same_as<X, S>, element = cuda::gpu_number<T>;
    static_assert(fits, "cpx: recur of tensors that are not sharded as the plan; make the plan with "
                        "carry(q.sharding(), ...)");
    static_assert(!fits || element, "cpx: recur of elements that a decay a head does not have on devices; use float, "
                                    "__nv_bfloat16 or __half");
    if constexpr (fits && element) {
        recur(plan, detail::device_head_decay<T>(r), detail::head_decay_given(t), by, here);
    }
}

/// Computes the gradients of `recur` of a decay a head, in the communicator's stream.
///
/// Arguments, costs and errors as in the forward, which has filled `t.saved`, and for tensors on the host.
template <carry_kind How, any_sharding S, class T, any_sharding X, class D, any_sharding G, detail::carries_states By>
void recur_backward(carry_plan<How, S> const& plan, head_decay_attention const& r, head_decay_tensors<T, X> const& t,
                    head_decay_gradient_tensors<D, G> const& to, By& by, caller here = caller::here()) {
    constexpr bool fits = std::same_as<X, S> && std::same_as<G, S>, same = std::same_as<D, T>;
    constexpr bool element = cuda::gpu_number<T>;
    static_assert(fits, "cpx: recur_backward of tensors or gradients that are not sharded as the plan; make the plan "
                        "with carry(q.sharding(), ...) and the gradients of the same sharding");
    static_assert(!fits || same, "cpx: recur_backward wants gradients of the tensors' elements");
    static_assert(!fits || !same || element,
                  "cpx: recur_backward of elements that a decay a head does not have on devices; use float, "
                  "__nv_bfloat16 or __half");
    if constexpr (fits && same && element) {
        cuda::recurrence_gradients const gradients{
            to.dout.view(), std::tuple(to.dq.view(), to.dk.view(), to.dv.view(), to.dg.view()), to.dfinal, to.dinitial};
        recur_backward(plan, detail::device_head_decay<T>(r), detail::head_decay_given(t), gradients, by, here);
    }
}

} // namespace cpx
