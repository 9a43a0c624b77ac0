// SPDX-License-Identifier: Apache-2.0
// Attention of single queries over kept keys and values: a block for a stretch of them, then the stretches joined.
#pragma once

#include <cpx/attention.cuh>

namespace cpx::kernels {

/// What the kernels here read. Query i sees `count[i]` rows of k and v from `first[i]` on, in stretches of
/// `attention::stretch`, which are numbered from `split[i]` on. Query head h reads key head
/// `(first_query + h) / group - first_key`.
template <class T>
struct cached_tensors {
    rows<T const> q, k, v;                           ///< q: (rows, heads * dim), the others: (rows, key heads * dim)
    std::int64_t const *split, *row, *first, *count; ///< of every query, `split` with the number behind the last
    int queries;
    std::int64_t first_query, first_key;
    int heads, group, dim;
    float scale;
};

namespace attention {

inline constexpr int stretch = 256;   ///< keys of a block: so a query's sums do not depend on the other queries
inline constexpr int step_tokens = 4; ///< keys that a warp reads at once

/// E neighbouring columns of a row, as they are in memory.
template <class T, int E>
struct lane_columns {
    static constexpr int most = 16 / static_cast<int>(sizeof(T)), at_once = E < most ? E : most;
    array<neighbours<T, at_once>, E / at_once> of;

