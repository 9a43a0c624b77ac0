// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's gradients: what warps of their own do (sm_90a).
#pragma once

#include <cpx/delta_rule_grad_block.cuh>

namespace cpx::kernels::delta {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Writes what the task of a number is, when the walks have come so far.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::take(int number) {
    if (number >= delta_share::tasks(in.plan, in.key_heads, in.share.last)) {
        task().n = 0;
        return;
    }
    int const chunk = number / in.key_heads;
    int const s = delta_sequence_of(in.plan, chunk), head = number % in.key_heads;
    delta_sequence const sequence = in.plan.sequences[s];
    int const place =
        in.first_chunks_first ? chunk - sequence.first_chunk : sequence.chunks - 1 - (chunk - sequence.first_chunk);
    for (int i = lane; i < 4 * in.group; i += 32) // halves of heads, by both walks
        await(in.plan.flags + (std::int64_t{s} * heads + head * in.group) * 4 + i,
              i % 2 ? sequence.chunks - place : place + 1);
    asm volatile("fence.proxy.async.global;" ::: "memory"); // what they have written is copied
    int const begin = sequence.chunk_begin(place);
    if (lane == 0) task() = {sequence.first_chunk + place, head, begin, sequence.chunk_end(place) - begin};
    __syncwarp();
}

/// Takes tasks as they come, and loads all.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::load(CUtensorMap const& queries, CUtensorMap const& keys,
                                                            CUtensorMap const& values, CUtensorMap const& dout,
                                                            CUtensorMap const& dvalues) {
    int landings = 0;
    int const first = delta_share::tasks(in.plan, in.key_heads, in.share.first);
    auto const next = [&] {
        int* const begun = in.plan.totals + (in.share.first > 0 ? 3 : 2);
        return first + __shfl_sync(~0u, lane == 0 ? atomicAdd(begun, 1) : 0, 0);
    };
    for (int number = next();; ++task_turn) {
        reload_memory();
        wait(memory->keys_empty[task_turn & 1], task_turn >> 1 & 1 ^ 1);
        take(number);
        if (task().n == 0) {
            arrive_warp(memory->keys_full[task_turn & 1]);
            wait_for_previous_kernel(); // or those after this one might come before the walks have ended
            return;
        }
        auto const load_of_task = [&](barrier& full, CUtensorMap const& map, char* to) {
            load_tokens(full, memory->landed, landings, task().n, 2 * panel_bytes,
                        [&](barrier& b) { load_panels<2>(map, b, to, task().head, task().begin); });
            if (task().n == delta_chunk) return;
            clear_rows(to, task().n);
            clear_rows(to + panel_bytes, task().n);
            cutlass::arch::fence_view_async_shared();
            arrive_warp(full);
        };
        load_of_task(memory->keys_full[task_turn & 1], keys, this->keys());
        of_group = 0;
        do {
            reload_memory();
            if (is_last()) number = next(); // early: it takes long
            constexpr int panels = Erases ? 6 : 4;
            if (lane == 0) {
                grad_task const own = task();
                int const head = own.head * in.group + of_group, parity = turn & 1 ^ 1;
                std::int64_t const place = std::int64_t{own.chunk} * heads + head;
                barrier& prepared_full = memory->prepared_full[turn & 1];
                wait(memory->prepared_empty[turn & 1], turn >> 1 & 1 ^ 1);
                prepared_full.arrive_and_expect_tx((Erases ? triangle_bytes : 0) +
                                                   static_cast<int>(sizeof(delta_gates)));
                if constexpr (Erases) load_inverse(in.prepared, place, prepared_full, memory->inverse[turn & 1]);
                load_gates(in.prepared, place, prepared_full, memory->gates[turn & 1]);
                auto const load_state = [&](barrier& empty, barrier& full, char* to, char const* from) {
                    wait(empty, parity);
                    full.arrive_and_expect_tx(state_bytes);
                    cute::SM90_BULK_COPY_G2S::copy(from + place * state_bytes, reinterpret_cast<std::uint64_t*>(&full),
                                                   to, state_bytes);
                };
                load_state(memory->dstate_empty, memory->dstate_full, memory->dstate, in.dstates);
                load_state(memory->state_empty, memory->state_full, memory->state, in.states);
                wait(memory->values_empty, parity);
                barrier& b = own.n == delta_chunk ? memory->values_full : memory->landed;
                b.arrive_and_expect_tx(panels * panel_bytes);
                load_panels<2>(values, b, memory->values, head, own.begin);
                load_panels<2>(dout, b, memory->dout, head, own.begin);
                if constexpr (Erases) load_panels<2>(dvalues, b, memory->dy, head, own.begin);
            }
            __syncwarp();
            if (task().n < delta_chunk) {
                wait(memory->landed, landings++ % 2);
#pragma unroll 1
                for (int p = 0; p < panels; ++p) clear_rows(memory->values + p * panel_bytes, task().n); // and dO, dY
                cutlass::arch::fence_view_async_shared();
                arrive_warp(memory->values_full);
            }
            ++turn;
            if (of_group > 0) continue;
            wait(memory->queries_empty, task_turn & 1 ^ 1); // last: the others may come while a task ends
            load_of_task(memory->queries_full, queries, memory->queries);
        } while (++of_group < in.group);
    }
}

