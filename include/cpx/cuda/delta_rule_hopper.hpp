// SPDX-License-Identifier: Apache-2.0
// Launches of the delta rule's kernels for sm_90a, and of a decay a head's. Without CUTLASS's headers there are none.
#pragma once

#include <cpx/cuda/delta_rule_launch.hpp>

namespace cpx::cuda::detail {

/// The order of a forward: outputs beside states; states first, for others wait for those after sequences; or first what
/// sequences make of the states before them, for which it waits.
enum class delta_order { together, states_first, steps_first };

/// Whether so few sequences and heads are faster by steps of stretches: whatever the device, for bits depend on it.
inline bool delta_by_stretches(index_t sequences, index_t heads) { return sequences * heads <= 16; }

} // namespace cpx::cuda::detail

#if __has_include(<cute/arch/mma_sm90_gmma.hpp>)

#include <cpx/delta_rule_dstate.cuh>
#include <cpx/delta_rule_grad.cuh>
#include <cpx/delta_rule_scan.cuh>

#include <cuda.h>

#include <algorithm>

namespace cpx::cuda::detail {

/// Returns what describes `r` to the copy engine, in panels of 64 rows by 64 columns.
template <class T>
CUtensorMap panels_of(rows<T> r, caller here) {
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
    cuuint64_t const sizes[] = {static_cast<cuuint64_t>(r.width()), static_cast<cuuint64_t>(r.count())};
    cuuint64_t const strides[] = {static_cast<cuuint64_t>(r.stride()) * sizeof(T)};
    cuuint32_t const box[] = {64, 64}, steps[] = {1, 1};
    auto const result =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(static_cast<void const*>(r.data())), sizes,
               strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(result == CUDA_SUCCESS, "cuda", "cuTensorMapEncodeTiled", "success", static_cast<int>(result), here);
    return map;
}

/// Whether the current device runs this build's code for sm_90a; other code of these kernels is empty.
template <bool Erases>
bool has_delta_hopper() {
    cudaFuncAttributes code{};
    check(cudaFuncGetAttributes(&code, kernels::delta_rule_main<Erases>), "cudaFuncGetAttributes");
    return code.numRegs > 64;
}

inline int multiprocessors() {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, current_device()), "cudaDeviceGetAttribute");
    return count;
}

/// Whether as many blocks keep the multiprocessors busy.
inline bool fills_multiprocessors(index_t blocks) { return 10 * blocks >= 9 * multiprocessors(); }

/// Returns how sequences are cut by scan: always alike, so that the bits are those of every GPU.
inline kernels::delta_cut delta_scan_cut(gated_delta_rule_shape const& shape) {
    return {shape.stretch > 0 ? static_cast<int>(shape.stretch) : 32};
}

/// Returns how sequences are cut: not at all, if they and heads alone keep the multiprocessors busy; else into
/// stretches of 16 chunks, or more if there are stretches enough for five or seven waves of blocks, as a state is
/// written and read before each.
template <bool Erases>
kernels::delta_cut delta_cut_of(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences,
                                delta_order order) {
    if (shape.scan || order == delta_order::steps_first) return delta_scan_cut(shape);
    if (shape.stretch > 0) return {static_cast<int>(shape.stretch)};
    int const all = multiprocessors(), heads = static_cast<int>(shape.value_heads);
    if (fills_multiprocessors(sequences * heads)) return {kernels::delta_uncut};
    if (order == delta_order::states_first) return {16};
    index_t const chunks = tokens / kernels::delta_chunk * heads / all; // of one of them
    return {chunks >= 64 * 7 ? 64 : chunks >= 24 * 5 ? 24 : 16, all, heads, 2 / kernels::delta_state_blocks<Erases>};
}

/// Whether tensor cores can be used, where the copy engine can read and write all rows.
template <bool Erases, class T>
bool has_delta_hopper(gated_delta_rule_shape const& shape, index_t tokens) {
    return std::same_as<T, __nv_bfloat16> && shape.path == delta_rule_path::tensor_cores && shape.key_dim == 128 &&
           shape.value_dim == 128 && tokens > 0 && has_delta_hopper<Erases>();
}

