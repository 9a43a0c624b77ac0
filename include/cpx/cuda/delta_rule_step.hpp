// SPDX-License-Identifier: Apache-2.0
// A step of decoding with the gated delta rule or a decay a head: a token each of many sequences, states in place.
#pragma once

#include <cpx/cuda/delta_rule_arguments.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/nvtx.hpp>

#include <cpx/delta_rule_decode.cuh>

namespace cpx::cuda {

/// What a step of decoding reads, in device memory, a row a sequence: (rows, heads * dim), q and k normalised, or
/// (rows, value heads). Any strides.
template <class T>
struct gated_delta_rule_step_input {
    rows<T const> q, k, v;
    rows<float const> g, beta = {};      ///< of a decay a head no beta, and q and k of any norm
    std::span<index_t const> slots = {}; ///< (rows): which state a row has, no two the same one; below 0: none, and its
                                         ///< output is left alone; empty: row i has state i
    log_decay_parameters<T> g_of = {};   ///< in place of g: what it is made of
};

namespace detail {

/// Launches a step of arguments that fit.
template <bool Erases, class T>
void run_delta_step(gated_delta_rule_shape const& shape, gated_delta_rule_step_input<T> const& in, rows<T> o,
                    std::span<float> states, cudaStream_t stream, caller here) {
    index_t const count = in.k.count();
    if (count == 0) return;
    index_t const count_of_states = std::ssize(states) / (shape.value_heads * shape.key_dim * shape.value_dim);
    kernels::delta_decode<T> const read{delta_view(in.q),
                                        delta_view(in.k),
                                        delta_view(in.v),
                                        delta_log_decays_of(in.g, in.g_of),
                                        delta_view(in.beta),
                                        in.slots.empty() ? nullptr : in.slots.data(),
                                        count_of_states,
                                        static_cast<int>(shape.key_heads),
                                        static_cast<int>(shape.value_heads / shape.key_heads),
                                        static_cast<int>(shape.key_dim),
                                        static_cast<int>(shape.value_dim),
                                        delta_scale_of(shape),
                                        Erases};
    auto const launch = [&](auto keys, auto channels) {
        constexpr index_t columns = 32 * channels;
        cuda::launch(kernels::delta_rule_decode<T, keys, channels>,
                     dims(count, shape.value_heads, (shape.value_dim + columns - 1) / columns), 256, 0, stream,
                     "delta_rule_decode", here, read, states.data(), delta_view(o));
    };
    bool const fours = shape.value_dim % 4 == 0 && address(states.data()) % 16 == 0;
    if (!fours)
        launch(std::integral_constant<int, 32>(), std::integral_constant<int, 1>());
    else if (shape.key_dim > 128)
        launch(std::integral_constant<int, 32>(), std::integral_constant<int, 4>());
    else
        launch(std::integral_constant<int, 16>(), std::integral_constant<int, 4>());
}

} // namespace detail

/// Computes a token of every row's sequence, as `gated_delta_rule`: its output, and its next state in place.
///
/// o: (rows, value heads * Dv). states: (states, value heads, Dk, Dv), as many as rows where there are no slots. Of the
/// shape stretch, scan and path have no effect. One kernel, token by token with float sums, of every size; it moves the
/// states once there and back, and that is what it takes. The same inputs have the same bits, whatever the other rows.
/// Can be captured; slots are read on the device, where one beyond the states traps: a CUDA error.
///
/// Throws `cpx::error` on shapes that do not fit and memory of another device, before anything is launched.
template <gpu_number T, erases Of = erases::yes>
void gated_delta_rule_step(gated_delta_rule_shape const& shape,
                           std::type_identity_t<gated_delta_rule_step_input<T>> const& in, rows<T> o,
                           std::span<float> states, cudaStream_t stream, caller here = caller::here()) {
    using namespace detail;
    constexpr bool Erases = Of == erases::yes;
    char const* const where = "cuda::gated_delta_rule_step";
    auto const range =
        Erases ? named_range<"cpx gated_delta_rule_step">() : named_range<"cpx head_decay_attention_step">();
    require_delta_rows<Erases>(where, shape, in, here);
    index_t const count = in.k.count(), width = shape.value_heads * shape.key_dim * shape.value_dim;
    require_rows(where, {{"o", o, count, shape.value_heads * shape.value_dim}}, here);
    require(std::ssize(states) % width == 0 && (!in.slots.empty() || std::ssize(states) == count * width), where,
            "size of states", in.slots.empty() ? count * width : width, states.size(), here);
    require(in.slots.empty() || std::ssize(in.slots) == count, where, "size of slots", count, in.slots.size(), here);
    require_memory(where, {{"states", states}, {"slots", in.slots}}, here);
    require_apart(where, std::array{operand("o", o), operand("states", states)},
                  std::array{operand("q", in.q), operand("k", in.k), operand("v", in.v), operand("g", in.g),
                             operand("beta", in.beta), operand("slots", in.slots), operand("a", in.g_of.a),
                             operand("a_log", in.g_of.a_log), operand("dt_bias", in.g_of.dt_bias)},
                  here);
    run_delta_step<Erases>(shape, in, o, states, stream, here);
}

} // namespace cpx::cuda
