// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's chain of gradients (sm_90a): back along sequences, with the gradient of the state.
//
//     dY = P^T dO + X dS',    dS = e_n dS' + Q^T (s e.dO) - K^T (e.dY),    dV = dY
#pragma once

#include <cpx/delta_rule_back_walk.cuh>

namespace cpx::kernels {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace delta {

/// Writes what of dO reaches the state before a chunk by reading it: scale * decay * dO. `decays(j)`: of tokens 2 j and
/// 2 j + 1 of the thread.
template <class T, class F>
__device__ __forceinline__ void read_tokens(std::uint32_t const (&dout)[16], F&& decays, float scale,
                                            std::uint32_t (&to)[16]) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        float2 const e = decays(j / 2);
        to[j] = round_two<T>(scale * e.x * low_of<T>(dout[j]), scale * e.y * high_of<T>(dout[j]));
    }
}

/// Writes what of the gradient of a chunk's values reaches the state before it by erasing: -decay * dy.
template <class T, class F>
__device__ __forceinline__ void erase_tokens(float const (&dy)[32], F&& decays, std::uint32_t (&to)[16]) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        float2 const e = decays(j / 2);
        to[j] = round_two<T>(__fmul_rn(-e.x, dy[2 * j]), __fmul_rn(-e.y, dy[2 * j + 1])); // else products are negated
    }
}

/// The gradient of a half of the state on its way back, in the registers of a warpgroup. A walk that Folds leaves
/// nothing but the gradient before its sequence.
template <class T, int Halves, bool Folds>
struct carried_gradient {
    static constexpr bool both = Halves == 2;

    back_walk<T, Halves> const& walk;
    int const group, own, half;   ///< of the block; of the halves here; of the state
    char* trace = walk.in.states; ///< where the gradient after the next chunk is left
    half_state s;
    ring<back_walk<T, Halves>::stages> r;
    ring<back_walk<T, Halves>::dout_stages> place;
    std::uint32_t dout[16]; ///< of the next chunk
    float fading = 0;       ///< its decay of the state

    __device__ carried_gradient(back_walk<T, Halves> const& of, int warpgroup)
        : walk(of), group(warpgroup), own(both ? warpgroup - 2 : 0), half(of.first_half + own) {}
    __device__ void await_chunk();
    __device__ void leave_trace(std::uint32_t const (&after)[32]);
    __device__ void pass_chunk(int i);
};

/// Waits for a chunk, and takes what of it is kept in registers.
template <class T, int Halves, bool Folds>
__device__ __forceinline__ void carried_gradient<T, Halves, Folds>::await_chunk() {
    auto& memory = walk.memory;
    wait(memory.full[r.at], r.parity);
    wait(memory.dout_full[place.at], place.parity);
    load_transposed(memory.dout[place.at][own], dout);
    fading = memory.gates[r.at].decay[delta_chunk - 1];
}

template <class T, int Halves, bool Folds>
__device__ __forceinline__ void carried_gradient<T, Halves, Folds>::leave_trace(std::uint32_t const (&after)[32]) {
    if constexpr (Folds) return;
    store_trace(after, trace);
    trace -= walk.in.half_of(1, 0, 0) * (state_bytes / 2);
}

