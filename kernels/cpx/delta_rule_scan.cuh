// SPDX-License-Identifier: Apache-2.0
// Steps S -> M S + E of the state (sm_90a): of stretches, beside each other, and what these make of states.
#pragma once

#include <cpx/delta_rule_state.cuh>

#include <cstddef>

namespace cpx::kernels {

/// Where the steps of stretches lie, (stretches, value heads, 128, 128) each, transposed: key channels last.
struct delta_steps {
    float *maps, *ends; ///< M, E; where nothing is erased M is a number
    bool before_known;  ///< first stretches begin with the states before sequences, and have no map
    bool last_wanted;   ///< steps of last stretches are wanted, too
};

/// Where the steps of sequences lie, key channels first, (sequences, value heads) of the walk's channels each; null:
/// not wanted.
struct delta_totals {
    float *maps, *ends;

    /// Where half a step, of these value channels from `value` on, or a state goes.
    struct place {
        float* to;
        delta_dims dims;
        __device__ __forceinline__ void put(int key, int value, float x) const {
            if (key < dims.key && value < dims.value) to[key * dims.value + value] = x;
        }
    };
    /// Returns where M or E of a sequence goes or, if no totals are wanted, the state after it.
    __device__ __forceinline__ place of(delta_walk const& in, int sequence, int head, bool of_map) const {
        float* const all = of_map ? maps : ends ? ends : in.last;
        delta_dims const dims{in.dims.key, of_map ? in.dims.key : in.dims.value};
        std::int64_t const number = std::int64_t{sequence} * in.key_heads * in.group + head;
        return {all ? all + number * dims.key * dims.value : nullptr, dims};
    }
};

namespace delta {

/// X is made two chunks ahead.
template <bool Erases>
struct fold_memory : erasing_memory<Erases, 4, 3> {
    static constexpr int stages = 4;
    char keys[stages][2 * panel_bytes], values[stages][2][panel_bytes];
    chunk_gates gates[stages];
    static constexpr int xs = 3;
    barrier full[stages], empty[stages], gates_landed[stages], x_full[xs], read[xs], landed;
};

/// Of a block of `delta_rule_join` that has so many value channels of a state: this, its rows in other banks, and
/// shares of the products.
template <std::size_t Columns>
struct join_memory {
    static constexpr int shares = 4, keys = 128 / shares; ///< rows of M^T of a share
    alignas(16) float state[128][Columns + 4];
    float sums[shares][Columns][128];
};

/// Returns where `load_words` finds the word of a value and key channel in the two halves of a snapshot.
__device__ __forceinline__ int place_of_word(int value, int key) {
    int const thread = value % 64 / 16 * 32 + value % 8 * 4 + key % 8 / 2;
    return value / 64 * snapshot_words + (key / 8 * 128 + thread) * 4 + value % 16 / 8 * 2 + key % 2;
}

/// What a block folds: the chunks [first, last) of a stretch and head.
struct folded {
    delta_sequence sequence;
    int stretch, head;
    bool of_map;
    int first, last;
};

/// The warp that loads keys and gates of chunks, the values unless M is made; Back: last chunks first.
template <bool Erases, bool Back>
__device__ __forceinline__ void load_fold(CUtensorMap const& keys, CUtensorMap const& values, delta_walk const& in,
                                          fold_memory<Erases>& memory, folded const& of) {
    constexpr int stages = fold_memory<Erases>::stages;
    int const heads = in.key_heads * in.group, head = of.head;
    ring<stages> r;
    for (int i = of.first, landings = 0; i < of.last; ++i, r.next()) {
        int const c = Back ? of.first + of.last - 1 - i : i;
        int const row = of.sequence.chunk_begin(c), n = of.sequence.chunk_end(c) - row;
        bool const whole = n == delta_chunk;
        barrier& full = whole ? memory.full[r.at] : memory.landed;
        wait(memory.empty[r.at], r.parity ^ 1);
        if (threadIdx.x == 0) {
            full.arrive_and_expect_tx((of.of_map ? 2 : 4) * panel_bytes + (Erases ? triangle_bytes : 0));
            load_panels<2>(keys, full, memory.keys[r.at], head / in.group, row);
            std::int64_t const place = std::int64_t{of.sequence.first_chunk + c} * heads + head;
            load_gates_apart(in.prepared, place, memory.gates_landed[r.at], memory.gates[r.at]);
            if constexpr (Erases) load_inverse(in.prepared, place, full, memory.inverse[r.at]);
            if (!of.of_map) load_panels<2>(values, full, memory.values[r.at][0], head, row);
        }
        __syncwarp();
        if (whole) continue;
        wait(memory.landed, landings++ % 2);
        clear_rows(memory.keys[r.at], n);
        clear_rows(memory.keys[r.at] + panel_bytes, n);
#pragma unroll
        for (int p = 0; p < 2; ++p) clear_rows(memory.values[r.at][p], n);
        cutlass::arch::fence_view_async_shared();
        arrive_warp(memory.full[r.at]);
    }
}

/// Computes half of E, or M, by a warpgroup.
template <class T, bool Erases, bool Back>
__device__ __forceinline__ void fold_half(delta_walk const& in, delta_steps const& to, fold_memory<Erases>& memory,
                                          folded const& of, float const* begin, int half) {
    int const chunks = of.last - of.first;
    float whole = 1;
    half_state s;
    if (of.of_map)
        for_each_word([&](int i, int value, int key) { s[i] = 64 * half + value == key ? 1.0f : 0.0f; });
    else
        load_state(begin, in.dims, half, s);
    ring<fold_memory<Erases>::stages> r;
    ring<fold_memory<Erases>::xs> x;
    std::uint32_t v[16] = {};
    float fading = 0;
    auto const await_chunk = [&] {
        wait(memory.full[r.at], r.parity);
        if (!of.of_map) load_transposed(memory.values[r.at][half], v);
        fading = memory.gates[r.at].decay[delta_chunk - 1];
    };
    auto const nothing = [] {};
    if (chunks > 0) await_chunk();
    for (int c = 0; c < chunks; ++c, x.next()) {
        std::uint32_t f[32];
        if constexpr (Erases) round_to_operand<T>(s, f);
        scale(s, fading); // while products are under way, the compiler would await them
        if constexpr (Erases) {
            erase_and_write<T>(memory, r.at, x, f, v, s, nothing);
        } else {
            whole *= fading;
            write_tokens<T, Back>(memory.gates[r.at], memory.keys[r.at], in.scale, v, s);
        }
        barrier& read = memory.empty[r.at];
        r.next();
        if (c + 1 < chunks) await_chunk();
        cute::warpgroup_wait<0>();
        keep(s);
        if constexpr (!Erases) arrive_warp(read);
    }
    int const stretch = of.sequence.first_stretch + of.stretch;
    float* const end = (of.of_map ? to.maps : to.ends) + in.state_of(stretch, of.head);
    for_each_word([&](int i, int value, int key) { end[(64 * half + value) * 128 + key] = s[i]; });
    if constexpr (!Erases && !Back)
        if (half == 0 && threadIdx.x % 128 == 0)
            to.maps[std::int64_t{stretch} * in.key_heads * in.group + of.head] = whole;
}

} // namespace delta

/// Threads of a block of `delta_rule_fold`: a warp that loads, one that completes gates and, unless nothing is erased,
/// a warpgroup that makes X, beside those that have half a state each.
template <bool Erases>
inline constexpr int delta_fold_threads = Erases ? 512 : 384;

/// Computes E and M of a stretch and value head: what its tokens make of zeros, or of the state before the sequence,
/// and, without values, of the identity. A grid of stretches at most * value heads blocks; twice as many with maps,
/// which are not numbers where something is erased.
///
/// Back, with queries for keys and dO for values: what outputs alone make the gradient of the state before a segment.
template <class T, bool Erases, bool Back = false>
static __global__ void __launch_bounds__(delta_fold_threads<Erases>, 1)
    delta_rule_fold(__grid_constant__ CUtensorMap const keys, __grid_constant__ CUtensorMap const values,
                    delta_walk const in, delta_steps const to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace delta;
    static_assert(!(Erases && Back));
    constexpr int stages = fold_memory<Erases>::stages, first_group = Erases ? 2 : 1;
    auto& memory = shared_memory<fold_memory<Erases>>();
    if constexpr (Erases) clear_triangles(memory.inverse);
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            memory.full[i].init(2), memory.empty[i].init(4 * (first_group + 1));
            memory.gates_landed[i].init(1);
        }
        for (barrier& full : memory.x_full) full.init(4);
        for (barrier& read : memory.read) read.init(8);
        memory.landed.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const heads = in.key_heads * in.group, group = static_cast<int>(threadIdx.x) / 128;
    int number = static_cast<int>(blockIdx.x);
    folded of{};
    if constexpr (Erases) of.of_map = number % 2, number /= 2;
    of.head = number % heads, number /= heads;
    float const* begin = nullptr;
    delta_stretch const stretch = in.plan.stretches[number];
    if (stretch.sequence < 0) return;
    of.sequence = stretch.of;
    of.stretch = stretch.number;
    if (!to.last_wanted && stretch.number + 1 == of.sequence.stretches) return;
    if (to.before_known && of.of_map && stretch.number == 0) return;
    of.first = in.plan.cut.begin(stretch.number, of.sequence.stretches);
    of.last = in.plan.end_of(of.sequence, stretch.number);
    if (stretch.number == 0 && to.before_known && in.initial)
        begin = in.initial + in.given_of(stretch.sequence, of.head);
    if (group == 0) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (threadIdx.x < 32)
            load_fold<Erases, Back>(keys, values, in, memory, of);
        else if (threadIdx.x < 64)
            gates_maker<fold_memory<Erases>, false>{}.make(memory, of.last - of.first);
    } else if (group < first_group) {
        cutlass::arch::warpgroup_reg_dealloc<104>();
        if constexpr (Erases) {
            x_maker<T, fold_memory<Erases>>{}.make(memory, of.last - of.first);
        }
    } else {
        if constexpr (Erases) cutlass::arch::warpgroup_reg_alloc<184>();
        fold_half<T, Erases, Back>(in, to, memory, of, begin, group - first_group);
    }
