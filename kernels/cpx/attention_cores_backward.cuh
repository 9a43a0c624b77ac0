// SPDX-License-Identifier: Apache-2.0
// The backward of attention on tensor cores: weights and their gradients are rounded to 16 bits, of half to its 11 bits
// with the exponents of float, for gradients may be small.
#pragma once

#include <cpx/attention_backward.cuh>
#include <cpx/attention_cores.cuh>

namespace cpx::kernels {

namespace attention {

inline constexpr int backward_step = 32; ///< keys, or queries, of a step; two are in memory

/// Returns the columns of a head that a warp sums up, and the keys of a block of `attend_backward_keys_on_cores`.
__host__ __device__ constexpr int warp_columns(int D) { return D < 128 ? D : 128; }
__host__ __device__ constexpr int core_keys(int D) { return core_rows * warp_columns(D) / D; }

/// Returns the bytes of the tiles of a block that has so many rows: two of them, and of each of two steps.
__host__ __device__ constexpr int backward_core_tiles(int rows, int D) {
    return 2 * core_bytes(rows, D) + 4 * core_bytes(backward_step, D);
}

/// Queries of a step, and their numbers of one head, in shared memory.
template <int N>
struct core_queries {
    tile_rows<N> at; ///< the token of one behind the last is -1
    array<float, N> lse, delta;

    /// All threads call it, before and after a barrier.
    template <class T>
    __device__ void find(attended_places const& of, attended_gradients<T> const& from, int head, std::int64_t place,
                         std::int64_t end) {
        at.find(of, place, end);
        int const i = static_cast<int>(threadIdx.x);
        if (i >= N) return;
        bool const here = place + i < end;
        lse[i] = here ? from.lse(at.row[i], head) * log2_e : 0.0f;
        delta[i] = here ? from.delta(at.row[i], head) : 0.0f;
        if (!here) at.token[i] = -1;
    }
};

/// Three steps: the one that is computed, the next and the one after it.
using backward_queries_notes = core_notes<tile_rows<core_rows>, tile_rows<backward_step>, 3>;
template <int D>
using backward_keys_notes = core_notes<tile_rows<core_keys(D)>, core_queries<backward_step>, 3>;

/// Returns the bytes of shared memory of a block of either kernel.
template <int D>
constexpr int backward_queries_memory = backward_core_tiles(core_rows, D) + int{sizeof(backward_queries_notes)};
template <int D>
constexpr int backward_keys_memory = backward_core_tiles(core_keys(D), D) + int{sizeof(backward_keys_notes<D>)};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

/// Makes of 8 N columns of scores their weights, and of the gradients of these, `pulls`, those of the scores but for
/// their scale; 0 where element e of this lane does not see column i. `lse(e, i)`: in powers of two.
template <std::size_t N, class Sees, class Lse, class Delta>
__device__ __forceinline__ void pull_core_scores(float scale, float (&scores)[N][4], float (&pulls)[N][4], Sees&& sees,
                                                 Lse&& lse, Delta&& delta) {
#pragma unroll
    for (int g = 0; g < N; ++g)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int const i = 8 * g + core_lane() % 4 * 2 + e % 2;
            bool const seen = sees(e, i);
            float const weight = power_of_two(scores[g][e] * scale - lse(e, i));
            scores[g][e] = seen ? weight : 0.0f;
            pulls[g][e] = seen ? weight * (pulls[g][e] - delta(e, i)) : 0.0f;
        }
}

/// Where a warp's sums of heads that share a key head go: they are added up in `sums` until the last one `ends`.
template <class Out>
struct core_readers {
    rows<Out> to;
    float* sums; ///< as `to`, side by side
    std::int64_t column;
    bool begins, ends;

    __device__ __forceinline__ void put(std::int64_t row, int d, float x) const {
        float* const sum = sums + row * to.width() + column + d;
        if (!begins) x += *sum;
        if (ends)
            to(row, column + d) = static_cast<Out>(x);
        else
            *sum = x;
    }
};

#endif

} // namespace attention

