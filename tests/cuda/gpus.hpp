// SPDX-License-Identifier: Apache-2.0
// Tests of GPUs that are not there, or for which the build has no code, say so.
#pragma once

#include "../../harness/gpus.hpp"

#include <support/skipped.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string>

/// Returns whether the current device has `bytes` of free memory, rounded up to GiB; if not, the test's program counts
/// as skipped.
inline bool has_free_memory(cpx::index_t bytes) {
    std::size_t free = 0, all = 0;
    cpx::cuda::check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    return support::enough(static_cast<int>((bytes >> 30) + 1), static_cast<int>(free >> 30),
                           "GiB of free device memory");
}

/// Returns of how many processes this is one that torchrun's variables name, each of which runs the same tests: 1 if
/// there are none. On one GPU a stock NCCL bears them if each has its own NCCL_HOSTID.
inline int launched_ranks() {
    char const* const ranks = std::getenv("WORLD_SIZE");
    return ranks ? std::max(1, std::stoi(ranks)) : 1;
}

/// Returns how many ranks can have a GPU that runs this build's code, at most `most`: processes that were launched
/// together, or threads of this one.
inline int usable_ranks(int most) {
    return launched_ranks() > 1 ? std::min(most, usable_gpus(1) * launched_ranks()) : usable_gpus(most);
}

/// Returns whether `wanted` ranks can have GPUs that run this build's code; if not, the test's program counts as
/// skipped.
inline bool has_gpus(int wanted = 1) {
    return support::enough(wanted, usable_ranks(wanted), "GPUs that run this build's code");
}

/// Returns whether there are `wanted` GPUs, even if ranks could share one; if not, the test's program counts as
/// skipped.
inline bool has_gpus_apart(int wanted) {
    return support::enough(wanted, std::min(usable_gpus(wanted), cpx::cuda::devices()), "GPUs apart");
}
