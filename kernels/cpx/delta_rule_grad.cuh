// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's gradients of queries, keys and gates (sm_90a), of all chunks beside each other.
#pragma once

#include <cpx/delta_rule_grad_decay.cuh>
#include <cpx/delta_rule_grad_gates.cuh>
#include <cpx/delta_rule_grad_rows.cuh>
#include <cpx/delta_rule_grad_tokens.cuh>

namespace cpx::kernels {

/// A block computes the gradients of chunks and key heads, one after the other, summed over a key head's value heads in
/// their order: the grid's size changes no bit. Blocks of 512 threads: a warp that loads, two that multiply states, one
/// that stores gradients and makes those of the gates; a warpgroup for Y and dX, one for dQ and dK, one for tokens by
/// tokens. Where nothing is erased a warpgroup each for dK, dQ and, with tokens by tokens, dV.
template <class T, bool Erases>
static __global__ void __launch_bounds__(512, 1)
    delta_rule_grad(__grid_constant__ CUtensorMap const queries, __grid_constant__ CUtensorMap const keys,
                    __grid_constant__ CUtensorMap const values, __grid_constant__ CUtensorMap const dout,
                    __grid_constant__ CUtensorMap const dvalues, __grid_constant__ CUtensorMap const dqueries,
                    __grid_constant__ CUtensorMap const dkeys, delta_gradients<T> const in) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace delta;
    auto* memory = &shared_memory<grad_memory>();
    if constexpr (Erases) clear_triangles(memory->inverse);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) memory->keys_full[i].init(1), memory->keys_empty[i].init(15);
        memory->queries_full.init(1), memory->queries_empty.init(Erases ? 5 : 12);
        memory->values_full.init(1), memory->values_empty.init(12);
        memory->state_full.init(1), memory->state_empty.init(Erases ? 10 : 6);
        memory->dstate_full.init(1), memory->dstate_empty.init(Erases ? 6 : 10);
        for (int i = 0; i < 2; ++i) memory->prepared_full[i].init(1), memory->prepared_empty[i].init(13);
        memory->y_full.init(4), memory->dx_full.init(4), memory->dscores_full.init(4), memory->z_full.init(4);
        memory->dx_empty.init(8), memory->z_empty.init(Erases ? 4 : 8), memory->sums_full.init(14),
            memory->sums_empty.init(1);
        memory->landed.init(1), memory->stored.init(1);
        memory->dq_full.init(4), memory->dk_full.init(4), memory->dv_full.init(4), memory->dv_empty.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    auto const as = [&](auto&& role) { // or what roles know alike would be kept in registers from here on
        grad_block<T, Erases> block{in, memory};
        role(block);
    };
    int const group = static_cast<int>(threadIdx.x) / 128, warp = static_cast<int>(threadIdx.x) / 32;
    if (group == 0) {
        cutlass::arch::warpgroup_reg_dealloc<48>();
        if (warp == 0)
            as([&](auto& block) { block.load(queries, keys, values, dout, dvalues); });
        else if (warp < 3)
            as([](auto& block) { block.multiply_states(); });
        else
            as([&](auto& block) { block.write_gates(dqueries, dkeys, dvalues); });
    } else if (group == 1) {
        if constexpr (Erases) {
            cutlass::arch::warpgroup_reg_dealloc<112>();
            as([](auto& block) { block.make_values(); });
        } else {
            cutlass::arch::warpgroup_reg_alloc<152>();
            as([](auto& block) { block.template write_sums<true>(); });
        }
    } else if (group == 2) {
        cutlass::arch::warpgroup_reg_alloc<Erases ? 200 : 152>();
        if constexpr (Erases)
            as([](auto& block) { block.write_rows(); });
        else
            as([](auto& block) { block.template write_sums<false>(); });
    } else {
        cutlass::arch::warpgroup_reg_alloc<Erases ? 152 : 160>();
        if constexpr (Erases)
            as([](auto& block) { block.multiply_tokens(); });
        else
            as([](auto& block) { block.write_values(); });
    }
#endif
}

} // namespace cpx::kernels
