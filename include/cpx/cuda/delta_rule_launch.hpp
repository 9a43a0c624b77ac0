// SPDX-License-Identifier: Apache-2.0
// Launches of the plain path of the gated delta rule and of a decay a head, which erases nothing.
#pragma once

#include <cpx/cuda/delta_rule_arguments.hpp>
#include <cpx/cuda/launch.hpp>

#include <cpx/delta_rule_plain_backward.cuh>

namespace cpx::cuda::detail {

template <class T>
void launch_delta_plan(gated_delta_rule_shape const& shape, gated_delta_rule_input<T> const& in,
                       delta_space const& space, char* workspace, cudaStream_t stream, caller here) {
    auto const list = [](std::span<index_t const> numbers) { return numbers.empty() ? nullptr : numbers.data(); };
    kernels::delta_rule_plan<<<1, 1024, 0, stream>>>(in.offsets.data(), list(in.first), list(in.counts),
                                                     delta_plan_at(shape, space, workspace));
    check(cudaGetLastError(), "delta_rule_plan", here);
}

template <class T>
kernels::delta_tokens<T> delta_tokens_of(gated_delta_rule_shape const& shape, gated_delta_rule_input<T> const& in,
                                         bool erases, delta_space const& space, char* workspace) {
    return {delta_view(in.q),
            delta_view(in.k),
            delta_view(in.v),
            delta_view(in.g),
            delta_view(in.beta),
            delta_plan_at(shape, space, workspace),
            static_cast<int>(shape.key_heads),
            static_cast<int>(shape.value_heads / shape.key_heads),
            static_cast<int>(shape.key_dim),
            static_cast<int>(shape.value_dim),
            delta_scale_of(shape),
            erases};
}

inline dim3 delta_plain_grid(gated_delta_rule_shape const& shape, delta_space const& space) {
    constexpr index_t columns = kernels::delta::plain_columns * kernels::delta::plain_warps;
    return dim3(static_cast<unsigned>((shape.value_dim + columns - 1) / columns),
                static_cast<unsigned>(shape.value_heads), static_cast<unsigned>(space.sequences));
}

template <class T>
void launch_delta_plain(gated_delta_rule_shape const& shape, gated_delta_rule_input<T> const& in, bool erases,
                        rows<T> o, std::span<float> last, kernels::delta_trace const& trace, delta_space const& space,
                        char* workspace, cudaStream_t stream, caller here) {
    with_lane_columns(shape.key_dim, [&](auto channels) {
        kernels::delta_rule_plain<T, channels><<<delta_plain_grid(shape, space), 128, 0, stream>>>(
            delta_tokens_of(shape, in, erases, space, workspace), in.state.data(), last.data(), delta_view(o), trace);
        check(cudaGetLastError(), "delta_rule_plain", here);
    });
}

template <class T>
void launch_delta_plain_backward(gated_delta_rule_shape const& shape, gated_delta_rule_input<T> const& in, bool erases,
                                 rows<T const> dout, std::span<float const> dlast,
                                 gated_delta_rule_gradients<T> const& to, delta_space const& space, char* workspace,
                                 cudaStream_t stream, caller here) {
    auto const at = [&](index_t place) { return reinterpret_cast<float*>(workspace + place); };
    kernels::delta_trace const forward{at(space.states), at(space.written)};
    kernels::delta_trace const back{at(space.dstates), at(space.dwritten)};
    launch_delta_plan(shape, in, space, workspace, stream, here);
    launch_delta_plain(shape, in, erases, rows<T>(), {}, forward, space, workspace, stream, here);
    auto const tokens = delta_tokens_of(shape, in, erases, space, workspace);
    with_lane_columns(shape.key_dim, [&](auto channels) {
        kernels::delta_rule_plain_back<T, channels><<<delta_plain_grid(shape, space), 128, 0, stream>>>(
            tokens, delta_view(dout), dlast.data(), to.dstate.data(), delta_view(to.dv), back);
        check(cudaGetLastError(), "delta_rule_plain_back", here);
        auto* const kernel = kernels::delta_rule_plain_gradients<T, channels>;
        constexpr int shared = sizeof(kernels::delta::plain_memory);
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute",
              here);
        kernels::delta_plain_gradients<T> const gradients{forward,
                                                          back,
                                                          delta_view(dout),
                                                          delta_view(to.dq),
                                                          delta_view(to.dk),
                                                          delta_view(to.dg),
                                                          delta_view(to.dbeta),
                                                          at(space.dq),
                                                          at(space.dk)};
        dim3 const grid(static_cast<unsigned>(space.chunks), static_cast<unsigned>(shape.key_heads));
        kernel<<<grid, 256, shared, stream>>>(tokens, gradients);
        check(cudaGetLastError(), "delta_rule_plain_gradients", here);
    });
}

} // namespace cpx::cuda::detail
