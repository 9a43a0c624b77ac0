// SPDX-License-Identifier: Apache-2.0
// The ranks that a step can run on.
#pragma once

namespace one_step {

/// What one rank of so many has found.
struct outcome {
    int rank = 0, ranks = 1;
    double checksum = 0;
};

outcome on_mpi();  ///< one of the ranks that mpirun has started
outcome on_gpus(); ///< one of the ranks that torchrun has started, each with a GPU

} // namespace one_step
