// SPDX-License-Identifier: Apache-2.0
// Launches of the plain path of the gated delta rule and of a decay a head, which erases nothing.
#pragma once

#include <cpx/cuda/delta_rule_arguments.hpp>
#include <cpx/cuda/launch.hpp>

#include <cpx/delta_rule_plain_backward.cuh>

namespace cpx::cuda::detail {

/// A call, of arguments that fit, as all its launches see it.
template <bool Erases, class T>
struct delta_call {
    gated_delta_rule_shape const& shape;
    gated_delta_rule_input<T> const& in;
    delta_space const& space;
    char* workspace;
    cudaStream_t stream;
    caller here;

    float* floats(index_t place) const { return reinterpret_cast<float*>(workspace + place); }
    int group() const { return static_cast<int>(shape.value_heads / shape.key_heads); }
    kernels::delta_plan plan() const {
        bool const fewer = !in.saved.empty() && in.saved_tokens >= 0;
        return {reinterpret_cast<kernels::delta_sequence*>(workspace + space.plan),
                reinterpret_cast<kernels::delta_stretch*>(workspace + space.stretch_list),
                reinterpret_cast<int*>(workspace + space.totals),
                reinterpret_cast<int*>(workspace + space.flags),
                space.stretches * shape.value_heads * 4,
                static_cast<int>(space.sequences),
                space.cut,
                in.k.count(),
                fewer ? std::min(space.chunks, delta_chunks(in.saved_tokens, space.sequences)) : space.chunks,
                space.stretches};
    }
    kernels::delta_tokens<T> tokens() const {
        return {delta_view(in.q),
                delta_view(in.k),
                delta_view(in.v),
                delta_log_decays_of(in.g, in.g_of),
                delta_view(in.beta),
                plan(),
                static_cast<int>(shape.key_heads),
                group(),
                static_cast<int>(shape.key_dim),
                static_cast<int>(shape.value_dim),
                delta_scale_of(shape),
                Erases};
    }
    kernels::delta_segments segments() const {
        auto const list = [](std::span<index_t const> numbers) { return numbers.empty() ? nullptr : numbers.data(); };
        return {in.offsets.data(), list(in.first), list(in.counts)};
    }
    void make_plan() const {
        launch_early(kernels::delta_rule_plan, 1, 1024, 0, stream, "delta_rule_plan", here, segments(), plan());
    }
    /// Launches a kernel of the plain path, with `more` blocks for other columns than those of values.
    template <class... P>
    void launch_plain(char const* name, void (*kernel)(P...), int more, std::type_identity_t<P> const&... given) const {
        constexpr index_t columns = kernels::delta::plain_columns * kernels::delta::plain_warps;
        launch(kernel, dims((shape.value_dim + columns - 1) / columns + more, shape.value_heads, space.sequences), 128,
               0, stream, name, here, given...);
    }
};

template <bool Erases, class T>
void launch_delta_plain(delta_call<Erases, T> const& of, rows<T> o, std::span<float> last,
                        kernels::delta_trace const& trace) {
    of.make_plan();
    with_lane_columns(of.shape.key_dim, [&](auto channels) {
        of.launch_plain("delta_rule_plain", kernels::delta_rule_plain<T, channels>, 0, of.tokens(), of.in.state.data(),
                        last.data(), delta_view(o), trace);
    });
}

template <bool Erases, class T>
void launch_delta_plain_backward(delta_call<Erases, T> const& of, rows<T const> dout, std::span<float const> dlast,
                                 gated_delta_rule_gradients<T> const& to) {
    auto const& space = of.space;
    kernels::delta_trace const forward{of.floats(space.states), of.floats(space.written)};
    kernels::delta_trace const back{of.floats(space.dstates), of.floats(space.dwritten)};
    launch_delta_plain(of, rows<T>(), {}, forward);
    auto const tokens = of.tokens();
    with_lane_columns(of.shape.key_dim, [&](auto channels) {
        of.launch_plain("delta_rule_plain_back", kernels::delta_rule_plain_back<T, channels>, 0, tokens,
                        delta_view(dout), dlast.data(), to.dstate.data(), delta_view(to.dv), back);
        kernels::delta_plain_gradients<T> const gradients{forward,
                                                          back,
                                                          delta_view(dout),
                                                          delta_view(to.dq),
                                                          delta_view(to.dk),
                                                          delta_view(to.dg),
                                                          delta_view(to.dbeta),
                                                          of.floats(space.dq),
                                                          of.floats(space.dk)};
        launch(kernels::delta_rule_plain_gradients<T, channels>, dims(space.chunks, of.shape.key_heads), 256,
               sizeof(kernels::delta::plain_memory), of.stream, "delta_rule_plain_gradients", of.here, tokens,
               gradients);
    });
}

/// Launches what the gradients of log decays, dg, make of the parameters that they are made of, after a backward.
template <bool Erases, class T>
void launch_delta_parameters(delta_call<Erases, T> const& of, float const* dg, log_decay_gradients<T> const& to) {
    auto const plan = of.plan();
    auto const sums = {to.da_log, to.ddt_bias};
    if (of.space.sequences == 0) { // there is no plan
        for (std::span<float> const sum : sums)
            check(cudaMemsetAsync(sum.data(), 0, sum.size_bytes(), of.stream), "cudaMemsetAsync", of.here);
        return;
    }
    index_t const heads = of.shape.value_heads, blocks = (heads + 31) / 32;
    float* const terms = of.floats(of.space.terms);
    launch(kernels::delta_rule_parameter_terms<T>, dims(of.space.chunks, blocks), 256, 0, of.stream,
           "delta_rule_parameter_terms", of.here, plan, delta_log_decays_of(of.in.g, of.in.g_of), dg, delta_view(to.da),
           static_cast<int>(heads), terms);
    launch(kernels::delta_rule_parameter_sums, dims(blocks, 2), 1024, 0, of.stream, "delta_rule_parameter_sums",
           of.here, plan.totals, terms, static_cast<int>(heads), to.da_log.data(), to.ddt_bias.data());
}

} // namespace cpx::cuda::detail