#endif
}

/// Joins the steps of the stretches of sequences, in float. Where nothing is erased M is a number.
///
/// Writes states before stretches but the first ones, `in.snapshots`, and after sequences, `in.last`, each unless null;
/// `in.initial`: the states before, unless first steps begin with them. With `totals` it writes the steps that
/// sequences make, E as states that begin with zeros, M as what they make of the identity.
///
/// A grid of (128 / Columns, or twice as many with maps among the totals, value heads, sequences) blocks of 256
/// threads: of every two key channels, four that share the products, so that a block reads M once. No bit depends on
/// Columns, 8 to 32: the more, the less is read, by fewer blocks.
template <bool Erases, int Columns>
static __global__ void __launch_bounds__(256, 1)
    delta_rule_join(delta_walk const in, delta_steps const steps, delta_totals const totals) {
    using namespace delta;
    using memory_type = join_memory<Columns>;
    constexpr int blocks = 128 / Columns, shares = memory_type::shares, all_rows = memory_type::keys;
    constexpr int rows = 256 / Columns, owned = Columns / 2; // rows of M^T on their way; a thread's sums
    auto& memory = shared_memory<memory_type>();
    auto& state = memory.state;
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const head = static_cast<int>(blockIdx.y), number = static_cast<int>(blockIdx.z);
    bool const of_map = static_cast<int>(blockIdx.x) >= blocks;
    int const first = static_cast<int>(blockIdx.x) % blocks * Columns;
    int const thread = static_cast<int>(threadIdx.x), keys = thread % 64 * 2, share = thread / 64;
    int const key = thread % 128, own_columns = thread / 128 * owned;
    delta_sequence const sequence = in.plan.sequences[number];
    auto const last = totals.of(in, number, head, of_map);
    int const count = sequence.stretches - (last.to ? 0 : 1), first_product = in.initial ? 0 : 1;
    auto const step_of = [&](float const* of, int stretch) {
        return of + in.state_of(sequence.first_stretch + stretch, head);
    };
    auto const number_of = [&](int stretch) {
        return steps.maps[std::int64_t{sequence.first_stretch + stretch} * in.key_heads * in.group + head];
    };
    auto const rows_of = [&](int stretch, int row) {
        return step_of(steps.maps, stretch) + (all_rows * share + row) * 128 + keys;
    };
    float2 map[rows];
    if (Erases && first_product < count)
#pragma unroll
        for (int j = 0; j < rows; ++j) map[j] = *reinterpret_cast<float2 const*>(rows_of(first_product, 0) + j * 128);
    if (in.initial) {
        float const* const from = in.initial + in.given_of(number, head);
#pragma unroll
        for (int v = 0; v < owned; ++v) state[key][own_columns + v] = in.dims.read(from, key, first + own_columns + v);
        __syncthreads();
    }
    float next[owned], next_number = 0; // of E, on their way, too
    auto const load = [&](int stretch) {
        float const* const end =
            step_of(of_map && stretch == 0 ? steps.maps : steps.ends, stretch) + (first + own_columns) * 128 + key;
        bool const adds = stretch < count && (!of_map || stretch == 0);
#pragma unroll
        for (int v = 0; v < owned; ++v) next[v] = adds ? end[v * 128] : 0;
        if (!Erases && stretch >= first_product && stretch < count) next_number = number_of(stretch);
    };
    load(0);
    for (int stretch = 0; stretch < count; ++stretch) {
        bool const multiplies = stretch >= first_product;
        float const map_number = next_number;
        float own[owned];
#pragma unroll
        for (int v = 0; v < owned; ++v) own[v] = next[v];
        load(stretch + 1);
        if (!Erases && multiplies) {
#pragma unroll
            for (int v = 0; v < owned; ++v) own[v] = fmaf(map_number, state[key][own_columns + v], own[v]);
        }
        if (Erases && multiplies) {
            float sum[2][Columns] = {};
#pragma unroll 1
            for (int row = 0; row < all_rows; row += rows) {
                // after the last one that again, which nobody reads
                float const* const more =
                    row + rows < all_rows ? rows_of(stretch, row + rows) : rows_of(min(stretch + 1, count - 1), 0);
#pragma unroll
                for (int j = 0; j < rows; ++j) {
#pragma unroll
                    for (int v = 0; v < Columns; v += 4) {
                        float4 const s = *reinterpret_cast<float4 const*>(&state[all_rows * share + row + j][v]);
                        float const four[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            sum[0][v + i] = fmaf(map[j].x, four[i], sum[0][v + i]);
                            sum[1][v + i] = fmaf(map[j].y, four[i], sum[1][v + i]);
                        }
                    }
                    map[j] = *reinterpret_cast<float2 const*>(more + j * 128);
                }
            }
#pragma unroll
            for (int v = 0; v < Columns; ++v)
                *reinterpret_cast<float2*>(&memory.sums[share][v][keys]) = make_float2(sum[0][v], sum[1][v]);
            __syncthreads();
#pragma unroll
            for (int v = 0; v < owned; ++v)
#pragma unroll
                for (int other = 0; other < shares; ++other) own[v] += memory.sums[other][own_columns + v][key];
        }
        if (in.snapshots && stretch + 1 < sequence.stretches) {
            float* const to = in.snapshots + in.half_of(sequence.first_stretch + stretch + 1, head, 0) * snapshot_words;
#pragma unroll
            for (int v = 0; v < owned; ++v) to[place_of_word(first + own_columns + v, key)] = own[v];
        }
        if (last.to && stretch + 1 == count)
#pragma unroll
            for (int v = 0; v < owned; ++v) last.put(key, first + own_columns + v, own[v]);
#pragma unroll
        for (int v = 0; v < owned; v += 4)
            *reinterpret_cast<float4*>(&state[key][own_columns + v]) =
                make_float4(own[v], own[v + 1], own[v + 2], own[v + 3]);
        __syncthreads();
    }
    if constexpr (!Erases)
        if (totals.maps && blockIdx.x == 0 && thread == 0) {
            float whole = 1;
            for (int stretch = 0; stretch < count; ++stretch) whole *= number_of(stretch);
            totals.maps[std::int64_t{number} * in.key_heads * in.group + head] = whole;
        }
}

} // namespace cpx::kernels