/// Carries the gradient past the chunk that `await_chunk` took, number `i` from behind, and takes the one before it.
template <class T, int Halves, bool Folds>
__device__ __forceinline__ void carried_gradient<T, Halves, Folds>::pass_chunk(int i) {
    auto& memory = walk.memory;
    int const at = r.at, dout_at = place.at, side = i & 1, p_at = both ? side : 0;
    std::uint32_t after[32], reading[16], erasing[16];
    round_to_operand<T>(s, after);
    scale(s, fading); // while products are under way, the compiler would await them
    token_decays held;
    if constexpr (!both) load_decays(memory.gates[at], held);
    auto const decays = [&](int j) {
        if constexpr (both)
            return decays_of(memory.gates[at], j);
        else
            return held[j];
    };
    read_tokens<T>(dout, decays, walk.in.scale, reading);
    auto const read = [&] {
        multiply_down<T>(s, reading, memory.queries[at], true);
        cute::warpgroup_commit_batch();
        leave_trace(after);
    };
    if constexpr (both) { // fewer registers; the other half's products fill the gap
        keep(s);
        cute::warpgroup_arrive();
        read();
        take_turn(group);
    }
    wait(memory.x_full[side], i >> 1 & 1);
    wait(memory.p_full[p_at], (both ? i >> 1 : i) & 1);
    if constexpr (both) cute::warpgroup_wait<0>();
    float dy[32];
    keep(dy);
    keep(s);
    cute::warpgroup_arrive();
    multiply_along<T, 8, both ? 0 : 2>(dy, after, memory.x[side], false);
    multiply_down<T>(dy, dout, memory.p[p_at], true);
    cute::warpgroup_commit_batch();
    if constexpr (!both) read();
    cute::warpgroup_wait<both ? 0 : 1>();
    keep(dy);
    erase_tokens<T>(dy, decays, erasing);
    cute::warpgroup_arrive();
    multiply_down<T, both ? 1 : 0>(s, erasing, memory.keys[at], true);
    cute::warpgroup_commit_batch();
    if constexpr (both) give_turn(5 - group);
    if constexpr (Folds) arrive_warp(memory.dout_empty[dout_at]); // now it is in registers for sure: see `arrive_warp`
    arrive_warp(memory.p_empty[p_at]);
    arrive_warp(memory.x_empty[side]);
    if (!both && walk.paired) arrive_warp(memory.x_empty[side], half ^ 1);
    if constexpr (!Folds) {
        std::uint32_t dv[16];
        round_to_operand<T>(dy, dv);
        store_transposed(dv, memory.dout[dout_at][own]);
    }
    r.next();
    place.next();
    if (i + 1 < walk.chunks) await_chunk();
    if constexpr (!Folds) {
        cutlass::arch::fence_view_async_shared(); // waits for what was written
        arrive_warp(memory.dvalues_full[dout_at][own]);
    }
    cute::warpgroup_wait<0>();
    keep(s);
    arrive_warp(memory.empty[at]);
}

/// Carries the gradient of a half of the state, by warpgroup `group` of the block.
template <class T, int Halves>
template <bool Folds>
__device__ __forceinline__ void back_walk<T, Halves>::carry_gradient(int group) const {
    carried_gradient<T, Halves, Folds> gradient(*this, group);
    load_state(in.initial ? in.initial + in.given_of(number, head) : nullptr, in.dims, gradient.half, gradient.s);
    if constexpr (!Folds)
        gradient.trace += in.half_of(sequence.first_chunk + chunks - 1, head, gradient.half) * (state_bytes / 2);
    if (chunks > 0) gradient.await_chunk();
    if (both && group == 3 && chunks > 0) give_turn(2);
    for (int i = 0; i < chunks; ++i) gradient.pass_chunk(i);
    if (in.last) store_state(gradient.s, in.dims, gradient.half, in.last + in.given_of(number, head));
}

