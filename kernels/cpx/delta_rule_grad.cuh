// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's gradients of queries, keys and gates (sm_90a), of all chunks beside each other.
#pragma once

#include <cpx/delta_rule_grad_gates.cuh>
#include <cpx/delta_rule_grad_rows.cuh>
#include <cpx/delta_rule_grad_tokens.cuh>

namespace cpx::kernels {

/// A block computes the gradients of chunks and key heads, one after the other, summed over a key head's value heads in
/// their order: the grid's size changes no bit. Blocks of 512 threads: a warp that loads, two that multiply states, one
/// that writes the gates' gradients; a warpgroup for Y and dX, one for dQ and dK, one for tokens by tokens.
static __global__ void __launch_bounds__(512, 1)
    delta_rule_grad(__grid_constant__ CUtensorMap const queries, __grid_constant__ CUtensorMap const keys,
                    __grid_constant__ CUtensorMap const values, __grid_constant__ CUtensorMap const dout,
                    __grid_constant__ CUtensorMap const dvalues, delta_gradients const in) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace delta;
    auto* memory = &shared_memory<grad_memory>();
    clear_triangles(memory->inverse);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) memory->keys_full[i].init(1), memory->keys_empty[i].init(15);
        memory->queries_full.init(1), memory->queries_empty.init(8);
        memory->values_full.init(1), memory->values_empty.init(12);
        memory->state_full.init(1), memory->state_empty.init(10);
        memory->dstate_full.init(1), memory->dstate_empty.init(6);
        for (int i = 0; i < 2; ++i) memory->prepared_full[i].init(1), memory->prepared_empty[i].init(13);
        memory->y_full.init(4), memory->dx_full.init(4), memory->dscores_full.init(4), memory->z_full.init(4);
        memory->dx_empty.init(8), memory->z_empty.init(4), memory->sums_full.init(14), memory->sums_empty.init(1);
        memory->landed.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    grad_block block{in, memory};
    if (block.group == 0) {
        cutlass::arch::warpgroup_reg_dealloc<48>();
        if (block.warp == 0)
            block.load(queries, keys, values, dout, dvalues);
        else if (block.warp < 3)
            block.multiply_states();
        else
            block.write_gates();
    } else if (block.group == 1) {
        cutlass::arch::warpgroup_reg_dealloc<112>();
        block.make_values();
    } else if (block.group == 2) {
        cutlass::arch::warpgroup_reg_alloc<192>();
        block.write_rows();
    } else {
        cutlass::arch::warpgroup_reg_alloc<160>();
        block.multiply_tokens();
    }
#endif
}

} // namespace cpx::kernels
