// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's gradients: what is tokens by tokens (sm_90a).
#pragma once

#include <cpx/delta_rule_grad_block.cuh>

namespace cpx::kernels::delta {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Sums of rows to their ends: `across` of column t is the sum over rows j < t, of a thread's two, of x_ji over i >= t.
/// x: 64 x 64, 16 rows a warp, as an operand. By products with ones.
template <class T>
__device__ __forceinline__ void add_across(std::uint32_t const (&x)[16], float (&across)[16]) {
    unsigned const thread = thread_again();
    int const warp = int(thread / 32 % 4), down = int(thread % 32 / 4), two = int(thread % 4 * 2);
    constexpr std::uint32_t one = std::is_same_v<T, __half> ? 0x3c00u : 0x3f80u, ones = one << 16 | one;
    std::uint32_t const from = (two < down ? 0u : one) | (two + 1 < down ? 0u : one << 16);
    auto const add = [&](float(&sum)[4], int k, std::uint32_t b0, std::uint32_t b1) {
        row_products<T>::multiply(sum, x + 4 * k, b0, b1);
    };
    float all[4] = {};
#pragma unroll
    for (int k = 3; k >= 0; --k) {
        float first[4] = {all[0], all[1], all[2], all[3]}, second[4] = {all[0], all[1], all[2], all[3]};
        add(first, k, from, ones);
        add(second, k, 0, from);
        if (k > 0) add(all, k, ones, ones);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            bool const upper = two + i > down; // on the diagonal block's diagonal blocks
            across[4 * k + i] = (k > warp || (k == warp && upper) ? first[i] : 0.0f) + (k > warp ? first[2 + i] : 0.0f);
            across[4 * k + 2 + i] =
                (k >= warp ? second[i] : 0.0f) + (k > warp || (k == warp && upper) ? second[2 + i] : 0.0f);
        }
    }
}

/// Stores x + x^T, of 16 rows of x a warp: an operand that is strictly lower.
__device__ __forceinline__ void store_symmetric(std::uint32_t const (&x)[16], char* panel) {
    unsigned const thread = thread_again();
    int const warp = static_cast<int>(thread / 32 % 4), straight = place_straight(0, thread);
    auto* const down = reinterpret_cast<cute::uint128_t*>(panel + place_transposed(0, thread));
    auto const along = [&](int k) { return reinterpret_cast<cute::uint128_t*>(panel + (straight ^ 32 * k)); };
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        std::uint32_t const* const y = x + 4 * k;
        if (k <= warp) cute::SM90_U32x4_STSM_N::copy(y[0], y[1], y[2], y[3], *along(k));
        if (k < warp) cute::SM90_U16x8_STSM_T::copy(y[0], y[1], y[2], y[3], down[128 * k]);
    }
    __syncwarp();
    std::uint32_t a[4], b[4]; // on the diagonal
    cute::SM75_U32x4_LDSM_N::copy(*along(warp), a[0], a[1], a[2], a[3]);
    cute::SM75_U16x8_LDSM_T::copy(down[128 * warp], b[0], b[1], b[2], b[3]);
    __syncwarp();
    cute::SM90_U32x4_STSM_N::copy(a[0] | b[0], a[1] | b[1], a[2] | b[2], a[3] | b[3], *along(warp));
}

/// Calls `put(i, decays, round)` for every word i of what is upper triangular, and decays: two factors, which the scale
/// is in but for its sign; `round(x, y)` makes the word, with that, of what they have been applied to.
template <class T, bool Erases>
template <class F>
__device__ __forceinline__ void grad_block<T, Erases>::weigh(delta_gates const& gates, below_diagonal const& below,
                                                             F&& put) const {
    // the scale as a power of two, and its sign
    float const power = __log2f(fabsf(in.scale)), g[2] = {power - gates.sum[row], power - gates.sum[row + 8]};
    std::uint32_t const sign = in.scale < 0 ? 0x80008000u : 0u;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float2 const sum = *reinterpret_cast<float2 const*>(gates.sum + 8 * (i / 2) + lane % 4 * 2);
        float2 const decays{power_of_two(sum.x + g[i % 2]), power_of_two(sum.y + g[i % 2])};
        put(i, decays, [&](float x, float y) { return round_two<T>(x, y) & ~below[i] ^ sign; });
    }
}