/// Clears what is never written, and makes the barriers.
template <int Halves, bool Folds>
__device__ __forceinline__ void begin_walk_back(dstate_memory<Halves>& memory, bool paired) {
    using layout = dstate_memory<Halves>;
    constexpr bool both = Halves == 2;
    clear_triangles(memory.inverse);
    if (threadIdx.x == 0) {
        for (int i = 0; i < layout::stages; ++i)
            memory.full[i].init(2), memory.empty[i].init(12), memory.gates_landed[i].init(1);
        for (int i = 0; i < layout::dout_stages; ++i) {
            memory.inverse_full[i].init(1), memory.inverse_empty[i].init(both ? 4 : 8);
            memory.dout_full[i].init(1), memory.dout_empty[i].init(Folds ? 4 * Halves : Halves);
            for (auto& full : memory.dvalues_full[i]) full.init(4);
        }
        for (int i = 0; i < Halves; ++i) memory.p_full[i].init(4), memory.p_empty[i].init(4 * Halves);
        for (int i = 0; i < 2; ++i) memory.x_full[i].init(4), memory.x_empty[i].init(both || paired ? 8 : 4);
        memory.landed.init(1), memory.dout_landed.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if (paired) cute::cluster_sync();
}

/// Walks back along Halves halves of the value channels of a sequence and value head, `block` of all of them; `initial`
/// and `last` of the walk are the gradients of the states after the sequences and before them. By two warps that load,
/// one for each half that stores and, of one half, one that completes gates; a warpgroup each for P, X and the
/// gradient of a half, or one for P and X and one each for the gradients of both halves. One that Folds leaves nothing
/// but the gradient before the sequence.
template <class T, int Halves, bool Folds = false>
__device__ __forceinline__ void walk_back(CUtensorMap const& queries, CUtensorMap const& keys, CUtensorMap const& dout,
                                          CUtensorMap const& dvalues, delta_walk const& in, delta_dvalues<T> const& to,
                                          int block) {
    using layout = dstate_memory<Halves>;
    auto& memory = shared_memory<layout>();
    constexpr bool both = Halves == 2;
    bool const paired = !both && cute::cluster_shape().x == 2;
    begin_walk_back<Halves, Folds>(memory, paired);
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const heads = in.key_heads * in.group, first_half = both ? 0 : block % 2;
    int const head = block * Halves / 2 % heads, number = block * Halves / 2 / heads;
    delta_sequence const sequence = in.plan.sequences[number];
    int const chunks = sequence.chunks, group = static_cast<int>(threadIdx.x) / 128;
    back_walk<T, Halves> const walk{in, memory, heads, first_half, head, number, sequence, chunks, paired};
    if (group == 0) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        int const warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
        if (warp == 0)
            walk.load_keys(queries, keys, lane);
        else if (warp == 1)
            walk.load_dout(dout, lane);
        else if (!Folds && warp < 2 + Halves)
            walk.store_values(dvalues, to, both ? warp - 2 : 0, lane);
        else if (!both && warp == 3)
            gates_maker<layout, true>{}.make(memory, chunks);
    } else if (group == 1) {
        cutlass::arch::warpgroup_reg_dealloc<104>();
        walk.make_p();
    } else if (!both && group == 3) {
        cutlass::arch::warpgroup_reg_dealloc<128>();
        walk.make_x();
    } else {
        cutlass::arch::warpgroup_reg_alloc<both ? 184 : 232>();
        walk.template carry_gradient<Folds>(group);
    }
    if (paired) leave_cluster();
}

} // namespace delta
#endif

/// Threads of a block of `delta_rule_walks`, and how many blocks a multiprocessor has.
template <bool Erases>
constexpr int delta_walks_threads = Erases ? 512 : 256;
template <bool Erases>
constexpr int delta_walks_blocks = Erases ? 1 : 2;

/// Walks back along all sequences, by sequences * value heads * 2 / Halves blocks of `delta_walks_threads`, and along
/// them, beside each other: by as many, or, of both halves, by as many as are wanted; or one of both, alone. `backs`:
/// how many blocks walk back, none or all. Of one half, in clusters of two, they share X. Where nothing is erased no
/// gradients of values are written.
///
/// One that Folds makes no more on its way back than the gradients before sequences, `back.last`, that their outputs
/// alone make; where nothing is erased `delta_rule_fold` does.
template <class T, int Halves, bool Erases, bool Folds = false>
static __global__ void __launch_bounds__(delta_walks_threads<Erases>, delta_walks_blocks<Erases>)
    delta_rule_walks(__grid_constant__ CUtensorMap const queries, __grid_constant__ CUtensorMap const keys,
                     __grid_constant__ CUtensorMap const values, __grid_constant__ CUtensorMap const dout,
                     __grid_constant__ CUtensorMap const dvalues, delta_walk const along, delta_walk const back,
                     delta_dvalues<T> const to, int backs) {
    static_assert(Erases || !Folds);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    int const block = static_cast<int>(blockIdx.x);
    if (block >= backs)
        delta::walk_along<T, true, Halves, Erases>(keys, values, along, backs);
    else if constexpr (Erases)
        delta::walk_back<T, Halves, Folds>(queries, keys, dout, dvalues, back, to, block); // which takes longer
    else
        delta::walk_along<T, true, Halves, false, true>(queries, dout, back, 0);
#endif
}

} // namespace cpx::kernels
