// SPDX-License-Identifier: Apache-2.0
// Stretches of a sequence as steps S -> M S + E of its state (sm_90a), beside each other, and what these make of it.
#pragma once

#include <cpx/delta_rule_state.cuh>

namespace cpx::kernels {

/// Where the steps of stretches lie, (stretches, value heads, 128, 128) each, or of the walk's channels if `apart`.
struct delta_steps {
    float *maps, *ends; ///< M, E; where nothing is erased M is a number
    bool apart;         ///< every sequence is one stretch, a segment, whose step is wanted; else all but the last are
};

namespace delta {

template <bool Erases>
struct fold_memory : erasing_memory<Erases, 4> {
    static constexpr int stages = 4;
    char keys[stages][2 * panel_bytes], values[stages][2][panel_bytes];
    delta_gates gates[stages];
    barrier full[stages], empty[stages], x_full[2], read[2], landed;
};

/// Value channels of a state that a block of `delta_rule_join` has.
inline constexpr int join_columns = 8;

/// Returns where `load_words` finds the word of a value and key channel in the two halves of a snapshot.
__device__ __forceinline__ int place_of_word(int value, int key) {
    int const thread = value % 64 / 16 * 32 + value % 8 * 4 + key % 8 / 2;
    return value / 64 * snapshot_words + (key / 8 * 128 + thread) * 4 + value % 16 / 8 * 2 + key % 2;
}

/// The warp that loads the keys and gates of a stretch's chunks, the values unless M is made; Back: last chunks first.
template <bool Erases, bool Back>
__device__ __forceinline__ void load_fold(CUtensorMap const& keys, CUtensorMap const& values, delta_walk const& in,
                                          fold_memory<Erases>& memory, delta_sequence const& sequence, int head,
                                          bool of_map, int first, int last) {
    constexpr int stages = fold_memory<Erases>::stages;
    int const heads = in.key_heads * in.group;
    ring<stages> r;
    for (int i = first, landings = 0; i < last; ++i, r.next()) {
        int const c = Back ? first + last - 1 - i : i;
        int const row = sequence.chunk_begin(c), n = sequence.chunk_end(c) - row;
        bool const whole = n == delta_chunk;
        barrier& full = whole ? memory.full[r.at] : memory.landed;
        wait(memory.empty[r.at], r.parity ^ 1);
        if (threadIdx.x == 0) {
            full.arrive_and_expect_tx((of_map ? 2 : 4) * panel_bytes + (Erases ? triangle_bytes : 0) +
                                      step_gates.bytes());
            load_panels<2>(keys, full, memory.keys[r.at], head / in.group, row);
            std::int64_t const place = std::int64_t{sequence.first_chunk + c} * heads + head;
            if constexpr (Erases)
                load_prepared(in.prepared, place, full, memory.inverse[r.at], memory.gates[r.at], step_gates);
            else
                load_gates(in.prepared, place, full, memory.gates[r.at], step_gates);
            if (!of_map) load_panels<2>(values, full, memory.values[r.at][0], head, row);
        }
        __syncwarp();
        if (whole) continue;
        wait(memory.landed, landings++ % 2);
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            clear_rows(memory.keys[r.at] + p * panel_bytes, n);
            clear_rows(memory.values[r.at][p], n);
        }
        cutlass::arch::fence_view_async_shared();
        arrive_warp(memory.full[r.at]);
    }
}

/// Computes half of E, or M, of the chunks of a stretch, by warpgroup number `half` of those that do.
template <bool Erases, bool Back>
__device__ __forceinline__ void fold_half(delta_walk const& in, delta_steps const& to, fold_memory<Erases>& memory,
                                          delta_stretch const& stretch, delta_sequence const& sequence, int head,
                                          bool of_map, int chunks, int half) {
    int const heads = in.key_heads * in.group;
    float whole = 1;
    half_state s;
    if (of_map)
        for_each_word([&](int i, int value, int key) { s[i] = 64 * half + value == key ? 1.0f : 0.0f; });
    else
        load_state(stretch.number == 0 && in.initial ? in.initial + in.given_of(stretch.sequence, head) : nullptr,
                   in.dims, half, s);
    ring<fold_memory<Erases>::stages> r;
    ring<2> x;
    std::uint32_t v[16] = {};
    float fading = 0;
    auto const await_chunk = [&] {
        wait(memory.full[r.at], r.parity);
        if (!of_map) load_transposed(memory.values[r.at][half], v);
        fading = memory.gates[r.at].decay[delta_chunk - 1];
    };
    if (chunks > 0) await_chunk();
    for (int c = 0; c < chunks; ++c, x.next()) {
        std::uint32_t f[32];
        if constexpr (Erases) round_to_operand(s, f);
        scale(s, fading); // while products are under way, the compiler would await them
        if constexpr (Erases) {
            erase_and_write(memory, r.at, x, f, v, s, [] {});
        } else {
            whole *= fading;
            write_tokens<Back>(memory.gates[r.at], memory.keys[r.at], in.scale, v, s);
        }
        barrier& read = memory.empty[r.at];
        r.next();
        if (c + 1 < chunks) await_chunk();
        cute::warpgroup_wait<0>();
        keep(s);
        if constexpr (!Erases) arrive_warp(read);
    }
    if constexpr (!Erases && !Back)
        if (half == 0 && threadIdx.x % 128 == 0)
            to.maps[std::int64_t{sequence.first_stretch + stretch.number} * heads + head] = whole;
    int const number = sequence.first_stretch + stretch.number;
    float* const end = of_map ? to.maps : to.ends;
    if (to.apart) {
        delta_dims const dims{in.dims.key, of_map ? in.dims.key : in.dims.value};
        store_state(s, dims, half, end + (std::int64_t{number} * heads + head) * dims.key * dims.value);
    } else {
        float* const at = end + in.state_of(number, head);
        for_each_word([&](int i, int value, int key) { at[(64 * half + value) * 128 + key] = s[i]; });
    }
}

} // namespace delta

