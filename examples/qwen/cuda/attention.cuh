// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention of any of the queries on all keys, and its backward: a warp for each row and head.
#pragma once

#include "launch.cuh"

namespace qwen::gpu {

/// Where a row stands in the batch: the first row of its sequence, and itself. A query sees the keys between.
struct batch_place {
    index_t first = 0, self = 0;
};

/// The tensors of an attention on one rank.
///
/// q, dout, o: (rows, query heads * dim); k, v: (keys, key heads * dim), for the heads that the rank holds; lse, delta:
/// (rows, query heads). `of_query`, `of_key`: one a row. Query head h reads key head `(first_query + h) / group -
/// first_key`.
struct attention_tensors {
    rows<float const> q, k, v, dout, lse, delta;
    batch_place const *of_query = nullptr, *of_key = nullptr;
    index_t dim = 1, first_query = 0, first_key = 0, group = 1;
    float scale = 1;

    __device__ index_t key_head(index_t h) const { return (first_query + h) / group - first_key; }
};

inline constexpr int most_channels = 8; ///< of a head, a lane: channels up to 8 * 32

namespace kernels {

/// Lane l's channels of a head: l, l + 32, ...
struct channels {
    float of[most_channels];

    template <class F>
    static __device__ void each(index_t dim, F&& f) {
#pragma unroll
        for (int i = 0; i < most_channels; ++i)
            if (index_t const d = i * warp + threadIdx.x; d < dim) f(i, d);
    }
    __device__ channels(float const* row, index_t dim, float scale) {
        each(dim, [&](int i, index_t d) { of[i] = row ? row[d] * scale : 0; });
    }
    __device__ float dot(float const* row, index_t dim) const {
        float sum = 0;
        each(dim, [&](int i, index_t d) { sum += of[i] * row[d]; });
        return sum_over_warp(sum);
    }
    __device__ void add(float factor, float const* row, index_t dim) {
        each(dim, [&](int i, index_t d) { of[i] += factor * row[d]; });
    }
    __device__ void write(float factor, float* row, index_t dim) const {
        each(dim, [&](int i, index_t d) { row[d] = of[i] * factor; });
    }
};

/// The keys in their order: `sum` and `total` are relative to the highest score so far.
static __global__ void attention(attention_tensors t, rows<float> o, rows<float> lse) {
    index_t const heads = t.q.width() / t.dim, row = item_of_warp() / heads, h = item_of_warp() % heads;
    if (row >= t.q.count()) return;
    index_t const key = t.key_head(h) * t.dim;
    channels const query(t.q.row(row) + h * t.dim, t.dim, t.scale);
    channels sum(nullptr, t.dim, 0);
    float highest = -INFINITY, total = 0;
    for (index_t j = t.of_query[row].first; j <= t.of_query[row].self; ++j) {
        float const score = query.dot(t.k.row(j) + key, t.dim), before = highest;
        highest = fmaxf(highest, score);
        float const fade = expf(before - highest), weight = expf(score - highest);
        total = total * fade + weight;
        channels::each(t.dim, [&](int i, index_t d) { sum.of[i] = sum.of[i] * fade + weight * t.v(j, key + d); });
    }
    sum.write(1 / total, o.row(row) + h * t.dim, t.dim);
    if (threadIdx.x == 0) lse(row, h) = highest + logf(total);
}

static __global__ void attention_backward_queries(attention_tensors t, rows<float> dq) {
    index_t const heads = t.q.width() / t.dim, row = item_of_warp() / heads, h = item_of_warp() % heads;
    if (row >= t.q.count()) return;
    index_t const key = t.key_head(h) * t.dim;
    channels const query(t.q.row(row) + h * t.dim, t.dim, t.scale), dout(t.dout.row(row) + h * t.dim, t.dim, 1);
    channels sum(nullptr, t.dim, 0);
    for (index_t j = t.of_query[row].first; j <= t.of_query[row].self; ++j) {
        float const weight = expf(query.dot(t.k.row(j) + key, t.dim) - t.lse(row, h));
        sum.add(weight * (dout.dot(t.v.row(j) + key, t.dim) - t.delta(row, h)), t.k.row(j) + key, t.dim);
    }
    sum.write(t.scale, dq.row(row) + h * t.dim, t.dim);
}

/// The query heads that read a key head, of each the queries in the order of their rows.
static __global__ void attention_backward_keys(attention_tensors t, rows<float> dk, rows<float> dv) {
    index_t const heads = t.k.width() / t.dim, row = item_of_warp() / heads, head = item_of_warp() % heads;
    if (row >= t.k.count()) return;
    channels const key(t.k.row(row) + head * t.dim, t.dim, t.scale), value(t.v.row(row) + head * t.dim, t.dim, 1);
    channels to_key(nullptr, t.dim, 0), to_value(nullptr, t.dim, 0);
    index_t const first = (t.first_key + head) * t.group - t.first_query, self = t.of_key[row].self;
    for (index_t h = first; h < first + t.group; ++h)
        for (index_t i = 0; i < t.q.count(); ++i) {
            if (t.of_query[i].first > self || t.of_query[i].self < self) continue;
            float const *const q = t.q.row(i) + h * t.dim, *const dout = t.dout.row(i) + h * t.dim;
            float const weight = expf(key.dot(q, t.dim) - t.lse(i, h));
            to_key.add(weight * (value.dot(dout, t.dim) - t.delta(i, h)), q, t.dim);
            to_value.add(weight, dout, t.dim);
        }
    to_key.write(t.scale, dk.row(row) + head * t.dim, t.dim);
    to_value.write(1, dv.row(row) + head * t.dim, t.dim);
}

} // namespace kernels

/// o = softmax(scale q K^T) V over the keys that each query sees, and the logarithms of the sums of weights.
inline void attention(attention_tensors const& t, rows<float> o, rows<float> lse, cudaStream_t stream) {
    launch_warps("attention", kernels::attention, t.q.count() * (t.q.width() / t.dim), stream, t, o, lse);
}
inline void attention_backward_queries(attention_tensors const& t, rows<float> dq, cudaStream_t stream) {
    launch_warps("attention_backward_queries", kernels::attention_backward_queries, t.q.count() * (t.q.width() / t.dim),
                 stream, t, dq);
}
/// Written from all queries that are here.
inline void attention_backward_keys(attention_tensors const& t, rows<float> dk, rows<float> dv, cudaStream_t stream) {
    launch_warps("attention_backward_keys", kernels::attention_backward_keys, t.k.count() * (t.k.width() / t.dim),
                 stream, t, dk, dv);
}

} // namespace qwen::gpu
