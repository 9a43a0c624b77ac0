// SPDX-License-Identifier: Apache-2.0
// Which path the delta rule and a decay a head take, how sequences are cut and workspaces divided. Without CUTLASS's
// headers it is the plain one.
#pragma once

#include <cpx/cuda/delta_rule_arguments.hpp>
#include <cpx/cuda/launch.hpp>

namespace cpx::cuda::detail {

/// The order of a forward: outputs beside states; states first, for others wait for those after sequences; or first
/// what sequences make of the states before them, for which it waits.
enum class delta_order { together, states_first, steps_first };

/// Whether so few sequences and heads are faster by steps of stretches: whatever the device, for bits depend on it.
inline bool delta_by_stretches(index_t sequences, index_t heads) { return sequences * heads <= 16; }

/// Chunks of a stretch by scan, unless a call says so; at least, where ranks choose.
inline constexpr index_t delta_scan_stretch = 32;

/// Returns of how many chunks ranks let stretches of segments be that go by their steps, of so many tokens in all and
/// of all `heads`: with which steps, joining these and outputs take least, of segments as long as each other. By a
/// model of an H200, in tenths of microseconds of a chunk and of a stretch; whatever the device, for bits depend on it.
inline index_t delta_stretch_of_steps(index_t tokens, index_t sequences, index_t heads) {
    constexpr index_t all = 128, of_outputs = 22, of_steps = 11, of_join = 29;
    auto const waves = [](index_t blocks) { return (blocks + all - 1) / all; };
    index_t const chains = sequences * heads;
    index_t const chunks = sequences > 0 ? (tokens / kernels::delta_chunk + sequences) / sequences : 1; // of each
    index_t best = 0, least = 0;
    for (index_t count = 1; count <= all && (count == 1 || (count - 1) * delta_scan_stretch < chunks); ++count) {
        index_t const stretch = std::max(delta_scan_stretch, (chunks + count - 1) / count);
        index_t const cost = stretch * (of_outputs * waves(count * chains) + of_steps * waves(2 * count * chains)) +
                             of_join * count * waves(4 * chains);
        if (best == 0 || cost < least) best = stretch, least = cost;
    }
    return std::min(best, index_t{kernels::delta_uncut});
}

inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

/// Whether as many blocks keep the multiprocessors busy.
inline bool fills_multiprocessors(index_t blocks) { return 10 * blocks >= 9 * multiprocessors(); }

} // namespace cpx::cuda::detail

#if __has_include(<cute/arch/mma_sm90_gmma.hpp>)

#include <cpx/delta_rule_dstate.cuh>
#include <cpx/delta_rule_scan.cuh>

namespace cpx::cuda::detail {

/// Whether the current device runs this build's code for sm_90a; other code of these kernels is empty.
template <bool Erases, class T>
bool has_delta_hopper() {
    if constexpr (!tensor_core_number<T>) {
        return false;
    } else {
        cudaFuncAttributes code{};
        check(cudaFuncGetAttributes(&code, kernels::delta_rule_main<T, Erases>), "cudaFuncGetAttributes");
        return code.numRegs > 64;
    }
}

/// Returns how sequences are cut by scan and in folds: on all GPUs alike, for bits depend on it.
inline kernels::delta_cut delta_scan_cut(gated_delta_rule_shape const& shape) {
    return {static_cast<int>(shape.stretch > 0 ? shape.stretch : delta_scan_stretch)};
}

/// Returns how sequences are cut: not at all, if they and heads alone keep the multiprocessors busy; else into
/// stretches of 16 chunks, or more if there are stretches enough for some waves of blocks, as a state is written and
/// read before each. The last wave or two are then short ones.
template <bool Erases>
kernels::delta_cut delta_cut_of(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences,
                                delta_order order) {
    if (shape.scan || order == delta_order::steps_first) return delta_scan_cut(shape);
    if (shape.stretch > 0) return {static_cast<int>(shape.stretch)};
    int const all = multiprocessors(), heads = static_cast<int>(shape.value_heads);
    if (sequences == 0 || fills_multiprocessors(sequences * heads)) return {kernels::delta_uncut};
    if (order == delta_order::states_first) return {16};
    index_t const chunks = tokens / kernels::delta_chunk * heads / all; // of one of them
    int const wave = static_cast<int>(all / (sequences * heads)), walks = 2 / kernels::delta_state_blocks<Erases>;
    if (chunks < 36 * 3) return {16, 0, all, heads, walks};
    return chunks < 64 * 3 ? kernels::delta_cut{36, wave, all, heads, walks}
                           : kernels::delta_cut{64, 2 * wave, all, heads, walks};
}

/// Returns the share of outputs, in 256ths, that is computed while as many sequences, with so many tokens, are walked
/// along to their ends. Rather too little, for others wait for the states: of a stretch that begins less than its own
/// outputs' time before a walk's end, or that is a whole sequence, outputs would end after the walk.
inline int delta_share_beside(gated_delta_rule_shape const& shape, kernels::delta_cut const& cut, index_t sequences,
                              index_t tokens) {
    constexpr int steps = 4; // of a walk, by trial, which a chunk's outputs take on a multiprocessor
    index_t const stretches = tokens / kernels::delta_chunk / cut.chunks, late = (steps - 1) * sequences;
    if (cut.chunks == kernels::delta_uncut || stretches <= late) return 0;
    double const all = multiprocessors(), chains = static_cast<double>(sequences * shape.value_heads);
    double const share = std::min((all - std::min(all, 2 * chains)) / (steps * chains),
                                  static_cast<double>(stretches - late) / static_cast<double>(stretches));
    return share * static_cast<double>(stretches) < 1 ? 0 : static_cast<int>(kernels::delta_share::all * share);
}

/// Whether tensor cores can be used, where the copy engine can read and write all rows: of heads whose channels, beside
/// zeros, fill tiles of 128, and begin at multiples of 16 bytes.
template <bool Erases, class T>
bool has_delta_hopper(gated_delta_rule_shape const& shape, index_t tokens) {
    auto const fits = [](index_t dim) { return dim <= 128 && dim % 8 == 0; };
    return shape.path == delta_rule_path::tensor_cores && fits(shape.key_dim) && fits(shape.value_dim) && tokens > 0 &&
           has_delta_hopper<Erases, T>();
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

} // namespace cpx::cuda::detail

#else

namespace cpx::cuda::detail {

template <class T>
delta_space delta_saved_space(gated_delta_rule_shape const&, index_t, index_t) {
    return {};
}
template <bool Erases, class T>
bool has_delta_hopper() {
    return false;
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

} // namespace cpx::cuda::detail

#endif
