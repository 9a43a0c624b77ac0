// SPDX-License-Identifier: Apache-2.0
// Relayouts within a layer, of which every call has the same.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/plan/relayout.hpp>
#include <cpx/transport/exchange.hpp>

namespace cpx::detail {

/// What a rank moves, and where to.
template <class T, any_sharding From, any_sharding To, any_memory M>
struct layer_move {
    relayout_plan<From, To> const& plan;
    sharded<T const, From, M> from;
    sharded<T, To, M> to;
    char const* where;
};

/// Moves it by the communicator of what a layer runs on, see `runs_layers`. On devices what carries states keeps what
/// it has prepared: `ops/cuda/layer_move.hpp`.
template <class T, any_sharding From, any_sharding To, any_memory M, class By>
void run_move(layer_move<T, From, To, M> const& of, By& by, caller here) {
    exchange_rows(of.plan, of.from.data(), of.to.data(), by.comm, here, of.where);
}

} // namespace cpx::detail