/// A block computes E or M of a stretch and value head: what the stretch makes of zeros, or of the state before the
/// sequence, and, without values, of the identity. Steps of segments are (key, value) and (key, key) channels, others
/// are transposed. A grid of (stretches at most) * 2 * value heads blocks of 512 threads: a warp that loads, a
/// warpgroup that makes X, two that have half a state each. Where nothing is erased, half the blocks, of 384 threads.
///
/// Back, with queries for keys and dO for values: what outputs alone make the gradient of the state before a segment.
template <bool Erases, bool Back = false>
static __global__ void __launch_bounds__(Erases ? 512 : 384, 1)
    delta_rule_fold(__grid_constant__ CUtensorMap const keys, __grid_constant__ CUtensorMap const values,
                    delta_walk const in, delta_steps const to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace delta;
    static_assert(!(Erases && Back));
    constexpr int stages = fold_memory<Erases>::stages, first_group = Erases ? 2 : 1;
    auto& memory = shared_memory<fold_memory<Erases>>();
    if constexpr (Erases) clear_triangles(memory.inverse);
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) memory.full[i].init(1), memory.empty[i].init(4 + 4 * first_group);
        for (int i = 0; i < 2; ++i) memory.x_full[i].init(4), memory.read[i].init(8);
        memory.landed.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const heads = in.key_heads * in.group, head = static_cast<int>(blockIdx.x) % heads;
    bool const of_map = Erases && static_cast<int>(blockIdx.x) / heads % 2;
    int const number = static_cast<int>(blockIdx.x) / heads / (Erases ? 2 : 1),
              group = static_cast<int>(threadIdx.x) / 128;
    if (number >= in.plan.totals[1]) return;
    delta_stretch const stretch = in.plan.stretches[number];
    delta_sequence const sequence = in.plan.sequences[stretch.sequence];
    if (!to.apart && (stretch.number + 1 == sequence.stretches || (of_map && stretch.number == 0))) return;
    int const first = stretch.number * in.plan.cut.chunks, last = in.plan.end_of(sequence, stretch.number);
    if (group == 0) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (threadIdx.x < 32) {
            load_fold<Erases, Back>(keys, values, in, memory, sequence, head, of_map, first, last);
        }
    } else if (group < first_group) {
        cutlass::arch::warpgroup_reg_dealloc<104>();
        if constexpr (Erases) {
            x_maker<fold_memory<Erases>>{}.make(memory, last - first);
        }
    } else {
        if constexpr (Erases) cutlass::arch::warpgroup_reg_alloc<184>();
        fold_half<Erases, Back>(in, to, memory, stretch, sequence, head, of_map, last - first, group - first_group);
    }