/// What H^T, times diag(b), adds up to for dg.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::put_across(std::uint32_t const (&h)[16]) const {
    float across[16];
    add_across<T>(h, across);
    float2 const sums = add_columns(across);
    wait(memory->sums_empty, turn & 1 ^ 1);
    reinterpret_cast<float2*>(memory->across[warp])[lane] = sums;
}

/// B^T, and of K K^T what is below its diagonal, of a task.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::multiply_rows(std::uint32_t (&squares)[16],
                                                                     below_diagonal const& below) {
    float b[32], kk[32];
    keep(kk);
    cute::warpgroup_arrive();
    multiply_panels<T, Major::K, Major::K, 8>(kk, keys(), keys(), false);
    cute::warpgroup_commit_batch();
    wait(memory->queries_full, task_turn & 1);
    keep(b);
    cute::warpgroup_arrive();
    multiply_panels<T, Major::K, Major::K, 8>(b, keys(), memory->queries, false);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    keep(kk);
    keep(b);
    arrive_warp(memory->queries_empty);
    std::uint32_t words[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        squares[i] = round_two<T>(kk[2 * i], kk[2 * i + 1]) & below[i];
        words[i] = round_two<T>(b[2 * i], b[2 * i + 1]) & ~below[i];
    }
    join_group(group);                                    // the task before has read it
    store_operand(words, memory->scores, thread_again()); // once a task: no registers for places
    cutlass::arch::fence_view_async_shared();
    join_group(group);
}

/// E^T, in `words`, and diag(b) E^T, in shared memory, and with B A, `h`.
template <class T, bool Erases>
__device__ __forceinline__ void
grad_block<T, Erases>::multiply_outputs(delta_gates const& gates, char const* inverse, below_diagonal const& below,
                                        std::uint32_t (&words)[16], std::uint32_t (&h)[16]) const {
    float ba[32], e[32]; // (B A)^T
    keep(ba);
    cute::warpgroup_arrive();
    multiply_squares<T, Major::MN, Major::MN, true>(ba, inverse, memory->scores);
    cute::warpgroup_commit_batch();
    wait(memory->y_full, turn & 1);
    keep(e);
    cute::warpgroup_arrive();
    multiply_panels<T, Major::K, Major::K, 8>(e, memory->values, memory->dout, false);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    keep(ba);
    keep(e);
    arrive_warp(memory->values_empty);
    float const b[2] = {gates.beta[row], gates.beta[row + 8]};
    wait(memory->z_empty, turn & 1 ^ 1); // what the turn before left has been read
    std::uint32_t weighted[4];           // of 16 columns
    int const place = place_straight(0, thread_again());
    weigh(gates, below, [&](int i, float2 decays, auto const& round) { // in float32: of H's sums dg is made
        float const x = decays.x * e[2 * i], y = decays.y * e[2 * i + 1];
        words[i] = round(x, y);
        weighted[i % 4] = round(b[i % 2] * x, b[i % 2] * y);
        h[i] = round(b[i % 2] * x * ba[2 * i], b[i % 2] * y * ba[2 * i + 1]);
        if (i % 4 == 3)
            cute::SM90_U32x4_STSM_N::copy(weighted[0], weighted[1], weighted[2], weighted[3],
                                          *reinterpret_cast<cute::uint128_t*>(memory->e + (place ^ 32 * (i / 4))));
    });
    cutlass::arch::fence_view_async_shared();
}

