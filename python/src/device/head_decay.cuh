// SPDX-License-Identifier: Apache-2.0
// Linear attention with a decay a head on elements of one type, on a device.
#pragma once

#include "recurrence.cuh"

#include <cpx/ops/cuda/head_decay_attention.hpp>

namespace binding {

/// Returns the tensors of a call, of which `saved` goes to the backward.
template <class T, class S, class On>
cpx::head_decay_tensors<T, S> decay_tensors_of(state_call const& c, On const& on, tensor const& o,
                                               cpx::recurrence_saved<T, cuda::memory>* saved) {
    return {on(rows_of<T>(c.x[0])),    on(rows_of<T>(c.x[1])),
            on(rows_of<T>(c.x[2])),    on(rows_of<float>(c.x[3])),
            on(rows_to<T>(o)),         cpx::rows<float const>(states_in<float>(c.initial)),
            states_in<float>(c.final), saved};
}

inline cpx::head_decay_attention decay_of(state_call const& c) {
    cpx::head_decay_attention r{{c.key_heads, c.value_heads, c.key_dim, c.value_dim}, {}};
    r.options.chunk = c.chunk, r.options.scale = c.scale;
    return r;
}

/// Calls `f(plan, state_exchange, on, saved)` for the states of a call; saved: null where it saves nothing.
template <class T, class F>
void with_decay(device_group& g, carry_value const& carry, state_call const& c, F&& f) {
    with_states(g, carry, c, [&]<class P>(P const& plan, cuda::state_exchange& by, auto const& on) {
        index_t const heads = plan.sharding.heads(plan.rank, c.value_heads).size();
        cpx::recurrence_saved<T, cuda::memory> saved;
        if (c.starts)
            saved = saved_in<T>(c, plan, heads * c.key_dim * c.value_dim, heads,
                                [](index_t, index_t) { return index_t{0}; });
        f(plan, by, on, c.starts ? &saved : nullptr);
    });
}

template <class T>
void head_decay(device_group& g, carry_value const& carry, state_call const& c) {
    with_decay<T>(g, carry, c, [&]<class P>(P const& plan, cuda::state_exchange& by, auto const& on, auto* saved) {
        using S = std::remove_cvref_t<decltype(plan.sharding)>;
        cpx::recur(plan, decay_of(c), decay_tensors_of<T, S>(c, on, c.o, saved), by);
    });
}

template <class T>
void head_decay_backward(device_group& g, carry_value const& carry, state_call const& c) {
    with_decay<T>(g, carry, c, [&]<class P>(P const& plan, cuda::state_exchange& by, auto const& on, auto* saved) {
        using S = std::remove_cvref_t<decltype(plan.sharding)>;
        cpx::head_decay_gradient_tensors<T, S> const to{
            on(rows_of<T>(c.dout)),      on(rows_to<T>(c.dx[0])),
            on(rows_to<T>(c.dx[1])),     on(rows_to<T>(c.dx[2])),
            on(rows_to<float>(c.dx[3])), cpx::rows<float const>(states_in<float>(c.dfinal)),
            states_in<float>(c.dinitial)};
        // The forward's result is not read: its gradient stands in its place.
        cpx::recur_backward(plan, decay_of(c), decay_tensors_of<T, S>(c, on, c.dout, saved), to, by);
    });
}

} // namespace binding
