// SPDX-License-Identifier: Apache-2.0
// Launches of kernels in a stream.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <cpx/previous_kernel.cuh>

#include <cstddef>
#include <type_traits>

namespace cpx::cuda {

namespace detail {

/// Returns as many blocks, or threads.
inline dim3 dims(index_t x, index_t y = 1, index_t z = 1) {
    return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

template <class... P>
void launch_kernel(bool early, int cluster, void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared,
                   cudaStream_t stream, char const* what, caller here, std::type_identity_t<P> const&... arguments) {
    int const dynamic = static_cast<int>(shared);
    cudaFuncAttributes code{};
    if (early || dynamic > 0) check(cudaFuncGetAttributes(&code, kernel), "cudaFuncGetAttributes", here);
    if (dynamic > code.maxDynamicSharedSizeBytes) // which is 48 KiB less what is static, until it has been set
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic),
              "cudaFuncSetAttribute", here);
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (early && code.ptxVersion >= 90) { // else nothing in the code waits
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), what, here);
}

/// Loads a kernel now: if its first launch loads it, that waits for kernels that wait for what is behind it.
void load(auto* kernel, caller here) {
    cudaFuncAttributes loaded{};
    check(cudaFuncGetAttributes(&loaded, kernel), "cudaFuncGetAttributes", here);
}

} // namespace detail

/// Launches a kernel. `shared`: bytes of dynamic shared memory, at most those that the device has. Can be captured.
template <class... P>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream, char const* what,
            caller here, std::type_identity_t<P> const&... arguments) {
    detail::launch_kernel(false, 1, kernel, grid, block, shared, stream, what, here, arguments...);
}
/// The same of a kernel that calls `kernels::wait_for_previous_kernel()` before it touches what kernels write: where
/// its code is of sm_90 or later, its blocks come to the multiprocessors while the kernel before it ends.
template <class... P>
void launch_early(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
                  char const* what, caller here, std::type_identity_t<P> const&... arguments) {
    detail::launch_kernel(true, 1, kernel, grid, block, shared, stream, what, here, arguments...);
}

/// The same in clusters of so many blocks, of which the grid has a multiple.
template <class... P>
void launch_early(int cluster, void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
                  char const* what, caller here, std::type_identity_t<P> const&... arguments) {
    detail::launch_kernel(true, cluster, kernel, grid, block, shared, stream, what, here, arguments...);
}

} // namespace cpx::cuda
