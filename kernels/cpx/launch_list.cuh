// SPDX-License-Identifier: Apache-2.0
// Lists that go to a kernel with its launch: nothing is uploaded.
#pragma once

#include <cpx/cuda/nvcc.hpp>

#include <cstddef>
#include <cstdint>

namespace cpx::kernels {

template <class T, int N>
struct launch_list {
    static constexpr int most = N;
    T items[static_cast<std::size_t>(N)];
};

/// Writes a list of numbers. One block.
template <int N>
__global__ void __launch_bounds__(256)
    write_numbers(__grid_constant__ launch_list<std::int64_t, N> const list, std::int64_t* to, int count) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 256) to[i] = list.items[i];
}

} // namespace cpx::kernels
