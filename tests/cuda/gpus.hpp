// SPDX-License-Identifier: Apache-2.0
// Tests of GPUs that are not there say so.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <cstdio>

/// Returns whether there are `wanted` GPUs; if not, says so in the words by which ctest counts a test as skipped.
inline bool has_gpus(int wanted = 1) {
    int const found = cpx::cuda::devices();
    if (found >= wanted) return true;
    std::printf("cpx: skipped, %d GPUs wanted, %d found\n", wanted, found);
    return false;
}
