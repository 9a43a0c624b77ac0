// SPDX-License-Identifier: Apache-2.0
// What kernels that take the gated delta rule's state along chunks have in common (sm_90a): what they are given, flags
// between them, loads of what is prepared and stores of rows, X, and the step.
#pragma once

#include <cpx/delta_rule_step.cuh>

namespace cpx::kernels {

/// What the kernels that walk along sequences are given besides their tensor maps. States are (sequences, value heads)
/// of `dims`, key channels first; null: zeros, or not wanted.
struct delta_walk {
    delta_plan plan;
    delta_prepared prepared;
    float const* initial;
    float* last;      ///< states after the sequences
    float* snapshots; ///< (stretches, value heads, 2, 64 * 128): states before the stretches, as they lie in registers
    int key_heads, group;
    delta_dims dims;
    float scale;
    char* states = nullptr; ///< (chunks, value heads) of `state_bytes`: states before chunks

    /// Returns where a state of the caller's lies.
    __device__ __forceinline__ std::int64_t given_of(int sequence, int head) const {
        return (std::int64_t{sequence} * key_heads * group + head) * dims.key * dims.value;
    }
    /// The same of one in the workspace, which has 128 channels of either, zeros beyond the heads' own.
    __device__ __forceinline__ std::int64_t state_of(int stretch, int head) const {
        return (std::int64_t{stretch} * key_heads * group + head) * 128 * 128;
    }
    /// Returns which half of a snapshot this is, and which flag.
    __device__ __forceinline__ std::int64_t half_of(int stretch, int head, int half) const {
        return (std::int64_t{stretch} * key_heads * group + head) * 2 + half;
    }
};

/// Rows of heads of `dim` channels, a multiple of 8 up to 128, that are written: (tokens, heads, channels).
template <class T>
struct delta_head_rows {
    delta_rows<T> rows;
    int dim;
};

namespace delta {

inline constexpr int snapshot_words = 64 * 128;

/// What a walk has besides where something is erased: A, and X.
template <bool Erases, std::size_t Stages, std::size_t Xs = 2>
struct erasing_memory {
    char inverse[Stages][panel_bytes], x[Xs][2 * panel_bytes];
};
template <std::size_t Stages, std::size_t Xs>
struct erasing_memory<false, Stages, Xs> {};

/// A place in a ring of N buffers, and the parity of the next fill of it.
template <int N>
struct ring {
    int at = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++at == N) at = 0, parity ^= 1;
    }
};

/// Stores n rows of half the channels of a head, a panel, from `row` on, by a warp; returns when the panel has been
/// read. What is beyond the head's channels is not written.
template <class T>
__device__ __forceinline__ void store_rows(CUtensorMap const& map, delta_head_rows<T> const& to, char const* panel,
                                           int head, int half, int row, int n) {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    if (n == delta_chunk) {
        if (lane == 0) {
            cute::SM90_TMA_STORE_3D::copy(&map, panel, 64 * half, row, head);
            cute::tma_store_arrive();
            cute::tma_store_wait<0>();
        }
    } else {
#pragma unroll 1
        for (int i = lane; i < n * 8; i += 32)
            if (int const channel = 64 * half + i % 8 * 8; channel < to.dim)
                *reinterpret_cast<uint4*>(to.rows.at(row + i / 8) + head * to.dim + channel) =
                    *reinterpret_cast<uint4 const*>(panel + swizzled(i / 8, i % 8));
    }
}

