// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's gradients: what is tokens by channels (sm_90a).
#pragma once

#include <cpx/delta_rule_grad_block.cuh>

namespace cpx::kernels::delta {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Y and dX.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::make_values() {
    each(
        nothing,
        [&](char*, delta_gates& gates) {
            wait(memory->prepared_full[turn & 1], turn >> 1 & 1);
            wait(memory->state_full, turn & 1);
            wait(memory->values_full, turn & 1);
            row_products<T> products;
            float const e[2] = {power_of_two(gates.sum[row]), power_of_two(gates.sum[row + 8])};
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                float u[32];
                keep(u);
                cute::warpgroup_arrive();
                multiply_keys<T>(u, keys(), memory->state + half * 8 * cores_bytes);
                cute::warpgroup_commit_batch();
                std::uint32_t words[16], rounded[16];
                load_operand(memory->values + half * panel_bytes, words);
                cute::warpgroup_wait<0>();
                keep(u);
                round_to_operand<T>(u, rounded);
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    words[i] = round_two<T>(fmaf(-e[i % 2], u[2 * i], low_of<T>(words[i])),
                                            fmaf(-e[i % 2], u[2 * i + 1], high_of<T>(words[i])));
                store_operand(words, memory->values + half * panel_bytes);
                load_operand(memory->dy + half * panel_bytes, words);
                products.add_all(rounded, words);
            }
            arrive_warp(memory->state_empty);
            cutlass::arch::fence_view_async_shared();
            arrive_warp(memory->y_full);
            std::uint32_t y[32];
            load_operand(memory->values, y);
            load_operand(memory->values + panel_bytes, y + 16);
            float const last = gates.sum[delta_chunk - 1];
            float const onward[2] = {power_of_two(last - gates.sum[row]), power_of_two(last - gates.sum[row + 8])};
            arrive_after_loads(memory->values_empty);
            arrive_warp(memory->prepared_empty[turn & 1]);
            put_rows(-e[0] * products.first(), -e[1] * products.last(), memory->reading[1]);
            arrive_warp(memory->sums_full);
            wait(memory->dstate_full, turn & 1);
            wait(memory->dx_empty, turn & 1 ^ 1);
#pragma unroll 1
            for (int half = 0; half < 2; ++half) { // of the key channels
                float r[32];
                keep(r);
                cute::warpgroup_arrive();
                multiply_values<T>(r, y, memory->dstate + half * 8 * 128, false);
                cute::warpgroup_commit_batch();
                cute::warpgroup_wait<0>();
                keep(r);
                std::uint32_t words[16];
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    words[i] = round_two<T>(onward[i % 2] * r[2 * i], onward[i % 2] * r[2 * i + 1]);
                store_operand(words, memory->dx + half * panel_bytes);
            }
            arrive_warp(memory->dstate_empty);
            cutlass::arch::fence_view_async_shared();
            arrive_warp(memory->dx_full);
        },
        nothing);
}

/// dQ and dK.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::write_rows() {
    float dq[64], dk[64];
    each(
        [&] {
            wait(memory->queries_full, task_turn & 1);
#pragma unroll
            for (int i = 0; i < 64; ++i) dq[i] = dk[i] = 0;
        },
        [&](char* inverse, delta_gates& gates) {
            wait(memory->prepared_full[turn & 1], turn >> 1 & 1);
            wait(memory->state_full, turn & 1);
            wait(memory->values_full, turn & 1);
            float const e[2] = {power_of_two(gates.sum[row]), power_of_two(gates.sum[row + 8])};
            {
                std::uint32_t words[32];
                load_operand(memory->dy, words);
                load_operand(memory->dy + panel_bytes, words + 16);
                std::uint32_t const erased[2] = {round_twice<T>(-e[0]), round_twice<T>(-e[1])};
#pragma unroll
                for (int i = 0; i < 32; ++i) words[i] = multiply_two<T>(words[i], erased[i % 2]);
                keep(dk);
                cute::warpgroup_arrive();
                multiply_values<T>(dk, words, memory->state, true);
                cute::warpgroup_commit_batch();
                cute::warpgroup_wait<0>();
                keep(dk);
            }
            {
                float along[2];
                float const reading[2] = {in.scale * e[0], in.scale * e[1]};
                add_states<T>(dq, along, memory->dout, memory->state, memory->queries, reading);
                arrive_warp(memory->state_empty);
                arrive_warp(memory->values_empty);
                put_rows(along[0], along[1], memory->reading[0]);
            }
            arrive_warp(memory->sums_full);
            wait(memory->dscores_full, turn & 1);
            keep(dq);
            keep(dk);
            cute::warpgroup_arrive();
            multiply_panels<T, Major::K, Major::MN, 4>(dk, memory->dscores, memory->queries, true);
            multiply_panels<T, Major::MN, Major::MN, 4>(dq, memory->dscores, keys(), true);
            cute::warpgroup_commit_batch();
            std::uint32_t words[16];
            load_triangle_operand(inverse, words, thread_again());
#pragma unroll
            for (int i = 0; i < 16; ++i) { // words 2 and 3 of 4 are 8 columns further
                float2 const b = *reinterpret_cast<float2 const*>(gates.beta + 8 * (i / 2) + lane % 4 * 2);
                words[i] = multiply_two<T>(words[i], round_two<T>(b.x, b.y));
            }
            wait(memory->dx_full, turn & 1);
            cute::warpgroup_wait<0>();
            keep(dq);
            keep(dk);
            arrive_warp(memory->prepared_empty[turn & 1]);
            cute::warpgroup_arrive();
            multiply_down<T>(dk, words, memory->dx, true); // A' dX
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
            keep(dk);
            arrive_warp(memory->dx_empty);
            if (is_last()) {       // while Z is made
                join_group(group); // all have read the queries
                put_gradient<T>(dq, memory->queries, memory->dq_full);
            }
            wait(memory->z_full, turn & 1);
            cute::warpgroup_arrive();
            multiply_panels<T, Major::K, Major::MN, 4>(dk, memory->e, keys(), true);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
            keep(dk);
            arrive_warp(memory->z_empty);
        },
        [&] {
            join_group(group); // all have read the keys; the others had before Z
            put_gradient<T>(dk, keys(), memory->dk_full);
        });
}

#endif

} // namespace cpx::kernels::delta
