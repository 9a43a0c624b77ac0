// SPDX-License-Identifier: Apache-2.0
// Launches of the forward of the delta rule's kernels for sm_90a, and of a decay a head's. Without CUTLASS's headers
// there are none.
#pragma once

#include <cpx/cuda/delta_rule_launch.hpp>
#include <cpx/cuda/delta_rule_space.hpp>

#if __has_include(<cute/arch/mma_sm90_gmma.hpp>)

#include <cpx/delta_rule_main.cuh>
#include <cpx/delta_rule_scan.cuh>

#include <cuda.h>

#include <algorithm>

namespace cpx::cuda::detail {

/// Returns what describes rows of heads of `dim` channels to the copy engine, in panels of 64 rows by 64 channels of a
/// head: those beyond `dim` are read as zeros and not written.
template <class T>
CUtensorMap panels_of(rows<T> r, index_t dim, caller here) {
    static auto const encode = [&] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result{};
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
              "cudaGetDriverEntryPointByVersion", here);
        require(result == cudaDriverEntryPointSuccess, "cuda", "driver", "one with cuTensorMapEncodeTiled", "none",
                here);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    }();
    CUtensorMap map{};
    auto const number = [](index_t n) { return static_cast<cuuint64_t>(n); };
    cuuint64_t const sizes[] = {number(dim), number(r.count()), number(r.width() / dim)};
    cuuint64_t const strides[] = {number(r.stride()) * sizeof(T), number(dim) * sizeof(T)};
    cuuint32_t const box[] = {64, 64, 1}, steps[] = {1, 1, 1};
    auto const kind = std::same_as<std::remove_const_t<T>, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    auto const result = encode(&map, kind, 3, const_cast<void*>(static_cast<void const*>(r.data())), sizes, strides,
                               box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(result == CUDA_SUCCESS, "cuda", "cuTensorMapEncodeTiled", "success", static_cast<int>(result), here);
    return map;
}

template <class T>
kernels::delta_head_rows<T> delta_view(rows<T> r, index_t dim) {
    return {delta_view(r), static_cast<int>(dim)};
}

/// Launches a kernel that waits for the one before it by itself, with much shared memory, by clusters of blocks.
template <class Call, class... P>
void launch_hopper(Call const& of, char const* what, int cluster, void (*kernel)(P...), index_t blocks, int threads,
                   std::size_t shared, std::type_identity_t<P> const&... arguments) {
    require(blocks < index_t{1} << 31, what, "blocks", "less than 2^31", blocks, of.here);
    launch_early(cluster, kernel, dims(blocks), dims(threads), shared, of.stream, what, of.here, arguments...);
}
template <class Call, class... P>
void launch_hopper(Call const& of, char const* what, void (*kernel)(P...), index_t blocks, int threads,
                   std::size_t shared, std::type_identity_t<P> const&... arguments) {
    launch_hopper(of, what, 1, kernel, blocks, threads, shared, arguments...);
}

/// Returns what walks are given: inverses and gates are in the workspace or, if that has no place for them, in
/// `in.saved`.
template <bool Erases, class T>
kernels::delta_walk delta_walk_of(delta_call<Erases, T> const& of) {
    auto const& [shape, in, space, workspace, stream, here] = of;
    bool const own = space.inverse >= 0;
    delta_space const at = own ? space : delta_saved_space<T>(shape, delta_saved_tokens(in), space.sequences);
    char* const prepared = own ? workspace : in.saved.data();
    return {of.plan(),
            {prepared + at.inverse, reinterpret_cast<kernels::delta_gates*>(prepared + at.gates)},
            in.state.data(),
            nullptr,
            nullptr,
            static_cast<int>(shape.key_heads),
            of.group(),
            {static_cast<int>(shape.key_dim), static_cast<int>(shape.value_dim)},
            delta_scale_of(shape)};
}

/// Launches what comes before all others: the plan and, unless they are made, inverses and gates.
template <bool Erases, class T>
void launch_delta_prepared(delta_call<Erases, T> const& of, kernels::delta_walk const& walk, bool made = false) {
    if (made) return of.make_plan();
    auto const keys = panels_of(of.in.k, of.shape.key_dim, of.here); // before a launch: a driver may lack it
    of.make_plan();
    launch_hopper(of, "delta_rule_prep", kernels::delta_rule_prep<T, Erases>,
                  of.space.chunks * kernels::delta_prep_blocks(walk.key_heads, walk.group), 128,
                  Erases ? sizeof(kernels::delta::prep_memory) : sizeof(kernels::delta::prep_gates), keys,
                  kernels::delta_prep_input<T>{of.segments(), walk.plan, delta_log_decays_of(of.in.g, of.in.g_of),
                                               delta_view(of.in.beta), walk.key_heads, walk.group},
                  walk.prepared);
}

