// SPDX-License-Identifier: Apache-2.0
// Launches of short kernels, of which the launch itself takes a share.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <cpx/previous_kernel.cuh>

namespace cpx::cuda {

/// Launches a kernel whose first statement is `kernels::wait_for_previous_kernel()`: where its code is of sm_90 or
/// later (on the first device that is launched to), its blocks come to the multiprocessors while the kernel before it
/// ends. Can be captured.
template <auto Kernel, class... Arguments>
void launch_early(dim3 grid, dim3 block, cudaStream_t stream, char const* what, caller here,
                  Arguments const&... arguments) {
    static bool const waits = [&] { // else nothing in the code waits
        cudaFuncAttributes found{};
        check(cudaFuncGetAttributes(&found, Kernel), "cudaFuncGetAttributes", here);
        return found.ptxVersion >= 90;
    }();
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = waits ? 1 : 0;
    check(cudaLaunchKernelEx(&config, Kernel, arguments...), what, here);
}

} // namespace cpx::cuda
