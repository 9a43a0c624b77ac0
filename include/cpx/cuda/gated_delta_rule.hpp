// SPDX-License-Identifier: Apache-2.0
// The gated delta rule of packed sequences in device memory, all heads at once.
#pragma once

#include <cpx/cuda/delta_rule_calls.hpp>
#include <cpx/cuda/nvtx.hpp>

namespace cpx::cuda {

/// Returns the bytes of workspace that a forward wants, of `tokens` rows in `sequences`, whatever the path; `saved`: if
/// it is given `gated_delta_rule_input::saved`.
template <gpu_number T>
index_t gated_delta_rule_workspace(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences,
                                   bool saved = false) {
    return detail::delta_forward_space<true, T>(shape, tokens, sequences, saved).bytes;
}

/// The same of a backward.
template <gpu_number T>
index_t gated_delta_rule_backward_workspace(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences,
                                            bool saved = false) {
    return detail::delta_backward_space<true, T>(shape, tokens, sequences, saved).bytes;
}

/// Returns the bytes that a forward may save for the backward, some 125 a token and value head; 0 on the plain path.
template <gpu_number T>
index_t gated_delta_rule_saved(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences) {
    return detail::delta_saved_space<T>(shape, tokens, sequences).bytes;
}

/// Computes, for every value head of every sequence,
///
///     S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t
///
/// o: (tokens, value heads * Dv). last: (sequences, value heads, Dk, Dv), the states after the sequences, or empty.
/// workspace: device memory at a multiple of 256 bytes. No result overlaps anything else.
///
/// Offsets are read on the device: the call can be captured, and replayed with another packing of as many sequences.
/// Returns the path it took: tensor cores want sm_90a's code and GPUs, CUTLASS's headers, bfloat16, Dk = Dv = 128 and
/// rows at multiples of 16 bytes. There, to cut a sequence at a multiple of 64 tokens and to hand the state on changes
/// no bit, nor do the other sequences, which may hold NaN.
///
/// Throws `cpx::error` on shapes that do not fit and memory of another device, before anything is launched.
template <gpu_number T>
delta_rule_path gated_delta_rule(gated_delta_rule_shape const& shape,
                                 std::type_identity_t<gated_delta_rule_input<T>> const& in, rows<T> o,
                                 std::span<float> last, std::span<char> workspace, cudaStream_t stream,
                                 caller here = caller::here()) {
    auto const range = named_range<"cpx gated_delta_rule">();
    return detail::run_delta_rule<true>("cuda::gated_delta_rule", shape, in, o, last, workspace, stream, here);
}

/// Computes the gradients of `gated_delta_rule`, given those of o and of the last states, `dlast`, or none.
///
/// Nothing is divided by a decay or by beta: g may be minus infinity, beta 0. Nothing is wanted of the forward but its
/// inputs and, if given, `in.saved`, which changes no bit. Returns the path it took, as `gated_delta_rule` does; where
/// that could be tensor cores but rows do not begin at multiples of 16 bytes, the path has to be set to `plain`.
template <gpu_number T>
delta_rule_path
gated_delta_rule_backward(gated_delta_rule_shape const& shape,
                          std::type_identity_t<gated_delta_rule_input<T>> const& in, rows<T const> dout,
                          std::span<float const> dlast, std::type_identity_t<gated_delta_rule_gradients<T>> const& to,
                          std::span<char> workspace, cudaStream_t stream, caller here = caller::here()) {
    auto const range = named_range<"cpx gated_delta_rule_backward">();
    return detail::run_delta_rule_backward<true>("cuda::gated_delta_rule_backward", shape, in, dout, dlast, to,
                                                 workspace, stream, here);
}

} // namespace cpx::cuda