template <bool Erases, class T>
kernels::delta_steps delta_steps_of(delta_call<Erases, T> const& of, bool before_known, bool last_wanted) {
    return {of.floats(of.space.maps), of.floats(of.space.ends), before_known, last_wanted};
}

/// Launches the steps of stretches, into the workspace, of keys and values, or back, of queries and dO.
template <bool Erases, bool Back = false, class T>
void launch_delta_steps(delta_call<Erases, T> const& of, kernels::delta_walk const& walk,
                        kernels::delta_steps const& steps, rows<T const> keys, rows<T const> values) {
    launch_hopper(of, Back ? "delta_rule_fold_back" : "delta_rule_fold", kernels::delta_rule_fold<T, Erases, Back>,
                  of.space.stretches * of.shape.value_heads * (Erases ? 2 : 1), kernels::delta_fold_threads<Erases>,
                  sizeof(kernels::delta::fold_memory<Erases>), panels_of(keys, of.shape.key_dim, of.here),
                  panels_of(values, of.shape.value_dim, of.here), walk, steps);
}

/// Launches what makes states of steps or, if they are wanted, `totals`.
template <bool Erases, class T>
void launch_delta_join(delta_call<Erases, T> const& of, kernels::delta_walk const& walk,
                       kernels::delta_steps const& steps, kernels::delta_totals const& totals) {
    index_t const parts = Erases && totals.maps ? 2 : 1, states = parts * of.shape.value_heads * of.space.sequences;
    auto const launch = [&](auto columns) {
        launch_early(kernels::delta_rule_join<Erases, columns>,
                     dims(128 / columns * parts, of.shape.value_heads, of.space.sequences), 256,
                     sizeof(kernels::delta::join_memory<columns>), of.stream, "delta_rule_join", of.here, walk, steps,
                     totals);
    };
    if constexpr (Erases) { // few columns where blocks are few; else fewer blocks, each of which reads all of M
        if (8 * states > multiprocessors()) return launch(std::integral_constant<int, 32>());
        if (16 * states > multiprocessors()) return launch(std::integral_constant<int, 16>());
    }
    launch(std::integral_constant<int, 8>());
}

/// Launches the walks that write states before stretches and, if `walk.last` is wanted, after sequences.
template <bool Erases, class T>
void launch_delta_state(delta_call<Erases, T> const& of, kernels::delta_walk const& walk) {
    int const paired = Erases && of.shape.value_dim > 64 ? 2 : 1; // both halves of a state, which share X
    launch_hopper(of, "delta_rule_state", paired, kernels::delta_rule_state<T, Erases>,
                  of.space.sequences * of.shape.value_heads * 2, kernels::delta_state_threads<Erases>,
                  sizeof(kernels::delta::state_memory<1, Erases>), panels_of(of.in.k, of.shape.key_dim, of.here),
                  panels_of(of.in.v, of.shape.value_dim, of.here), walk);
}

/// Launches the outputs of some stretches; `after_state`: while the walks before them go on.
template <bool Erases, class T>
void launch_delta_outputs(delta_call<Erases, T> const& of, kernels::delta_walk const& walk, rows<T> o, bool after_state,
                          kernels::delta_share share = {}) {
    if (share.first == share.last) return;
    auto const& in = of.in;
    index_t const stretches = of.space.stretches * (share.last - share.first) / kernels::delta_share::all + 1;
    launch_hopper(of, "delta_rule_main", kernels::delta_rule_main<T, Erases>,
                  std::min(stretches, of.space.stretches) * of.shape.value_heads, 512,
                  sizeof(kernels::delta::main_memory<Erases>), panels_of(in.q, of.shape.key_dim, of.here),
                  panels_of(in.k, of.shape.key_dim, of.here), panels_of(in.v, of.shape.value_dim, of.here),
                  panels_of(o, of.shape.value_dim, of.here), walk,
                  kernels::delta_output<T>{delta_view(o, of.shape.value_dim), share, after_state});
}

