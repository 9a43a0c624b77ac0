// SPDX-License-Identifier: Apache-2.0
// Positions on the shardings of Python, and features at their placeholders, of ranks on the host and on devices.
#pragma once

#include "features.hpp"
#include "sharding.hpp"

#include <cpx/ops/mrope.hpp>

namespace binding {

/// Positions of one rank's rows, as the host knows them.
struct placed_rows {
    std::variant<cpx::sharded_positions<any_tokens>, cpx::sharded_positions<any_rows>> real;

    template <class F>
    decltype(auto) visit(F&& f) const {
        return std::visit(std::forward<F>(f), real);
    }
};

/// Computes them. ids: in the memory of the transport's ranks. Collective.
template <class T, cpx::any_transport Comm>
placed_rows place(cpx::media const& m, any_layout const& sharding, cpx::rows<T const> ids, cpx::media_tokens tokens,
                  Comm& comm) {
    return sharding.visit([&](auto const& s) {
        cpx::require(s.ranks() == comm.ranks(), "mrope_positions", "ranks of the sharding", comm.ranks(), s.ranks());
        cpx::sharded const own(ids, s, comm.rank(), cpx::rank_memory(comm));
        return placed_rows{cpx::mrope_positions(m, own, tokens, comm)};
    });
}

/// Runs a step on rows in a memory. at: `cpx::sharded_positions`, or what that memory has in their place.
template <class At, class T, class M>
void run_step(feature_step step, At const& at, cpx::media_kind kind, cpx::rows<T> x, cpx::rows<T> features,
              M const& in) {
    cpx::sharded const text(x, at.sharding(), at.rank(), in);
    cpx::sharded const home(features, at.features(kind), at.rank(), in);
    switch (step) {
    case feature_step::put: return put_features(at, kind, home, text);
    case feature_step::put_backward: return put_features_backward(at, kind, text, home);
    case feature_step::add: return add_features(at, kind, home, text);
    case feature_step::add_backward: return add_features_backward(at, kind, text, home);
    }
}

} // namespace binding
