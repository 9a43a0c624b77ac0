// SPDX-License-Identifier: Apache-2.0
// Tests of GPUs that are not there, or for which the build has no code, say so.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <support/skipped.hpp>

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

/// Returns whether the current device has `bytes` of free memory, rounded up to GiB; if not, the test's program counts
/// as skipped.
inline bool has_free_memory(cpx::index_t bytes) {
    std::size_t free = 0, all = 0;
    cpx::cuda::check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    return support::enough(static_cast<int>((bytes >> 30) + 1), static_cast<int>(free >> 30),
                           "GiB of free device memory");
}

/// Returns whether `wanted` GPUs can run this build's code; if not, the test's program counts as skipped.
inline bool has_gpus(int wanted = 1) {
    return support::enough(wanted, usable_gpus(wanted), "GPUs that run this build's code");
}
