// SPDX-License-Identifier: Apache-2.0
// Launches of short kernels, of which the launch itself takes a share.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <cpx/previous_kernel.cuh>

#include <cstddef>
#include <type_traits>

namespace cpx::cuda {

/// Launches a kernel that calls `kernels::wait_for_previous_kernel()` before it touches what kernels write: where its
/// code is of sm_90 or later, its blocks come to the multiprocessors while the kernel before it ends. `shared`: bytes
/// of dynamic shared memory. Can be captured.
template <class... P>
void launch_early(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
                  char const* what, caller here, std::type_identity_t<P> const&... arguments) {
    cudaFuncAttributes code{};
    check(cudaFuncGetAttributes(&code, kernel), "cudaFuncGetAttributes", here);
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = code.ptxVersion >= 90 ? 1 : 0; // else nothing in the code waits
    check(cudaLaunchKernelEx(&config, kernel, arguments...), what, here);
}

} // namespace cpx::cuda
