// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's outputs (sm_90a), of all stretches of sequences beside each other.
//
//     P = s (lower(Q K^T) A) . decay diag(b),    O = s diag(e) Q S + P Y
//
// and where nothing is erased P = s lower(Q K^T) . decay and Y = V.
#pragma once

#include <cpx/delta_rule_main_tokens.cuh>
#include <cpx/delta_rule_state.cuh>

#include <cstddef>

namespace cpx::kernels {

namespace delta {

template <bool Erases>
struct main_memory : erasing_memory<Erases, 3> {
    static constexpr std::size_t stages = Erases ? 3 : 4;
    char queries[stages][2 * panel_bytes], keys[stages][2 * panel_bytes];
    char values[stages][2][panel_bytes]; ///< and then outputs: a warp writes where it alone has read
    char p[2][panel_bytes];
    chunk_gates gates[stages];
    barrier full[stages], empty[stages], gates_landed[stages], values_full[stages], values_empty[stages],
        out_full[stages][2];
    barrier aux_full[2], aux_empty[2], landed, values_landed;
};

} // namespace delta

/// What `delta_rule_main` writes, of value heads.
template <class T>
struct delta_output {
    delta_head_rows<T> rows;
    delta_share share; ///< all, if the walk's `last` is wanted of these blocks
    bool after_state;  ///< launched early after `delta_rule_state`, whose flags it awaits; else after all before it
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace delta {

/// Clears what is never written, and makes the barriers.
template <bool Erases>
__device__ __forceinline__ void begin_main(main_memory<Erases>& memory) {
    constexpr int stages = static_cast<int>(main_memory<Erases>::stages);
    if constexpr (Erases) clear_triangles(memory.inverse);
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            memory.full[i].init(2), memory.empty[i].init(12), memory.gates_landed[i].init(1);
            memory.values_full[i].init(1), memory.values_empty[i].init(2);
            for (int half = 0; half < 2; ++half) memory.out_full[i][half].init(4);
        }
        for (int i = 0; i < 2; ++i) memory.aux_full[i].init(4), memory.aux_empty[i].init(8);
        memory.landed.init(1), memory.values_landed.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
}

/// A stretch and value head, and what does not carry their state in it, by its role.
template <class T, bool Erases>
struct main_block {
    static constexpr int stages = static_cast<int>(main_memory<Erases>::stages);

    delta_walk const& in;
    main_memory<Erases>& memory;
    int heads, head; ///< value heads in all; the stretch's
    delta_sequence sequence;
    int first, last; ///< chunks

