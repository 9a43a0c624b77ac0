// SPDX-License-Identifier: Apache-2.0
// The gated delta rule on elements of one type, on a device.
#pragma once

#include "recurrence.cuh"

#include <cpx/ops/cuda/gated_delta_rule.hpp>

namespace binding {

/// Returns the tensors of a call, of which `saved` goes to the backward.
template <class T, class S, class On>
cpx::delta_rule_tensors<T, S, cuda::memory> tensors_of(state_call const& c, On const& on, tensor const& o,
                                                       cpx::delta_rule_saved<T, cuda::memory>* saved) {
    return {on(rows_of<T>(c.x[0])),
            on(rows_of<T>(c.x[1])),
            on(rows_of<T>(c.x[2])),
            on(rows_of<float>(c.x[3])),
            on(rows_of<float>(c.x[4])),
            on(rows_to<T>(o)),
            cpx::rows<float const>(states_in<float>(c.initial)),
            states_in<float>(c.final),
            saved};
}

inline std::pair<cpx::delta_rule_heads, cpx::delta_rule_options> parameters_of(state_call const& c) {
    cpx::delta_rule_options options;
    options.chunk = c.chunk, options.scale = c.scale, options.qk_l2norm = c.qk_l2norm;
    return {{c.key_heads, c.value_heads, c.key_dim, c.value_dim}, options};
}

template <class T>
void delta_rule(device_group& g, carry_value const& carry, state_call const& c) {
    auto const [heads, options] = parameters_of(c);
    with_states(g, carry, c, [&]<class P>(P const& plan, cuda::state_exchange& by, auto const& on) {
        using S = std::remove_cvref_t<decltype(plan.sharding)>;
        saving<T>(c, by.stream(), [&](auto* saved) {
            cpx::gated_delta_rule(plan, tensors_of<T, S>(c, on, c.o, saved), heads, options, by);
        });
    });
}

template <class T>
void delta_rule_backward(device_group& g, carry_value const& carry, state_call const& c) {
    auto const [heads, options] = parameters_of(c);
    with_states(g, carry, c, [&]<class P>(P const& plan, cuda::state_exchange& by, auto const& on) {
        using S = std::remove_cvref_t<decltype(plan.sharding)>;
        auto const dout = on(rows_of<T>(c.dout));
        cpx::delta_rule_gradient_tensors<T, S, cuda::memory> const to{
            dout,
            on(rows_to<T>(c.dx[0])),
            on(rows_to<T>(c.dx[1])),
            on(rows_to<T>(c.dx[2])),
            on(rows_to<float>(c.dx[3])),
            on(rows_to<float>(c.dx[4])),
            cpx::rows<float const>(states_in<float>(c.dfinal)),
            states_in<float>(c.dinitial)};
        with_saved<T>(c, by.stream(), [&](auto* saved) {
            // The forward's result is not read: its gradient stands in its place.
            cpx::gated_delta_rule_backward(plan, tensors_of<T, S>(c, on, c.dout, saved), to, heads, options, by);
        });
    });
}

} // namespace binding
