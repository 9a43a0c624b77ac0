// SPDX-License-Identifier: Apache-2.0
// What a walk back along a sequence does beside carrying the gradient of the state (sm_90a): loads, P and X, stores.
#pragma once

#include <cpx/delta_rule_main.cuh>

namespace cpx::kernels {

namespace delta {

/// Queries, keys and gates come long before they are wanted: first P and X are made of them.
template <std::size_t Halves>
struct dstate_memory {
    static constexpr std::size_t stages = Halves == 2 ? 3 : 4, dout_stages = 3;
    char queries[stages][2 * panel_bytes], keys[stages][2 * panel_bytes];
    char inverse[dout_stages][panel_bytes];
    /// And then gradients of values: a warp writes where it alone has read.
    char dout[dout_stages][Halves][panel_bytes];
    char p[Halves][panel_bytes], x[2][2 * panel_bytes];
    chunk_gates gates[stages];
    barrier full[stages], empty[stages], gates_landed[stages], inverse_full[dout_stages], inverse_empty[dout_stages];
    barrier dout_full[dout_stages], dout_empty[dout_stages], dvalues_full[dout_stages][Halves];
    barrier p_full[Halves], p_empty[Halves], x_full[2], x_empty[2], landed, dout_landed;
};

} // namespace delta

/// What a walk back writes besides gradients of states after chunks, `delta_walk::states`.
template <class T>
struct delta_dvalues {
    delta_head_rows<T> rows; ///< dV, of value heads
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace delta {

/// A walk back along Halves halves of the value channels of a sequence and value head, and what does not carry the
/// gradient in it, by its role.
template <class T, int Halves>
struct back_walk {
    using layout = dstate_memory<Halves>;
    static constexpr bool both = Halves == 2;
    static constexpr int stages = layout::stages, dout_stages = layout::dout_stages;

    delta_walk const& in;
    layout& memory;
    int heads, first_half, head, number; ///< value heads in all; of the walk, as the number of its sequence
    delta_sequence sequence;
    int chunks;  ///< of the sequence
    bool paired; ///< with the block of the other half, of the same cluster: either makes half of X for both

    // A warp each:
    __device__ void load_keys(CUtensorMap const& queries, CUtensorMap const& keys, int lane) const;
    __device__ void load_dout(CUtensorMap const& dout, int lane) const;
    __device__ void store_values(CUtensorMap const& dvalues, delta_dvalues<T> const& to, int own, int lane) const;
    // A warpgroup each:
    __device__ void make_p() const;
    __device__ void make_x() const;
    template <bool Folds>
    __device__ void carry_gradient(int group) const;
};

/// Loads queries, keys and what is prepared.
template <class T, int Halves>
__device__ __forceinline__ void back_walk<T, Halves>::load_keys(CUtensorMap const& queries, CUtensorMap const& keys,
                                                                int lane) const {
    ring<stages> r;
    ring<dout_stages> d;
    for (int c = chunks - 1, landings = 0; c >= 0; --c, r.next(), d.next()) {
        int const row = sequence.chunk_begin(c), n = sequence.chunk_end(c) - row;
        std::int64_t const place = std::int64_t{sequence.first_chunk + c} * heads + head;
        bool const whole = n == delta_chunk;
        barrier& full = whole ? memory.full[r.at] : memory.landed;
        wait(memory.empty[r.at], r.parity ^ 1);
        if (lane == 0) {
            full.arrive_and_expect_tx(4 * panel_bytes);
            load_panels<2>(queries, full, memory.queries[r.at], head / in.group, row);
            load_panels<2>(keys, full, memory.keys[r.at], head / in.group, row);
            load_gates_apart(in.prepared, place, memory.gates_landed[r.at], memory.gates[r.at]);
        }
        wait(memory.inverse_empty[d.at], d.parity ^ 1);
        if (lane == 0) {
            memory.inverse_full[d.at].arrive_and_expect_tx(triangle_bytes);
            load_inverse(in.prepared, place, memory.inverse_full[d.at], memory.inverse[d.at]);
        }
        __syncwarp();
        if (whole) continue;
        wait(memory.landed, landings++ % 2);
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            clear_rows(memory.queries[r.at] + p * panel_bytes, n);
            clear_rows(memory.keys[r.at] + p * panel_bytes, n);
        }
        cutlass::arch::fence_view_async_shared();
        arrive_warp(memory.full[r.at]);
    }
}

/// Loads dO and, of both halves, completes gates: the other warps store.
template <class T, int Halves>
__device__ __forceinline__ void back_walk<T, Halves>::load_dout(CUtensorMap const& dout, int lane) const {
    ring<dout_stages> d;
    gates_maker<layout, true> maker;
    for (int c = chunks - 1, landings = 0; c >= 0; --c, d.next()) {
        int const row = sequence.chunk_begin(c), n = sequence.chunk_end(c) - row;
        bool const whole = n == delta_chunk;
        barrier& full = whole ? memory.dout_full[d.at] : memory.dout_landed;
        wait(memory.dout_empty[d.at], d.parity ^ 1);
        if (lane == 0) {
            full.arrive_and_expect_tx(Halves * panel_bytes);
            load_panels<Halves>(dout, full, memory.dout[d.at][0], head, row, first_half);
        }
        __syncwarp();
        if constexpr (both) maker.make_one(memory);
        if (whole) continue;
        wait(memory.dout_landed, landings++ % 2);
#pragma unroll
        for (int i = 0; i < Halves; ++i) clear_rows(memory.dout[d.at][i], n);
        cutlass::arch::fence_view_async_shared();
        arrive_warp(memory.dout_full[d.at]);
    }
}

/// Stores dV of a half, and says how far the walk has come.
template <class T, int Halves>
__device__ __forceinline__ void
back_walk<T, Halves>::store_values(CUtensorMap const& dvalues, delta_dvalues<T> const& to, int own, int lane) const {
    ring<dout_stages> d;
    for (int c = chunks - 1; c >= 0; --c, d.next()) {
        int const begin = sequence.chunk_begin(c), n = sequence.chunk_end(c) - begin;
        wait(memory.dvalues_full[d.at][own], d.parity);
        store_rows(dvalues, to.rows, memory.dout[d.at][own], head, first_half + own, begin, n);
        arrive_warp(memory.dout_empty[d.at]);
        if (int const done = chunks - c; lane == 0 && (done % walk_chunks == 0 || c == 0)) {
            await_stores<0>();
            publish(in.plan.flags + 2 * in.half_of(number, head, first_half + own) + 1, done);
        }
    }
}

/// Makes P, and of both halves X.
template <class T, int Halves>
__device__ __forceinline__ void back_walk<T, Halves>::make_p() const {
    ring<stages> r;
    ring<dout_stages> a;
    ring<Halves> p;
    ring<2> x;
    for (int i = 0; i < chunks; ++i, r.next(), a.next(), p.next(), x.next()) {
        wait(memory.full[r.at], r.parity);
        wait(memory.inverse_full[a.at], a.parity);
        std::uint32_t words[16];
        compute_p<T, true>(memory.queries[r.at], memory.keys[r.at], memory.inverse[a.at], memory.gates[r.at], in.scale,
                           words, [] {}); // awaiting p_empty there would cost registers that are not left
        if constexpr (!both) {
            arrive_warp(memory.inverse_empty[a.at]);
            arrive_warp(memory.empty[r.at]);
        }
        wait(memory.p_empty[p.at], p.parity ^ 1);
        store_operand(words, memory.p[p.at]);
        cutlass::arch::fence_view_async_shared();
        arrive_warp(memory.p_full[p.at]);
        if constexpr (both) {
            wait(memory.x_empty[x.at], x.parity ^ 1);
            compute_x<T>(memory.inverse[a.at], memory.keys[r.at], memory.gates[r.at], memory.x[x.at]);
            cutlass::arch::fence_view_async_shared();
            arrive_warp(memory.x_full[x.at]);
            arrive_warp(memory.inverse_empty[a.at]);
            arrive_warp(memory.empty[r.at]);
        }
    }
}

/// Makes X of one half.
template <class T, int Halves>
__device__ __forceinline__ void back_walk<T, Halves>::make_x() const {
    ring<stages> r;
    ring<dout_stages> a;
    ring<2> x;
    for (int i = 0; i < chunks; ++i, r.next(), a.next(), x.next()) {
        wait(memory.full[r.at], r.parity);
        wait(memory.inverse_full[a.at], a.parity);
        wait(memory.x_empty[x.at], x.parity ^ 1);
        make_one_x<T>(memory.inverse[a.at], memory.keys[r.at], memory.gates[r.at], memory.x[x.at], memory.x_full[x.at],
                      paired, first_half);
        arrive_warp(memory.x_full[x.at]);
        arrive_warp(memory.inverse_empty[a.at]);
        arrive_warp(memory.empty[r.at]);
    }
}

} // namespace delta
#endif

} // namespace cpx::kernels
