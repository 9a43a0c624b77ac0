// SPDX-License-Identifier: Apache-2.0
// What tokens of a chunk read of each other's writes (sm_90a): P = s (lower(Q K^T) A) . decay diag(b).
#pragma once

#include <cpx/delta_rule_step.cuh>

namespace cpx::kernels::delta {

/// What P is, but for lower(Q K^T) A, of a thread's accumulators: s b_j and the decay from token j to i, 0 above the
/// diagonal. Beside the 16 x 16 block on the diagonal the decay is a product of two, of which no one is above 1.
__device__ __forceinline__ void load_factors(chunk_gates const& gates, float scale, float (&factor)[32]) {
    int const warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
    int const first = 16 * warp, row = first + lane / 4, two = lane % 4 * 2;
    float const begin = gates.sum[first], g[2] = {gates.sum[row], gates.sum[row + 8]};
    float const since[2] = {warp ? scale * power_of_two(g[0] - begin) : 0.0f,
                            warp ? scale * power_of_two(g[1] - begin) : 0.0f};
    float const* const until = gates.until[warp ? warp - 1 : 0] + two; // of no effect from the diagonal on
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float2 const u = *reinterpret_cast<float2 const*>(until + 8 * j);
#pragma unroll
        for (int i = 0; i < 2; ++i) factor[4 * j + 2 * i] = since[i] * u.x, factor[4 * j + 2 * i + 1] = since[i] * u.y;
    }
    float diagonal[8];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            int const across = 8 * j + two + k;
            float const from = gates.sum[first + across], b = scale * gates.beta[first + across];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                diagonal[4 * j + 2 * i + k] = across <= lane / 4 + 8 * i ? b * power_of_two(g[i] - from) : 0.0f;
        }
#pragma unroll
    for (int block = 0; block < 4; ++block)
        if (block == warp) {
#pragma unroll
            for (int i = 0; i < 8; ++i) factor[8 * block + i] = diagonal[i];
        }
}

/// Computes P of a chunk by a warpgroup, of 16 tokens by a warp, with B = lower(Q K^T). Those beyond the chunk's end
/// have anything. No inverse is read where nothing is erased. Calls `meanwhile()`, which waits for something, while the
/// first product is under way: its factors are made before that wait. Without it the compiler makes them after the last
/// product.
template <class T, bool Erases, class F>
__device__ __forceinline__ void compute_p(char const* queries, char const* keys, char const* inverse,
                                          chunk_gates const& gates, float scale, std::uint32_t (&words)[16],
                                          F&& meanwhile) {
    int const warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
    float sum[32], factor[32];
    std::uint64_t const a = along_rows(queries), b = along_rows(keys);
    keep(sum);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 8; ++k)
        fma_shared<shared_64<T, Major::K, Major::K>>(sum, step_along(a, k), step_along(b, k),
                                                     k ? ScaleOut::One : ScaleOut::Zero,
                                                     std::make_index_sequence<32>());
    cute::warpgroup_commit_batch();
    load_factors(gates, scale, factor);
    keep(factor);
    meanwhile();
    std::uint32_t const triangle =
        (lane % 4 * 2 <= lane / 4 ? 0xffffu : 0u) | (lane % 4 * 2 + 1 <= lane / 4 ? 0xffff0000u : 0u);
    cute::warpgroup_wait<0>();
    keep(sum);
    auto const lower = [&](int i) { // of 16 columns four words, of which the third one is above the diagonal
        std::uint32_t const on_diagonal = i % 4 == 1 ? ~0u : i % 4 == 2 ? 0u : triangle;
        return i / 4 < warp ? ~0u : i / 4 == warp ? on_diagonal : 0u;
    };
    if constexpr (Erases) {
        // B A is B (A - I) and B: of the latter the sum keeps what rounding the operand loses, so that none is rounded.
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            words[i] = round_two<T>(sum[2 * i], sum[2 * i + 1]);
            sum[2 * i] -= low_of<T>(words[i]), sum[2 * i + 1] -= high_of<T>(words[i]);
            words[i] &= lower(i);
        }
        keep(sum);
        cute::warpgroup_arrive();
        multiply_triangle<T>(sum, words, inverse, true);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        keep(sum);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i)
        words[i] =
            round_two<T>(factor[2 * i] * sum[2 * i], factor[2 * i + 1] * sum[2 * i + 1]) & (Erases ? ~0u : lower(i));
}

} // namespace cpx::kernels::delta
