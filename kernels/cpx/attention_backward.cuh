// SPDX-License-Identifier: Apache-2.0
// The backward of causal softmax attention: gradients of queries, and of keys and values, by a block each, no atomics.
#pragma once

#include <cpx/attention.cuh>

namespace cpx::kernels {

/// What the backward knows of queries beside them: dout as q; lse, delta: (rows, query heads).
template <class T>
struct attended_gradients {
    rows<T const> dout;
    rows<float const> lse, delta;
};

namespace attention {

/// Makes of a score its weight, and of the gradient of the weight, `pull`, that of the score; 0 where it is not seen.
__device__ inline void pull_score(bool sees, float scale, float lse, float delta, float& score, float& pull) {
    score = sees ? expf(score * scale - lse) : 0.0f;
    pull = sees ? score * (pull - delta) * scale : 0.0f;
}

} // namespace attention

/// The gradient of queries. Grid and C as of `attend`.
template <class T, int C>
__global__ void __launch_bounds__(attention::threads)
    attend_backward_queries(__grid_constant__ attended_tensors<T> const t,
                            __grid_constant__ attended_gradients<T> const from, rows<T> const dq) {
    using namespace attention;
    extern __shared__ __align__(16) float memory[];
    __shared__ tile_rows<> own, seen;
    int const size = tile * tile_stride(t.dim);
    float *const q = memory, *const dout = q + size, *const k = dout + size, *const v = k + size,
                 *const scores = v + size, *const pulls = scores + tile * (tile + 1);
    int const head = static_cast<int>(blockIdx.y), lane = own_sums<C>::lane();
    std::int64_t const column = std::int64_t{head} * t.dim, key = t.key_column(head);
    block_tile const at(t.of_queries);
    own.find(t.of_queries, at.place, at.end);
    __syncthreads();
    load_tile(own, t.q, column, t.dim, q);
    load_tile(own, from.dout, column, t.dim, dout);
    own_sums<C> sums;

    std::int64_t const begin = t.of_keys.first[at.sequence], end = begin + own.last_token() + 1;
    for (std::int64_t place = begin; place < end; place += tile) {
        __syncthreads(); // the tile before has been read
        seen.find(t.of_keys, place, end);
        __syncthreads();
        load_tile(seen, t.k, key, t.dim, k);
        load_tile(seen, t.v, key, t.dim, v);
        __syncthreads();
        multiply_tiles(q, k, t.dim, scores);
        multiply_tiles(dout, v, t.dim, pulls);
        __syncthreads();
        int none[own_rows], visible[own_rows];
#pragma unroll
        for (int r = 0; r < own_rows; ++r) {
            int const row = own_sums<C>::row(r), place_in_tile = row * (tile + 1) + lane;
            bool const here = row < own.count, sees = here && lane < seen.count && seen.token[lane] <= own.token[row];
            pull_score(sees, t.scale, here ? from.lse(own.row[row], head) : 0.0f,
                       here ? from.delta(own.row[row], head) : 0.0f, scores[place_in_tile], pulls[place_in_tile]);
            none[r] = 0;
            visible[r] = __popc(__ballot_sync(~0u, sees));
        }
        __syncwarp();
        sums.add(pulls, k, t.dim, none, visible);
    }
    sums.write(own, dq, column, t.dim);
}

/// What every `each` query heads, side by side, give to the gradients of keys and values: a head of dk and dv for them,
/// to which they are added in their order, each with its queries in the order of their tokens. A grid of (tiles of
/// keys, heads of dk) blocks; C as of `attend`.
template <class T, class Out, int C>
__global__ void __launch_bounds__(attention::threads)
    attend_backward_keys(__grid_constant__ attended_tensors<T> const t,
                         __grid_constant__ attended_gradients<T> const from, int each, rows<Out> const dk,
                         rows<Out> const dv) {
    using namespace attention;
    extern __shared__ __align__(16) float memory[];
    __shared__ tile_rows<> own, seen;
    int const size = tile * tile_stride(t.dim), lane = own_sums<C>::lane();
    float *const k = memory, *const v = k + size, *const q = v + size, *const dout = q + size,
                 *const scores = dout + size, *const pulls = scores + tile * (tile + 1);
    int const first_head = static_cast<int>(blockIdx.y) * each;
    std::int64_t const key = t.key_column(first_head);
    block_tile const at(t.of_keys);
    own.find(t.of_keys, at.place, at.end);
    __syncthreads();
    load_tile(own, t.k, key, t.dim, k);
    load_tile(own, t.v, key, t.dim, v);
    std::int64_t const begin = t.of_queries.place_from(at.sequence, own.token[0]),
                       end = t.of_queries.first[at.sequence + 1];
    own_sums<C> of_key, of_value;
    for (int head = first_head; head < first_head + each; ++head) {
        own_sums<C> to_key, to_value;
        for (std::int64_t place = begin; place < end; place += tile) {
            std::int64_t const column = std::int64_t{head} * t.dim;
            __syncthreads(); // the tile before has been read
            seen.find(t.of_queries, place, end);
            __syncthreads();
            load_tile(seen, t.q, column, t.dim, q);
            load_tile(seen, from.dout, column, t.dim, dout);
            __syncthreads();
            multiply_tiles(k, q, t.dim, scores);
            multiply_tiles(v, dout, t.dim, pulls);
            __syncthreads();
            bool const here = lane < seen.count;
            float const lse = here ? from.lse(seen.row[lane], head) : 0.0f,
                        delta = here ? from.delta(seen.row[lane], head) : 0.0f;
            int first[own_rows], last[own_rows];
#pragma unroll
            for (int r = 0; r < own_rows; ++r) {
                int const row = own_sums<C>::row(r), place_in_tile = row * (tile + 1) + lane;
                bool const sees = here && row < own.count && own.token[row] <= seen.token[lane];
                pull_score(sees, t.scale, lse, delta, scores[place_in_tile], pulls[place_in_tile]);
                last[r] = seen.count;
                first[r] = seen.count - __popc(__ballot_sync(~0u, sees));
            }
            __syncwarp();
            to_key.add(pulls, q, t.dim, first, last);
            to_value.add(scores, dout, t.dim, first, last);
        }
        if (head == first_head) {
            of_key = to_key;
            of_value = to_value;
        } else {
            of_key.add(to_key);
            of_value.add(to_value);
        }
    }
    std::int64_t const column = std::int64_t{blockIdx.y} * t.dim;
    of_key.write(own, dk, column, t.dim);
    of_value.write(own, dv, column, t.dim);
}

} // namespace cpx::kernels