    /// Loads columns from `column` on; those from `dim` on, and without a row all, are zeros.
    __device__ void load(T const* row, int column, int dim) {
#pragma unroll
        for (int i = 0; i < E / at_once; ++i) {
            int const first = column + i * at_once;
            if (row && dim % E == 0 && first < dim) {
                of[i] = *reinterpret_cast<neighbours<T, at_once> const*>(row + first);
                continue;
            }
#pragma unroll
            for (int e = 0; e < at_once; ++e)
                of[i].element[e] = row && first + e < dim ? row[first + e] : static_cast<T>(0.0f);
        }
    }
    __device__ float operator[](int e) const { return widen(of[e / at_once].element[e % at_once]); }
};

/// Adds each of N sums up over a warp, N <= 32 a power of two. Lane l gets number l / (32 / N).
template <int N>
__device__ float sum_each(array<float, N>& of) {
    int const lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
        int const apart = half * 32 / N;
        bool const upper = lane & apart;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            float const keep = upper ? of[i + half] : of[i], give = upper ? of[i] : of[i + half];
            of[i] = keep + __shfl_xor_sync(~0u, give, apart);
        }
    }
    float sum = of[0];
#pragma unroll
    for (int apart = 16 / N; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

/// Sums of a warp over the keys it has read, of G query heads: lane l has columns l E, l E + 1, ... of each.
template <class T, int E, int G>
struct cache_sums {
    static constexpr int scores = step_tokens * G, lanes = 32 / scores; ///< of a step; that have the same score
    using columns = lane_columns<T, E>;

    array<float, G, E> q, sum;
    float highest = -INFINITY, total = 0.0f; ///< of the lane's head, of its token of every step

    __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ static int token() { return lane() / lanes / G; }
    __device__ static int head() { return lane() / lanes % G; }
    __device__ static int lane_of(int token, int head) { return (token * G + head) * lanes; }

    /// Takes scores of the keys k, of which the lane's token is one to see or none; returns its weight.
    __device__ float weigh(columns const (&k)[step_tokens], bool sees, float scale) {
        array<float, scores> products;
#pragma unroll
        for (int t = 0; t < step_tokens; ++t)
#pragma unroll
            for (int g = 0; g < G; ++g) {
                float product = 0.0f;
#pragma unroll
                for (int e = 0; e < E; ++e) product = fmaf(q[g][e], k[t][e], product);
                products[t * G + g] = product;
            }
        float const product = sum_each<scores>(products), score = sees ? product * scale : -INFINITY;
        float top = fmaxf(score, __shfl_xor_sync(~0u, score, 16));
        top = fmaxf(highest, fmaxf(top, __shfl_xor_sync(~0u, top, 8)));
        float const fade = highest == top ? 1.0f : expf(highest - top), weight = sees ? expf(score - top) : 0.0f;
        highest = top;
        total = total * fade + weight;
        if (__ballot_sync(~0u, fade != 1.0f) == 0) return weight;
#pragma unroll
        for (int g = 0; g < G; ++g) {
            float const of_head = __shfl_sync(~0u, fade, lane_of(0, g));
#pragma unroll
            for (int e = 0; e < E; ++e) sum[g][e] *= of_head;
        }
        return weight;
    }
    /// Adds values by their weights, tokens ascending.
    __device__ void add(columns const (&v)[step_tokens], float weight) {
#pragma unroll
        for (int t = 0; t < step_tokens; ++t)
#pragma unroll
            for (int g = 0; g < G; ++g) {
                float const of_head = __shfl_sync(~0u, weight, lane_of(t, g));
#pragma unroll
                for (int e = 0; e < E; ++e) sum[g][e] = fmaf(of_head, v[t][e], sum[g][e]);
            }
    }
};

/// Returns the largest of a block's numbers, on every thread. `of_warps`: shared.
__device__ inline float over_block(float x, array<float, warps>& of_warps) {
    float const own = over_warp(x, [](float a, float b) { return fmaxf(a, b); });
    if (threadIdx.x % 32 == 0) of_warps[static_cast<int>(threadIdx.x) / 32] = own;
    __syncthreads();
    float largest = of_warps[0];
    for (int w = 1; w < warps; ++w) largest = fmaxf(largest, of_warps[w]);
    return largest;
}

} // namespace attention

/// Attention of a query's heads that read one key head, G at a time, over one stretch of what it sees. parts:
/// (stretches, heads, dim + 2): sums of weighted values, the highest score, the sum of weights. A grid of (stretches,
/// key heads that are read * chunks of G of a group). E: columns of a lane, 32 E >= dim.
template <class T, int E, int G>
__global__ void __launch_bounds__(attention::threads)
    attend_over_stretch(__grid_constant__ cached_tensors<T> const t, float* const parts) {
    using namespace attention;
    using sums = cache_sums<T, E, G>;
    __shared__ array<float, warps, 32 * E> of_warps;
    __shared__ array<float, warps, G> highest, total;
    int const warp = static_cast<int>(threadIdx.x) / 32, chunks = (t.group + G - 1) / G;
    std::int64_t const split = t.split[0] + blockIdx.x;
    int const query = last_at_or_before(split, t.queries, [&](int i) { return t.split[i]; });
    std::int64_t const begin = (split - t.split[query]) * stretch,
                       end = min(begin + std::int64_t{stretch}, t.count[query]),
                       key = t.first_query / t.group + blockIdx.y / static_cast<unsigned>(chunks);
    int const chunk = static_cast<int>(blockIdx.y) % chunks,
              first_head = static_cast<int>(key * t.group - t.first_query) + chunk * G; // on this rank
    auto const has = [&](int g) { return chunk * G + g < t.group && first_head + g >= 0 && first_head + g < t.heads; };
    if (first_head >= t.heads || first_head + min(G, t.group - chunk * G) <= 0) return;

    int const column = sums::lane() * E;
    sums own;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        T const* const row = t.q.row(t.row[query]) + (first_head + g) * t.dim;
#pragma unroll
        for (int e = 0; e < E; ++e) {
            own.q[g][e] = has(g) && column + e < t.dim ? widen(row[column + e]) : 0.0f;
            own.sum[g][e] = 0.0f;
        }
    }
    lane_columns<T, E> k[step_tokens], v[step_tokens];
    auto const load = [&](lane_columns<T, E>(&to)[step_tokens], rows<T const> const& from, std::int64_t place) {
#pragma unroll
        for (int i = 0; i < step_tokens; ++i)
            to[i].load(place + i < end ? from.row(t.first[query] + place + i) + (key - t.first_key) * t.dim : nullptr,
                       column, t.dim);
    };
    std::int64_t place = begin + warp * step_tokens;
    load(k, t.k, place);
    load(v, t.v, place);
    for (; place < end; place += threads / 32 * step_tokens) { // loads of a step are under way while another is added
        std::int64_t const next = place + threads / 32 * step_tokens;
        float const weight = own.weigh(k, place + sums::token() < end, t.scale);
        load(k, t.k, next);
        own.add(v, weight);
        load(v, t.v, next);
    }

