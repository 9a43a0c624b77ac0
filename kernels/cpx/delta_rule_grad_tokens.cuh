// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's gradients: what is tokens by tokens (sm_90a).
#pragma once

#include <cpx/delta_rule_grad_block.cuh>

namespace cpx::kernels::delta {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Sums of rows from their beginnings: `across` of column t is the sum over rows i >= t, of a thread's two, of x_ij
/// over j < t. x: 64 x 64, 16 rows a warp, as an operand. By products with ones.
__device__ __forceinline__ void add_across(std::uint32_t const (&x)[16], float (&across)[16]) {
    int thread = static_cast<int>(threadIdx.x) % 128;
    asm volatile("" : "+r"(thread)); // or what depends on it would be kept in registers
    int const warp = thread / 32, lane = thread % 32, down = lane / 4, two = lane % 4 * 2;
    std::uint32_t const ones = 0x3f803f80u, before = (two < down ? 0x3f80u : 0u) | (two + 1 < down ? 0x3f800000u : 0u);
    auto const add = [&](float(&sum)[4], int k, std::uint32_t b0, std::uint32_t b1) {
        cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(sum[0], sum[1], sum[2], sum[3], x[4 * k], x[4 * k + 1], x[4 * k + 2],
                                                  x[4 * k + 3], b0, b1, sum[0], sum[1], sum[2], sum[3]);
    };
    float all[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        float first[4] = {all[0], all[1], all[2], all[3]}, second[4] = {all[0], all[1], all[2], all[3]};
        add(first, k, before, 0);
        add(second, k, ones, before);
        if (k < 3) add(all, k, ones, ones);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            bool const upper = two + i <= down; // on the diagonal block's diagonal blocks
            across[4 * k + i] =
                (k < warp || (k == warp && upper) ? first[i] : 0.0f) + (k <= warp ? first[2 + i] : 0.0f);
            across[4 * k + 2 + i] =
                (k < warp ? second[i] : 0.0f) + (k < warp || (k == warp && upper) ? second[2 + i] : 0.0f);
        }
    }
}

/// x, and 0 above the diagonal, as an operand.
template <bool Erases>
__device__ __forceinline__ void grad_block<Erases>::round_lower(float const (&x)[32],
                                                                std::uint32_t (&words)[16]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] = two_bf16(x[2 * i], x[2 * i + 1]) & lower(i, true);
}

/// B, and K K^T in __half, of a task.
template <bool Erases>
__device__ __forceinline__ void grad_block<Erases>::multiply_rows(std::uint32_t (&squares)[16]) {
    float b[32], kk[32];
    keep(kk);
    cute::warpgroup_arrive();
    multiply_panels<Major::K, Major::K, 8>(kk, keys(), keys(), false);
    cute::warpgroup_commit_batch();
    wait(memory->queries_full, task_turn & 1);
    keep(b);
    cute::warpgroup_arrive();
    multiply_panels<Major::K, Major::K, 8>(b, memory->queries, keys(), false);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    keep(kk);
    keep(b);
    arrive_warp(memory->queries_empty);
#pragma unroll
    for (int i = 0; i < 16; ++i) squares[i] = two_halves(kk[2 * i], kk[2 * i + 1]) & lower(i, false);
    std::uint32_t words[16];
    round_lower(b, words);
    join_group(group); // the task before has read it
    store_operand(words, memory->scores);
    cutlass::arch::fence_view_async_shared();
    join_group(group);
}

/// From products E and H, of which `words` take E, and times diag(b) `weighted` and `h`; `down`: sums of H's columns.
template <bool Erases>
__device__ __forceinline__ void grad_block<Erases>::weigh(delta_gates const& gates, float const (&ba)[32],
                                                          float const (&e)[32], std::uint32_t (&words)[16],
                                                          std::uint32_t (&weighted)[16], std::uint32_t (&h)[16],
                                                          float (&down)[16]) const {
    // the scale as a power of two, and its sign
    float const power = __log2f(fabsf(in.scale)), g[2] = {gates.sum[row] + power, gates.sum[row + 8] + power};
    std::uint32_t const sign = in.scale < 0 ? 0x80008000u : 0u;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        int const column = 8 * (i / 2) + lane % 4 * 2, r = i % 2;
        float2 const sum = *reinterpret_cast<float2 const*>(gates.sum + column);
        float2 const b = *reinterpret_cast<float2 const*>(gates.beta + column);
        float const e0 = power_of_two(g[r] - sum.x) * e[2 * i], e1 = power_of_two(g[r] - sum.y) * e[2 * i + 1];
        std::uint32_t const kept = lower(i, true);
        words[i] = two_bf16(e0, e1) & kept ^ sign;
        weighted[i] = two_bf16(b.x * e0, b.y * e1) & kept ^ sign;
        float const h0 = low_half(words[i]) * ba[2 * i], h1 = high_half(words[i]) * ba[2 * i + 1];
        down[i / 2 * 2] += h0;
        down[i / 2 * 2 + 1] += h1;
        h[i] = two_bf16(b.x * h0, b.y * h1);
    }
}

/// What H, an operand, adds up to along its columns, `down` of a thread's, and for dg.
template <bool Erases>
__device__ __forceinline__ void grad_block<Erases>::put_h(std::uint32_t const (&h)[16], float (&down)[16]) const {
    float2 const down_sums = add_columns(down);
    float across[16];
    add_across(h, across);
    float2 const across_sums = add_columns(across);
    wait(memory->sums_empty, turn & 1 ^ 1);
    reinterpret_cast<float2*>(memory->down[warp])[lane] = down_sums;
    reinterpret_cast<float2*>(memory->across[warp])[lane] = across_sums;
}