/// Half of <S, dS'>.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::multiply_states() {
    each(
        nothing,
        [&](char*, delta_gates&) {
            wait(memory->state_full, turn & 1);
            wait(memory->dstate_full, turn & 1);
            float sum = 0;
#pragma unroll 4
            for (int i = (warp - 1) * 1024 + lane; i < warp * 1024; i += 32) { // not by tensor cores: they have a queue
                uint4 const a = reinterpret_cast<uint4 const*>(memory->state)[i];
                uint4 const b = reinterpret_cast<uint4 const*>(memory->dstate)[i];
                auto const add = [&](std::uint32_t x, std::uint32_t y) {
                    sum = fmaf(high_of<T>(x), high_of<T>(y), fmaf(low_of<T>(x), low_of<T>(y), sum));
                };
                add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w);
            }
            arrive_warp(memory->state_empty);
            arrive_warp(memory->dstate_empty);
#pragma unroll
            for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
            wait(memory->sums_empty, turn & 1 ^ 1);
            if (lane == 0) memory->inner[warp - 1] = sum;
            arrive_warp(memory->sums_full);
        },
        nothing);
}

/// Stores a task's gradient, of a head, when the panels have it; returns when they have been read.
template <class T, bool Erases>
__device__ __forceinline__ void grad_block<T, Erases>::store(CUtensorMap const& map, delta_head_rows<T> const& to,
                                                             char const* panels, int head, barrier& full, int parity) {
    wait(full, parity);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) store_rows(map, to, panels + i * panel_bytes, head, i, task().begin, task().n);
    __syncwarp();
}

/// Gradients of the gates, of two tokens a lane; and stores the others.
template <class T, bool Erases>
__device__ __forceinline__ void
grad_block<T, Erases>::write_gates(CUtensorMap const& dqueries, CUtensorMap const& dkeys, CUtensorMap const& dvalues) {
    auto const store_queries = [&](char const* panels, barrier& stored) {
        store(dqueries, in.dq, panels, task().head, memory->dq_full, task_turn & 1);
        arrive_warp(stored);
    };
    each(
        nothing,
        [&](char*, delta_gates& gates) {
            wait(memory->prepared_full[turn & 1], turn >> 1 & 1);
            float2 const b = reinterpret_cast<float2 const*>(gates.beta)[lane];
            float const fading = power_of_two(gates.sum[delta_chunk - 1]);
            arrive_after_loads(memory->prepared_empty[turn & 1]);
            if (Erases && is_last()) store_queries(memory->queries, memory->queries_empty);
            wait(memory->sums_full, turn & 1);
            auto const two = [&](float const* x) { return reinterpret_cast<float2 const*>(x)[lane]; };
            float2 const t = two(Erases ? memory->t : memory->reading[1]);
            float2 reading = two(memory->reading[0]), dbeta{};
            if constexpr (Erases) {
                reading.x += two(memory->reading[1]).x, reading.y += two(memory->reading[1]).y;
                dbeta = two(memory->own);
                dbeta.x -= two(memory->products).x, dbeta.y -= two(memory->products).y;
            }
            float2 across = two(memory->across[0]);
            for (int i = 1; i < 4; ++i) across.x += two(memory->across[i]).x, across.y += two(memory->across[i]).y;
            float const whole = fading * (memory->inner[0] + memory->inner[1]);
            arrive_warp(memory->sums_empty);
            float after = reading.x + reading.y, before = b.x * t.x + b.y * t.y;
            float const own = b.x * t.x;
#pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                float const next = __shfl_down_sync(~0u, after, apart);
                float const last = __shfl_up_sync(~0u, before, apart);
                if (lane + apart < 32) after += next;
                if (lane >= apart) before += last;
            }
            before = __shfl_up_sync(~0u, before, 1);
            if (lane == 0) before = 0;
            float const later = __shfl_down_sync(~0u, after, 1);
            float const from_second = reading.y + (lane < 31 ? later : 0.0f);
            float const dg[2] = {after + before + across.x + whole, from_second + (before + own) + across.y + whole};
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (int const token = 2 * lane + i; token < task().n) {
                    int const head = task().head * in.group + of_group;
                    in.dg.at(task().begin + token)[head] = dg[i];
                    if constexpr (Erases) in.dbeta.at(task().begin + token)[head] = i ? dbeta.y : dbeta.x;
                }
            if constexpr (!Erases) {
                store(dvalues, in.dv, memory->dy, task().head * in.group + of_group, memory->dv_full, turn & 1);
                arrive_warp(memory->dv_empty);
            }
        },
        [&] {
            store(dkeys, in.dk, Erases ? keys() : memory->dx, task().head, memory->dk_full, task_turn & 1);
            if constexpr (!Erases) store_queries(memory->inverse[0], memory->stored);
        });
}

#endif

} // namespace cpx::kernels::delta