    // For the warp that loads:
    __device__ void load_keys(CUtensorMap const& queries, CUtensorMap const& keys, barrier& full, int at, int c) const;
    __device__ void load(CUtensorMap const& queries, CUtensorMap const& keys, CUtensorMap const& values) const;
    // For a warp that stores:
    __device__ void store(CUtensorMap const& outputs, delta_output<T> const& to, int half) const;
    // A warpgroup:
    __device__ void make_p() const;
    // For a warpgroup that carries half the state, or would, where heads have no channels of that half:
    __device__ void pass(int group) const;
    __device__ void carry(delta_stretch const& stretch, delta_output<T> const& to, int group) const;
    __device__ void erase_and_read(half_state& s, std::uint32_t const (&f)[32], std::uint32_t const (&v)[16], int at,
                                   int i, int group, float (&o)[32], std::uint32_t (&y)[16]) const;
    __device__ void write_and_read(half_state& s, std::uint32_t const (&f)[32], std::uint32_t const (&v)[16], int at,
                                   int i, int group, float (&o)[32], std::uint32_t (&y)[16]) const;
};

/// Asks for a chunk's queries, keys and gates, and A, by a thread.
template <class T, bool Erases>
__device__ __forceinline__ void main_block<T, Erases>::load_keys(CUtensorMap const& queries, CUtensorMap const& keys,
                                                                 barrier& full, int at, int c) const {
    int const row = sequence.chunk_begin(c);
    full.arrive_and_expect_tx(4 * panel_bytes + (Erases ? triangle_bytes : 0));
    load_panels<2>(queries, full, memory.queries[at], head / in.group, row);
    load_panels<2>(keys, full, memory.keys[at], head / in.group, row);
    std::int64_t const place = std::int64_t{sequence.first_chunk + c} * heads + head;
    load_gates_apart(in.prepared, place, memory.gates_landed[at], memory.gates[at]);
    if constexpr (Erases) load_inverse(in.prepared, place, full, memory.inverse[at]);
}

/// Loads a stretch, by a warp.
template <class T, bool Erases>
__device__ __forceinline__ void main_block<T, Erases>::load(CUtensorMap const& queries, CUtensorMap const& keys,
                                                            CUtensorMap const& values) const {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    ring<stages> r;
    for (int c = first, landings = 0; c < last; ++c, r.next()) {
        int const row = sequence.chunk_begin(c), n = sequence.chunk_end(c) - row;
        bool const whole = n == delta_chunk;
        barrier& full = whole ? memory.full[r.at] : memory.landed;
        wait(memory.empty[r.at], r.parity ^ 1);
        if (lane == 0) load_keys(queries, keys, full, r.at, c);
        barrier& values_full = whole ? memory.values_full[r.at] : memory.values_landed;
        wait(memory.values_empty[r.at], r.parity ^ 1);
        if (lane == 0) {
            values_full.arrive_and_expect_tx(2 * panel_bytes);
            load_panels<2>(values, values_full, memory.values[r.at][0], head, row);
        }
        __syncwarp();
        if (whole) continue;
        wait(memory.landed, landings % 2);
        wait(memory.values_landed, landings++ % 2);
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            clear_rows(memory.keys[r.at] + p * panel_bytes, n);
            clear_rows(memory.values[r.at][p], n);
        }
        cutlass::arch::fence_view_async_shared();
        arrive_warp(memory.full[r.at]);
        arrive_warp(memory.values_full[r.at]);
    }
}

/// Stores the outputs of half the channels, by a warp.
template <class T, bool Erases>
__device__ __forceinline__ void main_block<T, Erases>::store(CUtensorMap const& outputs, delta_output<T> const& to,
                                                             int half) const {
    ring<stages> r;
    for (int c = first; c < last; ++c, r.next()) {
        int const begin = sequence.chunk_begin(c), n = sequence.chunk_end(c) - begin;
        char* const out = memory.values[r.at][half];
        wait(memory.out_full[r.at][half], r.parity);
        store_rows(outputs, to.rows, out, head, half, begin, n);
        arrive_warp(memory.values_empty[r.at]);
    }
}

/// Makes P, and X unless nothing is erased.
template <class T, bool Erases>
__device__ __forceinline__ void main_block<T, Erases>::make_p() const {
    ring<stages> r;
    ring<2> b;
    for (int c = first; c < last; ++c, r.next(), b.next()) {
        wait(memory.full[r.at], r.parity);
        std::uint32_t words[16];
        char const* inverse = nullptr;
        if constexpr (Erases) inverse = memory.inverse[r.at];
        compute_p<T, Erases>(memory.queries[r.at], memory.keys[r.at], inverse, memory.gates[r.at], in.scale, words,
                             [&] { wait(memory.aux_empty[b.at], b.parity ^ 1); });
        store_operand(words, memory.p[b.at]);
        if constexpr (Erases) compute_x<T>(inverse, memory.keys[r.at], memory.gates[r.at], memory.x[b.at]);
        cutlass::arch::fence_view_async_shared();
        arrive_warp(memory.aux_full[b.at]);
        arrive_warp(memory.empty[r.at]);
    }
}

/// Makes Y, takes the state over a chunk, and computes what queries read of the state before it, f.
template <class T, bool Erases>
__device__ __forceinline__ void
main_block<T, Erases>::erase_and_read(half_state& s, std::uint32_t const (&f)[32], std::uint32_t const (&v)[16], int at,
                                      int i, int group, float (&o)[32], std::uint32_t (&y)[16]) const {
    float ks[32];
    take_turn(group); // or both would want products at once, and round at once
    keep(ks);
    cute::warpgroup_arrive();
    multiply_along<T, 8>(ks, f, memory.keys[at], false);
    cute::warpgroup_commit_batch();
    token_decays e;
    load_decays(memory.gates[at], e);
    wait(memory.aux_full[i & 1], i >> 1 & 1);
    cute::warpgroup_wait<0>();
    keep(ks);
    subtract<T>(v, ks, e, y);
    keep(s);
    keep(o);
    cute::warpgroup_arrive();
    multiply_down<T, 1>(s, y, memory.x[i & 1], true);
    cute::warpgroup_commit_batch();
    give_turn(5 - group);
    cute::warpgroup_arrive();
    multiply_along<T, 8>(o, f, memory.queries[at], false);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    keep(s);
    keep(o);
    arrive_warp(memory.empty[at]);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        o[2 * j] *= in.scale * e[j / 2].x;
        o[2 * j + 1] *= in.scale * e[j / 2].y;
    }
}

