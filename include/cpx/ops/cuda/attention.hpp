// SPDX-License-Identifier: Apache-2.0
// Attention of tensors on devices, on any sharding, called as that of tensors on the host.
//
// q, k, v and their gradients may be float, bfloat16 or half; lse, delta and all sums are float. Heads have up to 256
// columns. Everything is in the stream of q, in which nobody waits. A row of o and dq has the same bits on every
// sharding, and so have dk and dv where the host's have.
#pragma once

#include <cpx/cuda/attention.hpp>
#include <cpx/ops/attention_backward.hpp>

namespace cpx::detail {

template <class T>
inline constexpr bool attends<cuda::memory, T> = cuda::gpu_number<T>;

/// Keys and queries of one rank as kernels read them.
template <class T>
struct device_attention {
    template <any_sharding Q, any_sharding K>
    device_attention(char const* where, sharded<T const, Q, cuda::memory> const& q,
                     sharded<T const, K, cuda::memory> const& k, sharded<T const, K, cuda::memory> const& v,
                     attended_heads const& at, double scale, caller here)
        : of_queries(q.sharding(), q.rank(), q.memory(), here), of_keys(k.sharding(), k.rank(), q.memory(), here),
          tensors{q.data(),
                  k.data(),
                  v.data(),
                  of_queries.view(),
                  of_keys.view(),
                  at.queries.first,
                  at.keys.first,
                  static_cast<int>(at.group),
                  static_cast<int>(at.dim),
                  static_cast<float>(scale)} {
        cuda::detail::require_memory(where, "q", q.data(), here);
        cuda::detail::require_memory(where, "k", k.data(), here);
        cuda::detail::require_memory(where, "v", v.data(), here);
    }

    cuda::detail::attention_places of_queries, of_keys;
    kernels::attended_tensors<T> tensors;
};
template <class T, any_sharding Q>
kernels::attended_gradients<T> device_gradients_of(char const* where, attention_queries<T, Q, cuda::memory> const& from,
                                                   caller here) {
    cuda::detail::require_memory(where, "dout", from.dout.data(), here);
    cuda::detail::require_memory(where, "lse", from.lse.data(), here);
    cuda::detail::require_memory(where, "delta", from.delta.data(), here);
    return {from.dout.data(), from.lse.data(), from.delta.data()};
}

template <class T, any_sharding Q, any_sharding K>
void attend_rows(sharded<T const, Q, cuda::memory> const& q, sharded<T const, K, cuda::memory> const& k,
                 sharded<T const, K, cuda::memory> const& v, attended_heads const& at, double scale, rows<T> o,
                 rows<float> lse, caller here) {
    char const* const where = "attention";
    device_attention<T> const on(where, q, k, v, at, scale, here);
    cuda::detail::require_memory(where, "o", o, here);
    if (lse.data()) cuda::detail::require_memory(where, "lse", lse, here);
    auto const range = cuda::named_range<"cpx attention">();
    cuda::detail::with_lane_columns(at.dim, [&](auto columns) {
        cuda::detail::launch_tiles(where, kernels::attend<T, columns>, on.of_queries.tiles(), at.queries.size(), 3,
                                   at.dim, q.memory().stream(), here, on.tensors, o, lse);
    });
}

template <class T, any_sharding Q, any_sharding K>
void attend_rows_backward_queries(attention_queries<T, Q, cuda::memory> const& from,
                                  sharded<T const, K, cuda::memory> const& k,
                                  sharded<T const, K, cuda::memory> const& v, attended_heads const& at, double scale,
                                  rows<T> dq, caller here) {
    char const* const where = "attention_backward_queries";
    device_attention<T> const on(where, from.q, k, v, at, scale, here);
    auto const gradients = device_gradients_of(where, from, here);
    cuda::detail::require_memory(where, "dq", dq, here);
    auto const range = cuda::named_range<"cpx attention_backward_queries">();
    cuda::detail::with_lane_columns(at.dim, [&](auto columns) {
        cuda::detail::launch_tiles(where, kernels::attend_backward_queries<T, columns>, on.of_queries.tiles(),
                                   at.queries.size(), 4, at.dim, k.memory().stream(), here, on.tensors, gradients, dq);
    });
}

/// Out: T, or float where sums are not whole.
template <class T, any_sharding Q, any_sharding K, class Out>
void attend_rows_backward_keys(attention_queries<T, Q, cuda::memory> const& from,
                               sharded<T const, K, cuda::memory> const& k, sharded<T const, K, cuda::memory> const& v,
                               attended_heads const& at, index_t each, double scale, rows<Out> dk, rows<Out> dv,
                               caller here) {
    char const* const where = "attention_backward_keys";
    device_attention<T> const on(where, from.q, k, v, at, scale, here);
    auto const gradients = device_gradients_of(where, from, here);
    cuda::detail::require_memory(where, "dk", dk, here);
    cuda::detail::require_memory(where, "dv", dv, here);
    auto const range = cuda::named_range<"cpx attention_backward_keys">();
    cuda::detail::with_lane_columns(at.dim, [&](auto columns) {
        cuda::detail::launch_tiles(where, kernels::attend_backward_keys<T, Out, columns>, on.of_keys.tiles(),
                                   at.queries.size() / each, 4, at.dim, k.memory().stream(), here, on.tensors,
                                   gradients, static_cast<int>(each), dk, dv);
    });
}

} // namespace cpx::detail
