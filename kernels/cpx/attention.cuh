// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention, sums in float: a block for a tile of queries and a head, keys tile by tile.
#pragma once

#include <cpx/attention_tiles.cuh>

namespace cpx::kernels {

/// What the kernels of attention read. Query head h reads key head `(first_query + h) / group - first_key`.
template <class T>
struct attended_tensors {
    rows<T const> q, k, v; ///< (rows, heads of the rank * dim)
    attended_places of_queries, of_keys;
    std::int64_t first_query, first_key;
    int group, dim;
    float scale;

    __device__ std::int64_t key_column(int head) const { return ((first_query + head) / group - first_key) * dim; }
};

namespace attention {

/// A block's tile of one sequence, the last ones first: they have the most to read.
struct block_tile {
    int sequence;
    std::int64_t place, end; ///< its first, and that behind its sequence

    __device__ explicit block_tile(attended_places const& of)
        : block_tile(of, std::int64_t{gridDim.x} - 1 - blockIdx.x, tile) {}
    __device__ block_tile(attended_places const& of, std::int64_t number, int rows) {
        sequence = last_at_or_before(number, of.sequences, [&](int s) { return of.first_tile[s]; });
        place = of.first[sequence] + (number - of.first_tile[sequence]) * rows;
        end = of.first[sequence + 1];
    }
};

template <class F>
__device__ float over_warp(float x, F&& join) {
    for (int apart = 16; apart > 0; apart /= 2) x = join(x, __shfl_xor_sync(~0u, x, apart));
    return x;
}

} // namespace attention

/// o = softmax(scale q K^T) V; lse: (rows, query heads), the logarithms of the sums of weights, if it is memory. A grid
/// of (tiles of queries, query heads) blocks. Keys hold every token. C: at least dim / 32.
template <class T, int C>
__global__ void __launch_bounds__(attention::threads)
    attend(__grid_constant__ attended_tensors<T> const t, rows<T> const o, rows<float> const lse) {
    using namespace attention;
    extern __shared__ __align__(16) float memory[];
    __shared__ tile_rows<> own, seen;
    float *const q = memory, *const k = q + tile * tile_stride(t.dim), *const v = k + tile * tile_stride(t.dim),
                 *const scores = v + tile * tile_stride(t.dim);
    int const head = static_cast<int>(blockIdx.y), lane = own_sums<C>::lane();
    std::int64_t const column = std::int64_t{head} * t.dim, key = t.key_column(head);
    block_tile const at(t.of_queries);
    own.find(t.of_queries, at.place, at.end);
    __syncthreads();
    load_tile(own, t.q, column, t.dim, q);
    own_sums<C> sums;
    float highest[own_rows], total[own_rows];
#pragma unroll
    for (int r = 0; r < own_rows; ++r) highest[r] = -INFINITY, total[r] = 0.0f;

    std::int64_t const begin = t.of_keys.first[at.sequence], end = begin + own.last_token() + 1;
    for (std::int64_t place = begin; place < end; place += tile) {
        __syncthreads(); // the tile before has been read
        seen.find(t.of_keys, place, end);
        __syncthreads();
        load_tile(seen, t.k, key, t.dim, k);
        load_tile(seen, t.v, key, t.dim, v);
        __syncthreads();
        multiply_tiles(q, k, t.dim, scores);
        __syncthreads();
        int none[own_rows], visible[own_rows];
#pragma unroll
        for (int r = 0; r < own_rows; ++r) {
            int const row = own_sums<C>::row(r);
            float& score = scores[row * (tile + 1) + lane];
            bool const sees = row < own.count && lane < seen.count && seen.token[lane] <= own.token[row];
            float const scaled = sees ? score * t.scale : -INFINITY;
            float const before = highest[r];
            highest[r] = fmaxf(before, over_warp(scaled, [](float a, float b) { return fmaxf(a, b); }));
            float const weight = sees ? expf(scaled - highest[r]) : 0.0f;
            float const fade = before == highest[r] ? 1.0f : expf(before - highest[r]);
            score = weight;
            total[r] = total[r] * fade + over_warp(weight, [](float a, float b) { return a + b; });
#pragma unroll
            for (int c = 0; c < C; ++c) sums.of[r][c] *= fade;
            none[r] = 0;
            visible[r] = __popc(__ballot_sync(~0u, sees));
        }
        __syncwarp();
        sums.add(scores, v, t.dim, none, visible);
    }
#pragma unroll
    for (int r = 0; r < own_rows; ++r) {
#pragma unroll
        for (int c = 0; c < C; ++c) sums.of[r][c] /= total[r];
        int const row = own_sums<C>::row(r);
        if (lse.data() && lane == 0 && row < own.count) lse(own.row[row], head) = highest[r] + logf(total[r]);
    }
    sums.write(own, o, column, t.dim);
}

} // namespace cpx::kernels
