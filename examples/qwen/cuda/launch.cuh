// SPDX-License-Identifier: Apache-2.0
// What the example's kernels have in common: a warp or a thread for each item, and sums over a warp in one order.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/cuda/runtime.hpp>

#include <cmath>
#include <type_traits>

namespace qwen::gpu {

using cpx::index_t, cpx::rows;

inline constexpr int warp = 32, warps = 4; ///< threads of a warp, warps of a block

/// Returns the sum over all lanes of a warp, on each of them, always added in the same order.
template <class T>
__device__ T sum_over_warp(T x) {
    for (int distance = warp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

/// Returns `a . b` of `n` elements, on every lane.
__device__ inline float dot(float const* a, float const* b, index_t n) {
    float sum = 0;
    for (index_t j = threadIdx.x; j < n; j += warp) sum += a[j] * b[j];
    return sum_over_warp(sum);
}

/// Returns which item this warp, or this thread, is launched for; those behind the last one have nothing to do.
__device__ inline index_t item_of_warp() { return static_cast<index_t>(blockIdx.x) * warps + threadIdx.y; }
__device__ inline index_t item_of_thread() { return static_cast<index_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

/// Launches `blocks` blocks; none is fine.
template <class... P>
void launch(char const* name, void (*kernel)(P...), index_t blocks, dim3 threads, index_t shared_bytes,
            cudaStream_t stream, std::type_identity_t<P>... arguments) {
    cpx::require(blocks < index_t{1} << 31, name, "blocks", "less than 2^31", blocks);
    if (blocks == 0) return;
    kernel<<<static_cast<unsigned>(blocks), threads, static_cast<std::size_t>(shared_bytes), stream>>>(arguments...);
    cpx::cuda::check(cudaGetLastError(), name);
}
/// Launches a warp for each item.
template <class... P>
void launch_warps(char const* name, void (*kernel)(P...), index_t items, cudaStream_t stream,
                  std::type_identity_t<P>... arguments) {
    launch<P...>(name, kernel, (items + warps - 1) / warps, dim3(warp, warps), 0, stream, arguments...);
}
namespace kernels {

template <class F>
__global__ void each(index_t count, index_t width, F f) {
    index_t const i = item_of_thread();
    if (i < count * width) f(i / width, i % width);
}

} // namespace kernels

/// Calls `f(row, column)` for all of them, a thread each.
template <class F>
void each(index_t count, index_t width, F const& f, cudaStream_t stream) {
    launch("each", kernels::each<F>, (count * width + 255) / 256, dim3(256), 0, stream, count, width, f);
}

} // namespace qwen::gpu
