// SPDX-License-Identifier: Apache-2.0
// The GPUs that can run this build's code.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <algorithm>

static __global__ void code_of_this_build() {}

/// Returns how many GPUs can run this build's code, up to the first that cannot, at most `most`: tests take the first.
inline int usable_gpus(int most) {
    int const all = std::min(most, cpx::cuda::devices());
    if (all == 0) return 0;
    int const before = cpx::cuda::current_device();
    int count = 0;
    for (; count < all; ++count) {
        cpx::cuda::use_device(count);
        cudaFuncAttributes attributes{};
        cudaError_t const result = cudaFuncGetAttributes(&attributes, code_of_this_build);
        if (result == cudaErrorNoKernelImageForDevice || result == cudaErrorInvalidDeviceFunction ||
            result == cudaErrorUnsupportedPtxVersion) {
            static_cast<void>(cudaGetLastError());
            break;
        }
        cpx::cuda::check(result, "cudaFuncGetAttributes"); // a GPU that is broken is not one that is absent
    }
    cpx::cuda::use_device(before);
    return count;
}
