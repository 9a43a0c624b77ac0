// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention on tensor cores, of elements of 16 bits: weights are rounded to them, sums are in float.
#pragma once

#include <cpx/attention_core_tiles.cuh>

namespace cpx::kernels {

namespace attention {

inline constexpr int forward_keys = 64; ///< of a step

using forward_notes = core_notes<tile_rows<core_rows>, tile_rows<forward_keys>, 2>;

/// Returns the bytes of the tiles of a block of `attend_on_cores`: queries, keys and values.
__host__ __device__ constexpr int forward_core_tiles(int D) {
    return core_bytes(core_rows, D) + 2 * core_bytes(forward_keys, D);
}
/// Returns the bytes of its shared memory.
constexpr int forward_core_memory(int D) { return forward_core_tiles(D) + int{sizeof(forward_notes)}; }

/// Which tokens the rows of a warp, 16 from `row` on, and of this lane stand at; -1: none.
struct core_tokens {
    std::int64_t first, last, of[2];

    template <int Rows>
    __device__ core_tokens(tile_rows<Rows> const& own, int row)
        : first(row + 15 < own.count ? own.token[row] : -1),
          last(row < own.count ? own.token[min(row + 15, own.count - 1)] : -1) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int const i = row + core_lane() / 4 + 8 * r;
            of[r] = i < own.count ? own.token[i] : -1;
        }
    }
    /// Returns how many of `count` keys from token `base` on row r of this lane sees.
    __device__ int sees(int r, std::int64_t base, int count) const {
        return static_cast<int>(max(min(of[r] - base + 1, std::int64_t{count}), std::int64_t{0}));
    }
};

/// The softmax of this lane's two rows so far: the highest score, of which weights are powers of two apart, and the sum
/// of the weights of this lane's columns.
struct running_softmax {
    float highest[2] = {-INFINITY, -INFINITY}, total[2] = {};

    /// Makes weights of the scores of `8 N` keys from token `base` on, `all` of which the rows see or some, and fades
    /// the sums of values before.
    template <std::size_t N, std::size_t G>
    __device__ __forceinline__ void add(core_tokens const& tokens, std::int64_t base, bool all, float scale,
                                        float (&scores)[N][4], float (&sums)[G][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int const visible = all ? 8 * static_cast<int>(N) : tokens.sees(r, base, 8 * static_cast<int>(N));
            float const before = highest[r];
            float most = before, sum = 0.0f;
#pragma unroll
            for (int g = 0; g < N; ++g)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    bool const sees = 8 * g + core_lane() % 4 * 2 + e % 2 < visible;
                    scores[g][e] = sees ? scores[g][e] * scale : -INFINITY;
                    most = fmaxf(most, scores[g][e]);
                }
            for (int apart = 2; apart > 0; apart /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
            highest[r] = most;
            float const fade = before == most ? 1.0f : power_of_two(before - most);
#pragma unroll
            for (int g = 0; g < N; ++g)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) sum += scores[g][e] = power_of_two(scores[g][e] - most);
            total[r] = total[r] * fade + sum;
#pragma unroll
            for (int g = 0; g < G; ++g)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) sums[g][e] *= fade;
        }
    }
    /// Adds up what the lanes of a row have.
    __device__ __forceinline__ void end() {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            for (int apart = 2; apart > 0; apart /= 2) total[r] += __shfl_xor_sync(~0u, total[r], apart);
    }
};

} // namespace attention

/// As `attend`, of heads of up to D columns, a multiple of 8; rows begin at multiples of 16 bytes. Which rows are in a
/// block changes no bit of the others: what a row does not see is added as 0.
template <class T, int D>
__global__ void __launch_bounds__(attention::core_threads)
    attend_on_cores(__grid_constant__ attended_tensors<T> const t, rows<T> const o, rows<float> const lse) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    using namespace attention;
    constexpr int keys = forward_keys, groups = keys / 8;
    extern __shared__ __align__(1024) char core_memory[];
    auto& [own, seen, marks] = *reinterpret_cast<forward_notes*>(core_memory + forward_core_tiles(D));
    std::uint32_t const q = shared_address(core_memory), k = q + core_bytes(core_rows, D), v = k + core_bytes(keys, D);
    char* const values = core_memory + core_bytes(core_rows, D) + core_bytes(keys, D);
    int const head = static_cast<int>(blockIdx.y), row = 16 * core_warp(), lane = core_lane();
    std::int64_t const column = std::int64_t{head} * t.dim, key = t.key_column(head);
    block_tile const at(t.of_queries, std::int64_t{gridDim.x} - 1 - blockIdx.x, core_rows);
    own.find(t.of_queries, at.place, at.end);
    if (threadIdx.x == 0) marks = 0;
    __syncthreads();
    std::int64_t const begin = t.of_keys.first[at.sequence], end = begin + own.last_token() + 1;
    seen[0].find(t.of_keys, begin, end);
    load_core_tile<T, D>(own, t.q, column, t.dim, q);
    __syncthreads();
    load_core_tile<T, D>(seen[0], t.k, key, t.dim, k);
    core_tokens const tokens(own, row);
    float const scale = t.scale * log2_e;
    running_softmax softmax;
    float sums[D / 8][4] = {};
    bool spoilt[2] = {};

    int slot = 0;
    for (std::int64_t place = begin; place < end; place += keys, slot ^= 1) {
        std::int64_t const base = place - begin; // the token, for there are all of them
        bool const any = base <= tokens.last, all = base + keys - 1 <= tokens.first;
        wait_for_copies();
        __syncthreads(); // keys are there, and the values before have been read
        if (place + keys < end) seen[slot ^ 1].find(t.of_keys, place + keys, end);
        load_core_tile<T, D>(seen[slot], t.v, key, t.dim, v);
        float scores[groups][4];
        if (any) {
            multiply_rows<T, D>(q, row, k, scores);
            softmax.add(tokens, base, all, scale, scores, sums);
        }
        wait_for_copies();
        __syncthreads(); // values are there, and keys have been read
        if (place + keys < end) load_core_tile<T, D>(seen[slot ^ 1], t.k, key, t.dim, k);
        if (base + keys - 1 > own.token[0])
            spoil(clear_no_numbers<T, D, keys>(values, marks), spoilt,
                  [&](int r, int i) { return base + i <= tokens.of[r]; });
        if (any) add_product<T, D, false>(scores, v, 0, sums);
    }
    softmax.end();
    each_core_sum(own, row, t.dim, 0, sums, [&](std::int64_t to, int d, float x, int r) {
        o(to, column + d) = static_cast<T>(spoilt[r] ? NAN : x / softmax.total[r]);
    });
    if (!lse.data() || lane % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int const i = row + lane / 4 + 8 * r;
        if (i < own.count) lse(own.row[i], head) = softmax.highest[r] * ln_2 + logf(softmax.total[r]);
    }
#endif
}

} // namespace cpx::kernels
