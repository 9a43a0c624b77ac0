// SPDX-License-Identifier: Apache-2.0
// What steps of all tokens before the ends of stretches make of the states before sequences (sm_90a).
#pragma once

#include <cpx/delta_rule_scan.cuh>

#include <cute/arch/copy_sm80.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace cpx::kernels {

namespace delta {

struct apply_memory {
    float map[128][128], state[128][64];
};

} // namespace delta

/// Makes states of the steps that all tokens before a stretch's end make, and of those before sequences, `in.initial`:
/// writes what `delta_rule_join` does.
///
/// A grid of (2, or 4 with maps among the totals) * value heads * stretches blocks of 256 threads, half a state each: a
/// thread has four key channels and eight value channels.
template <bool Erases>
static __global__ void __launch_bounds__(256, 2)
    delta_rule_apply(delta_walk const in, delta_steps const steps, delta_totals const totals) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace delta;
    auto& memory = shared_memory<apply_memory>();
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const parts = Erases && totals.maps ? 4 : 2, heads = in.key_heads * in.group;
    int const part = static_cast<int>(blockIdx.x) % parts, half = part % 2;
    int const head = static_cast<int>(blockIdx.x) / parts % heads;
    int const number = static_cast<int>(blockIdx.x) / parts / heads;
    bool const of_map = part >= 2;
    delta_stretch const stretch = in.plan.stretches[number];
    if (stretch.sequence < 0) return;
    delta_sequence const& sequence = stretch.of;
    bool const at_end = stretch.number + 1 == sequence.stretches;
    auto const last = totals.of(in, stretch.sequence, head, of_map);
    if (at_end ? !last.to : !in.snapshots) return;
    int const thread = static_cast<int>(threadIdx.x), keys = thread % 32 * 4, values = thread / 32 * 8;
    std::int64_t const step = std::int64_t{sequence.first_stretch + stretch.number} * heads + head;
    auto const place = in.state_of(sequence.first_stretch + stretch.number, head);
    float const* const from = in.initial ? in.initial + in.given_of(stretch.sequence, head) : nullptr;
    bool const vectors = in.dims.key == 128 && in.dims.value == 128 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0;
    if (from && vectors) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int const row = i * 16 + thread / 16, column = thread % 16 * 4;
            cute::SM80_CP_ASYNC_CACHEGLOBAL<float4>::copy(
                *reinterpret_cast<float4 const*>(from + row * 128 + 64 * half + column),
                *reinterpret_cast<float4*>(&memory.state[row][column]));
        }
        cute::cp_async_fence();
    }
    constexpr int batches = 4, rows = 128 / batches; // of the map
    if (Erases && from)
#pragma unroll
        for (int b = 0; b < batches; ++b) {
#pragma unroll
            for (int i = 0; i < rows / 8; ++i) {
                int const row = b * rows + i * 8 + thread / 32;
                cute::SM80_CP_ASYNC_CACHEGLOBAL<float4>::copy(
                    *reinterpret_cast<float4 const*>(steps.maps + place + row * 128 + keys),
                    *reinterpret_cast<float4*>(&memory.map[row][keys]));
            }
            cute::cp_async_fence();
        }
    float sum[8][4];
#pragma unroll
    for (int v = 0; v < 8; ++v) {
        float4 const four = __ldcg(reinterpret_cast<float4 const*>((of_map ? steps.maps : steps.ends) + place +
                                                                   (64 * half + values + v) * 128 + keys));
        sum[v][0] = four.x, sum[v][1] = four.y, sum[v][2] = four.z, sum[v][3] = four.w;
    }
    if (from) {
#pragma unroll 8
        for (int i = thread; i < 128 * 64 && !vectors; i += 256)
            memory.state[i / 64][i % 64] = in.dims.read(from, i / 64, 64 * half + i % 64);
        auto const add = [&](int row, float const(&map)[4], int first, int last) {
            float4 const a = *reinterpret_cast<float4 const*>(&memory.state[row][values]);
            float4 const b = *reinterpret_cast<float4 const*>(&memory.state[row][values + 4]);
            float const before[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int v = 0; v < 8; ++v)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    if (k >= first && k < last) sum[v][k] = fmaf(map[k], before[v], sum[v][k]);
        };
        if constexpr (Erases) {
            auto const multiply = [&](auto batch) {
                cute::cp_async_wait<batches - 1 - batch>();
                __syncthreads();
#pragma unroll 8
                for (int row = batch * rows; row < (batch + 1) * rows; ++row) {
                    float4 const m = *reinterpret_cast<float4 const*>(&memory.map[row][keys]);
                    add(row, {m.x, m.y, m.z, m.w}, 0, 4);
                }
            };
            [&]<std::size_t... B>(std::index_sequence<B...>) {
                (multiply(std::integral_constant<int, static_cast<int>(B)>()), ...);
            }(std::make_index_sequence<batches>());
        } else {
            cute::cp_async_wait<0>();
            __syncthreads();
            float const map = steps.maps[step];
#pragma unroll
            for (int k = 0; k < 4; ++k) add(keys + k, {map, map, map, map}, k, k + 1);
        }
    }
    if (at_end) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int v = 0; v < 8; ++v) last.put(keys + k, 64 * half + values + v, sum[v][k]);
    } else {
        // By way of shared memory, or a warp would write to 32 places. 8 key channels are a row there, and are apart by
        // 16 bytes more, as banks are.
        constexpr int row = 8 * 64, padded = row + 4;
        float* const words = &memory.map[0][0];
        __syncthreads(); // all have read the map
#pragma unroll
        for (int v = 0; v < 8; ++v)
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                int const place = place_of_word(values + v, keys + k);
                *reinterpret_cast<float2*>(words + place / row * padded + place % row) =
                    make_float2(sum[v][k], sum[v][k + 1]);
            }
        __syncthreads();
        float* const to =
            in.snapshots + in.half_of(sequence.first_stretch + stretch.number + 1, head, half) * snapshot_words;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int const place = (i * 256 + thread) * 4;
            *reinterpret_cast<float4*>(to + place) =
                *reinterpret_cast<float4 const*>(words + place / row * padded + place % row);
        }
    }
    if constexpr (!Erases)
        if (totals.maps && at_end && half == 0 && thread == 0)
            totals.maps[std::int64_t{stretch.sequence} * heads + head] = steps.maps[step];
#endif
}

} // namespace cpx::kernels
