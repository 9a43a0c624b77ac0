// SPDX-License-Identifier: Apache-2.0
// The GPUs that can run this build's code.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <algorithm>
#include <cstdlib>
#include <string_view>

static __global__ void code_of_this_build() {}

/// What ranks are that shall share a GPU: threads of one process, or a process each.
enum class ranks_are { threads, processes };

/// Returns how many ranks a GPU has at most: two where NCCL is told to bear several, as it can from 2.30 on, and two
/// processes where NCCL_HOSTID is set: each of them then gets one of its own, and NCCL takes them for hosts. More would
/// be borne, but wait for each other for long.
inline int ranks_of_a_gpu(ranks_are what = ranks_are::threads) {
    char const* const told = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    bool const hosts = what == ranks_are::processes && std::getenv("NCCL_HOSTID");
    return hosts || (told && told == std::string_view("1")) ? 2 : 1;
}

/// Returns the device of a rank of this host.
inline int gpu_of(int rank) { return rank % std::max(1, cpx::cuda::devices()); }

/// Returns how many ranks can have a GPU that runs this build's code, up to the first GPU that cannot, at most `most`:
/// rank r takes `gpu_of(r)`.
inline int usable_gpus(int most, ranks_are what = ranks_are::threads) {
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
    return count < cpx::cuda::devices() ? count : std::min(most, count * ranks_of_a_gpu(what));
}
