// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's gradients: what is tokens by tokens (sm_90a).
#pragma once

#include <cpx/delta_rule_grad_block.cuh>

namespace cpx::kernels::delta {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// B, E, dB, N and Z, and of the gates' gradients what they give.
__device__ __forceinline__ void grad_block::multiply_tokens() {
    each(
        [&](int) {
            wait(memory->tokens_full, task_turn & 1);
            float b[32];
            keep(b);
            cute::warpgroup_arrive();
            multiply_panels<Major::K, Major::K, 8>(b, memory->queries, memory->keys, false);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
            keep(b);
            std::uint32_t words[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                int const across = 8 * (i / 2) + lane % 4 * 2, down = row + i % 2 * 8;
                words[i] = two_bf16(across <= down ? b[2 * i] : 0.0f, across + 1 <= down ? b[2 * i + 1] : 0.0f);
            }
            join_group(group); // the task before has read it
            store_operand(words, memory->scores);
            cutlass::arch::fence_view_async_shared();
            join_group(group);
        },
        [&](int, int, char* inverse, delta_gates& gates) {
            wait(memory->prepared_full[turn & 1], turn >> 1 & 1);
            std::uint32_t words[16];
            {
                float ba[32], e[32];
                keep(ba);
                cute::warpgroup_arrive();
                multiply_panels<Major::K, Major::MN, 4>(ba, memory->scores, inverse, false);
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
                float const g[2] = {gates.sum[row], gates.sum[row + 8]};
                float down[16] = {}, across[16] = {}, before[2] = {};
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    int const column = 8 * (i / 2) + lane % 4 * 2, r = i % 2, token = row + 8 * r;
                    float2 const sum = *reinterpret_cast<float2 const*>(gates.sum + column);
                    float2 const b = *reinterpret_cast<float2 const*>(gates.beta + column);
                    float const e0 = column <= token ? in.scale * power_of_two(g[r] - sum.x) * e[2 * i] : 0.0f;
                    float const e1 = column + 1 <= token ? in.scale * power_of_two(g[r] - sum.y) * e[2 * i + 1] : 0.0f;
                    words[i] = two_bf16(e0, e1);
                    float const h0 = e0 * ba[2 * i], h1 = e1 * ba[2 * i + 1];
                    down[i / 2 * 2] += h0;
                    down[i / 2 * 2 + 1] += h1;
                    float const x0 = b.x * h0, both = x0 + b.y * h1;
                    float const near = __shfl_xor_sync(~0u, both, 1), pair = both + near;
                    float const far = __shfl_xor_sync(~0u, pair, 2);
                    float const until = before[r] + (lane & 1 ? near : 0.0f) + (lane & 2 ? far : 0.0f);
                    if (column <= token) across[i / 2 * 2] += until;
                    if (column + 1 <= token) across[i / 2 * 2 + 1] += until + x0;
                    before[r] += pair + far;
                }
                float2 const down_sums = add_columns(down), across_sums = add_columns(across);
                wait(memory->sums_empty, turn & 1 ^ 1);
                reinterpret_cast<float2*>(memory->down[warp])[lane] = down_sums;
                reinterpret_cast<float2*>(memory->across[warp])[lane] = across_sums;
            }
            join_group(group); // the turn before has read it
            store_operand(words, memory->e);
            cutlass::arch::fence_view_async_shared();
            join_group(group);
            wait(memory->dx_full, turn & 1);
            float n[32], x[32];
            keep(x);
            keep(n);
            cute::warpgroup_arrive();
            multiply_along<4>(x, words, memory->weighted, false); // dB
            cute::warpgroup_commit_batch();
            multiply_panels<Major::K, Major::K, 8>(n, memory->keys, memory->dx, false);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<1>();
            keep(x);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                int const column = 8 * (i / 2) + lane % 4 * 2, token = row + i % 2 * 8;
                words[i] = two_bf16(column <= token ? x[2 * i] : 0.0f, column + 1 <= token ? x[2 * i + 1] : 0.0f);
            }
            store_operand(words, memory->dscores); // read before: dX is full again
            cutlass::arch::fence_view_async_shared();
            arrive_warp(memory->dscores_full);
            load_operand(inverse, words);
            cute::warpgroup_wait<0>();
            keep(n);
            {
                float t[16];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    t[2 * i] = fmaf(low_half(words[2 * i]), n[4 * i], low_half(words[2 * i + 1]) * n[4 * i + 2]);
                    t[2 * i + 1] =
                        fmaf(high_half(words[2 * i]), n[4 * i + 1], high_half(words[2 * i + 1]) * n[4 * i + 3]);
                }
                reinterpret_cast<float2*>(memory->t[warp])[lane] = add_columns(t);
            }
            keep(n);
            cute::warpgroup_arrive();
            multiply_panels<Major::MN, Major::MN, 4>(n, memory->scores, memory->e, true);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
            keep(n);
            round_to_operand(n, words);
            keep(x);
            cute::warpgroup_arrive();
            multiply_along<4>(x, words, memory->weighted, false);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
            keep(x);
            round_to_operand(x, words);
            arrive_warp(memory->dx_empty);
            join_group(group); // E has been read
            store_operand(words, memory->e);
            cutlass::arch::fence_view_async_shared();
            join_group(group);
            keep(x);
            keep(n);
            cute::warpgroup_arrive();
            multiply_panels<Major::MN, Major::MN, 4>(x, inverse, memory->e, false);
            multiply_panels<Major::K, Major::K, 8>(n, memory->keys, memory->keys, false);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
            keep(x);
            keep(n);
            float const b[2] = {-gates.beta[row], -gates.beta[row + 8]};
            float along[2] = {};
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                int const column = 8 * (i / 2) + lane % 4 * 2, r = i % 2, token = row + 8 * r;
                float const z0 = column < token ? x[2 * i] : 0.0f, z1 = column + 1 < token ? x[2 * i + 1] : 0.0f;
                along[r] = fmaf(-z1, n[2 * i + 1], fmaf(-z0, n[2 * i], along[r]));
                words[i] = two_bf16(b[r] * z0, b[r] * z1);
            }
            wait(memory->z_empty, turn & 1 ^ 1);
            store_operand(words, memory->z);
            cutlass::arch::fence_view_async_shared();
            arrive_warp(memory->z_full);
            arrive_warp(memory->prepared_empty[turn & 1]);
            put_sums(along, memory->products);
            arrive_warp(memory->sums_full);
        },
        [&](int) { arrive_warp(memory->tokens_empty); });
}

#endif

} // namespace cpx::kernels::delta
