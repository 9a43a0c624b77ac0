// SPDX-License-Identifier: Apache-2.0
// The ranks of a run: threads, or processes of a launcher.
#pragma once

#include <cpx/transport/threads.hpp>
#include <cpx/transport/transport_ref.hpp>

#include <functional>

namespace qwen {

/// The ranks of a run: so many threads, or the processes that a launcher has started, of which this is one.
struct group {
    int ranks = 1;
    cpx::transport_ref* launched = nullptr;
    int experts_over = 1; ///< how many neighbouring ranks share the experts, a divisor of the ranks

    void run(std::function<void(cpx::transport_ref&)> const& program) const {
        if (launched) return program(*launched);
        cpx::threads::run(ranks, [&](cpx::threads& comm) {
            cpx::transport_ref rank(comm);
            program(rank);
        });
    }
};

/// Returns whether a launcher of MPI has started this process.
bool is_launched();
/// Calls `body` with this process's end of the ranks that a launcher has started, or with null if there was none.
/// Throws `cpx::error` if there was one and the program is built without MPI.
void with_launched(std::function<void(cpx::transport_ref*)> const& body);

} // namespace qwen
