// SPDX-License-Identifier: Apache-2.0
// cpx's kernels as functions of C, so that a Python program can time them beside a peer's on the same tensors.
//
// nvcc -std=c++20 --expt-relaxed-constexpr -O3 -gencode arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC
//      -Iinclude -Ikernels bench/peers/library.cu -o libcpx_peers.so
#include <cpx/cpx.hpp>
#include <cpx/cuda/causal_conv1d.hpp>

#include <cstdio>

namespace {

using element = __nv_bfloat16;

/// Runs `f`; returns 0, or 1 after it has said what was wrong.
template <class F>
int guarded(F&& f) {
    try {
        f();
        return 0;
    } catch (std::exception const& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}

} // namespace

extern "C" {

/// Returns the plan of a convolution of `taps` taps over whole sequences of one rank; offsets in host memory.
void* cpx_conv_plan(std::int64_t const* offsets, int sequences, int taps) {
    void* plan = nullptr;
    guarded([&] {
        auto const batch = cpx::thd::from_offsets(std::span(offsets, static_cast<std::size_t>(sequences) + 1));
        auto const one = cpx::shard(batch, cpx::sequential<1>{});
        plan = new cpx::cuda::conv_plan(cpx::halo(one, 0, taps - 1), cpx::halo(one, 0, taps - 1, cpx::side::after));
    });
    return plan;
}
std::int64_t cpx_conv_workspace(void* plan, std::int64_t channels) {
    return cpx::cuda::causal_conv1d_workspace(*static_cast<cpx::cuda::conv_plan*>(plan), channels);
}
int cpx_conv_forward(void* plan, element* x, element* weight, element* y, std::int64_t rows, std::int64_t channels,
                     std::int64_t taps, cudaStream_t stream) {
    return guarded([&] {
        cpx::cuda::causal_conv1d(*static_cast<cpx::cuda::conv_plan*>(plan), cpx::rows<element const>(x, rows, channels),
                                 {}, cpx::rows<element const>(weight, channels, taps), {}, cpx::cuda::activation::silu,
                                 cpx::rows<element>(y, rows, channels), stream);
    });
}
int cpx_conv_backward(void* plan, element* x, element* weight, element* dy, element* dx, float* dweight,
                      float* workspace, std::int64_t size, std::int64_t rows, std::int64_t channels, std::int64_t taps,
                      cudaStream_t stream) {
    return guarded([&] {
        cpx::cuda::causal_conv1d_backward(
            *static_cast<cpx::cuda::conv_plan*>(plan), cpx::rows<element const>(x, rows, channels), {},
            cpx::rows<element const>(weight, channels, taps), {}, cpx::cuda::activation::silu,
            cpx::rows<element const>(dy, rows, channels), {}, {},
            {cpx::rows<element>(dx, rows, channels),
             cpx::rows<float>(dweight, channels, taps),
             {},
             std::span(workspace, static_cast<std::size_t>(size))},
            stream);
    });
}

} // extern "C"