template <bool Erases>
void take_delta_prepared(gated_delta_rule_shape const& shape, delta_space& space) {
    space.inverse = space.take(Erases ? space.chunks * shape.value_heads : 0, kernels::delta::triangle_bytes);
    space.gates = space.take(space.chunks * shape.value_heads, sizeof(kernels::delta_gates));
}

/// Returns where inverses and gates lie in what a forward saves; nothing, where it takes the plain path.
template <class T>
delta_space delta_saved_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences) {
    delta_space space;
    if (!has_delta_hopper<true, T>(shape, tokens)) return space;
    space.chunks = delta_chunks(tokens, sequences);
    take_delta_prepared<true>(shape, space);
    return space;
}

inline index_t take_delta_states(gated_delta_rule_shape const& shape, delta_space& space) {
    return space.take(space.stretches * shape.value_heads * 2 * kernels::delta::snapshot_words, sizeof(float));
}
template <bool Erases>
void take_delta_steps(gated_delta_rule_shape const& shape, delta_space& space) {
    space.maps =
        Erases ? take_delta_states(shape, space) : space.take(space.stretches * shape.value_heads, sizeof(float));
    space.ends = take_delta_states(shape, space);
}

/// `saved`: inverses and gates have a place of their own.
template <bool Erases, class T>
delta_space delta_forward_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences, bool saved,
                                delta_order order = delta_order::together) {
    if (!has_delta_hopper<Erases, T>(shape, tokens)) return delta_plan_space(shape, tokens, sequences);
    auto space = delta_plan_space(shape, tokens, sequences, delta_cut_of<Erases>(shape, tokens, sequences, order));
    space.hopper = true;
    if (!saved) take_delta_prepared<Erases>(shape, space);
    space.states_first = order != delta_order::together ||
                         (tokens + kernels::delta_chunk - 1) / kernels::delta_chunk + 1 > space.cut.chunks;
    space.snapshots = take_delta_states(shape, space);
    if (shape.scan || order == delta_order::steps_first) take_delta_steps<Erases>(shape, space);
    return space;
}

/// `back`: of the backward, where a sequence is not cut.
template <bool Erases, class T>
delta_space delta_fold_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences,
                             bool back = false) {
    bool const hopper = has_delta_hopper<Erases, T>(shape, tokens);
    auto space = delta_plan_space(shape, tokens, sequences,
                                  hopper && !back ? delta_scan_cut(shape) : kernels::delta_cut{kernels::delta_uncut});
    space.hopper = hopper;
    if (!hopper) return space;
    take_delta_prepared<Erases>(shape, space);
    if (!back || !Erases) take_delta_steps<Erases>(shape, space);
    return space;
}

template <bool Erases, class T>
delta_space delta_backward_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences, bool saved) {
    if (!has_delta_hopper<Erases, T>(shape, tokens)) return delta_plain_backward_space(shape, tokens, sequences);
    auto space = delta_plan_space(shape, tokens, sequences);
    space.hopper = true;
    if (!saved) take_delta_prepared<Erases>(shape, space);
    space.states = space.take(space.chunks * shape.value_heads, kernels::delta::state_bytes);
    space.dstates = space.take(space.chunks * shape.value_heads, kernels::delta::state_bytes);
    return space;
}

/// Launches a kernel that waits for the one before it by itself, with much shared memory.
template <class Call, class... P>
void launch_hopper(Call const& of, char const* what, void (*kernel)(P...), index_t blocks, int threads,
                   std::size_t shared, std::type_identity_t<P> const&... arguments) {
    require(blocks < index_t{1} << 31, "cuda::gated_delta_rule", "blocks", "less than 2^31", blocks, of.here);
    launch_early(kernel, dims(blocks), dims(threads), shared, of.stream, what, of.here, arguments...);
}

/// Returns what walks are given: inverses and gates are in the workspace or, if that has no place for them, in
/// `in.saved`.
template <bool Erases, class T>
kernels::delta_walk delta_walk_of(delta_call<Erases, T> const& of) {
    auto const& [shape, in, space, workspace, stream, here] = of;
    bool const own = space.inverse >= 0;
    delta_space const at = own ? space : delta_saved_space<T>(shape, delta_saved_tokens(in), space.sequences);
    char* const prepared = own ? workspace : in.saved.data();
    return {of.plan(),       {prepared + at.inverse, reinterpret_cast<kernels::delta_gates*>(prepared + at.gates)},
            in.state.data(), nullptr,
            nullptr,         static_cast<int>(shape.key_heads),
            of.group(),      delta_scale_of(shape),
            nullptr};
}

