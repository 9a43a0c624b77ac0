// SPDX-License-Identifier: Apache-2.0
// Stands for mpi.cpp where that cannot be compiled.
#include "ranks.hpp"

namespace qwen {

void with_launched(std::function<void(cpx::transport_ref*)> const& body) {
    cpx::require(!is_launched(), "a launcher of MPI", "program", "one built where MPI was found", "one built without");
    body(nullptr);
}

} // namespace qwen
