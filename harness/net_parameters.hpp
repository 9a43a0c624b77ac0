// SPDX-License-Identifier: Apache-2.0
// The parameters of a gated delta net in one array.
#pragma once

#include <cpx/ops/gated_delta_net.hpp>

#include <type_traits>

namespace harness {

/// Views all parameters one behind the other; those of gates in `wide`, at the same places.
template <class A, class W>
cpx::gated_delta_net_parameters<A> net_parameters(A* values, W* wide, cpx::gated_delta_net_config const& config) {
    using cpx::index_t;
    cpx::gated_delta_net_parameters<A> view;
    index_t first = 0;
    for_each_parameter(view, config, [&]<class E>(char const*, cpx::rows<E>& of, index_t count, index_t width) {
        if constexpr (std::is_same_v<E, A>)
            of = cpx::rows<E>(values + first, count, width);
        else
            of = cpx::rows<E>(wide + first, count, width);
        first += count * width;
    });
    return view;
}

} // namespace harness
