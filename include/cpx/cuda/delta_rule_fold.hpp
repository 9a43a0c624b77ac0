// SPDX-License-Identifier: Apache-2.0
// What segments of the gated delta rule, or of a decay a head, do on a device to the state before them: S -> M S + E.
#pragma once

#include <cpx/cuda/delta_rule_hopper_backward.hpp>
#include <cpx/cuda/delta_rule_launch.hpp>

#include <cpx/delta_rule_fold.cuh>

namespace cpx::cuda {

namespace detail {

/// Runs `gated_delta_rule_fold`, and that of the backward, of a call that fits.
template <bool Erases, class T>
delta_rule_path run_delta_fold(delta_call<Erases, T> const& of, std::span<float> maps, std::span<float> ends) {
    if (of.space.sequences == 0) return delta_rule_path::plain;
    if constexpr (tensor_core_number<T>)
        if (of.space.hopper && in_panels(of.in.k, of.in.v)) {
            launch_delta_hopper_fold(of, maps, ends);
            return delta_rule_path::tensor_cores;
        }
    of.make_plan();
    int const of_maps = Erases ? kernels::delta::plain_blocks(static_cast<int>(of.shape.key_dim)) : 0;
    with_lane_columns(of.shape.key_dim, [&](auto channels) {
        of.launch_plain("delta_rule_plain_fold", kernels::delta_rule_plain_fold<T, channels>, of_maps, of.tokens(),
                        maps.data(), ends.data());
    });
    return delta_rule_path::plain;
}
template <bool Erases, class T>
delta_rule_path run_delta_fold_back(delta_call<Erases, T> const& of, rows<T const> dout, std::span<float> dstates) {
    if (of.space.sequences == 0) return delta_rule_path::plain;
    if constexpr (tensor_core_number<T>)
        if (of.space.hopper && in_panels(of.in.q, of.in.k, dout)) {
            launch_delta_hopper_backward_fold(of, dout, dstates);
            return delta_rule_path::tensor_cores;
        }
    of.make_plan();
    with_lane_columns(of.shape.key_dim, [&](auto channels) {
        of.launch_plain("delta_rule_plain_fold_back", kernels::delta_rule_plain_fold_back<T, channels>, 0, of.tokens(),
                        delta_view(dout), dstates.data());
    });
    return delta_rule_path::plain;
}

} // namespace detail

/// Returns the bytes of workspace that `gated_delta_rule_fold` and its backward want.
template <gpu_number T, erases Of = erases::yes>
index_t gated_delta_rule_fold_workspace(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences,
                                        caller here = caller::here()) {
    detail::require_delta_sizes("cuda::gated_delta_rule_fold_workspace", shape, tokens, sequences, here);
    return detail::delta_fold_space<Of == erases::yes, T>(shape, tokens, sequences).bytes;
}

/// Computes the step S -> M S + E that every sequence, here a segment of one, makes of the state before it.
///
/// `in` as in `gated_delta_rule`, with nothing `saved`; its q, which has its shape all the same, and its state are not
/// read. maps: (sequences, value heads, Dk, Dk), the M, or of `erases::no` (sequences, value heads), the products of
/// decays; ends: (sequences, value heads, Dk, Dv), the E; both written, M the identity and E zeros for no tokens.
/// workspace: device memory at a multiple of 256 bytes. No result overlaps anything else. Can be captured.
///
/// Returns the path it took, as `gated_delta_rule` does. On tensor cores the columns of M and E are states like any
/// other, with operands of T: within rounding of the state that `gated_delta_rule` hands on. Segments are cut
/// into stretches of `shape.stretch` chunks, or 32, whose steps are joined in float: bits depend on it.
///
/// Throws `cpx::error` on shapes that do not fit and memory of another device, before anything is launched.
template <gpu_number T, erases Of = erases::yes>
delta_rule_path gated_delta_rule_fold(gated_delta_rule_shape const& shape,
                                      std::type_identity_t<gated_delta_rule_input<T>> const& in, std::span<float> maps,
                                      std::span<float> ends, std::span<char> workspace, cudaStream_t stream,
                                      caller here = caller::here()) {
    using namespace detail;
    constexpr bool Erases = Of == erases::yes;
    char const* const where = "cuda::gated_delta_rule_fold";
    require_delta_input<Erases>(where, shape, in, here);
    require(in.saved.empty(), where, "saved", "none", in.saved.size(), here);
    index_t const tokens = in.k.count(), sequences = std::ssize(in.offsets) - 1;
    auto const require_all = [&](char const* what, std::span<float> states, index_t elements) {
        index_t const wanted = sequences * shape.value_heads * elements;
        require(std::ssize(states) == wanted, where, what, wanted, states.size(), here);
        require_memory(where, {{what, states}}, here);
    };
    require_all("size of maps", maps, Erases ? shape.key_dim * shape.key_dim : 1);
    require_all("size of ends", ends, shape.key_dim * shape.value_dim);
    auto const space = delta_fold_space<Erases, T>(shape, tokens, sequences);
    require_bytes(where, "workspace", space.bytes, workspace, here);
    require_delta_apart(where, in, {{"maps", maps}, {"ends", ends}, {"workspace", workspace}}, {}, here);
    return run_delta_fold<Erases, T>({shape, in, space, workspace.data(), stream, here}, maps, ends);
}

/// Computes what the outputs of every segment alone make the gradient of the state before it: M^T dS + this is that
/// gradient, where dS is the gradient of the state after the segment.
///
/// dout: the gradients of o; `in.v`, which has its shape all the same, and `in.state` are not read. dstates:
/// (sequences, value heads, Dk, Dv), written; the rest as in the fold. No segment is cut.
template <gpu_number T, erases Of = erases::yes>
delta_rule_path gated_delta_rule_backward_fold(gated_delta_rule_shape const& shape,
                                               std::type_identity_t<gated_delta_rule_input<T>> const& in,
                                               rows<T const> dout, std::span<float> dstates, std::span<char> workspace,
                                               cudaStream_t stream, caller here = caller::here()) {
    using namespace detail;
    constexpr bool Erases = Of == erases::yes;
    char const* const where = "cuda::gated_delta_rule_backward_fold";
    require_delta_input<Erases>(where, shape, in, here);
    require(in.saved.empty(), where, "saved", "none", in.saved.size(), here);
    index_t const tokens = in.k.count(), sequences = std::ssize(in.offsets) - 1;
    require_rows(where, {{"dout", dout, tokens, shape.value_heads * shape.value_dim}}, here);
    require(!dstates.empty() || sequences == 0, where, "dstates", "one for each sequence", "none", here);
    require_states(where, "dstates", shape, in, dstates, here);
    auto const space = delta_fold_space<Erases, T>(shape, tokens, sequences, true);
    require_bytes(where, "workspace", space.bytes, workspace, here);
    require_delta_apart(where, in, {{"dstates", dstates}, {"workspace", workspace}}, {{"dout", dout}}, here);
    return run_delta_fold_back<Erases, T>({shape, in, space, workspace.data(), stream, here}, dout, dstates);
}

} // namespace cpx::cuda
