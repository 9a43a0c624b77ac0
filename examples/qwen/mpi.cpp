// SPDX-License-Identifier: Apache-2.0
// Ranks that a launcher of MPI has started.
#include "ranks.hpp"

#include <cpx/transport/mpi.hpp>

namespace qwen {

void with_launched(std::function<void(cpx::transport_ref*)> const& body) {
    if (!is_launched()) return body(nullptr);
    cpx::mpi_environment const environment;
    cpx::mpi::run([&](cpx::mpi& comm) {
        cpx::transport_ref rank(comm);
        body(&rank);
    });
}

} // namespace qwen