    own.total += __shfl_xor_sync(~0u, own.total, 16);
    own.total += __shfl_xor_sync(~0u, own.total, 8);
    if (sums::lane() == sums::lane_of(0, sums::head())) {
        highest[warp][sums::head()] = own.highest;
        total[warp][sums::head()] = own.total;
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
        __syncthreads(); // what was there has been read
#pragma unroll
        for (int e = 0; e < E; ++e) of_warps[warp][column + e] = own.sum[g][e];
        __syncthreads();
        int const d = static_cast<int>(threadIdx.x);
        if (!has(g) || d >= t.dim) continue;
        float top = highest[0][g], sum = 0.0f, all = 0.0f;
        for (int w = 1; w < warps; ++w) top = fmaxf(top, highest[w][g]);
        for (int w = 0; w < warps && begin + w * step_tokens < end; ++w) { // the others have read nothing
            float const share = expf(highest[w][g] - top);
            sum = fmaf(share, of_warps[w][d], sum);
            all = fmaf(share, total[w][g], all);
        }
        float* const to = parts + (std::int64_t{blockIdx.x} * t.heads + first_head + g) * (t.dim + 2);
        to[d] = sum;
        if (d == 0) to[t.dim] = top, to[t.dim + 1] = all;
    }
}

/// o = the parts of a query's head joined, stretches ascending; 0 where it sees nothing. lse: (rows, heads), if it is
/// memory. A grid of (queries, heads).
template <class T>
__global__ void __launch_bounds__(attention::threads)
    join_stretches(__grid_constant__ rows<T> const o, __grid_constant__ rows<float> const lse,
                   std::int64_t const* const split, std::int64_t const* const row, float const* const parts, int dim) {
    using namespace attention;
    __shared__ array<float, warps> of_warps;
    __shared__ array<float, threads> share, total;
    int const thread = static_cast<int>(threadIdx.x), heads = static_cast<int>(gridDim.y), width = dim + 2;
    std::int64_t const begin = split[blockIdx.x] - split[0], end = split[blockIdx.x + 1] - split[0];
    auto const part = [&](std::int64_t i) { return parts + (i * heads + blockIdx.y) * width; };
    float top = -INFINITY, sum = 0.0f, all = 0.0f;
    for (std::int64_t i = begin + thread; i < end; i += threads) top = fmaxf(top, part(i)[dim]);
    top = over_block(top, of_warps);
    for (std::int64_t base = begin; base < end; base += threads) {
        __syncthreads(); // those before have been read
        if (base + thread < end) {
            share[thread] = expf(part(base + thread)[dim] - top);
            total[thread] = share[thread] * part(base + thread)[dim + 1];
        }
        __syncthreads();
        int const count = static_cast<int>(min(end - base, std::int64_t{threads}));
#pragma unroll 8
        for (int i = 0; i < count; ++i) {
            if (thread < dim) sum = fmaf(share[i], part(base + i)[thread], sum);
            all += total[i];
        }
    }
    if (thread < dim) o(row[blockIdx.x], blockIdx.y * dim + thread) = static_cast<T>(begin == end ? 0.0f : sum / all);
    if (lse.data() && thread == 0) lse(row[blockIdx.x], blockIdx.y) = begin == end ? -INFINITY : top + logf(all);
}

} // namespace cpx::kernels
