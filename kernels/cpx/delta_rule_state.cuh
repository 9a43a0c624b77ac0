// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's chain (sm_90a): states before the stretches of a sequence, or before its chunks, with nothing
// but the state.
#pragma once

#include <cpx/delta_rule_walk.cuh>

namespace cpx::kernels {

namespace delta {

/// What a walk along has for states that it leaves. Sends: halves of those before chunks, on their way to memory by the
/// copy engine, as `walk_along` wants where something is erased and it is Traced; else threads write them themselves.
template <bool Sends>
struct left_states {
    char traces[2][state_bytes / 2];
    barrier full[2], empty[2];
};
template <>
struct left_states<false> {
    barrier written, seen;
};

/// Chunks that a walk along loads ahead; of both halves, both of which it sends, one less.
template <std::size_t Halves>
constexpr std::size_t state_stages = Halves == 2 ? 3 : 4;

/// A block with one half makes X two chunks ahead, of which half may come from the other half's block.
template <std::size_t Halves, bool Erases, bool Sends = false>
struct state_memory : erasing_memory<Erases, state_stages<Halves>, Halves == 1 ? 3 : 2> {
    static_assert(Halves == 1 || Sends);
    static_assert(sizeof(left_states<Sends>) % 16 == 0, "the copy engine writes gates");
    static constexpr std::size_t stages = state_stages<Halves>;
    static constexpr std::size_t xs = Halves == 1 ? 3 : 2;
    char keys[stages][2 * panel_bytes], values[stages][Halves][panel_bytes];
    left_states<Sends> left;
    chunk_gates gates[stages];
    barrier full[stages], empty[stages], gates_landed[stages], x_full[xs], read[xs], landed;
};

} // namespace delta

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace delta {

/// Clears what is never written, and makes the barriers. `paired`: in a cluster with the block of the other half.
template <std::size_t Halves, bool Erases, bool Sends>
__device__ __forceinline__ void begin_walk(state_memory<Halves, Erases, Sends>& memory, bool paired) {
    constexpr int stages = state_memory<Halves, Erases, Sends>::stages, first_group = Erases ? 2 : 1;
    constexpr int halves = static_cast<int>(Halves);
    if constexpr (Erases) clear_triangles(memory.inverse);
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i)
            memory.full[i].init(2), memory.gates_landed[i].init(1),
                memory.empty[i].init(4 * (first_group - 1) + 4 * halves);
        for (barrier& full : memory.x_full) full.init(4);
        for (barrier& read : memory.read) read.init(4 * (paired ? 2 : halves));
        memory.landed.init(1);
        if constexpr (Sends)
            for (int i = 0; i < 2; ++i) memory.left.full[i].init(4), memory.left.empty[i].init(1);
        else
            memory.left.written.init(4 * halves), memory.left.seen.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if (paired) cute::cluster_sync(); // or what the other block sends might come before there are barriers
}

/// A sequence and value head along which a block walks.
struct walked_head {
    delta_sequence sequence;
    int number, head; ///< of the sequence
    int chunks;       ///< all or, if only states before stretches are wanted, those up to its last stretch

