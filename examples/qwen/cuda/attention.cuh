// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention of any of the queries on all keys: a warp for each query row and head.
#pragma once

#include "launch.cuh"

namespace qwen::gpu {

/// The keys that a query sees: rows `first` to `last`, its own token, of those in sequence order.
struct seen_keys {
    index_t first = 0, last = 0;
};

/// The tensors of an attention on one rank.
///
/// q, o: (rows, query heads * dim); k, v: (tokens, key heads * dim), for the heads that the rank holds; `seen`: one a
/// row of q. Query head h reads key head `(first_query + h) / group - first_key`.
struct attention_tensors {
    rows<float const> q, k, v;
    rows<float> o;
    seen_keys const* seen = nullptr;
    index_t dim = 1, first_query = 0, first_key = 0, group = 1;
    float scale = 1;
};

inline constexpr int most_channels = 8; ///< of a head, a lane: channels up to 8 * 32

namespace kernels {

/// Lane l holds channels l, l + 32, ... of the query and of the sum over keys, taken in their order: `sum` and `total`
/// are relative to the highest score so far.
static __global__ void attention(attention_tensors t) {
    index_t const heads = t.q.width() / t.dim, item = item_of_warp();
    if (item >= t.q.count() * heads) return;
    index_t const row = item / heads, h = item % heads;
    index_t const key = ((t.first_query + h) / t.group - t.first_key) * t.dim;
    auto const each_channel = [&](auto&& f) {
#pragma unroll
        for (int i = 0; i < most_channels; ++i)
            if (index_t const d = i * warp + threadIdx.x; d < t.dim) f(i, d);
    };
    float query[most_channels], sum[most_channels];
    each_channel([&](int i, index_t d) {
        query[i] = t.q(row, h * t.dim + d) * t.scale;
        sum[i] = 0;
    });
    float highest = -INFINITY, total = 0;
    seen_keys const seen = t.seen[row];
    for (index_t j = seen.first; j <= seen.last; ++j) {
        float product = 0;
        each_channel([&](int i, index_t d) { product += query[i] * t.k(j, key + d); });
        float const score = sum_over_warp(product), before = highest;
        highest = fmaxf(highest, score);
        float const fade = expf(before - highest), weight = expf(score - highest);
        total = total * fade + weight;
        each_channel([&](int i, index_t d) { sum[i] = sum[i] * fade + weight * t.v(j, key + d); });
    }
    each_channel([&](int i, index_t d) { t.o(row, h * t.dim + d) = sum[i] / total; });
}

} // namespace kernels

/// o = softmax(scale q K^T) V over the keys that each query sees. Throws `cpx::error` on heads that are too wide.
inline void attention(attention_tensors const& t, cudaStream_t stream) {
    cpx::require(t.dim <= most_channels * warp, "attention", "channels of a head",
                 "at most " + std::to_string(most_channels * warp), t.dim);
    launch_warps("attention", kernels::attention, t.q.count() * (t.q.width() / t.dim), stream, t);
}

} // namespace qwen::gpu
