// SPDX-License-Identifier: Apache-2.0
// Stands for mpi.cpp where that cannot be compiled.
#include "ranks.hpp"

#include <cpx/core/error.hpp>

namespace one_step {

outcome on_mpi() { throw cpx::error("--on", "mpi", "a program built where MPI was found", "one built without"); }

} // namespace one_step