/// t: what A.x adds up to along columns. a: A as an operand.
template <bool Erases>
__device__ __forceinline__ void grad_block<Erases>::put_columns(std::uint32_t const (&a)[16],
                                                                float const (&x)[32]) const {
    float t[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = fmaf(low_half(a[2 * i]), x[4 * i], low_half(a[2 * i + 1]) * x[4 * i + 2]);
        t[2 * i + 1] = fmaf(high_half(a[2 * i]), x[4 * i + 1], high_half(a[2 * i + 1]) * x[4 * i + 3]);
    }
    reinterpret_cast<float2*>(memory->t[warp])[lane] = add_columns(t);
}

/// Z of x, A^T N A'^T, and sums of it for db.
template <bool Erases>
__device__ __forceinline__ void grad_block<Erases>::write_z(delta_gates& gates, std::uint32_t const (&squares)[16],
                                                            float const (&x)[32], std::uint32_t (&words)[16]) {
    float const b[2] = {-gates.beta[row], -gates.beta[row + 8]};
    float along[2] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        int const r = i % 2;
        float2 const kk = __half22float2(reinterpret_cast<__half2 const&>(squares[i]));
        along[r] = fmaf(-x[2 * i + 1], kk.y, fmaf(-x[2 * i], kk.x, along[r]));
        words[i] = two_bf16(b[r] * x[2 * i], b[r] * x[2 * i + 1]) & lower(i, false);
    }
    join_group(group); // N A'^T has been read
    store_operand(words, memory->e);
    cutlass::arch::fence_view_async_shared();
    arrive_warp(memory->z_full);
    arrive_warp(memory->prepared_empty[turn & 1]);
    put_sums(along, memory->products);
    arrive_warp(memory->sums_full);
}

/// E, and what H adds up to. `words`: E diag(b), an operand.
template <bool Erases>
__device__ __forceinline__ void grad_block<Erases>::multiply_outputs(delta_gates const& gates, char const* inverse,
                                                                     std::uint32_t (&words)[16]) const {
    float ba[32], e[32];
    keep(ba);
    cute::warpgroup_arrive();
    multiply_triangle(ba, memory->scores, inverse);
    cute::warpgroup_commit_batch();
    wait(memory->y_full, turn & 1);
    keep(e);
    cute::warpgroup_arrive();
    multiply_panels<Major::K, Major::K, 8>(e, memory->dout, memory->values, false);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    keep(ba);
    keep(e);
    arrive_warp(memory->values_empty);
    float down[16] = {};
    std::uint32_t weighted[16], h[16]; // E and H, times diag(b)
    weigh(gates, ba, e, words, weighted, h, down);
    wait(memory->z_empty, turn & 1 ^ 1); // what the turn before left has been read
    store_operand(words, memory->e);
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] = weighted[i];
    put_h(h, down);
}

/// N, and what its columns add up to. `words`: N diag(b), an operand.
template <bool Erases>
__device__ __forceinline__ void grad_block<Erases>::multiply_n(delta_gates const& gates, char const* inverse,
                                                               std::uint32_t (&words)[16]) const {
    wait(memory->dx_full, turn & 1);
    float n[32];
    keep(n);
    cute::warpgroup_arrive();
    multiply_panels<Major::K, Major::K, 8>(n, keys(), memory->dx, false);
    cute::warpgroup_commit_batch();
    load_triangle_operand(inverse, words);
    cute::warpgroup_wait<0>();
    keep(n);
    put_columns(words, n);
    keep(n);
    cute::warpgroup_arrive();
    multiply_panels<Major::MN, Major::MN, 4>(n, memory->scores, memory->e, true);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    keep(n);
    arrive_warp(memory->dx_empty);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float2 const b = *reinterpret_cast<float2 const*>(gates.beta + 8 * (i / 2) + lane % 4 * 2);
        words[i] = two_bf16(b.x * n[2 * i], b.y * n[2 * i + 1]);
    }
}

/// B, E, dB, N and Z, and of the gates' gradients what they give.
template <bool Erases>
__device__ __forceinline__ void grad_block<Erases>::multiply_tokens() {
    std::uint32_t squares[16]; // K K^T, in __half
    each([&] { multiply_rows(squares); },
         [&](char* inverse, delta_gates& gates) {
             wait(memory->prepared_full[turn & 1], turn >> 1 & 1);
             std::uint32_t words[16];
             multiply_outputs(gates, inverse, words);
             float x[32];
             keep(x);
             cute::warpgroup_arrive();
             multiply_transposed(x, words, inverse); // dB
             cute::warpgroup_commit_batch();
             cute::warpgroup_wait<0>();
             keep(x);
             round_lower(x, words);
             store_operand(words, memory->dscores); // read before, as Z was
             cutlass::arch::fence_view_async_shared();
             arrive_warp(memory->dscores_full);
             join_group(group); // all have written E
             multiply_n(gates, inverse, words);
             keep(x);
             cute::warpgroup_arrive();
             multiply_transposed(x, words, inverse);
             cute::warpgroup_commit_batch();
             cute::warpgroup_wait<0>();
             keep(x);
             round_to_operand(x, words);
             join_group(group); // E has been read
             store_operand(words, memory->e);
             cutlass::arch::fence_view_async_shared();
             join_group(group);
             keep(x);
             cute::warpgroup_arrive();
             multiply_by_triangle(x, inverse, memory->e);
             cute::warpgroup_commit_batch();
             cute::warpgroup_wait<0>();
             keep(x);
             write_z(gates, squares, x, words);
         },
         nothing);
}

#endif

} // namespace cpx::kernels::delta