/// Launches what comes before all others: the plan and, unless they are made, inverses and gates.
template <bool Erases, class T>
void launch_delta_prepared(delta_call<Erases, T> const& of, kernels::delta_walk const& walk, bool made = false) {
    of.make_plan();
    if (made) return;
    launch_hopper(
        of, "delta_rule_prep", kernels::delta_rule_prep<Erases>,
        of.space.chunks * kernels::delta_prep_blocks(walk.key_heads, walk.group), 128,
        Erases ? sizeof(kernels::delta::prep_memory) : sizeof(kernels::delta::prep_gates), panels_of(of.in.k, of.here),
        kernels::delta_prep_input{walk.plan, delta_view(of.in.g), delta_view(of.in.beta), walk.key_heads, walk.group},
        walk.prepared);
}

template <bool Erases, class T>
kernels::delta_steps delta_steps_of(delta_call<Erases, T> const& of, bool before_known, bool last_wanted) {
    return {of.floats(of.space.maps), of.floats(of.space.ends), before_known, last_wanted};
}

/// Launches steps, into the workspace: of stretches or, `along` sequences, of all tokens before their ends.
template <bool Erases, class T>
void launch_delta_steps(delta_call<Erases, T> const& of, kernels::delta_walk const& walk,
                        kernels::delta_steps const& steps, bool along) {
    auto const launch = [&](auto halves, index_t blocks) {
        launch_hopper(of, "delta_rule_fold", kernels::delta_rule_fold<Erases, false, halves>,
                      blocks * (Erases ? 2 : 1) * of.shape.value_heads, kernels::delta_fold_threads<Erases, halves>,
                      sizeof(kernels::delta::fold_memory<Erases, halves>), panels_of(of.in.k, of.here),
                      panels_of(of.in.v, of.here), walk, steps);
    };
    if (along)
        launch(std::integral_constant<int, 1>(), 2 * of.space.sequences);
    else
        launch(std::integral_constant<int, 2>(), of.space.stretches);
}

/// Launches what makes states of steps or, if they are wanted, `totals`.
template <bool Erases, class T>
void launch_delta_join(delta_call<Erases, T> const& of, kernels::delta_walk const& walk,
                       kernels::delta_steps const& steps, kernels::delta_totals const& totals, bool along) {
    int const blocks = along ? 2 : 128 / kernels::delta::join_columns;
    auto const launch = [&](auto kernel, index_t of_sequences, int threads) {
        launch_early(kernel, dims(Erases && totals.maps ? 2 * blocks : blocks, of.shape.value_heads, of_sequences),
                     dims(threads), 0, of.stream, "delta_rule_join", of.here, walk, steps, totals);
    };
    if (along)
        launch(kernels::delta_rule_apply<Erases>, of.space.stretches, 256);
    else
        launch(kernels::delta_rule_join<Erases>, of.space.sequences, 512);
}

/// Launches the walks that write states before stretches and, if `walk.last` is wanted, after sequences.
template <bool Erases, class T>
void launch_delta_state(delta_call<Erases, T> const& of, kernels::delta_walk const& walk) {
    launch_hopper(of, "delta_rule_state", kernels::delta_rule_state<Erases>,
                  of.space.sequences * of.shape.value_heads * 2, kernels::delta_state_threads<Erases>,
                  sizeof(kernels::delta::state_memory<1, Erases>), panels_of(of.in.k, of.here),
                  panels_of(of.in.v, of.here), walk);
}

/// Launches the outputs; `after_state`: while the walks before them go on.
template <bool Erases, class T>
void launch_delta_outputs(delta_call<Erases, T> const& of, kernels::delta_walk const& walk, rows<T> o,
                          bool after_state) {
    auto const& in = of.in;
    launch_hopper(of, "delta_rule_main", kernels::delta_rule_main<Erases>, of.space.stretches * of.shape.value_heads,
                  512, sizeof(kernels::delta::main_memory<Erases>), panels_of(in.q, of.here), panels_of(in.k, of.here),
                  panels_of(in.v, of.here), panels_of(o, of.here), walk,
                  kernels::delta_output{delta_view(o), after_state});
}

