// SPDX-License-Identifier: Apache-2.0
// The last rank never comes. The others say so and return from main, and the launcher ends the job.
#include <cpx/transport/gather.hpp>
#include <cpx/transport/mpi.hpp>

#include <cstdio>

int main() {
    cpx::mpi_environment environment;
    try {
        cpx::mpi::run(
            [](cpx::mpi& comm) {
                int ranks = 0;
                if (comm.rank() == comm.ranks() - 1) std::this_thread::sleep_for(std::chrono::minutes(10));
                cpx::gather(comm, &ranks, std::vector<int>(static_cast<std::size_t>(comm.ranks())).data(),
                            sizeof ranks);
            },
            std::chrono::milliseconds(500));
    } catch (cpx::error const& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
