// SPDX-License-Identifier: Apache-2.0
// Stands for gpus.cu where that cannot be compiled.
#include "ranks.hpp"

#include <cpx/core/error.hpp>

namespace one_step {

outcome on_gpus() {
    throw cpx::error("--on", "gpus", "a program built for GPUs: nvcc and NCCL found", "one built without");
}

} // namespace one_step