__device__ __forceinline__ void publish(int* flag, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
/// Waits until a flag has at least this value.
__device__ __forceinline__ void await(int const* flag, int least) {
    int value = 0;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    while (value < least);
}

/// Waits, by a thread, until all but the last Left groups of its stores by the copy engine are in memory: CUTLASS's
/// `tma_store_wait` waits until they have been read.
template <int Left>
__device__ __forceinline__ void await_stores() {
    ::cuda::ptx::cp_async_bulk_wait_group(::cuda::ptx::n32_t<Left>());
}

/// After how many chunks a walk of the backward says how far it has come.
inline constexpr int walk_chunks = 8;

/// Asks for the inverse of a chunk and head, for its gates, and for these by a barrier of their own.
__device__ __forceinline__ void load_inverse(delta_prepared const& from, std::int64_t place, barrier& full,
                                             char* inverse) {
    load_triangle(from.inverse + place * triangle_bytes, full, inverse);
}
__device__ __forceinline__ void load_gates(delta_prepared const& from, std::int64_t place, barrier& full,
                                           delta_gates& gates) {
    cute::SM90_BULK_COPY_G2S::copy(from.gates + place, reinterpret_cast<std::uint64_t*>(&full), &gates,
                                   static_cast<int>(sizeof(delta_gates)));
}
__device__ __forceinline__ void load_gates_apart(delta_prepared const& from, std::int64_t place, barrier& landed,
                                                 delta_gates& gates) {
    landed.arrive_and_expect_tx(sizeof(delta_gates));
    load_gates(from, place, landed, gates);
}

/// Completes the gates of chunk after chunk, whose G and b land by themselves, by a warp: one of two arrivals that
/// `full` of a chunk awaits; what else is loaded is the other one.
template <class Memory, bool WantsUntil>
struct gates_maker {
    ring<static_cast<int>(Memory::stages)> r;

    __device__ __forceinline__ void make_one(Memory& memory) {
        wait(memory.gates_landed[r.at], r.parity);
        complete_gates<WantsUntil>(memory.gates[r.at]);
        arrive_warp(memory.full[r.at]);
        r.next();
    }
    __device__ __forceinline__ void make(Memory& memory, int chunks) {
        for (int i = 0; i < chunks; ++i) make_one(memory);
    }
};

} // namespace delta

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace delta {

/// Makes X of a chunk by a warpgroup, which has still to arrive at `full`, where who reads X waits. `paired`: the panel
/// that has the block's number in its cluster, for both blocks; the other panel comes from the other block. X is made
/// where both have read what was there: then the other block's panel may come, and this one's has gone.
template <class T>
__device__ __forceinline__ void make_one_x(char const* inverse, char const* keys, chunk_gates const& gates, char* x,
                                           barrier& full, bool paired, int own) {
    if (paired) {
        char* const panel = x + own * panel_bytes;
        compute_x<T, 1>(inverse, keys + own * panel_bytes, gates, panel);
        cutlass::arch::fence_view_async_shared();
        share_rows(panel, full, own ^ 1);
    } else {
        compute_x<T>(inverse, keys, gates, x);
        cutlass::arch::fence_view_async_shared();
    }
}

/// Makes X of chunk after chunk, in the memory of a walk or of a fold, by a warpgroup.
template <class T, class Memory>
struct x_maker {
    static constexpr int xs = Memory::xs;

    ring<Memory::stages> r;
    ring<xs> x;
    int done = 0; ///< chunks

    __device__ __forceinline__ void make(Memory& memory, int chunks, bool paired = false, int own = 0) {
        for (int const last = done + chunks; done < last; ++done, r.next()) {
            int const at = x.at;
            x.next();
            wait(memory.full[r.at], r.parity);
            // The X that was here is read where the next one's Y is made: sooner both would round, later K S would wait
            if (done + 1 >= xs) wait(memory.read[x.at], x.parity ^ 1);
            make_one_x<T>(memory.inverse[r.at], memory.keys[r.at], memory.gates[r.at], memory.x[at], memory.x_full[at],
                          paired, own);
            arrive_warp(memory.x_full[at]);
            arrive_warp(memory.empty[r.at]);
        }
    }
};

/// Takes half a state over a chunk, whose X is being made; its products are still under way. f: the state before it, an
/// operand, already faded in s. Calls `meanwhile()` while the first products are.
template <class T, class Memory, class F>
__device__ __forceinline__ void erase_and_write(Memory& memory, int at, ring<Memory::xs> const& x,
                                                std::uint32_t const (&f)[32], std::uint32_t const (&v)[16],
                                                half_state& s, F&& meanwhile, int peer = -1) {
    float ks[32];
    std::uint32_t y[16];
    keep(ks);
    cute::warpgroup_arrive();
    multiply_along<T, 8, 2>(ks, f, memory.keys[at], false);
    cute::warpgroup_commit_batch();
    token_decays e;
    load_decays(memory.gates[at], e);
    meanwhile();
    wait(memory.x_full[x.at], x.parity);
    cute::warpgroup_wait<0>();
    keep(ks);
    subtract<T>(v, ks, e, y);
    keep(s);
    arrive_warp(memory.read[x.at]);
    if (peer >= 0) arrive_warp(memory.read[x.at], peer);
    cute::warpgroup_arrive();
    multiply_down<T, 1>(s, y, memory.x[x.at], true);
    cute::warpgroup_commit_batch();
    arrive_warp(memory.empty[at]);
}

} // namespace delta
#endif

} // namespace cpx::kernels
