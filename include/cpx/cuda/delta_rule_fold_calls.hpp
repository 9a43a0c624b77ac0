// SPDX-License-Identifier: Apache-2.0
// Calls that fold segments of the gated delta rule and of a decay a head, which erases nothing.
#pragma once

#include <cpx/cuda/delta_rule_hopper.hpp>
#include <cpx/cuda/delta_rule_launch.hpp>

#include <cpx/delta_rule_fold.cuh>

namespace cpx::cuda::detail {

/// Of `cuda::gated_delta_rule_fold` and `cuda::head_decay_attention_fold`.
template <bool Erases, class T>
delta_rule_path run_delta_rule_fold(char const* where, gated_delta_rule_shape const& shape,
                                    gated_delta_rule_input<T> const& in, std::span<float> maps, std::span<float> ends,
                                    std::span<char> workspace, cudaStream_t stream, caller here) {
    require_delta_input<Erases>(where, shape, in, here);
    index_t const tokens = in.k.count(), sequences = std::ssize(in.offsets) - 1;
    auto const require_all = [&](char const* what, std::span<float> states, index_t elements) {
        index_t const wanted = sequences * shape.value_heads * elements;
        require(std::ssize(states) == wanted, where, what, wanted, states.size(), here);
        require_memory(where, what, states, here);
    };
    require_all("size of maps", maps, Erases ? shape.key_dim * shape.key_dim : 1);
    require_all("size of ends", ends, shape.key_dim * shape.value_dim);
    auto const space = delta_fold_space<Erases, T>(shape, tokens, sequences);
    require_workspace(where, space.bytes, workspace, here);
    require_delta_apart(where, in, {{"maps", maps}, {"ends", ends}, {"workspace", workspace}}, {}, here);
    if (sequences == 0) return delta_rule_path::plain;
    if constexpr (std::same_as<T, __nv_bfloat16>)
        if (space.hopper && row_vector(in.k, in.v) == 16) {
            launch_delta_hopper_fold<Erases>(shape, in, maps, ends, space, workspace.data(), stream, here);
            return delta_rule_path::tensor_cores;
        }
    launch_delta_plan(shape, in, space, workspace.data(), stream, here);
    with_lane_columns(shape.key_dim, [&](auto channels) {
        auto grid = delta_plain_grid(shape, space);
        if constexpr (Erases)
            grid.x += static_cast<unsigned>(kernels::delta::plain_blocks(static_cast<int>(shape.key_dim)));
        kernels::delta_rule_plain_fold<T, channels><<<grid, 128, 0, stream>>>(
            delta_tokens_of(shape, in, Erases, space, workspace.data()), maps.data(), ends.data());
        check(cudaGetLastError(), "delta_rule_plain_fold", here);
    });
    return delta_rule_path::plain;
}

/// Of `cuda::gated_delta_rule_backward_fold` and `cuda::head_decay_attention_backward_fold`.
template <bool Erases, class T>
delta_rule_path run_delta_rule_backward_fold(char const* where, gated_delta_rule_shape const& shape,
                                             gated_delta_rule_input<T> const& in, rows<T const> dout,
                                             std::span<float> dstates, std::span<char> workspace, cudaStream_t stream,
                                             caller here) {
    require_delta_input<Erases>(where, shape, in, here);
    index_t const tokens = in.k.count(), sequences = std::ssize(in.offsets) - 1;
    require_rows(where, "dout", dout, tokens, shape.value_heads * shape.value_dim, here);
    require(!dstates.empty() || sequences == 0, where, "dstates", "one for each sequence", "none", here);
    require_states(where, "dstates", shape, in, dstates, here);
    auto const space = delta_fold_space<Erases, T>(shape, tokens, sequences);
    require_workspace(where, space.bytes, workspace, here);
    require_delta_apart(where, in, {{"dstates", dstates}, {"workspace", workspace}}, {{"dout", dout}}, here);
    if (sequences == 0) return delta_rule_path::plain;
    if constexpr (std::same_as<T, __nv_bfloat16>)
        if (space.hopper && row_vector(in.q, in.k, dout) == 16) {
            launch_delta_hopper_backward_fold<Erases>(shape, in, dout, dstates, space, workspace.data(), stream, here);
            return delta_rule_path::tensor_cores;
        }
    launch_delta_plan(shape, in, space, workspace.data(), stream, here);
    with_lane_columns(shape.key_dim, [&](auto channels) {
        kernels::delta_rule_plain_fold_back<T, channels><<<delta_plain_grid(shape, space), 128, 0, stream>>>(
            delta_tokens_of(shape, in, Erases, space, workspace.data()), delta_view(dout), dstates.data());
        check(cudaGetLastError(), "delta_rule_plain_fold_back", here);
    });
    return delta_rule_path::plain;
}

} // namespace cpx::cuda::detail
