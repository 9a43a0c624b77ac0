// SPDX-License-Identifier: Apache-2.0
// Sums that every rank gets with the same bits.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/transport/exchange.hpp>

#include <ranges>

namespace cpx {

/// Replaces `values` on every rank by the sums over all ranks, added in rank order: gradients of weights, of which
/// every rank has its share.
///
/// values: a vector, array or span, in the memory of the transport's ranks. Collective; all ranks have equally many.
/// Each rank adds up its share of them and hands it to the others, so that it sends 2 (W - 1) / W times the values.
/// Throws what `exchange` throws.
template <std::ranges::contiguous_range V, any_transport Comm>
    requires std::ranges::borrowed_range<V>
void sum_over_ranks(V&& values, Comm& comm, caller here = caller::here()) {
    index_t const count = std::ssize(values);
    thd const batch({0, count}); // every value is a row
    replicated<> const whole(comm.ranks(), batch);
    auto const plan = relayout(shard(batch, sequential<>(comm.ranks())), whole, comm.rank(), here);
    using T = std::ranges::range_value_t<V>;
    auto const memory = rank_memory(comm);
    sharded const all(rows<T>(std::ranges::data(values), count, 1), whole, comm.rank(), memory);
    tensor<T, sharding<sequential<>>, rank_memory_of<Comm>> share(plan.from, comm.rank(), 1, memory, here);
    exchange(plan.transposed(), all, share, comm, here);
    exchange(plan, share, all, comm, here);
}

} // namespace cpx
