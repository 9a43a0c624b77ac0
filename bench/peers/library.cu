// SPDX-License-Identifier: Apache-2.0
// cpx's kernels as functions of C, so that a Python program can time them beside a peer's on the same tensors: the
// target cpx_peers, build/gpu/bench/libcpx_peers.so. What fails says so on stderr.
#include <cpx/cpx.hpp>
#include <cpx/cuda/causal_conv1d.hpp>
#include <cpx/cuda/gated_delta_rule.hpp>

#include <cstdio>

namespace {

using element = __nv_bfloat16;
using conv_plan = cpx::cuda::conv_plan;

/// Returns what `f` returns, or `failure` after it has said what was wrong.
template <class R, class F>
R guarded(R failure, F&& f) {
    try {
        return f();
    } catch (std::exception const& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return failure;
    }
}

conv_plan const& conv_plan_of(void const* plan) {
    cpx::require(plan != nullptr, "cpx_conv", "plan", "one that cpx_conv_plan returned", "null");
    return *static_cast<conv_plan const*>(plan);
}

/// `scan`: whether the forward scans.
cpx::cuda::gated_delta_rule_shape delta_shape(std::int64_t key_heads, std::int64_t value_heads, std::int64_t dim,
                                              std::int64_t scan) {
    return {.key_heads = key_heads, .value_heads = value_heads, .key_dim = dim, .value_dim = dim, .scan = scan != 0};
}

} // namespace

/// What a gated delta rule of a packed batch is given; all in device memory. offsets: (sequences + 1).
struct cpx_delta_rule {
    element const *q, *k, *v;
    float const *g, *beta;
    std::int64_t const* offsets;
    std::int64_t tokens, sequences, key_heads, value_heads, dim;
    std::int64_t scan; ///< not 0: the forward scans
    char* saved;       ///< null: nothing is saved
    char* workspace;
    cudaStream_t stream;

    cpx::cuda::gated_delta_rule_shape shape() const { return delta_shape(key_heads, value_heads, dim, scan); }
    std::int64_t saved_bytes() const {
        return saved ? cpx::cuda::gated_delta_rule_saved<element>(shape(), tokens, sequences) : 0;
    }
    template <class T>
    cpx::rows<T> keys(T* data) const {
        return {data, tokens, key_heads * dim};
    }
    template <class T>
    cpx::rows<T> values(T* data) const {
        return {data, tokens, value_heads * dim};
    }
    template <class T>
    cpx::rows<T> gates(T* data) const {
        return {data, tokens, value_heads};
    }
    cpx::cuda::gated_delta_rule_input<element> input() const {
        return {keys(q),     keys(k),
                values(v),   gates(g),
                gates(beta), std::span(offsets, static_cast<std::size_t>(sequences) + 1),
                {},          {},
                {},          std::span(saved, static_cast<std::size_t>(saved_bytes()))};
    }
    std::span<char> space(std::int64_t bytes) const { return {workspace, static_cast<std::size_t>(bytes)}; }
};