template <bool Erases, class T>
void launch_delta_hopper(delta_call<Erases, T> const& of, rows<T> o, std::span<float> last) {
    auto walk = delta_walk_of(of);
    walk.snapshots = of.floats(of.space.snapshots);
    launch_delta_prepared(of, walk);
    bool const by_scan = of.space.states_first && of.shape.scan;
    if (by_scan) {
        auto const steps = delta_steps_of(of, true, false);
        launch_delta_steps(of, walk, steps, false);
        auto joined = walk;
        joined.initial = nullptr; // the first steps begin with it
        launch_delta_join(of, joined, steps, {}, false);
    } else if (of.space.states_first)
        launch_delta_state(of, walk);
    walk.last = last.data();
    launch_delta_outputs(of, walk, o, of.space.states_first && !by_scan);
}

// A forward in parts, of a call of another `delta_order` than together: what comes before; the states, which are walked along
// or, by scan, joined of the steps of stretches; the outputs. Where states before are not `known` yet, the second part is
// what sequences make of those, of steps, and the third one the states, made of steps, too.
template <bool Erases, class T>
void launch_delta_hopper_begin(delta_call<Erases, T> const& of, bool known) {
    auto const walk = delta_walk_of(of);
    launch_delta_prepared(of, walk);
    if (of.shape.scan || !known) launch_delta_steps(of, walk, delta_steps_of(of, known, true), !of.shape.scan);
}
template <bool Erases, class T>
void launch_delta_hopper_totals(delta_call<Erases, T> const& of, std::span<float> maps, std::span<float> ends) {
    auto walk = delta_walk_of(of);
    walk.initial = nullptr;
    launch_delta_join(of, walk, delta_steps_of(of, false, true), {maps.data(), ends.data()}, !of.shape.scan);
}
template <bool Erases, class T>
void launch_delta_hopper_states(delta_call<Erases, T> const& of, bool known, std::span<float> after) {
    auto walk = delta_walk_of(of);
    walk.snapshots = of.floats(of.space.snapshots);
    walk.last = after.data();
    if (known && !of.shape.scan) return launch_delta_state(of, walk);
    if (known) walk.initial = nullptr; // the first steps begin with it
    launch_delta_join(of, walk, delta_steps_of(of, known, true), {}, !of.shape.scan);
}
template <bool Erases, class T>
void launch_delta_hopper_outputs(delta_call<Erases, T> const& of, rows<T> o) {
    auto walk = delta_walk_of(of);
    walk.snapshots = of.floats(of.space.snapshots);
    launch_delta_outputs(of, walk, o, false);
}

template <bool Erases, class T>
void launch_delta_hopper_fold(delta_call<Erases, T> const& of, std::span<float> maps, std::span<float> ends) {
    launch_delta_hopper_begin(of, false);
    launch_delta_hopper_totals(of, maps, ends);
}

/// Calls `f` with how many halves of a chain a block takes, as an std::integral_constant: both where blocks are enough,
/// for then what these share counts. Those of a decay share little.
template <bool Erases, class F>
void with_halves(bool enough, F&& f) {
    if constexpr (Erases)
        if (enough) return f(std::integral_constant<int, 2>());
    f(std::integral_constant<int, 1>());
}

template <bool Erases, class T>
void launch_delta_hopper_backward_fold(delta_call<Erases, T> const& of, rows<T const> dout, std::span<float> dstates) {
    auto walk = delta_walk_of(of);
    walk.initial = nullptr;
    launch_delta_prepared(of, walk);
    if constexpr (!Erases) {
        auto const steps = delta_steps_of(of, false, true);
        launch_hopper(of, "delta_rule_fold_back", kernels::delta_rule_fold<false, true>,
                      of.space.stretches * of.shape.value_heads, kernels::delta_fold_threads<false, 2>,
                      sizeof(kernels::delta::fold_memory<false, 2>), panels_of(of.in.q, of.here),
                      panels_of(dout, of.here), walk, steps);
        launch_delta_join(of, walk, steps, {nullptr, dstates.data()}, false);
    } else {
        auto const q = panels_of(of.in.q, of.here), k = panels_of(of.in.k, of.here), d = panels_of(dout, of.here);
        index_t const chains = of.space.sequences * of.shape.value_heads;
        walk.last = dstates.data();
        with_halves<true>(fills_multiprocessors(2 * chains), [&](auto halves) {
            launch_hopper(of, "delta_rule_fold_back", kernels::delta_rule_fold_back<halves>, chains * 2 / halves, 512,
                          sizeof(kernels::delta::dstate_memory<halves>), q, k, d, walk);
        });
    }
}