/// As `attend_backward_queries`, of what `attend_on_cores` takes.
template <class T, int D>
__global__ void __launch_bounds__(attention::core_threads)
    attend_backward_queries_on_cores(__grid_constant__ attended_tensors<T> const t,
                                     __grid_constant__ attended_gradients<T> const from, rows<T> const dq) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    using namespace attention;
    constexpr int keys = backward_step, groups = keys / 8, step = core_bytes(keys, D);
    extern __shared__ __align__(1024) char core_memory[];
    auto& [own, seen, marks] =
        *reinterpret_cast<backward_queries_notes*>(core_memory + backward_core_tiles(core_rows, D));
    std::uint32_t const q = shared_address(core_memory), dout = q + core_bytes(core_rows, D),
                        steps = dout + core_bytes(core_rows, D);
    int const head = static_cast<int>(blockIdx.y), row = 16 * core_warp(), lane = core_lane();
    std::int64_t const column = std::int64_t{head} * t.dim, key = t.key_column(head);
    block_tile const at(t.of_queries, std::int64_t{gridDim.x} - 1 - blockIdx.x, core_rows);
    own.find(t.of_queries, at.place, at.end);
    if (threadIdx.x == 0) marks = 0;
    __syncthreads();
    std::int64_t const begin = t.of_keys.first[at.sequence], end = begin + own.last_token() + 1;
    seen[0].find(t.of_keys, begin, end);
    if (begin + keys < end) seen[1].find(t.of_keys, begin + keys, end);
    load_core_tile<T, D>(own, t.q, column, t.dim, q);
    load_core_tile<T, D>(own, from.dout, column, t.dim, dout);
    __syncthreads();
    auto const load_keys = [&](tile_rows<keys> const& of, std::uint32_t to) {
        load_core_tile<T, D>(of, t.k, key, t.dim, to);
        load_core_tile<T, D>(of, t.v, key, t.dim, to + step);
    };
    load_keys(seen[0], steps);
    core_tokens const tokens(own, row);
    float const scale = t.scale * log2_e;
    float lse[2], delta[2], sums[D / 8][4] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        bool const here = tokens.of[r] >= 0;
        std::int64_t const place = here ? own.row[row + lane / 4 + 8 * r] : 0;
        lse[r] = here ? from.lse(place, head) * log2_e : 0.0f;
        delta[r] = here ? from.delta(place, head) : 0.0f;
    }

    int slot = 0, half = 0;
    bool spoilt[2] = {};
    for (std::int64_t place = begin; place < end; place += keys, half ^= 1) {
        std::int64_t const base = place - begin;
        bool const any = base <= tokens.last, all = base + keys - 1 <= tokens.first;
        int const next = (slot + 1) % 3;
        std::uint32_t const k = steps + half * 2 * step, v = k + step;
        wait_for_copies();
        __syncthreads(); // this step is there, and the one before has been read
        if (place + 2 * keys < end) seen[(slot + 2) % 3].find(t.of_keys, place + 2 * keys, end);
        if (place + keys < end) load_keys(seen[next], steps + (half ^ 1) * 2 * step);
        float pulls[groups][4];
        if (any) {
            float scores[groups][4];
            multiply_rows<T, D>(q, row, k, scores);
            multiply_rows<T, D>(dout, row, v, pulls);
            int const visible[2] = {all ? keys : tokens.sees(0, base, keys), all ? keys : tokens.sees(1, base, keys)};
            pull_core_scores(
                scale, scores, pulls, [&](int e, int i) { return i < visible[e / 2]; },
                [&](int e, int) { return lse[e / 2]; }, [&](int e, int) { return delta[e / 2]; });
        }
        if (base + keys - 1 > own.token[0]) {
            __syncthreads(); // the scores have been computed
            spoil(clear_no_numbers<T, D, keys>(core_memory + (k - q), marks), spoilt,
                  [&](int r, int i) { return base + i <= tokens.of[r]; });
        }
        if (any) add_product<T, D, true>(pulls, k, 0, sums);
        slot = next;
    }
    each_core_sum(own, row, t.dim, 0, sums, [&](std::int64_t to, int d, float x, int r) {
        dq(to, column + d) = static_cast<T>(spoilt[r] ? NAN : x * t.scale);
    });
#endif
}

