// SPDX-License-Identifier: Apache-2.0
// Calls of the gated delta rule and of a decay a head, which erases nothing: what they want, and which path they take.
#pragma once

#include <cpx/cuda/delta_rule_hopper.hpp>
#include <cpx/cuda/delta_rule_launch.hpp>

namespace cpx::cuda::detail {

/// Throws `cpx::error` unless there is room for what is saved, if it is wanted.
template <class T>
void require_saved(char const* where, gated_delta_rule_shape const& shape, gated_delta_rule_input<T> const& in,
                   caller here) {
    if (in.saved.empty()) return;
    index_t const bytes = delta_saved_space<T>(shape, delta_saved_tokens(in), std::ssize(in.offsets) - 1).bytes;
    require_bytes(where, "saved", bytes, in.saved, here);
}

/// Of `cuda::gated_delta_rule` and `cuda::head_decay_attention`.
template <bool Erases, class T>
delta_rule_path run_delta_rule(char const* where, gated_delta_rule_shape const& shape,
                               gated_delta_rule_input<T> const& in, rows<T> o, std::span<float> last,
                               std::span<char> workspace, cudaStream_t stream, caller here) {
    require_delta_input<Erases>(where, shape, in, here);
    require_rows(where, "o", o, in.k.count(), shape.value_heads * shape.value_dim, here);
    require_states(where, "last", shape, in, last, here);
    auto const space =
        delta_forward_space<Erases, T>(shape, in.k.count(), std::ssize(in.offsets) - 1, !in.saved.empty());
    require_workspace(where, space.bytes, workspace, here);
    require_saved(where, shape, in, here);
    require_delta_apart(where, in, {{"o", o}, {"last", last}, {"workspace", workspace}, {"saved", in.saved}}, {}, here);
    if (in.offsets.size() == 1) return delta_rule_path::plain;
    if constexpr (std::same_as<T, __nv_bfloat16>)
        if (space.hopper && row_vector(in.q, in.k, in.v, o) == 16) {
            launch_delta_hopper<Erases>(shape, in, o, last, space, workspace.data(), stream, here);
            return delta_rule_path::tensor_cores;
        }
    require(in.saved.empty() || !space.hopper, where, "rows", "at multiples of 16 bytes, or nothing saved", "others",
            here);
    launch_delta_plan(shape, in, space, workspace.data(), stream, here);
    launch_delta_plain(shape, in, Erases, o, last, {}, space, workspace.data(), stream, here);
    return delta_rule_path::plain;
}

/// Of their backwards.
template <bool Erases, class T>
delta_rule_path run_delta_rule_backward(char const* where, gated_delta_rule_shape const& shape,
                                        gated_delta_rule_input<T> const& in, rows<T const> dout,
                                        std::span<float const> dlast, gated_delta_rule_gradients<T> const& to,
                                        std::span<char> workspace, cudaStream_t stream, caller here) {
    require_delta_input<Erases>(where, shape, in, here);
    index_t const tokens = in.k.count(), keys = shape.key_heads * shape.key_dim;
    index_t const values = shape.value_heads * shape.value_dim;
    require_rows(where, "dout", dout, tokens, values, here);
    require_states(where, "dlast", shape, in, dlast, here);
    require_rows(where, "dq", to.dq, tokens, keys, here);
    require_rows(where, "dk", to.dk, tokens, keys, here);
    require_rows(where, "dv", to.dv, tokens, values, here);
    require_rows(where, "dg", to.dg, tokens, shape.value_heads, here);
    if constexpr (Erases) require_rows(where, "dbeta", to.dbeta, tokens, shape.value_heads, here);
    require_states(where, "dstate", shape, in, to.dstate, here);
    auto const space = delta_backward_space<Erases, T>(shape, tokens, std::ssize(in.offsets) - 1, !in.saved.empty());
    require_workspace(where, space.bytes, workspace, here);
    require_saved(where, shape, in, here);
    require_delta_apart(where, in,
                        {{"dq", to.dq},
                         {"dk", to.dk},
                         {"dv", to.dv},
                         {"dg", to.dg},
                         {"dbeta", to.dbeta},
                         {"dstate", to.dstate},
                         {"workspace", workspace}},
                        {{"dout", dout}, {"dlast", dlast}, {"saved", in.saved}}, here);
    if (in.offsets.size() == 1) return delta_rule_path::plain;
    if constexpr (std::same_as<T, __nv_bfloat16>)
        if (space.hopper) {
            require(row_vector(in.q, in.k, in.v, dout, to.dq, to.dk, to.dv) == 16, where, "rows",
                    "at multiples of 16 bytes, or shape.path = plain", "others", here);
            launch_delta_hopper_backward<Erases>(shape, in, dout, dlast, to, space, workspace.data(), stream, here);
            return delta_rule_path::tensor_cores;
        }
    launch_delta_plain_backward(shape, in, Erases, dout, dlast, to, space, workspace.data(), stream, here);
    return delta_rule_path::plain;
}

} // namespace cpx::cuda::detail