/// Launches all but what comes before.
template <bool Erases, class T>
void launch_delta_hopper_together(delta_call<Erases, T> const& of, rows<T> o, std::span<float> last) {
    auto walk = delta_walk_of(of);
    walk.snapshots = of.floats(of.space.snapshots);
    bool const by_scan = of.space.states_first && of.shape.scan;
    if (by_scan) {
        auto const steps = delta_steps_of(of, true, false);
        launch_delta_steps(of, walk, steps, of.in.k, of.in.v);
        auto joined = walk;
        joined.initial = nullptr; // the first steps begin with it
        launch_delta_join(of, joined, steps, {});
    } else if (of.space.states_first) {
        launch_delta_state(of, walk);
    }
    walk.last = last.data();
    launch_delta_outputs(of, walk, o, of.space.states_first && !by_scan);
}

template <bool Erases, class T>
void launch_delta_hopper(delta_call<Erases, T> const& of, rows<T> o, std::span<float> last) {
    launch_delta_prepared(of, delta_walk_of(of));
    launch_delta_hopper_together(of, o, last);
}

// A forward in parts. What comes before, and the steps of stretches, if they are wanted; what these make of sequences;
// the states, of steps or walked along, which leaves multiprocessors to some outputs; the other outputs. `known`:
// whether those before are, which first steps begin with then; `to_ends`: whether those after sequences are wanted.
template <bool Erases, class T>
void launch_delta_hopper_begin(delta_call<Erases, T> const& of, delta_order order, bool known, bool to_ends = true) {
    auto const walk = delta_walk_of(of);
    launch_delta_prepared(of, walk);
    if (order == delta_order::steps_first || (of.shape.scan && order == delta_order::states_first))
        launch_delta_steps(of, walk, delta_steps_of(of, known, to_ends), of.in.k, of.in.v);
}
template <bool Erases, class T>
void launch_delta_hopper_totals(delta_call<Erases, T> const& of, std::span<float> maps, std::span<float> ends) {
    auto walk = delta_walk_of(of);
    walk.initial = nullptr;
    launch_delta_join(of, walk, delta_steps_of(of, false, true), {maps.data(), ends.data()});
}
/// Returns the share of outputs that is computed beside states, which are walked along then.
template <bool Erases, class T>
int delta_share_beside(delta_call<Erases, T> const& of, delta_order order) {
    if (order != delta_order::states_first || of.shape.scan) return 0;
    return delta_share_beside(of.shape, of.space.cut, of.space.sequences, delta_saved_tokens(of.in));
}
template <bool Erases, class T>
void launch_delta_hopper_states(delta_call<Erases, T> const& of, delta_order order, std::span<float> after, rows<T> o) {
    auto walk = delta_walk_of(of);
    walk.snapshots = of.floats(of.space.snapshots);
    walk.last = after.data();
    bool const given = order == delta_order::states_first;
    if (given && !of.shape.scan) {
        launch_delta_state(of, walk);
        walk.last = nullptr; // the walks write them
        return launch_delta_outputs(of, walk, o, true, {0, delta_share_beside(of, order)});
    }
    if (given) walk.initial = nullptr; // the first steps begin with it
    launch_delta_join(of, walk, delta_steps_of(of, given, true), {});
}
template <bool Erases, class T>
void launch_delta_hopper_outputs(delta_call<Erases, T> const& of, delta_order order, rows<T> o) {
    auto walk = delta_walk_of(of);
    walk.snapshots = of.floats(of.space.snapshots);
    launch_delta_outputs(of, walk, o, false, {delta_share_beside(of, order), kernels::delta_share::all});
}

template <bool Erases, class T>
void launch_delta_hopper_fold(delta_call<Erases, T> const& of, std::span<float> maps, std::span<float> ends) {
    launch_delta_hopper_begin(of, delta_order::steps_first, false);
    launch_delta_hopper_totals(of, maps, ends);
}

} // namespace cpx::cuda::detail

#else

namespace cpx::cuda::detail {

template <class... A>
void launch_delta_hopper(A const&...) {}
template <class... A>
void launch_delta_hopper_together(A const&...) {}
template <class... A>
int delta_share_beside(A const&...) {
    return 0;
}
template <class... A>
void launch_delta_hopper_begin(A const&...) {}
template <class... A>
void launch_delta_hopper_totals(A const&...) {}
template <class... A>
void launch_delta_hopper_states(A const&...) {}
template <class... A>
void launch_delta_hopper_outputs(A const&...) {}
template <class... A>
void launch_delta_hopper_fold(A const&...) {}

} // namespace cpx::cuda::detail

#endif
