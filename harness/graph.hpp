// SPDX-License-Identifier: Apache-2.0
// Work of a stream, captured and run again, as programs do that replay a step.
#pragma once

#include <cpx/cuda/runtime.hpp>

namespace harness {

/// What a stream was given, to be given again at once.
class graph {
public:
    /// Captures what `f()` gives to `in` instead of running it.
    template <class F>
    graph(cudaStream_t in, F&& f, cpx::caller here = cpx::caller::here()) {
        cudaGraph_t captured = nullptr;
        cpx::cuda::check(cudaStreamBeginCapture(in, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture", here);
        try {
            f();
        } catch (...) {
            static_cast<void>(cudaStreamEndCapture(in, &captured));
            if (captured) static_cast<void>(cudaGraphDestroy(captured));
            static_cast<void>(cudaGetLastError());
            throw;
        }
        cpx::cuda::check(cudaStreamEndCapture(in, &captured), "cudaStreamEndCapture", here);
        cudaGraphExec_t made = nullptr;
        cudaError_t const result = cudaGraphInstantiate(&made, captured, 0);
        static_cast<void>(cudaGraphDestroy(captured));
        cpx::cuda::check(result, "cudaGraphInstantiate", here);
        graph_.reset(made);
    }
    void launch(cudaStream_t in, cpx::caller here = cpx::caller::here()) const {
        cpx::cuda::check(cudaGraphLaunch(graph_.get(), in), "cudaGraphLaunch", here);
    }

private:
    cpx::cuda::detail::owned<cudaGraphExec_t, cudaGraphExecDestroy> graph_;
};

} // namespace harness
