// SPDX-License-Identifier: Apache-2.0
// Attention of single queries over kept keys and values: a block for a stretch of them, then the stretches joined.
#pragma once

#include <cpx/attention.cuh>
#include <cpx/previous_kernel.cuh>

#include <cstddef>

namespace cpx::kernels {

/// A row of queries and the rows of k and v that it sees, in stretches of `attention::stretch_of(count)`, which are
/// numbered from `stretch` on.
struct seen_rows {
    std::int64_t stretch, row, first, count;
};
/// Some queries, and one more, whose `stretch` is the number behind the last: with the launch if they are few.
struct seen_list {
    static constexpr int most = 64;
    seen_rows const* elsewhere; ///< in the device's memory, or null
    int queries;
    seen_rows here[most + 1];

    __device__ seen_rows const* data() const { return elsewhere ? elsewhere : here; }
    /// Returns the query that has a stretch. A warp calls it.
    __device__ int find(std::int64_t stretch) const {
        int begin = 0, end = queries;
        while (end - begin > 1) {
            int const each = (end - begin + 31) / 32, mine = begin + static_cast<int>(threadIdx.x) % 32 * each;
            bool const before = mine < end && data()[mine].stretch <= stretch;
            begin += (__popc(__ballot_sync(~0u, before)) - 1) * each;
            end = min(begin + each, end);
        }
        return begin;
    }
};

/// What the kernels here read. Of a rank's query heads `group` read a key head; `first_key` is the one of k and v that
/// its first query head reads, which has `skipped` before it elsewhere.
template <class T>
struct cached_tensors {
    rows<T const> q, k, v; ///< q: (rows, heads * dim), the others: (rows, key heads * dim)
    seen_list queries;
    int heads, group, first_key, skipped, dim;
    float scale;

    /// Returns how many key heads the rank's query heads read.
    __host__ __device__ int keys() const { return (skipped + heads - 1) / group + 1; }
};

/// What comes of stretches, which are numbered from 0 on: sums of weighted values, (stretches, heads, `partial_width`);
/// the highest score and the sum of weights, (stretches, heads).
struct stretch_partials {
    float* values;
    float2* weights;
};
__host__ __device__ constexpr int partial_width(int dim) { return (dim + 3) / 4 * 4; }

namespace attention {

inline constexpr int step_tokens = 4;     ///< keys that a warp reads at once
inline constexpr int most_stretches = 64; ///< of a query

/// Returns how many keys of `count` a block takes: so a query's sums do not depend on the other queries.
__host__ __device__ inline std::int64_t stretch_of(std::int64_t count) {
    constexpr std::int64_t least = 512, all = least * most_stretches;
    return least * max((count + all - 1) / all, std::int64_t{1});
}

/// What a block has: keys `[begin, end)` of what a query sees, and G of the query heads that read one key head. A grid
/// of stretches * key heads that are read * chunks of G of a group; what reads the same tokens is neighbours.
template <int G>
struct block_stretch {
    int number;                                            ///< of the stretch
    std::int64_t begin, end, first_row, query, key_column; ///< rows of k and v from `first_row` on
    int head, from, to;                                    ///< that of g = 0 on this rank; those that it has