    /// Number `place` of all sequences, value heads and 2 / Halves ranges of their channels.
    template <bool Traced, int Halves>
    static __device__ __forceinline__ walked_head at(delta_walk const& in, int place) {
        int const heads = in.key_heads * in.group, chain = place * Halves / 2;
        delta_sequence const sequence = in.plan.sequences[chain / heads];
        return {sequence, chain / heads, chain % heads,
                Traced || in.last ? sequence.chunks : in.plan.cut.begin(sequence.stretches - 1, sequence.stretches)};
    }
};

/// Calls `f(walked_head)` for what a block walks along, of the blocks from number `before` on.
template <bool Traced, int Halves, class F>
__device__ __forceinline__ void each_head(delta_walk const& in, int before, F&& f) {
    int place = static_cast<int>(blockIdx.x) - before;
    if constexpr (Halves == 1) {
        f(walked_head::at<Traced, 1>(in, place));
    } else {
        asm volatile("" : "+r"(place)); // or it would be kept from the kernel's beginning on
        while (place < in.plan.count * in.key_heads * in.group) {
            f(walked_head::at<Traced, 2>(in, place));
            int blocks = static_cast<int>(gridDim.x);
            asm volatile("" : "+r"(blocks)); // likewise
            place += blocks - before;
        }
    }
}

/// What the warp that loads keys, values and gates of a walk along, and X's operand where something is erased, knows of
/// the block's memory.
template <int Stages>
struct along_loads {
    ring<Stages> r;
    int landings = 0;
};

/// Loads a sequence of a walk along, by a warp.
template <int Halves, bool Erases, bool Sends, bool Back>
__device__ __forceinline__ void load_along(CUtensorMap const& keys, CUtensorMap const& values, delta_walk const& in,
                                           state_memory<Halves, Erases, Sends>& memory, walked_head const& walked,
                                           int first_half,
                                           along_loads<state_memory<Halves, Erases, Sends>::stages>& at) {
    int const heads = in.key_heads * in.group, head = walked.head;
    delta_sequence const& sequence = walked.sequence;
    auto& [r, landings] = at;
    for (int i = 0; i < walked.chunks; ++i, r.next()) {
        int const c = Back ? walked.chunks - 1 - i : i;
        int const row = sequence.chunk_begin(c), n = sequence.chunk_end(c) - row;
        bool const whole = n == delta_chunk;
        barrier& full = whole ? memory.full[r.at] : memory.landed;
        wait(memory.empty[r.at], r.parity ^ 1);
        if (threadIdx.x == 0) {
            full.arrive_and_expect_tx((2 + Halves) * panel_bytes + (Erases ? triangle_bytes : 0));
            load_panels<2>(keys, full, memory.keys[r.at], head / in.group, row);
            std::int64_t const place = std::int64_t{sequence.first_chunk + c} * heads + head;
            load_gates_apart(in.prepared, place, memory.gates_landed[r.at], memory.gates[r.at]);
            if constexpr (Erases) load_inverse(in.prepared, place, full, memory.inverse[r.at]);
            load_panels<Halves>(values, full, memory.values[r.at][0], head, row, first_half);
        }
        __syncwarp();
        if (whole) continue;
        wait(memory.landed, landings++ % 2);
        clear_rows(memory.keys[r.at], n);
        clear_rows(memory.keys[r.at] + panel_bytes, n);
#pragma unroll
        for (int i = 0; i < Halves; ++i) clear_rows(memory.values[r.at][i], n);
        cutlass::arch::fence_view_async_shared();
        arrive_warp(memory.full[r.at]);
    }
}

/// Returns how many chunks a walk goes before it tells so for the `i`th time: to the next stretch or, Traced, always as
/// many.
template <bool Traced>
__device__ __forceinline__ int chunks_to_tell(delta_walk const& in, walked_head const& walked, int i) {
    return Traced ? walk_chunks : in.plan.cut.length(i, walked.sequence.stretches);
}

/// Tells the other kernels that a walk, Traced, has come past so many chunks.
template <int Halves, bool Back>
__device__ __forceinline__ void publish_chunks(delta_walk const& in, walked_head const& walked, int first_half,
                                               int chunks) {
#pragma unroll
    for (int half = first_half; half < first_half + Halves; ++half)
        publish(in.plan.flags + 2 * in.half_of(walked.number, walked.head, half) + (Back ? 1 : 0), chunks);
}

/// The thread that tells the other kernels how far a walk along of one half has come, every so many chunks: that takes
/// long.
template <bool Traced, bool Erases, bool Back>
__device__ __forceinline__ void publish_along(delta_walk const& in, state_memory<1, Erases>& memory,
                                              walked_head const& walked, int half, int& parity) {
    for (int c = 0, told = 0; c < walked.chunks; parity ^= 1) {
        c = min(c + chunks_to_tell<Traced>(in, walked, told++), walked.chunks);
        wait(memory.left.written, parity);
        memory.left.seen.arrive();
        if constexpr (Traced)
            publish_chunks<1, Back>(in, walked, half, c);
        else // of a last stretch nobody awaits the flag
            publish(in.plan.flags + in.half_of(walked.sequence.first_stretch + told, walked.head, half), 1);
    }
}

/// The thread that sends the states before chunks, and tells the other kernels how many are there.
template <int Halves>
__device__ __forceinline__ void send_traces(delta_walk const& in, state_memory<Halves, true, true>& memory,
                                            walked_head const& walked, int first_half, ring<2>& r) {
    constexpr int bytes = state_bytes / 2;
    for (int c = 0; c < walked.chunks; ++c) {
        int const chunk = walked.sequence.first_chunk + c;
#pragma unroll
        for (int half = 0; half < Halves; ++half, r.next()) {
            wait(memory.left.full[r.at], r.parity);
            cute::SM90_BULK_COPY_S2G::copy(
                memory.left.traces[r.at], in.states + in.half_of(chunk, walked.head, first_half + half) * bytes, bytes);
            cute::tma_store_arrive();
            cute::tma_store_wait<1>(); // the one before has been read
            if (c + half > 0) memory.left.empty[r.at ^ 1].arrive();
        }
        if (c > 0 && c % walk_chunks == 0) { // but for this chunk's
            await_stores<Halves>();
            publish_chunks<Halves, false>(in, walked, first_half, c);
        }
    }
    await_stores<0>();
    if (walked.chunks == 0) return;
    memory.left.empty[r.at ^ 1].arrive();
    publish_chunks<Halves, false>(in, walked, first_half, walked.chunks);
}

/// What a warpgroup that carries half a state knows of the block's memory.
template <class Memory, int Traces>
struct along_carry {
    ring<Memory::stages> r;
    ring<Memory::xs> x;
    ring<Traces> trace;
    int parity = 1;
};

/// Carries half a state along, number `own` of those of the block.
template <class T, bool Traced, int Halves, bool Erases, bool Back, bool Sends>
__device__ __forceinline__ void
carry_along(delta_walk const& in, state_memory<Halves, Erases, Sends>& memory, walked_head const& walked, int own,
            int half, along_carry<state_memory<Halves, Erases, Sends>, 2 / Halves>& at, int peer) {
    auto& [r, x, trace, parity] = at;
    int const number = walked.number, head = walked.head, chunks = walked.chunks;
    half_state s;
    load_state(in.initial ? in.initial + in.given_of(number, head) : nullptr, in.dims, half, s);
    float* snapshot = in.snapshots + in.half_of(walked.sequence.first_stretch + 1, head, half) * snapshot_words;
    char* states = // where threads write them
        in.states + in.half_of(walked.sequence.first_chunk + (Back ? chunks - 1 : 0), head, half) * (state_bytes / 2);
    int told = 0, to_go = chunks_to_tell<Traced>(in, walked, told);
    std::uint32_t v[16];
    float fading = 0;
    auto const await_chunk = [&] {
        wait(memory.full[r.at], r.parity);
        load_transposed(memory.values[r.at][own], v);
        fading = memory.gates[r.at].decay[delta_chunk - 1];
    };
    if (chunks > 0) await_chunk();
    for (int c = 0; c < chunks; ++c, x.next()) {
        std::uint32_t f[32];
        if constexpr (Erases || Traced) round_to_operand<T>(s, f);
        scale(s, fading); // while products are under way, the compiler would await them
        auto const leave_trace = [&] {
            if constexpr (Sends) {
                int const place = Halves == 2 ? own : trace.at;
                wait(memory.left.empty[place], trace.parity ^ 1);
                put_trace(f, memory.left.traces[place]);
                cutlass::arch::fence_view_async_shared();
                arrive_warp(memory.left.full[place]);
                trace.next();
            } else if constexpr (Traced) {
                store_trace(f, states);
                states += (Back ? -1 : 1) * in.half_of(1, 0, 0) * (state_bytes / 2);
            }
        };
        if constexpr (Erases) {
            erase_and_write<T>(memory, r.at, x, f, v, s, leave_trace, peer);
        } else {
            write_tokens<T, Back>(memory.gates[r.at], memory.keys[r.at], in.scale, v, s);
            leave_trace();
        }
        barrier& read = memory.empty[r.at];
        r.next();
        if (c + 1 < chunks) await_chunk();
        cute::warpgroup_wait<0>();
        keep(s);
        if constexpr (!Erases) arrive_warp(read);
        if constexpr (!Sends) {
            if (--to_go > 0 && c + 1 < chunks) continue;
            to_go = chunks_to_tell<Traced>(in, walked, ++told);
            if (!Traced && !(in.last && c + 1 == chunks)) {
                store_words(s, snapshot);
                snapshot += in.half_of(1, 0, 0) * snapshot_words;
            }
            wait(memory.left.seen, parity);
            parity ^= 1;
            arrive_warp(memory.left.written);
        }
    }
    if constexpr (Back || !Traced)
        if (in.last) store_state(s, in.dims, half, in.last + in.given_of(number, head));
}

/// Walks along Halves halves of the value channels of what one of the blocks from number `before` on has: one half of a
/// sequence and value head up to its last stretch, or of all of it if its last state is wanted or, Traced, the states
/// before all chunks instead of those before stretches; or both halves of one sequence and value head after the other.
/// By a warp that loads, one that completes gates, a warpgroup that makes X, unless nothing is erased, one for each
/// half that has its state; and by a thread that tells how far they have come, and sends what they leave.
///
/// Where nothing is erased the gradient of the state is a walk Back: with queries for keys, dO for values.
template <class T, bool Traced, int Halves, bool Erases, bool Back = false>
__device__ __forceinline__ void walk_along(CUtensorMap const& keys, CUtensorMap const& values, delta_walk const& in,
                                           int before) {
    static_assert(!(Erases && Back) && (Traced || !Back) && (Traced || Halves == 1));
    constexpr bool sends = Traced && Erases;
    using layout = state_memory<Halves, Erases, sends>;
    auto& memory = shared_memory<layout>();
    constexpr int first_group = Erases ? 2 : 1;
    bool const paired = Erases && Halves == 1 && cute::cluster_shape().x == 2;
    begin_walk<Halves, Erases, sends>(memory, paired);
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const first_half = Halves == 2 ? 0 : (static_cast<int>(blockIdx.x) - before) % 2;
    int const group = static_cast<int>(threadIdx.x) / 128;
    auto const each = [&](auto&& f) { each_head<Traced, Halves>(in, before, f); };
    if (group == 0) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (threadIdx.x < 32) {
            along_loads<layout::stages> at;
            each([&](walked_head const& walked) {
                load_along<Halves, Erases, sends, Back>(keys, values, in, memory, walked, first_half, at);
            });
        } else if (threadIdx.x == 32) {
            std::conditional_t<sends, ring<2>, int> at{};
            each([&](walked_head const& walked) {
                if constexpr (sends)
                    send_traces<Halves>(in, memory, walked, first_half, at);
                else
                    publish_along<Traced, Erases, Back>(in, memory, walked, first_half, at);
            });
        } else if (threadIdx.x / 32 == 2) {
            gates_maker<layout, false> maker;
            each([&](walked_head const& walked) { maker.make(memory, walked.chunks); });
        }
    } else if (group < first_group) {
        cutlass::arch::warpgroup_reg_dealloc<Halves == 2 ? 104 : 128>();
        if constexpr (Erases) {
            x_maker<T, layout> maker;
            each([&](walked_head const& walked) { maker.make(memory, walked.chunks, paired, first_half); });
        }
    } else if (group < first_group + Halves) {
        cutlass::arch::warpgroup_reg_alloc<Halves == 2 ? 184 : 200>();
        int const own = Halves == 2 ? group - first_group : 0, half = first_half + own;
        along_carry<layout, 2 / Halves> at;
        each([&](walked_head const& walked) {
            carry_along<T, Traced, Halves, Erases, Back>(in, memory, walked, own, half, at, paired ? half ^ 1 : -1);
        });
    }
    if (paired) leave_cluster();
}

} // namespace delta
#endif

/// Threads of a block of `delta_rule_state`, and how many blocks a multiprocessor has.
template <bool Erases>
constexpr int delta_state_threads = Erases ? 384 : 256;
template <bool Erases>
constexpr int delta_state_blocks = Erases ? 1 : 2;

/// A grid of sequences * value heads * 2 blocks of `delta_state_threads`; in clusters of both halves these share X.
template <class T, bool Erases>
static __global__ void __launch_bounds__(delta_state_threads<Erases>, delta_state_blocks<Erases>)
    delta_rule_state(__grid_constant__ CUtensorMap const keys, __grid_constant__ CUtensorMap const values,
                     delta_walk const in) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (blockIdx.x % 2 && in.dims.value <= 64) return; // no head has channels of that half, and nothing awaits it
    delta::walk_along<T, false, 1, Erases>(keys, values, in, 0);
#endif
}

} // namespace cpx::kernels
