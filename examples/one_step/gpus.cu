// SPDX-License-Identifier: Apache-2.0
// The step on a rank that has a GPU.
#include <cpx/ops/cuda/causal_conv1d.hpp> // before the step, which calls it

#include "ranks.hpp"
#include "step.hpp"

namespace one_step {

outcome on_gpus() {
    auto const group = cpx::nccl::from_environment(); // which rank of how many, and which GPU
    cpx::cuda::stream const stream;
    cpx::cuda::communicator comm(*group, stream);
    return {comm.rank(), comm.ranks(), step(comm)};
}

} // namespace one_step
