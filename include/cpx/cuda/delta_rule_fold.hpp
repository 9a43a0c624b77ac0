// SPDX-License-Identifier: Apache-2.0
// What segments of the gated delta rule do to the state that reaches them, in device memory: S -> M S + E.
#pragma once

#include <cpx/cuda/delta_rule_fold_calls.hpp>

namespace cpx::cuda {

/// Returns the bytes of workspace that `gated_delta_rule_fold` and its backward want.
template <gpu_number T>
index_t gated_delta_rule_fold_workspace(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences) {
    return detail::delta_fold_space<true, T>(shape, tokens, sequences).bytes;
}

/// Computes the step S -> M S + E that every sequence, here a segment of one, makes of the state before it.
///
/// `in` as in `gated_delta_rule`; its q and state are not read. maps: (sequences, value heads, Dk, Dk), the M; ends:
/// (sequences, value heads, Dk, Dv), the E; both written, M the identity and E zeros for no tokens. workspace: device
/// memory at a multiple of 256 bytes. No result overlaps anything else. Can be captured.
///
/// Returns the path it took, as `gated_delta_rule` does. On tensor cores the columns of M and E are states like any
/// other, with operands of bfloat16: within rounding of the state that `gated_delta_rule` hands on.
///
/// Throws `cpx::error` on shapes that do not fit and memory of another device, before anything is launched.
template <gpu_number T>
delta_rule_path gated_delta_rule_fold(gated_delta_rule_shape const& shape,
                                      std::type_identity_t<gated_delta_rule_input<T>> const& in, std::span<float> maps,
                                      std::span<float> ends, std::span<char> workspace, cudaStream_t stream,
                                      caller here = caller::here()) {
    return detail::run_delta_rule_fold<true>("cuda::gated_delta_rule_fold", shape, in, maps, ends, workspace, stream,
                                             here);
}

/// Computes what the outputs of every segment alone make the gradient of the state before it: M^T dS + this is that
/// gradient, where dS is the gradient of the state after the segment.
///
/// dout: the gradients of o; `in.v` and `in.state` are not read. dstates: (sequences, value heads, Dk, Dv), written;
/// the rest as in the fold.
template <gpu_number T>
delta_rule_path gated_delta_rule_backward_fold(gated_delta_rule_shape const& shape,
                                               std::type_identity_t<gated_delta_rule_input<T>> const& in,
                                               rows<T const> dout, std::span<float> dstates, std::span<char> workspace,
                                               cudaStream_t stream, caller here = caller::here()) {
    return detail::run_delta_rule_backward_fold<true>("cuda::gated_delta_rule_backward_fold", shape, in, dout, dstates,
                                                      workspace, stream, here);
}

} // namespace cpx::cuda
