// SPDX-License-Identifier: Apache-2.0
// Launches of the delta rule's kernels for sm_90a, and of a decay a head's. Without CUTLASS's headers there are none.
#pragma once

#include <cpx/cuda/delta_rule_launch.hpp>

#if __has_include(<cute/arch/mma_sm90_gmma.hpp>)

#include <cpx/delta_rule_dstate.cuh>
#include <cpx/delta_rule_grad.cuh>
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
    auto const result =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(static_cast<void const*>(r.data())), sizes,
               strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(result == CUDA_SUCCESS, "cuda", "cuTensorMapEncodeTiled", "success", static_cast<int>(result), here);
    return map;
}

template <class T>
kernels::delta_head_rows delta_view(rows<T> r, index_t dim) {
    return {delta_view(r), static_cast<int>(dim)};
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

/// Returns how sequences are cut: not at all, if they and heads alone keep the multiprocessors busy; else into
/// stretches of 16 chunks, or more if there are stretches enough for five or seven waves of blocks, as a state is
/// written and read before each. By scan it is always the same, so that the bits are those of every GPU.
template <bool Erases>
kernels::delta_cut delta_cut_of(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences) {
    if (shape.stretch > 0) return {static_cast<int>(shape.stretch)};
    if (shape.scan) return {32};
    int const all = multiprocessors(), heads = static_cast<int>(shape.value_heads);
    if (fills_multiprocessors(sequences * heads)) return {1 << 24};
    index_t const chunks = tokens / kernels::delta_chunk * heads / all; // of one of them
    return {chunks >= 64 * 7 ? 64 : chunks >= 24 * 5 ? 24 : 16, all, heads, 2 / kernels::delta_state_blocks<Erases>};
}

/// Whether tensor cores can be used, where the copy engine can read and write all rows: of heads whose channels, beside
/// zeros, fill tiles of 128, and begin at multiples of 16 bytes.
template <bool Erases, class T>
bool has_delta_hopper(gated_delta_rule_shape const& shape, index_t tokens) {
    auto const fits = [](index_t dim) { return dim <= 128 && dim % 8 == 0; };
    return std::same_as<T, __nv_bfloat16> && shape.path == delta_rule_path::tensor_cores && fits(shape.key_dim) &&
           fits(shape.value_dim) && tokens > 0 && has_delta_hopper<Erases>();
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

/// `saved`: inverses and gates have a place of their own.
template <bool Erases, class T>
delta_space delta_forward_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences, bool saved) {
    if (!has_delta_hopper<Erases, T>(shape, tokens)) return delta_plan_space(shape, tokens, sequences);
    auto space = delta_plan_space(shape, tokens, sequences, delta_cut_of<Erases>(shape, tokens, sequences));
    space.hopper = true;
    if (!saved) take_delta_prepared<Erases>(shape, space);
    space.states_first = (tokens + kernels::delta_chunk - 1) / kernels::delta_chunk + 1 > space.cut.chunks;
    auto const states = [&] {
        return space.take(space.stretches * shape.value_heads * 2 * kernels::delta::snapshot_words, sizeof(float));
    };
    space.snapshots = states();
    if (shape.scan) {
        space.maps = Erases ? states() : space.take(space.stretches * shape.value_heads, sizeof(float));
        space.ends = states();
    }
    return space;
}

template <bool Erases, class T>
delta_space delta_fold_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences) {
    auto space = delta_plan_space(shape, tokens, sequences);
    space.hopper = has_delta_hopper<Erases, T>(shape, tokens);
    if (space.hopper) take_delta_prepared<Erases>(shape, space);
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

/// Launches what comes before all others: the plan and, unless `made`, the inverses and the gates, into the workspace
/// or, if that has no place for them, to `in.saved`. Returns what walks are given.
template <bool Erases, class T>
kernels::delta_walk launch_delta_prepared(delta_call<Erases, T> const& of, CUtensorMap const& k, bool made = false) {
    auto const& [shape, in, space, workspace, stream, here] = of;
    int const key_heads = static_cast<int>(shape.key_heads), group = of.group();
    bool const own = space.inverse >= 0;
    delta_space const at = own ? space : delta_saved_space<T>(shape, delta_saved_tokens(in), space.sequences);
    char* const prepared = own ? workspace : in.saved.data();
    kernels::delta_walk const walk{
        of.plan(),
        {prepared + at.inverse, reinterpret_cast<kernels::delta_gates*>(prepared + at.gates)},
        in.state.data(),
        nullptr,
        nullptr,
        key_heads,
        group,
        {static_cast<int>(shape.key_dim), static_cast<int>(shape.value_dim)},
        delta_scale_of(shape)};
    of.make_plan();
    if (made) return walk;
    launch_hopper(of, "delta_rule_prep", kernels::delta_rule_prep<Erases>,
                  space.chunks * kernels::delta_prep_blocks(key_heads, group), 128,
                  Erases ? sizeof(kernels::delta::prep_memory) : sizeof(kernels::delta::prep_gates), k,
                  kernels::delta_prep_input{walk.plan, delta_view(in.g), delta_view(in.beta), key_heads, group},
                  walk.prepared);
    return walk;
}

template <bool Back = false, bool Erases, class T>
void launch_delta_fold(delta_call<Erases, T> const& of, CUtensorMap const& k, CUtensorMap const& v,
                       kernels::delta_walk const& walk, kernels::delta_steps const& steps, index_t stretches) {
    launch_hopper(of, "delta_rule_fold", kernels::delta_rule_fold<Erases, Back>,
                  stretches * (Erases ? 2 : 1) * of.shape.value_heads, Erases ? 512 : 384,
                  sizeof(kernels::delta::fold_memory<Erases>), k, v, walk, steps);
}

template <bool Erases, class T>
void launch_delta_hopper(delta_call<Erases, T> const& of, rows<T> o, std::span<float> last) {
    namespace delta = kernels::delta;
    auto const& [shape, in, space, workspace, stream, here] = of;
    auto const q = panels_of(in.q, shape.key_dim, here), k = panels_of(in.k, shape.key_dim, here),
               v = panels_of(in.v, shape.value_dim, here), out = panels_of(o, shape.value_dim, here);
    auto walk = launch_delta_prepared(of, k);
    walk.last = last.data();
    walk.snapshots = of.floats(space.snapshots);
    bool const by_scan = space.states_first && shape.scan;
    if (by_scan) {
        kernels::delta_steps const steps{of.floats(space.maps), of.floats(space.ends), false};
        launch_delta_fold(of, k, v, walk, steps, space.stretches);
        launch_early(kernels::delta_rule_join<Erases>,
                     dims(128 / delta::join_columns, shape.value_heads, space.sequences), 512, 0, stream,
                     "delta_rule_join", here, walk, steps);
    } else if (space.states_first) {
        launch_hopper(of, "delta_rule_state", kernels::delta_rule_state<Erases>,
                      space.sequences * shape.value_heads * 2, kernels::delta_state_threads<Erases>,
                      sizeof(delta::state_memory<1, Erases>), k, v, walk);
    }
    launch_hopper(of, "delta_rule_main", kernels::delta_rule_main<Erases>, space.stretches * shape.value_heads, 512,
                  sizeof(delta::main_memory<Erases>), q, k, v, out, walk,
                  kernels::delta_output{delta_view(o, shape.value_dim), space.states_first && !by_scan});
}

template <bool Erases, class T>
void launch_delta_hopper_fold(delta_call<Erases, T> const& of, std::span<float> maps, std::span<float> ends) {
    auto const k = panels_of(of.in.k, of.shape.key_dim, of.here), v = panels_of(of.in.v, of.shape.value_dim, of.here);
    auto walk = launch_delta_prepared(of, k);
    walk.initial = nullptr;
    launch_delta_fold(of, k, v, walk, {maps.data(), ends.data(), true}, of.space.sequences);
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
    auto const q = panels_of(of.in.q, of.shape.key_dim, of.here), k = panels_of(of.in.k, of.shape.key_dim, of.here),
               d = panels_of(dout, of.shape.value_dim, of.here);
    auto walk = launch_delta_prepared(of, k);
    walk.initial = nullptr;
    walk.last = dstates.data();
    index_t const chains = of.space.sequences * of.shape.value_heads;
    if constexpr (!Erases)
        launch_delta_fold<true>(of, q, d, walk, {nullptr, dstates.data(), true}, of.space.sequences);
    else
        with_halves<true>(fills_multiprocessors(2 * chains), [&](auto halves) {
            launch_hopper(of, "delta_rule_fold_back", kernels::delta_rule_fold_back<halves>, chains * 2 / halves, 512,
                          sizeof(kernels::delta::dstate_memory<halves>), q, k, d, walk);
        });
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
    index_t const keys = shape.key_dim, values = shape.value_dim;
    auto const q = panels_of(in.q, keys, here), k = panels_of(in.k, keys, here), v = panels_of(in.v, values, here),
               d = panels_of(dout, values, here), dv = panels_of(to.dv, values, here);
    auto walk = launch_delta_prepared(of, k, !in.saved.empty());
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
                      back, kernels::delta_dvalues{delta_view(to.dv, values)});
    });
    launch_hopper(of, "delta_rule_grad", kernels::delta_rule_grad<Erases>,
                  std::min<index_t>(space.chunks * shape.key_heads, multiprocessors()), 512, sizeof(delta::grad_memory),
                  q, k, v, d, dv, panels_of(to.dq, keys, here), panels_of(to.dk, keys, here),
                  kernels::delta_gradients{walk.plan, walk.prepared, walk.states, back.states, delta_view(to.dq, keys),
                                           delta_view(to.dk, keys), delta_view(to.dg), delta_view(to.dbeta),
                                           walk.key_heads, walk.group, walk.scale, delta_view(to.dv, values),
                                           both && along < chains});
}

} // namespace cpx::cuda::detail

#else

namespace cpx::cuda::detail {

template <class T>
delta_space delta_saved_space(gated_delta_rule_shape const&, index_t, index_t) {
    return {};
}
template <bool Erases, class T>
delta_space delta_forward_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences, bool) {
    return delta_plan_space(shape, tokens, sequences);
}
template <bool Erases, class T>
delta_space delta_fold_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences) {
    return delta_plan_space(shape, tokens, sequences);
}
template <bool Erases, class T>
delta_space delta_backward_space(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences, bool) {
    return delta_plain_backward_space(shape, tokens, sequences);
}
template <class... A>
void launch_delta_hopper(A const&...) {}
template <class... A>
void launch_delta_hopper_fold(A const&...) {}
template <class... A>
void launch_delta_hopper_backward_fold(A const&...) {}
template <class... A>
void launch_delta_hopper_backward(A const&...) {}

} // namespace cpx::cuda::detail

#endif
