// SPDX-License-Identifier: Apache-2.0
// Sums that every rank gets with the same bits.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/transport/exchange.hpp>

#include <ranges>

namespace cpx {

/// Replaces `values` on every rank by the sums over all ranks, added in rank order, such as gradients of weights.
///
/// values: a vector, array or span, in the memory of the transport's ranks. Collective; all ranks have equally many.
/// Each adds up its share and hands it to the others: 2 (W - 1) / W times the values. Throws what `exchange` throws.
template <std::ranges::contiguous_range V, any_transport Comm>
    requires std::ranges::borrowed_range<V> && std::ranges::output_range<V, std::ranges::range_value_t<V>>
void sum_over_ranks(V&& values, Comm& comm, caller here = caller::here()) {
    index_t const count = std::ssize(values);
    thd const batch({0, count}); // every value is a row
    replicated<> const whole(comm.ranks(), batch);
    auto plan = relayout(shard(batch, sequential<>(comm.ranks())), whole, comm.rank(), here);
    identity::set(plan.id.operation, "sum_over_ranks");
    plan.id.forget_batch();
    plan.id[identity::parameter] = static_cast<std::uint64_t>(count);
    using T = std::ranges::range_value_t<V>;
    auto const memory = rank_memory(comm);
    rows<T> const all(std::ranges::data(values), count, 1);
    tensor<T, sharding<sequential<>>, rank_memory_of<Comm>> share(plan.from, comm.rank(), 1, memory, here);
    detail::exchange_rows(plan.transposed(), all, share.data(), comm, here, "sum_over_ranks");
    detail::exchange_rows(plan, share.data(), all, comm, here, "sum_over_ranks");
}
template <class X = detail::any>
detail::refused sum_over_ranks(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: sum_over_ranks(values, comm) wants a vector, array or span that stays, not "
                                    "const, and a cpx::transport; of a tensor give its elements()");
    return {};
}

} // namespace cpx
