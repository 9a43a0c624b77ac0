// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention on elements of one type, on a device.
#pragma once

#include "group.hpp"

#include <cpx/ops/cuda/attention.hpp>

namespace binding {

/// Calls `f(on_queries, on_keys, comm)`, which make tensors of rows.
template <class F>
void with_attention(device_group& g, attention_call const& c, F&& f) {
    auto& comm = g.comm();
    auto const tensors_of = [&](auto const& sharding) {
        return [&](auto const& rows) { return cpx::sharded(rows, sharding, comm.rank(), comm.memory()); };
    };
    auto const& keys = std::get<any_rows>(c.keys->real);
    c.queries->visit([&](auto const& queries) { f(tensors_of(queries), tensors_of(keys), comm); });
}

inline cpx::attention_heads heads_of(attention_call const& c) { return {c.query_heads, c.key_heads, c.dim}; }

template <class T>
void attend(device_group& g, attention_call const& c) {
    auto const q = rows_of<T>(c.q), k = rows_of<T>(c.k), v = rows_of<T>(c.v);
    auto const o = rows_to<T>(c.o);
    auto const lse = rows_to<float>(c.lse);
    with_attention(g, c, [&](auto const& on, auto const& by_key, cuda::communicator&) {
        cpx::attention(on(q), by_key(k), by_key(v), heads_of(c), c.scale, on(o), lse);
    });
}

template <class T>
void attend_backward(device_group& g, attention_call const& c) {
    auto const q = rows_of<T>(c.q), k = rows_of<T>(c.k), v = rows_of<T>(c.v), o = rows_of<T>(c.o),
               dout = rows_of<T>(c.dout);
    auto const dq = rows_to<T>(c.dq), dk = rows_to<T>(c.dk), dv = rows_to<T>(c.dv);
    auto const lse = rows_of<float>(c.lse);
    with_attention(g, c, [&](auto const& on, auto const& by_key, cuda::communicator& comm) {
        auto sums = comm.memory().template room<float>(lse.count() * lse.width());
        cpx::rows<float> const delta(sums.data(), lse.count(), lse.width());
        cpx::attention_delta(on(o), on(dout), c.dim, on(delta));
        using S = std::remove_cvref_t<decltype(on(q).sharding())>;
        cpx::attention_queries<T, S, cuda::memory> const from{on(q), on(dout), on(lse),
                                                              on(cpx::rows<float const>(delta))};
        cpx::attention_backward_queries(from, by_key(k), by_key(v), heads_of(c), c.scale, on(dq));
        cpx::attention_backward_keys(from, by_key(k), by_key(v), heads_of(c), c.scale, by_key(dk), by_key(dv), comm);
    });
}

} // namespace binding