    template <class T>
    __device__ explicit block_stretch(cached_tensors<T> const& t) {
        int const chunks = (t.group + G - 1) / G, width = t.keys() * chunks, block = static_cast<int>(blockIdx.x),
                  key = block % width / chunks, chunk = block % chunks; // width is a multiple of chunks
        number = block / width;
        seen_rows const* const list = t.queries.data();
        std::int64_t const stretch = list->stretch + number;
        seen_rows const seen = list[t.queries.find(stretch)];
        std::int64_t const each = stretch_of(seen.count);
        begin = (stretch - seen.stretch) * each;
        end = min(begin + each, seen.count);
        first_row = seen.first;
        query = seen.row;
        key_column = std::int64_t{t.first_key + key} * t.dim;
        head = key * t.group - t.skipped + chunk * G;
        from = max(0, -head);
        to = min(min(G, t.group - chunk * G), t.heads - head);
    }
    __device__ bool has(int g) const { return g >= from && g < to; }
    /// Writes what comes of a head, `sum(column)`: by all threads of the block, so many.
    template <class T, class F>
    __device__ void write(int threads, cached_tensors<T> const& t, stretch_partials const& to_partials, int g,
                          float top, float all, F const& sum) const {
        std::int64_t const partial = std::int64_t{number} * t.heads + head + g;
        int const width = partial_width(t.dim);
        for (int d = static_cast<int>(threadIdx.x); d < width; d += threads)
            to_partials.values[partial * width + d] = sum(d);
        if (threadIdx.x == 0) to_partials.weights[partial] = {top, all};
    }
};

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
template <int N, std::size_t All>
__device__ __forceinline__ float sum_each(float (&of)[All]) {
    constexpr int apart = 16 / (static_cast<int>(All) / N), half = N / 2;
    if constexpr (N > 1) {
        bool const upper = threadIdx.x % 32 & apart;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            float const keep = upper ? of[i + half] : of[i], give = upper ? of[i] : of[i + half];
            of[i] = keep + __shfl_xor_sync(~0u, give, apart);
        }
        return sum_each<half>(of);
    } else {
        float sum = of[0];
#pragma unroll
        for (int rest = apart; rest > 0; rest /= 2) sum += __shfl_xor_sync(~0u, sum, rest);
        return sum;
    }
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

} // namespace attention

/// Attention of a query's heads that read one key head, G at a time, over one stretch of what it sees. The grid is that
/// of `block_stretch`. E: columns of a lane, 32 E >= dim.
template <class T, int E, int G>
__global__ void __launch_bounds__(attention::threads)
    attend_over_stretch(__grid_constant__ cached_tensors<T> const t, stretch_partials const partials) {
    using namespace attention;
    using sums = cache_sums<T, E, G>;
    __shared__ array<float, warps, 32 * E> of_warps;
    __shared__ array<float, warps, G> highest, total;
    wait_for_previous_kernel();
    block_stretch<G> const at(t);
    if (at.from >= at.to) return;
    int const warp = static_cast<int>(threadIdx.x) / 32;

    int const column = sums::lane() * E;
    sums own;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        T const* const row = t.q.row(at.query) + (at.head + g) * t.dim;
#pragma unroll
        for (int e = 0; e < E; ++e) {
            own.q[g][e] = at.has(g) && column + e < t.dim ? widen(row[column + e]) : 0.0f;
            own.sum[g][e] = 0.0f;
        }
    }
    lane_columns<T, E> k[step_tokens], v[step_tokens];
    auto const load = [&](lane_columns<T, E>(&to)[step_tokens], rows<T const> const& from, std::int64_t place) {
#pragma unroll
        for (int i = 0; i < step_tokens; ++i)
            to[i].load(place + i < at.end ? from.row(at.first_row + place + i) + at.key_column : nullptr, column,
                       t.dim);
    };
    std::int64_t place = at.begin + warp * step_tokens;
    load(k, t.k, place);
    load(v, t.v, place);
    for (; place < at.end;
         place += threads / 32 * step_tokens) { // loads of a step are under way while another is added
        std::int64_t const next = place + threads / 32 * step_tokens;
        float const weight = own.weigh(k, place + sums::token() < at.end, t.scale);
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
        if (!at.has(g)) continue;
        float top = highest[0][g], all = 0.0f;
        array<float, warps> share;
#pragma unroll
        for (int w = 1; w < warps; ++w) top = fmaxf(top, highest[w][g]);
#pragma unroll
        for (int w = 0; w < warps; ++w) { // those behind the end have read nothing
            share[w] = at.begin + w * step_tokens < at.end ? expf(highest[w][g] - top) : 0.0f;
            all = fmaf(share[w], total[w][g], all);
        }
        at.write(threads, t, partials, g, top, all, [&](int d) {
            float joined = 0.0f;
#pragma unroll
            for (int w = 0; w < warps; ++w) joined = fmaf(share[w], of_warps[w][d], joined);
            return joined;
        });
    }
}

/// o = the partials of a query's head joined: some threads add every so many stretches, ascending, and then their sums
/// are added in their order; 0 where it sees nothing. lse: (rows, heads), if it is memory. A grid of (queries, heads).
template <class T>
__global__ void __launch_bounds__(attention::threads)
    join_stretches(__grid_constant__ rows<T> const o, __grid_constant__ rows<float> const lse,
                   __grid_constant__ seen_list const queries, stretch_partials const partials, int dim) {
    using namespace attention;
    __shared__ array<float, most_stretches> share;
    __shared__ float4 sums[threads];
    __shared__ float highest, total;
    wait_for_previous_kernel();
    int const thread = static_cast<int>(threadIdx.x), heads = static_cast<int>(gridDim.y), width = partial_width(dim),
              lanes = width > 128  ? 64
                      : width > 64 ? 32
                                   : 16,
              lane = thread % lanes, group = thread / lanes;
    seen_rows const* const list = queries.data();
    seen_rows const& query = list[blockIdx.x];
    std::int64_t const first = (query.stretch - list->stretch) * heads + blockIdx.y;
    int const count = static_cast<int>(list[blockIdx.x + 1].stretch - query.stretch);
    if (thread < 32) {
        float2 of[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            of[i] =
                thread + 32 * i < count ? partials.weights[first + (thread + 32 * i) * heads] : float2{-INFINITY, 0};
        float const top = over_warp(fmaxf(of[0].x, of[1].x), [](float a, float b) { return fmaxf(a, b); });
        float all = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (thread + 32 * i < count) {
                share[thread + 32 * i] = expf(of[i].x - top);
                all = fmaf(share[thread + 32 * i], of[i].y, all);
            }
        all = over_warp(all, [](float a, float b) { return a + b; });
        if (thread == 0) highest = top, total = all;
    }
    __syncthreads();
    float4 sum = {0, 0, 0, 0};
    bool const has = 4 * lane < width;
    if (has)
#pragma unroll 8
        for (int i = group; i < count; i += threads / lanes) {
            float4 const x = *reinterpret_cast<float4 const*>(partials.values + (first + i * heads) * width + 4 * lane);
            sum.x = fmaf(share[i], x.x, sum.x), sum.y = fmaf(share[i], x.y, sum.y);
            sum.z = fmaf(share[i], x.z, sum.z), sum.w = fmaf(share[i], x.w, sum.w);
        }
    sums[thread] = sum;
    __syncthreads();
    if (group > 0 || !has) return;
    for (int g = 1; g < threads / lanes; ++g) {
        float4 const x = sums[g * lanes + lane];
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    float const of[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (int const d = 4 * lane + e; d < dim)
            o(query.row, blockIdx.y * dim + d) = static_cast<T>(count == 0 ? 0.0f : of[e] / total);
    if (lse.data() && lane == 0) lse(query.row, blockIdx.y) = count == 0 ? -INFINITY : highest + logf(total);
}

} // namespace cpx::kernels
