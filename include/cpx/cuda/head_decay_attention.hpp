// SPDX-License-Identifier: Apache-2.0
// Linear attention with a decay a head (Mamba-2, lightning attention) of packed sequences in device memory.
#pragma once

#include <cpx/cuda/delta_rule_calls.hpp>
#include <cpx/cuda/delta_rule_fold_calls.hpp>
#include <cpx/cuda/nvtx.hpp>

namespace cpx::cuda {

/// Returns the bytes of workspace that `head_decay_attention` wants, of `tokens` rows in `sequences`, whatever the
/// path.
template <gpu_number T>
index_t head_decay_attention_workspace(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences) {
    return detail::delta_forward_space<false, T>(shape, tokens, sequences, false).bytes;
}

/// The same of its backward, and of its folds.
template <gpu_number T>
index_t head_decay_attention_backward_workspace(gated_delta_rule_shape const& shape, index_t tokens,
                                                index_t sequences) {
    return detail::delta_backward_space<false, T>(shape, tokens, sequences, false).bytes;
}
template <gpu_number T>
index_t head_decay_attention_fold_workspace(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences) {
    return detail::delta_fold_space<false, T>(shape, tokens, sequences).bytes;
}

/// Computes, for every value head of every sequence,
///
///     S_t = exp(g_t) S_{t-1} + k_t v_t^T,    o_t = scale S_t^T q_t
///
/// Arguments, paths, bits and errors as of `gated_delta_rule`, of whose kernels these are the member that erases
/// nothing: beta and what is saved are left empty. The host's is `cpx::head_decay_attention`.
template <gpu_number T>
delta_rule_path head_decay_attention(gated_delta_rule_shape const& shape,
                                     std::type_identity_t<gated_delta_rule_input<T>> const& in, rows<T> o,
                                     std::span<float> last, std::span<char> workspace, cudaStream_t stream,
                                     caller here = caller::here()) {
    auto const range = named_range<"cpx head_decay_attention">();
    return detail::run_delta_rule<false>("cuda::head_decay_attention", shape, in, o, last, workspace, stream, here);
}

/// Computes the gradients of `head_decay_attention`, given those of o and of the last states, `dlast`, or none.
///
/// Nothing is divided by a decay: g may be minus infinity. Nothing is wanted of the forward but its inputs.
template <gpu_number T>
delta_rule_path head_decay_attention_backward(gated_delta_rule_shape const& shape,
                                              std::type_identity_t<gated_delta_rule_input<T>> const& in,
                                              rows<T const> dout, std::span<float const> dlast,
                                              std::type_identity_t<gated_delta_rule_gradients<T>> const& to,
                                              std::span<char> workspace, cudaStream_t stream,
                                              caller here = caller::here()) {
    auto const range = named_range<"cpx head_decay_attention_backward">();
    return detail::run_delta_rule_backward<false>("cuda::head_decay_attention_backward", shape, in, dout, dlast, to,
                                                  workspace, stream, here);
}

/// Computes the step S -> m S + E that every sequence, here a segment of one, makes of the state before it; m is the
/// product of its decays.
///
/// maps: (sequences, value heads), the m; ends: (sequences, value heads, Dk, Dv); 1 and zeros for no tokens. The rest
/// as in `gated_delta_rule_fold`.
template <gpu_number T>
delta_rule_path head_decay_attention_fold(gated_delta_rule_shape const& shape,
                                          std::type_identity_t<gated_delta_rule_input<T>> const& in,
                                          std::span<float> maps, std::span<float> ends, std::span<char> workspace,
                                          cudaStream_t stream, caller here = caller::here()) {
    return detail::run_delta_rule_fold<false>("cuda::head_decay_attention_fold", shape, in, maps, ends, workspace,
                                              stream, here);
}

/// Computes what the outputs of every segment alone make the gradient of the state before it, as
/// `gated_delta_rule_backward_fold` does.
template <gpu_number T>
delta_rule_path head_decay_attention_backward_fold(gated_delta_rule_shape const& shape,
                                                   std::type_identity_t<gated_delta_rule_input<T>> const& in,
                                                   rows<T const> dout, std::span<float> dstates,
                                                   std::span<char> workspace, cudaStream_t stream,
                                                   caller here = caller::here()) {
    return detail::run_delta_rule_backward_fold<false>("cuda::head_decay_attention_backward_fold", shape, in, dout,
                                                       dstates, workspace, stream, here);
}

} // namespace cpx::cuda