/// The same where nothing is erased, Y being V; the products of the state may be under way when it returns.
template <class T, bool Erases>
__device__ __forceinline__ void
main_block<T, Erases>::write_and_read(half_state& s, std::uint32_t const (&f)[32], std::uint32_t const (&v)[16], int at,
                                      int i, int group, float (&o)[32], std::uint32_t (&y)[16]) const {
    std::uint32_t written[16];
    scale_tokens<T>(v, memory.gates[at].onward, 1.0f, written);
    keep(o);
    keep(s);
    cute::warpgroup_arrive();
    multiply_along<T, 8>(o, f, memory.queries[at], false);
    cute::warpgroup_commit_batch();
    multiply_down<T>(s, written, memory.keys[at], true);
    cute::warpgroup_commit_batch();
    wait(memory.aux_full[i & 1], i >> 1 & 1);
    cute::warpgroup_wait<1>();
    keep(o);
    load_transposed(memory.values[at][group - 2], y); // again: there were no registers for it
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        float2 const e = decays_of(memory.gates[at], j / 2);
        o[2 * j] *= in.scale * e.x;
        o[2 * j + 1] *= in.scale * e.y;
    }
}

/// Takes turns over a stretch, and says that what was loaded has been read.
template <class T, bool Erases>
__device__ __forceinline__ void main_block<T, Erases>::pass(int group) const {
    ring<stages> r;
    if (Erases && first < last) give_turn(5 - group);
#pragma unroll 1
    for (int i = 0; i < last - first; ++i, r.next()) {
        wait(memory.full[r.at], r.parity);
        wait(memory.values_full[r.at], r.parity);
        if constexpr (Erases) {
            take_turn(group);
            give_turn(5 - group);
        }
        wait(memory.aux_full[i & 1], i >> 1 & 1);
        arrive_warp(memory.empty[r.at]);
        arrive_warp(memory.aux_empty[i & 1]);
        arrive_warp(memory.out_full[r.at][group - 2]);
    }
}

