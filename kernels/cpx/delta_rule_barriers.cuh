// SPDX-License-Identifier: Apache-2.0
// How warps of a block, and of the other block of its cluster, wait for each other (sm_90a), by CUTLASS's wrappers.
#pragma once

#include <cpx/cuda/nvcc.hpp>

#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/barrier.h>

#include <cstdint>

namespace cpx::kernels::delta {

// compute-sanitizer's racecheck (13.0) does not follow a barrier's arrival by one lane for its warp, not with
// `--racecheck-indirect-barrier-dependency` either: it reports hazards that are gone when every lane arrives.
#ifdef CPX_EVERY_LANE_ARRIVES
inline constexpr int arrivals_of_warp = 32;
#else
inline constexpr int arrivals_of_warp = 1;
#endif

/// A barrier of shared memory that counts warps: an arrival is one lane's for its warp.
struct barrier : cutlass::arch::ClusterTransactionBarrier {
    using base = cutlass::arch::ClusterTransactionBarrier;
    __device__ __forceinline__ void init(int warps) {
        base::init(static_cast<std::uint32_t>(warps * arrivals_of_warp));
    }
    __device__ __forceinline__ void arrive() const {
#pragma unroll
        for (int i = 0; i < arrivals_of_warp; ++i) base::arrive();
    }
    __device__ __forceinline__ void arrive_and_expect_tx(std::uint32_t bytes) const {
        base::arrive_and_expect_tx(bytes);
#pragma unroll
        for (int i = 1; i < arrivals_of_warp; ++i) base::arrive();
    }
};

/// Returns a block's shared memory. Its address is computed once; the compiler would wait for it at every use.
template <class M>
__device__ __forceinline__ M& shared_memory() {
    extern __shared__ __align__(1024) char raw[];
    std::uint32_t address = cute::cast_smem_ptr_to_uint(raw);
    asm volatile("" : "+r"(address));
    return *static_cast<M*>(__cvta_shared_to_generic(address));
}

/// Returns where something in a block's shared memory is in that of block number `block` of its cluster.
template <class T>
__device__ __forceinline__ T* of_block(T* own, int block) {
    // __cluster_map_shared_rank is declared for sm_90 alone
    return static_cast<T*>(__cvta_shared_to_generic(
        cute::set_block_rank(cute::cast_smem_ptr_to_uint(own), static_cast<std::uint32_t>(block))));
}

/// Waits for the phase of the parity; what the others wrote before they arrived is seen.
__device__ __forceinline__ void wait(barrier& b, int parity) {
    b.wait(static_cast<std::uint32_t>(parity));
    asm volatile("" ::: "memory"); // CUTLASS's asm names no memory
}
/// One arrival for a warp: __syncwarp puts what the other lanes read and wrote before it.
///
/// It does not wait for loads: what has been asked of shared memory while the warp's products are under way may come
/// after the copy engine has written there (seen on an H200: sums of other numbers at every run). So a warp that says
/// that something has been read has used it, at the latest as an operand of a product, or takes `arrive_after_loads`.
__device__ __forceinline__ void arrive_warp(barrier& b) {
    __syncwarp();
    asm volatile("" ::: "memory");
    if (arrivals_of_warp == 32 || threadIdx.x % 32 == 0) b.base::arrive();
}

/// The same at that barrier of a block of the cluster, after `arrive_warp` of the own one, which joins the lanes.
__device__ __forceinline__ void arrive_warp(barrier& b, int block) {
    if (arrivals_of_warp == 32 || threadIdx.x % 32 == 0) b.base::arrive(static_cast<std::uint32_t>(block));
}

/// One arrival for a warp where nothing has used yet what was loaded: the loads come first.
__device__ __forceinline__ void arrive_after_loads(barrier& b) {
    asm volatile("" ::: "memory");
    cutlass::arch::fence_view_async_shared(); // orders reads before the copy engine's writes, too
    arrive_warp(b);
}

/// Joins the threads of a warpgroup, number `group` of the block.
__device__ __forceinline__ void join_group(int group) {
    asm volatile("" ::: "memory");
    cutlass::arch::NamedBarrier::sync(128, static_cast<std::uint32_t>(group));
    asm volatile("" ::: "memory");
}

/// A block ends with the others of its cluster, which send to its shared memory until then.
__device__ __forceinline__ void leave_cluster() {
    __syncwarp();
    cute::cluster_sync();
}

/// Two warpgroups of a block take turns: each waits until the other one has given it its turn.
__device__ __forceinline__ void take_turn(int group) {
    cutlass::arch::NamedBarrier::sync(256, static_cast<std::uint32_t>(4 + group));
}
__device__ __forceinline__ void give_turn(int group) {
    cutlass::arch::NamedBarrier::arrive(256, static_cast<std::uint32_t>(4 + group));
}

} // namespace cpx::kernels::delta
