// SPDX-License-Identifier: Apache-2.0
// The step on a rank of MPI.
#include "ranks.hpp"
#include "step.hpp"

#include <cpx/transport/mpi.hpp>

namespace one_step {

outcome on_mpi() {
    static cpx::mpi_environment environment; // until the program ends
    outcome result;
    cpx::mpi::run([&](cpx::mpi& comm) { result = {comm.rank(), comm.ranks(), step(comm)}; });
    return result;
}

} // namespace one_step