#endif
}

/// Writes the states before the stretches of sequences but the first ones, from the steps of those before them, in
/// float. Where nothing is erased M is a number.
///
/// A grid of (128 / join_columns, value heads, sequences) blocks of 512 threads: of every two key channels, eight that
/// share the products.
template <bool Erases>
static __global__ void __launch_bounds__(512, 1) delta_rule_join(delta_walk const in, delta_steps const steps) {
    using namespace delta;
    constexpr int columns = join_columns;
    __shared__ __align__(16) float state[128][columns], sums[8][columns][128];
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const head = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.x) * columns;
    int const thread = static_cast<int>(threadIdx.x), keys = thread % 64 * 2, share = thread / 64;
    int const key = thread % 128, own_columns = thread / 128 * 2; // of the sums
    delta_sequence const sequence = in.plan.sequences[blockIdx.z];
    float2 map[16];
    auto const load = [&](int stretch) {
        if constexpr (!Erases) return;
        float const* const from =
            steps.maps + in.state_of(sequence.first_stretch + stretch, head) + 16 * share * 128 + keys;
#pragma unroll
        for (int j = 0; j < 16; ++j) map[j] = *reinterpret_cast<float2 const*>(from + j * 128);
    };
    if (sequence.stretches > 2) load(1);
    for (int stretch = 0; stretch + 1 < sequence.stretches; ++stretch) {
        float const* const end =
            steps.ends + in.state_of(sequence.first_stretch + stretch, head) + (first + own_columns) * 128 + key;
        float own[2] = {end[0], end[128]};
        if (!Erases && stretch > 0) {
            float const map =
                steps.maps[std::int64_t{sequence.first_stretch + stretch} * in.key_heads * in.group + head];
#pragma unroll
            for (int v = 0; v < 2; ++v) own[v] = fmaf(map, state[key][own_columns + v], own[v]);
        }
        if (Erases && stretch > 0) {
            float sum[2][columns] = {};
#pragma unroll
            for (int j = 0; j < 16; ++j)
#pragma unroll
                for (int v = 0; v < columns; v += 4) {
                    float4 const s = *reinterpret_cast<float4 const*>(&state[16 * share + j][v]);
                    float const four[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        sum[0][v + i] = fmaf(map[j].x, four[i], sum[0][v + i]);
                        sum[1][v + i] = fmaf(map[j].y, four[i], sum[1][v + i]);
                    }
                }
            if (stretch + 2 < sequence.stretches) load(stretch + 1);
#pragma unroll
            for (int v = 0; v < columns; ++v)
                *reinterpret_cast<float2*>(&sums[share][v][keys]) = make_float2(sum[0][v], sum[1][v]);
            __syncthreads();
#pragma unroll
            for (int v = 0; v < 2; ++v)
#pragma unroll
                for (int other = 0; other < 8; ++other) own[v] += sums[other][own_columns + v][key];
        }
        float* const to = in.snapshots + in.half_of(sequence.first_stretch + stretch + 1, head, 0) * snapshot_words;
#pragma unroll
        for (int v = 0; v < 2; ++v) {
            state[key][own_columns + v] = own[v];
            to[place_of_word(first + own_columns + v, key)] = own[v];
        }
        __syncthreads();
    }
}

} // namespace cpx::kernels