extern "C" {

/// Returns the plan of a convolution of `taps` taps over whole sequences of one rank, or null; offsets in host memory,
/// `sequences` + 1 of them. Freed by `cpx_conv_plan_free`.
void* cpx_conv_plan(std::int64_t const* offsets, int sequences, int taps) {
    return guarded<void*>(nullptr, [&] {
        cpx::require(offsets != nullptr && sequences >= 0, "cpx_conv_plan", "offsets", "one a sequence and one",
                     "none");
        auto const batch = cpx::thd::from_offsets(std::span(offsets, static_cast<std::size_t>(sequences) + 1));
        auto const one = cpx::shard(batch, cpx::sequential<1>{});
        return new conv_plan(cpx::halo(one, 0, taps - 1), cpx::halo(one, 0, taps - 1, cpx::side::after));
    });
}
/// Null is nothing to free.
void cpx_conv_plan_free(void* plan) { delete static_cast<conv_plan*>(plan); }

/// Returns the floats that the backward wants, or -1.
std::int64_t cpx_conv_workspace(void const* plan, std::int64_t channels) {
    return guarded<std::int64_t>(-1, [&] { return cpx::cuda::causal_conv1d_workspace(conv_plan_of(plan), channels); });
}
/// x, y: (rows, channels); weight: (channels, taps). Returns 0, or 1 if it failed; so does the next one.
int cpx_conv_forward(void const* plan, element const* x, element const* weight, element* y, std::int64_t rows,
                     std::int64_t channels, std::int64_t taps, cudaStream_t stream) {
    return guarded(1, [&] {
        cpx::cuda::causal_conv1d(conv_plan_of(plan), cpx::rows<element const>(x, rows, channels), {},
                                 cpx::rows<element const>(weight, channels, taps), {}, cpx::cuda::activation::silu,
                                 cpx::rows<element>(y, rows, channels), stream);
        return 0;
    });
}
/// dweight: (channels, taps), is added to; workspace: `size` floats.
int cpx_conv_backward(void const* plan, element const* x, element const* weight, element const* dy, element* dx,
                      float* dweight, float* workspace, std::int64_t size, std::int64_t rows, std::int64_t channels,
                      std::int64_t taps, cudaStream_t stream) {
    return guarded(1, [&] {
        cpx::cuda::causal_conv1d_backward(conv_plan_of(plan), cpx::rows<element const>(x, rows, channels), {},
                                          cpx::rows<element const>(weight, channels, taps), {},
                                          cpx::cuda::activation::silu, cpx::rows<element const>(dy, rows, channels), {},
                                          {},
                                          {cpx::rows<element>(dx, rows, channels),
                                           cpx::rows<float>(dweight, channels, taps),
                                           {},
                                           std::span(workspace, static_cast<std::size_t>(size))},
                                          stream);
        return 0;
    });
}

/// Writes the bytes that a gated delta rule wants: of its forward's workspace, of its backward's, and of what it saves.
int cpx_delta_rule_bytes(std::int64_t tokens, std::int64_t sequences, std::int64_t key_heads, std::int64_t value_heads,
                         std::int64_t dim, std::int64_t scan, std::int64_t* bytes) {
    return guarded(1, [&] {
        auto const shape = delta_shape(key_heads, value_heads, dim, scan);
        bytes[0] = cpx::cuda::gated_delta_rule_workspace<element>(shape, tokens, sequences);
        bytes[1] = cpx::cuda::gated_delta_rule_backward_workspace<element>(shape, tokens, sequences);
        bytes[2] = cpx::cuda::gated_delta_rule_saved<element>(shape, tokens, sequences);
        return 0;
    });
}
/// o: (tokens, value heads * dim).
int cpx_delta_rule_forward(cpx_delta_rule const* of, element* o) {
    return guarded(1, [&] {
        auto const bytes = cpx::cuda::gated_delta_rule_workspace<element>(of->shape(), of->tokens, of->sequences,
                                                                          of->saved != nullptr);
        cpx::cuda::gated_delta_rule<element>(of->shape(), of->input(), of->values(o), {}, of->space(bytes), of->stream);
        return 0;
    });
}
/// Gradients: shaped as what they are gradients of; reads what the forward has saved, if anything.
int cpx_delta_rule_backward(cpx_delta_rule const* of, element const* dout, element* dq, element* dk, element* dv,
                            float* dg, float* dbeta) {
    return guarded(1, [&] {
        auto const bytes = cpx::cuda::gated_delta_rule_backward_workspace<element>(of->shape(), of->tokens,
                                                                                   of->sequences, of->saved != nullptr);
        cpx::cuda::gated_delta_rule_backward<element>(
            of->shape(), of->input(), of->values(dout), {},
            {of->keys(dq), of->keys(dk), of->values(dv), of->gates(dg), of->gates(dbeta)}, of->space(bytes),
            of->stream);
        return 0;
    });
}

} // extern "C"
