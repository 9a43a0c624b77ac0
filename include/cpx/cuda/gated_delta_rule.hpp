// SPDX-License-Identifier: Apache-2.0
// The gated delta rule and a decay a head of packed sequences in device memory, all heads at once.
#pragma once

#include <cpx/cuda/delta_rule_hopper_backward.hpp>
#include <cpx/cuda/delta_rule_launch.hpp>
#include <cpx/cuda/nvtx.hpp>

namespace cpx::cuda {

namespace detail {

/// Throws `cpx::error` unless there is room for what is saved, if it is wanted.
template <class T>
void require_saved(char const* where, gated_delta_rule_shape const& shape, gated_delta_rule_input<T> const& in,
                   caller here) {
    if (in.saved.empty()) return;
    require(in.saved_tokens != 0, where, "saved_tokens", "some, where there is something saved", 0, here);
    index_t const bytes = delta_saved_space<T>(shape, delta_saved_tokens(in), std::ssize(in.offsets) - 1).bytes;
    require_bytes(where, "saved", bytes, in.saved, here);
}

/// Runs `gated_delta_rule`, and its backward, of a call that fits.
template <bool Erases, class T>
delta_rule_path run_delta(delta_call<Erases, T> const& of, rows<T> o, std::span<float> last) {
    auto const range = Erases ? named_range<"cpx gated_delta_rule">() : named_range<"cpx head_decay_attention">();
    if (of.space.sequences == 0) return delta_rule_path::plain;
    if constexpr (tensor_core_number<T>)
        if (of.space.hopper && in_panels(of.in.q, of.in.k, of.in.v, o)) {
            launch_delta_hopper(of, o, last);
            return delta_rule_path::tensor_cores;
        }
    launch_delta_plain(of, o, last, {});
    return delta_rule_path::plain;
}
template <bool Erases, class T>
delta_rule_path run_delta_backward(delta_call<Erases, T> const& of, rows<T const> dout, std::span<float const> dlast,
                                   gated_delta_rule_gradients<T> const& to) {
    auto const range =
        Erases ? named_range<"cpx gated_delta_rule_backward">() : named_range<"cpx head_decay_attention_backward">();
    if (of.space.sequences == 0) return delta_rule_path::plain;
    if constexpr (tensor_core_number<T>)
        if (of.space.hopper) {
            launch_delta_hopper_backward(of, dout, dlast, to);
            return delta_rule_path::tensor_cores;
        }
    launch_delta_plain_backward(of, dout, dlast, to);
    return delta_rule_path::plain;
}

} // namespace detail

/// Returns the bytes of workspace that a forward wants, of `tokens` rows in `sequences`, whatever the path; `saved`: if
/// it is given `gated_delta_rule_input::saved`. On another model of GPU, or with another `stretch`, `scan` or `path`,
/// it may want others. Throws `cpx::error` on sizes that no call takes.
template <gpu_number T, erases Of = erases::yes>
index_t gated_delta_rule_workspace(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences,
                                   bool saved = false, caller here = caller::here()) {
    detail::require_delta_sizes("cuda::gated_delta_rule_workspace", shape, tokens, sequences, here);
    return detail::delta_forward_space<Of == erases::yes, T>(shape, tokens, sequences, saved).bytes;
}

/// The same of a backward, with room for gradients of g that is made of parameters, too.
template <gpu_number T, erases Of = erases::yes>
index_t gated_delta_rule_backward_workspace(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences,
                                            bool saved = false, caller here = caller::here()) {
    detail::require_delta_sizes("cuda::gated_delta_rule_backward_workspace", shape, tokens, sequences, here);
    auto space = detail::delta_backward_space<Of == erases::yes, T>(shape, tokens, sequences, saved);
    detail::take_delta_parameters(shape, tokens, space);
    return space.bytes;
}

/// Returns the bytes that a forward may save for the backward, some 88 a token and value head; 0 on the plain path.
template <gpu_number T>
index_t gated_delta_rule_saved(gated_delta_rule_shape const& shape, index_t tokens, index_t sequences,
                               caller here = caller::here()) {
    detail::require_delta_sizes("cuda::gated_delta_rule_saved", shape, tokens, sequences, here);
    return detail::delta_saved_space<T>(shape, tokens, sequences).bytes;
}

/// Computes, for every value head of every sequence,
///
///     S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t
///
/// and of `erases::no` S_t = exp(g_t) S_{t-1} + k_t v_t^T: the gated delta rule (Yang, Kautz and Hatamizadeh 2024,
/// arXiv 2412.06464), and Mamba-2 or lightning attention. g is given, or `in.g_of`, of which kernels make
/// -exp(a_log) softplus(a + dt_bias) where they read it; `rowwise::delta_gates` makes the same g, and beta, beforehand.
///
///     gated_delta_rule_shape const shape{.key_heads = 16, .value_heads = 32};
///     buffer<char> const room(gated_delta_rule_workspace<__nv_bfloat16>(shape, tokens, sequences));
///     gated_delta_rule<__nv_bfloat16>(shape, {.q = q, .k = k, .v = v, .g = g, .beta = beta, .offsets = cu_seqlens}, o,
///                                     {}, {room.data(), static_cast<std::size_t>(room.size())}, stream);
///
/// o: (tokens, value heads * Dv). last: (sequences, value heads, Dk, Dv), the states after the sequences, or empty.
/// workspace: device memory at a multiple of 256 bytes. No result overlaps anything else.
///
/// Offsets are read on the device: the call can be captured, and replayed with another packing of as many sequences.
/// Offsets that go back or are negative, sequences beyond the rows, and ones that together have more than all rows, as
/// they overlap, trap: a CUDA error. At most 65535 sequences and value heads, and less than 2^31 - 128 rows. On tensor
/// cores 64 tokens of a value head of 128 channels take some 10 MFLOP, and 32 in the backward.
///
/// Returns the path it took: tensor cores want sm_90a's code and GPUs, CUTLASS's headers, bfloat16 or half, Dk and Dv
/// multiples of 8 up to 128, which they fill up with zeros, and rows at multiples of 16 bytes. There, to cut a sequence
/// at a multiple of 64 tokens and to hand the state on changes no bit, nor do the other sequences, which may hold NaN.
/// Operands are rounded to T, those that are made of states and of gradients among them, and sums are float. Errors of
/// half are a quarter to an eighth of those of bfloat16 where its operands lie between 6e-5 and 65504: a larger one
/// becomes infinite, smaller ones lose bits, those below 6e-8 all. So a backward of half wants a scale by which dO is
/// not much smaller than o. The plain path has all but rows in float. Between rows of bfloat16 the rule can be half's:
/// `causal_conv1d` writes `conv_parts<__half>`, `normalise_rows` reads o, and so do their backwards, which scale
/// gradients: `gradient_scale`. The layer of all this is `gated_delta_net<How, S, Mix, __half>`.
///
/// Throws `cpx::error` on shapes that do not fit and memory of another device, before anything is launched.
template <gpu_number T, erases Of = erases::yes>
delta_rule_path gated_delta_rule(gated_delta_rule_shape const& shape,
                                 std::type_identity_t<gated_delta_rule_input<T>> const& in, rows<T> o,
                                 std::span<float> last, std::span<char> workspace, cudaStream_t stream,
                                 caller here = caller::here()) {
    using namespace detail;
    constexpr bool Erases = Of == erases::yes;
    char const* const where = "cuda::gated_delta_rule";
    require_delta_input<Erases>(where, shape, in, here);
    require_rows(where, {{"o", o, in.k.count(), shape.value_heads * shape.value_dim}}, here);
    require_states(where, "last", shape, in, last, here);
    auto const space =
        delta_forward_space<Erases, T>(shape, in.k.count(), std::ssize(in.offsets) - 1, !in.saved.empty());
    require_bytes(where, "workspace", space.bytes, workspace, here);
    require_saved(where, shape, in, here);
    require(in.saved.empty() || !space.hopper || in_panels(in.q, in.k, in.v, o), where, "rows",
            "at multiples of 16 bytes, or nothing saved", "others", here);
    require_delta_apart(where, in, {{"o", o}, {"last", last}, {"workspace", workspace}, {"saved", in.saved}}, {}, here);
    return run_delta<Erases, T>({shape, in, space, workspace.data(), stream, here}, o, last);
}

/// Computes the gradients of `gated_delta_rule`, given those of o and of the last states, `dlast`, or none.
///
/// Nothing is divided by a decay or by beta: g may be minus infinity, beta 0. Nothing is wanted of the forward but its
/// inputs and, if given, `in.saved`, which changes no bit. Returns the path it took, as `gated_delta_rule` does; where
/// that could be tensor cores but rows do not begin at multiples of 16 bytes, the path has to be set to `plain`.
template <gpu_number T, erases Of = erases::yes>
delta_rule_path
gated_delta_rule_backward(gated_delta_rule_shape const& shape,
                          std::type_identity_t<gated_delta_rule_input<T>> const& in, rows<T const> dout,
                          std::span<float const> dlast, std::type_identity_t<gated_delta_rule_gradients<T>> const& to,
                          std::span<char> workspace, cudaStream_t stream, caller here = caller::here()) {
    using namespace detail;
    constexpr bool Erases = Of == erases::yes;
    char const* const where = "cuda::gated_delta_rule_backward";
    require_delta_input<Erases>(where, shape, in, here);
    index_t const tokens = in.k.count(), keys = shape.key_heads * shape.key_dim;
    index_t const values = shape.value_heads * shape.value_dim;
    require_rows(where, {{"dout", dout, tokens, values}}, here);
    require_states(where, "dlast", shape, in, dlast, here);
    require_rows(where, {{"dq", to.dq, tokens, keys}, {"dk", to.dk, tokens, keys}, {"dv", to.dv, tokens, values}},
                 here);
    bool const of_parameters = in.g_of.given();
    if (of_parameters) {
        require(!to.dg.data(), where, "dg", "none, for g is made of parameters", "some", here);
        require_rows(where, {{"da", to.dg_of.da, tokens, shape.value_heads}}, here);
        require_heads(where, "da_log", shape, to.dg_of.da_log, here);
        require_heads(where, "ddt_bias", shape, to.dg_of.ddt_bias, here);
    } else {
        require_rows(where, {{"dg", to.dg, tokens, shape.value_heads}}, here);
        require(!to.dg_of.da.data() && to.dg_of.da_log.empty() && to.dg_of.ddt_bias.empty(), where, "dg_of",
                "none, for g is given", "some", here);
    }
    if constexpr (Erases) require_rows(where, {{"dbeta", to.dbeta, tokens, shape.value_heads}}, here);
    require_states(where, "dstate", shape, in, to.dstate, here);
    auto space = delta_backward_space<Erases, T>(shape, tokens, std::ssize(in.offsets) - 1, !in.saved.empty());
    if (of_parameters) take_delta_parameters(shape, tokens, space);
    require_bytes(where, "workspace", space.bytes, workspace, here);
    require_saved(where, shape, in, here);
    require(!space.hopper || in_panels(in.q, in.k, in.v, dout, to.dq, to.dk, to.dv), where, "rows",
            "at multiples of 16 bytes, or shape.path = plain", "others", here);
    require_delta_apart(where, in,
                        {{"dq", to.dq},
                         {"dk", to.dk},
                         {"dv", to.dv},
                         {"dg", to.dg},
                         {"dbeta", to.dbeta},
                         {"dstate", to.dstate},
                         {"da", to.dg_of.da},
                         {"da_log", to.dg_of.da_log},
                         {"ddt_bias", to.dg_of.ddt_bias},
                         {"workspace", workspace}},
                        {{"dout", dout}, {"dlast", dlast}, {"saved", in.saved}}, here);
    delta_call<Erases, T> const call{shape, in, space, workspace.data(), stream, here};
    if (!of_parameters) return run_delta_backward(call, dout, dlast, to);
    auto inside = to;
    float* const dg = call.floats(space.dg);
    inside.dg = rows<float>(dg, tokens, shape.value_heads);
    auto const path = run_delta_backward(call, dout, dlast, inside);
    launch_delta_parameters(call, dg, to.dg_of);
    return path;
}

} // namespace cpx::cuda
