// SPDX-License-Identifier: Apache-2.0
// The gradients of a decay a head, where nothing is erased (sm_90a).
#pragma once

#include <cpx/delta_rule_grad_tokens.cuh>

namespace cpx::kernels::delta {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// dK, of dS' and values, or dQ, of S and dO.
template <class T, bool Erases>
template <bool OfKeys>
__device__ __forceinline__ void grad_block<T, Erases>::write_sums() {
    float sum[64];
    each(
        [&] {
            wait(memory->queries_full, task_turn & 1);
#pragma unroll
            for (int i = 0; i < 64; ++i) sum[i] = 0;
        },
        [&](char*, delta_gates& gates) {
            wait(memory->prepared_full[turn & 1], turn >> 1 & 1);
            wait(OfKeys ? memory->dstate_full : memory->state_full, turn & 1);
            wait(memory->values_full, turn & 1);
            float factor[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                factor[i] = OfKeys ? power_of_two(gates.sum[delta_chunk - 1] - gates.sum[row + 8 * i])
                                   : in.scale * power_of_two(gates.sum[row + 8 * i]);
            float along[2];
            if constexpr (OfKeys)
                add_states<T>(sum, along, memory->values, memory->dstate, keys(), factor);
            else
                add_states<T>(sum, along, memory->dout, memory->state, memory->queries, factor);
            arrive_warp(memory->prepared_empty[turn & 1]); // the factors have been used
            arrive_warp(OfKeys ? memory->dstate_empty : memory->state_empty);
            arrive_warp(memory->values_empty);
            put_rows(along[0], along[1], memory->reading[OfKeys]);
            arrive_warp(memory->sums_full);
            wait(memory->dscores_full, turn & 1);
            keep(sum);
            cute::warpgroup_arrive();
            if constexpr (OfKeys)
                multiply_panels<T, Major::K, Major::MN, 4>(sum, memory->dscores, memory->queries, true);
            else
                multiply_panels<T, Major::MN, Major::MN, 4>(sum, memory->dscores, keys(), true);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
            keep(sum);
            if (is_last()) arrive_warp(memory->queries_empty);
            arrive_warp(memory->z_empty);
        },
        [&] {
            wait(memory->stored, task_turn & 1 ^ 1);
            put_gradient<T>(sum, OfKeys ? memory->dx : memory->inverse[0], OfKeys ? memory->dk_full : memory->dq_full);
        });
}

/// B, P and E, and dV.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::write_values() {
    below_diagonal const below(warp, lane);
    float b[32]; // B^T, and so are P and E
    each(
        [&] {
            wait(memory->queries_full, task_turn & 1);
            keep(b);
            cute::warpgroup_arrive();
            multiply_panels<T, Major::K, Major::K, 8>(b, keys(), memory->queries, false);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
            keep(b);
            arrive_warp(memory->queries_empty);
        },
        [&](char*, delta_gates& gates) {
            wait(memory->prepared_full[turn & 1], turn >> 1 & 1);
            wait(memory->values_full, turn & 1);
            float const g[2] = {gates.sum[row], gates.sum[row + 8]}, last = gates.sum[delta_chunk - 1];
            {
                float e[32];
                keep(e);
                cute::warpgroup_arrive();
                multiply_panels<T, Major::K, Major::K, 8>(e, memory->values, memory->dout, false);
                cute::warpgroup_commit_batch();
                cute::warpgroup_wait<0>();
                keep(e);
                std::uint32_t words[16], p[16], h[16]; // E, P and H
                weigh(gates, below, [&](int i, float2 decays, auto const& round) {
                    float const x = decays.x * e[2 * i], y = decays.y * e[2 * i + 1];
                    words[i] = round(x, y);
                    p[i] = round(decays.x * b[2 * i], decays.y * b[2 * i + 1]);
                    h[i] = round(x * b[2 * i], y * b[2 * i + 1]);
                });
                wait(memory->z_empty, turn & 1 ^ 1); // what the turn before left has been read
                store_operand(words, memory->dscores);
                cutlass::arch::fence_view_async_shared();
                arrive_warp(memory->dscores_full);
                join_group(group); // P of the turn before has been read
                store_operand(p, memory->scores);
                cutlass::arch::fence_view_async_shared();
                put_across(h);
                arrive_warp(memory->sums_full);
                join_group(group);
            }
            float dv[64];
            wait(memory->dstate_full, turn & 1);
            keep(dv);
            cute::warpgroup_arrive();
            multiply_keys<T>(dv, keys(), memory->dstate);
            cute::warpgroup_commit_batch();
            float const onward[2] = {power_of_two(last - g[0]), power_of_two(last - g[1])};
            arrive_warp(memory->prepared_empty[turn & 1]);
            cute::warpgroup_wait<0>();
            keep(dv);
            arrive_warp(memory->dstate_empty);
#pragma unroll
            for (int i = 0; i < 64; ++i) dv[i] *= onward[i / 2 % 2];
            keep(dv);
            cute::warpgroup_arrive();
            multiply_panels<T, Major::K, Major::MN, 4>(dv, memory->scores, memory->dout, true);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
            keep(dv);
            arrive_warp(memory->values_empty);
            wait(memory->dv_empty, turn & 1 ^ 1);
            put_gradient<T>(dv, memory->dy, memory->dv_full);
        },
        nothing);
}

#endif

} // namespace cpx::kernels::delta
