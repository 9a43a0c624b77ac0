// SPDX-License-Identifier: Apache-2.0
// Copies neighbouring bytes, several vectors a thread at a time.
#pragma once

#include <cpx/neighbours.cuh>

namespace cpx::kernels::detail {

/// Copies `units` vectors, by `lanes` neighbouring threads, each of which holds `AtOnce` of them at a time.
template <int AtOnce, class Vector>
__device__ __forceinline__ void copy_units(char const* source, char* target, int units, int lanes) {
    for (int first = static_cast<int>(threadIdx.x) % lanes; first < units; first += lanes * AtOnce) {
        Vector held[AtOnce];
#pragma unroll
        for (int i = 0; i < AtOnce; ++i)
            if (first + lanes * i < units) held[i] = reinterpret_cast<Vector const*>(source)[first + lanes * i];
#pragma unroll
        for (int i = 0; i < AtOnce; ++i)
            if (first + lanes * i < units) reinterpret_cast<Vector*>(target)[first + lanes * i] = held[i];
    }
}

} // namespace cpx::kernels::detail