/// As `attend_backward_keys`. Queries are taken in steps of their places, so that which keys are in a block changes no
/// bit of the others where every query is there. sums: (2, rows, heads of dk * dim) for terms of heads before the last,
/// unless `each` is 1.
template <class T, class Out, int D>
__global__ void __launch_bounds__(attention::core_threads)
    attend_backward_keys_on_cores(__grid_constant__ attended_tensors<T> const t,
                                  __grid_constant__ attended_gradients<T> const from, int each, float* const sums,
                                  rows<Out> const dk, rows<Out> const dv) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    using namespace attention;
    constexpr int queries = backward_step, groups = queries / 8, step = core_bytes(queries, D), held = core_keys(D),
                  columns = warp_columns(D);
    extern __shared__ __align__(1024) char core_memory[];
    auto& [own, seen, marks] = *reinterpret_cast<backward_keys_notes<D>*>(core_memory + backward_core_tiles(held, D));
    std::uint32_t const k = shared_address(core_memory), v = k + core_bytes(held, D), steps = v + core_bytes(held, D);
    int const row = core_warp() % (held / 16) * 16, first = core_warp() / (held / 16) * columns;
    int const first_head = static_cast<int>(blockIdx.y) * each;
    std::int64_t const key = t.key_column(first_head), column = std::int64_t{blockIdx.y} * t.dim;
    block_tile const at(t.of_keys, blockIdx.x, held); // the first ones first: they have the most to read
    own.find(t.of_keys, at.place, at.end);
    if (threadIdx.x == 0) marks = 0;
    __syncthreads();
    load_core_tile<T, D>(own, t.k, key, t.dim, k);
    load_core_tile<T, D>(own, t.v, key, t.dim, v);
    core_tokens const tokens(own, row);
    std::int64_t const zero = t.of_queries.first[at.sequence], end = t.of_queries.first[at.sequence + 1],
                       begin = zero + (t.of_queries.place_from(at.sequence, own.token[0]) - zero) / queries * queries;
    float const scale = t.scale * log2_e;
    for (int head = first_head; head < first_head + each; ++head) {
        float to_key[columns / 8][4] = {}, to_value[columns / 8][4] = {};
        bool spoilt[2] = {};
        std::int64_t const of_head = std::int64_t{head} * t.dim;
        auto const find = [&](int slot, std::int64_t place) { seen[slot].find(t.of_queries, from, head, place, end); };
        auto const load_queries = [&](int slot, std::uint32_t to) {
            load_core_tile<T, D>(seen[slot].at, t.q, of_head, t.dim, to);
            load_core_tile<T, D>(seen[slot].at, from.dout, of_head, t.dim, to + step);
        };
        __syncthreads(); // the head before has been read
        if (begin < end) find(0, begin);
        if (begin + queries < end) find(1, begin + queries);
        __syncthreads();
        if (begin < end) load_queries(0, steps);
        int slot = 0, half = 0;
        for (std::int64_t place = begin; place < end; place += queries, half ^= 1) {
            int const next = (slot + 1) % 3;
            std::uint32_t const q = steps + half * 2 * step, dout = q + step;
            wait_for_copies();
            __syncthreads(); // this step is there, and the one before has been read
            if (place + 2 * queries < end) find((slot + 2) % 3, place + 2 * queries);
            if (place + queries < end) load_queries(next, steps + (half ^ 1) * 2 * step);
            core_queries<queries> const& queries_of = seen[slot];
            tile_rows<queries> const& of = queries_of.at;
            bool const any = tokens.last >= 0 && own.token[row] <= of.last_token(),
                       all = tokens.first >= 0 && of.count == queries && tokens.last <= of.token[0];
            float weights[groups][4], pulls[groups][4];
            if (any) {
                multiply_rows<T, D>(k, row, q, weights);
                multiply_rows<T, D>(v, row, dout, pulls);
                pull_core_scores(
                    scale, weights, pulls,
                    [&](int e, int i) { return all || (tokens.of[e / 2] >= 0 && tokens.of[e / 2] <= of.token[i]); },
                    [&](int, int i) { return queries_of.lse[i]; }, [&](int, int i) { return queries_of.delta[i]; });
            }
            if (of.token[0] < own.last_token()) {
                __syncthreads(); // the scores have been computed
                spoil(clear_no_numbers<T, D, 2 * queries>(core_memory + (q - k), marks), spoilt, // and dout behind it
                      [&](int r, int i) { return tokens.of[r] >= 0 && tokens.of[r] <= of.token[i % queries]; });
            }
            if (any) {
                add_product<T, D, true>(weights, dout, first, to_value);
                add_product<T, D, true>(pulls, q, first, to_key);
            }
            slot = next;
        }
        bool const begins = head == first_head, ends = head + 1 == first_head + each;
        core_readers<Out> const keys{dk, sums, column, begins, ends},
            values{dv, sums + dk.count() * dk.width(), column, begins, ends};
        each_core_sum(own, row, t.dim, first, to_key,
                      [&](std::int64_t i, int d, float x, int r) { keys.put(i, d, spoilt[r] ? NAN : x * t.scale); });
        each_core_sum(own, row, t.dim, first, to_value,
                      [&](std::int64_t i, int d, float x, int r) { values.put(i, d, spoilt[r] ? NAN : x); });
    }
#endif
}

} // namespace cpx::kernels
