// SPDX-License-Identifier: Apache-2.0
// Attention of tensors on devices, on any sharding, called as that of tensors on the host.
//
// q, k, v and their gradients may be float, bfloat16 or half; lse, delta and all sums are float. Heads have up to 256
// columns. Everything is in the stream of q, in which nobody waits. A row of o and dq has the same bits on every
// sharding, and so have dk and dv where the host's have, if their kernels are the same: on tensor cores where elements,
// heads and rows let them be (`cuda::attention_path_of`) and the heads do not ask for plain ones.
//
// The kernels are the library's own: these bits, for rows of any packing that stand anywhere, want sums in an order
// that is fixed. It has a price. As PyTorch runs them, cuDNN is 3.1 to 4.1 times as fast forward and 3.5 to 4.6 times
// backward, FlashAttention 1.4 to 2.1 and 2.3 to 2.6 times (one H200, bfloat16, heads of 128 and 256 columns;
// bench/RESULTS.md, "Attention"). So a forward that need not have the bits of one rank may ask cuDNN,
// `attention_heads::engine`. The backward does not: of packed rows cuDNN's dq has other bits in every run or, asked for
// the same ones, before 9.25 takes memory for queries x keys numbers of every head.
#pragma once

#include <cpx/cuda/attention.hpp>
#include <cpx/ops/attention_backward.hpp>
#include <cpx/ops/cuda/operands.hpp>

namespace cpx::detail {

template <class T>
inline constexpr bool attends<cuda::memory, T> = cuda::gpu_number<T>;

template <class T, any_sharding Q, any_sharding K>
cuda::attention_rows<T, Q, K>
rows_on_device(sharded<T const, Q, cuda::memory> const& q, sharded<T const, K, cuda::memory> const& k,
               sharded<T const, K, cuda::memory> const& v, attended_heads const& at, double scale) {
    auto const path = at.on_tensor_cores ? cuda::attention_path::tensor_cores : cuda::attention_path::plain;
    return {q.sharding(),      k.sharding(),  q.rank(), q.memory(), q.data(), k.data(), v.data(), at.queries.first,
            at.queries.size(), at.keys.first, at.group, at.dim,     scale,    path,     at.engine};
}
template <class T, any_sharding Q>
kernels::attended_gradients<T> gradients_on_device(attention_queries<T, Q, cuda::memory> const& from) {
    return {from.dout.data(), from.lse.data(), from.delta.data()};
}

template <class T, any_sharding Q, any_sharding K>
void attend_rows(sharded<T const, Q, cuda::memory> const& q, sharded<T const, K, cuda::memory> const& k,
                 sharded<T const, K, cuda::memory> const& v, attended_heads const& at, double scale, rows<T> o,
                 rows<float> lse, caller here) {
    cuda::attend(rows_on_device(q, k, v, at, scale), o, lse, here);
}

template <class T, any_sharding Q, any_sharding K>
void attend_rows_backward_queries(attention_queries<T, Q, cuda::memory> const& from,
                                  sharded<T const, K, cuda::memory> const& k,
                                  sharded<T const, K, cuda::memory> const& v, attended_heads const& at, double scale,
                                  rows<T> dq, caller here) {
    cuda::attend_backward_queries(rows_on_device(from.q, k, v, at, scale), gradients_on_device(from), dq, here);
}

/// Out: T, or float where sums are not whole.
template <class T, any_sharding Q, any_sharding K, class Out>
void attend_rows_backward_keys(attention_queries<T, Q, cuda::memory> const& from,
                               sharded<T const, K, cuda::memory> const& k, sharded<T const, K, cuda::memory> const& v,
                               attended_heads const& at, index_t each, double scale, rows<Out> dk, rows<Out> dv,
                               caller here) {
    cuda::attend_backward_keys(rows_on_device(from.q, k, v, at, scale), gradients_on_device(from), each, dk, dv, here);
}

} // namespace cpx::detail