/// Returns by how many blocks the backward walks along so many chains, both halves each, while as many walk back: where
/// these leave no room, by few, one chain after the other, so that gradients can follow while what was read is in L2.
inline index_t delta_walks_along(gated_delta_rule_shape const& shape, index_t chains) {
    index_t const room = multiprocessors() - chains, heads = shape.value_heads;
    return chains <= room ? chains : std::min(chains, std::max({heads, multiprocessors() / 4 / heads * heads, room}));
}

template <bool Erases, class T>
void launch_delta_hopper_backward(delta_call<Erases, T> const& of, rows<T const> dout, std::span<float const> dlast,
                                  gated_delta_rule_gradients<T> const& to) {
    namespace delta = kernels::delta;
    auto const& [shape, in, space, workspace, stream, here] = of;
    auto const q = panels_of(in.q, here), k = panels_of(in.k, here), v = panels_of(in.v, here),
               d = panels_of(dout, here), dv = panels_of(to.dv, here);
    auto walk = delta_walk_of(of);
    launch_delta_prepared(of, walk, !in.saved.empty());
    walk.states = workspace + space.states;
    auto back = walk;
    back.states = workspace + space.dstates;
    back.initial = dlast.data();
    back.last = to.dstate.data();
    index_t const chains = space.sequences * shape.value_heads, along = delta_walks_along(shape, chains);
    bool const both = Erases && fills_multiprocessors(2 * chains);
    with_halves<Erases>(both, [&](auto halves) {
        constexpr std::size_t bytes = sizeof(delta::state_memory<halves, Erases>);
        launch_hopper(of, "delta_rule_walks", kernels::delta_rule_walks<halves, Erases>,
                      chains * 2 / halves + (both ? along : 2 * chains), kernels::delta_walks_threads<Erases>,
                      Erases ? std::max(bytes, sizeof(delta::dstate_memory<halves>)) : bytes, q, k, v, d, dv, walk,
                      back, kernels::delta_dvalues{delta_view(to.dv)});
    });
    launch_hopper(of, "delta_rule_grad", kernels::delta_rule_grad<Erases>,
                  std::min<index_t>(space.chunks * shape.key_heads, multiprocessors()), 512, sizeof(delta::grad_memory),
                  q, k, v, d, dv, panels_of(to.dq, here), panels_of(to.dk, here),
                  kernels::delta_gradients{walk.plan, walk.prepared, walk.states, back.states, delta_view(to.dq),
                                           delta_view(to.dk), delta_view(to.dg), delta_view(to.dbeta), walk.key_heads,
                                           walk.group, walk.scale, delta_view(to.dv), both && along < chains});
}

} // namespace cpx::cuda::detail

#else

namespace cpx::cuda::detail {

template <class T>
delta_space delta_saved_space(gated_delta_rule_shape const&, index_t, index_t) {
    return {};
}
template <bool Erases, class T>
bool has_delta_hopper(gated_delta_rule_shape const&, index_t) {
    return false;
}
template <bool Erases, class T>
delta_space delta_forward_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences, bool,
                                delta_order = delta_order::together) {
    return delta_plan_space(shape, tokens, sequences);
}
template <bool Erases, class T>
delta_space delta_fold_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences, bool = false) {
    return delta_plan_space(shape, tokens, sequences);
}
template <bool Erases, class T>
delta_space delta_backward_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences, bool) {
    return delta_plain_backward_space(shape, tokens, sequences);
}
template <class... A>
void launch_delta_hopper(A const&...) {}
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
template <class... A>
void launch_delta_hopper_backward_fold(A const&...) {}
template <class... A>
void launch_delta_hopper_backward(A const&...) {}

} // namespace cpx::cuda::detail

#endif
