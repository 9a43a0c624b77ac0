// SPDX-License-Identifier: Apache-2.0
// Numbers in device memory for what is timed, the same ones of a seed.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <cstdint>

namespace timing {

/// Writes numbers from `low` to `high`.
template <class T>
__global__ void fill(T* to, cpx::index_t count, std::uint64_t seed, float low, float high) {
    for (cpx::index_t i = static_cast<cpx::index_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += cpx::index_t{gridDim.x} * blockDim.x) {
        std::uint64_t z = (static_cast<std::uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull * (2 * seed + 1);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z ^= z >> 31;
        to[i] = static_cast<T>(low + (high - low) * static_cast<float>(z >> 40) * 0x1p-24f);
    }
}

/// Returns as many numbers from `low` to `high`.
template <class T>
cpx::cuda::buffer<T> random(cpx::index_t count, std::uint64_t seed, float low, float high) {
    cpx::cuda::buffer<T> b(count);
    fill<<<1024, 256>>>(b.data(), count, seed, low, high);
    cpx::cuda::check(cudaDeviceSynchronize(), "fill");
    return b;
}

} // namespace timing