/// Carries half the state over a stretch and computes the outputs of its channels, by warpgroup number `group`.
template <class T, bool Erases>
__device__ __forceinline__ void main_block<T, Erases>::carry(delta_stretch const& stretch, delta_output<T> const& to,
                                                             int group) const {
    int const count = last - first, half = group - 2;
    half_state s;
    if (stretch.number == 0) {
        load_state(in.initial ? in.initial + in.given_of(stretch.sequence, head) : nullptr, in.dims, half, s);
    } else {
        auto const place = in.half_of(sequence.first_stretch + stretch.number, head, half);
        if (to.after_state && threadIdx.x % 128 == 0) await(in.plan.flags + place, 1);
        join_group(group);
        load_words(in.snapshots + place * snapshot_words, s);
    }
    ring<stages> r;
    std::uint32_t v[16];
    float fading = 1;
    auto const await_chunk = [&] {
        wait(memory.full[r.at], r.parity);
        wait(memory.values_full[r.at], r.parity);
        load_transposed(memory.values[r.at][half], v);
        fading = memory.gates[r.at].decay[delta_chunk - 1];
    };
    // Now, or the compiler would do it between products; while they are under way, it would await them.
    auto const fade = [&] {
        scale(s, fading);
        keep(s);
    };
    std::uint32_t f[32];
    if (count > 0) await_chunk();
    if (Erases) {
        round_to_operand<T>(s, f);
        fade();
    }
    if (Erases && group == 3 && count > 0) give_turn(2);
    for (int i = 0; i < count; ++i) {
        int const at = r.at, side = i & 1;
        std::uint32_t y[16];
        if (!Erases) {
            round_to_operand<T>(s, f);
            fade();
        }
        float o[32];
        if constexpr (Erases) {
            erase_and_read(s, f, v, at, i, group, o, y);
        } else {
            write_and_read(s, f, v, at, i, group, o, y);
        }
        keep(o);
        cute::warpgroup_arrive();
        multiply_along<T, 4>(o, y, memory.p[side], true);
        cute::warpgroup_commit_batch();
        if (Erases) round_to_operand<T>(s, f);
        r.next();
        fading = 1;
        if (i + 1 < count) await_chunk();
        cute::warpgroup_wait<0>();
        if constexpr (!Erases) {
            keep(s);
            arrive_warp(memory.empty[at]);
        }
        keep(o);
        if (Erases) fade();
        arrive_warp(memory.aux_empty[side]);
        round_to_operand<T>(o, y);
        store_transposed(y, memory.values[at][half]);
        cutlass::arch::fence_view_async_shared();
        arrive_warp(memory.out_full[at][half]);
    }
    int block = static_cast<int>(blockIdx.x), all = in.group;
    asm volatile("" : "+r"(block), "+r"(all)); // or what follows would be kept in registers that are wanted above
    all *= in.key_heads;
    delta_stretch const done = in.plan.stretches[block / all];
    if (in.last && done.number + 1 == done.of.stretches)
        store_state(s, in.dims, half, in.last + in.given_of(done.sequence, block % all));
}

} // namespace delta
#endif

/// A block computes the outputs of a stretch of a sequence and value head. A grid of (stretches of the share at most) *
/// value heads blocks of 512 threads: a warp that loads, one that completes gates, a warpgroup that makes P and X one
/// chunk ahead, two that have half a state each.
template <class T, bool Erases>
static __global__ void __launch_bounds__(512, 1)
    delta_rule_main(__grid_constant__ CUtensorMap const queries, __grid_constant__ CUtensorMap const keys,
                    __grid_constant__ CUtensorMap const values, __grid_constant__ CUtensorMap const outputs,
                    delta_walk const in, delta_output<T> const to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace delta;
    auto& memory = shared_memory<main_memory<Erases>>();
    int const heads = in.key_heads * in.group, head = static_cast<int>(blockIdx.x) % heads;
    int number = static_cast<int>(blockIdx.x) / heads, end = in.plan.most_stretches;
    int const group = static_cast<int>(threadIdx.x) / 128;
    if (!to.after_state) wait_for_previous_kernel();
    if (to.share.first > 0) number += delta_share::stretches(in.plan, to.share.first);
    if (to.share.last < delta_share::all) end = delta_share::stretches(in.plan, to.share.last);
    if (number >= end) return;
    delta_stretch const stretch = in.plan.stretches[number];
    begin_main<Erases>(memory); // while that is on its way
    if (stretch.sequence < 0) return;
    int const first = in.plan.cut.begin(stretch.number, stretch.of.stretches);
    int const last = in.plan.end_of(stretch.of, stretch.number);
    main_block<T, Erases> const work{in, memory, heads, head, stretch.of, first, last};
    if (group == 0) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        int const warp = static_cast<int>(threadIdx.x) / 32;
        if (warp == 0) {
            work.load(queries, keys, values);
        } else if (warp >= 2) {
            work.store(outputs, to, warp - 2);
        } else {
            gates_maker<main_memory<Erases>, true>{}.make(memory, last - first);
            if (to.after_state && number + 1 == delta_share::stretches(in.plan, to.share.last))
                wait_for_previous_kernel(); // or those after this one might come before the walks have ended
        }
    } else if (group == 1) {
        cutlass::arch::warpgroup_reg_dealloc<104>();
        work.make_p();
    } else if (group == 3 && in.dims.value <= 64) {
        work.pass(group);
    } else {
        cutlass::arch::warpgroup_reg_alloc<184>();
        work.carry(stretch, to, group);
    }
#endif
}

} // namespace cpx::kernels
