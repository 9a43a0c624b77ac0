// SPDX-License-Identifier: Apache-2.0
// A kernel that is brought to the multiprocessors while the one before it ends.
#pragma once

#include <cpx/cuda/nvcc.hpp>

namespace cpx::kernels {

/// Waits until the kernels before this one in the stream have ended and what they wrote is seen. A kernel that
/// `cuda::launch_early` launches says so before it touches what other kernels write. What the kernel before it had
/// waited for when it let this one come is there.
///
/// From sm_90 on (programmatic dependent launch, CUDA C++ Programming Guide); older code begins when those have ended.
/// CUTLASS wraps these instructions, too; kernels that do without it use them here.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel come to the multiprocessors, and wait there, once every block has called this or has ended.
__device__ __forceinline__ void let_next_kernel_come() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

} // namespace cpx::kernels
