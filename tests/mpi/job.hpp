// SPDX-License-Identifier: Apache-2.0
// The ranks that the launcher has started. Every rank runs every test case, so a check of one is a check of all.
#pragma once

#include <cpx/transport/mpi.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

#include <chrono>
#include <string>
#include <thread>

namespace job {

/// MPI until the program ends, also where tests have made transports fail: here all ranks come to the end.
struct until_the_end {
    cpx::mpi_environment environment;
    ~until_the_end() { MPI_Finalize(); }
};

inline int ranks() {
    static until_the_end const mpi;
    int count = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &count);
    return count;
}

inline bool holds(std::string const& text, std::string const& passage) {
    return text.find(passage) != std::string::npos;
}

/// Waits for all ranks and leaves the core to them meanwhile, as MPI_Barrier does not.
inline void meet() {
    MPI_Request all = MPI_REQUEST_NULL;
    MPI_Ibarrier(MPI_COMM_WORLD, &all);
    for (int come = 0; !come; std::this_thread::sleep_for(std::chrono::microseconds(200)))
        MPI_Test(&all, &come, MPI_STATUS_IGNORE);
}

/// Runs `program(comm)` on all ranks and returns what this one says, or "". All ranks have ended when it returns.
template <class F>
std::string error(std::chrono::milliseconds deadline, F&& program) {
    ranks();
    std::string const text = support::message([&] { cpx::mpi::run(program, deadline); });
    meet();
    return text;
}

} // namespace job
