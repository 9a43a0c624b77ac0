// SPDX-License-Identifier: Apache-2.0
// A function of a row and a column, a thread for each of them.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/cuda/nvcc.hpp>

namespace cpx::kernels {

/// Blocks of 256 threads, as many as hold them all.
template <class F>
__global__ void __launch_bounds__(256) each_element(index_t count, index_t width, F f) {
    index_t const i = static_cast<index_t>(blockIdx.x) * 256 + threadIdx.x;
    if (i < count * width) f(i / width, i % width);
}

} // namespace cpx::kernels