/// N^T, as an operand, of E^T; and what A.(K dX^T) and A.N add up to along columns.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::multiply_n(char const* inverse,
                                                                  std::uint32_t (&words)[16]) const {
    wait(memory->dx_full, turn & 1);
    float n[32];
    keep(n);
    cute::warpgroup_arrive();
    multiply_panels<T, Major::K, Major::K, 8>(n, memory->dx, keys(), false);
    cute::warpgroup_commit_batch();
    std::uint32_t a[16];
    load_triangle_transposed(inverse, a, thread_again());
    cute::warpgroup_wait<0>();
    keep(n);
    float t[2] = {}; // of floats: to round them first makes dg be off by a tenth more
#pragma unroll
    for (int i = 0; i < 16; ++i)
        t[i % 2] = fmaf(n[2 * i], low_of<T>(a[i]), fmaf(n[2 * i + 1], high_of<T>(a[i]), t[i % 2]));
    keep(n);
    cute::warpgroup_arrive();
    multiply_along<T, 4>(n, words, memory->scores, true);
    cute::warpgroup_commit_batch();
#pragma unroll
    for (float& x : t) x += __shfl_xor_sync(~0u, x, 1), x += __shfl_xor_sync(~0u, x, 2);
    row_products<T> own;
    cute::warpgroup_wait<0>();
    keep(n);
    arrive_warp(memory->dx_empty);
    round_to_operand<T>(n, words);
    own.add_all(words, a);
    put_rows(t[0], t[1], memory->t);
    put_rows(own.first(), own.last(), memory->own);
}

/// B, E, dB, N and Z, and of the gates' gradients what they give.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::multiply_tokens() {
    below_diagonal const below(warp, lane);
    std::uint32_t squares[16]; // K K^T
    each([&] { multiply_rows(squares, below); },
         [&](char* inverse, delta_gates& gates) {
             wait(memory->prepared_full[turn & 1], turn >> 1 & 1);
             std::uint32_t words[16], rounded[16], h[16];
             multiply_outputs(gates, inverse, below, words, h);
             join_group(group); // all have written E
             float x[32];
             keep(x);
             cute::warpgroup_arrive();
             multiply_squares<T, Major::K, Major::MN, true>(x, inverse, memory->e); // dB^T
             cute::warpgroup_commit_batch();
             put_across(h);
             cute::warpgroup_wait<0>();
             keep(x);
#pragma unroll
             for (int i = 0; i < 16; ++i) rounded[i] = round_two<T>(x[2 * i], x[2 * i + 1]) & ~below[i];
             store_operand(rounded, memory->dscores); // read before, as Z was
             cutlass::arch::fence_view_async_shared();
             arrive_warp(memory->dscores_full);
             multiply_n(inverse, words);
             keep(x);
             cute::warpgroup_arrive();
             multiply_triangle<T>(x, words, inverse, false); // N^T A
             cute::warpgroup_commit_batch();
             std::uint32_t b[2] = {round_twice<T>(gates.beta[row]), round_twice<T>(gates.beta[row + 8])};
             cute::warpgroup_wait<0>();
             keep(x);
#pragma unroll
             for (int i = 0; i < 16; ++i) words[i] = multiply_two<T>(round_two<T>(x[2 * i], x[2 * i + 1]), b[i % 2]);
             join_group(group); // E has been read
             store_operand(words, memory->e);
             cutlass::arch::fence_view_async_shared();
             join_group(group);
             keep(x);
             cute::warpgroup_arrive();
             multiply_squares<T, Major::MN, Major::K, false>(x, memory->e, inverse); // A^T N A'^T
             cute::warpgroup_commit_batch();
             cute::warpgroup_wait<0>();
             keep(x);
             row_products<T> products;
             round_to_operand<T>(x, words);
             products.add_all(words, squares);
             b[0] ^= 0x80008000u, b[1] ^= 0x80008000u;
#pragma unroll
             for (int i = 0; i < 16; ++i) words[i] = multiply_two<T>(words[i], b[i % 2]) & below[i];
             join_group(group); // N^T A has been read
             store_symmetric(words, memory->e);
             cutlass::arch::fence_view_async_shared();
             arrive_warp(memory->z_full);
             arrive_warp(memory->prepared_empty[turn & 1]);
             put_rows(products.first(), products.last(), memory->products);
             arrive_warp(memory->sums_full);
         },
         nothing);
}

#endif

} // namespace cpx::kernels::delta
