// SPDX-License-Identifier: Apache-2.0
// Communicators of GPUs do what a transport of devices owes.
#include <cpx/cuda/shared_communicator.hpp>

#include <cpx/testing/transport.hpp>

#include "member.hpp"

#include <algorithm>
#include <chrono>
#include <type_traits>

namespace {

using namespace std::chrono_literals;

/// Tests communicators of type Comm, of as many processes as there are GPUs, at most 3.
template <class Comm>
void check_transport() {
    auto const found = cpx::testing::check_transport(
        [](auto const& program, std::chrono::milliseconds deadline) {
            processes::run(std::min(processes::gpus(), 3), [&](int) -> std::string {
                auto const joined = cpx::nccl::from_environment(deadline);
                cpx::cuda::stream const stream;
                if constexpr (std::is_same_v<Comm, cpx::cuda::shared_communicator>) {
                    cpx::cuda::shared_memory memory(*joined, 1 << 20);
                    Comm comm(memory, stream);
                    program(comm);
                } else {
                    Comm comm(*joined, stream);
                    program(comm);
                }
                return "";
            });
        },
        3s);
    CHECK_MESSAGE(found.all_duties(), found.text());
    for (auto const& f : found.findings)
        if (f.property == "which names it") CHECK_MESSAGE(f.problem.empty(), found.text());
    CHECK(found.findings.size() == 16);
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("communicators do all that a transport of devices owes, and name who does not come") {
        if (enough_gpus(2)) check_transport<cpx::cuda::communicator>();
    }
    TEST_CASE("communicators that write to each other's memory do so, too") {
        if (enough_gpus(2)) check_transport<cpx::cuda::shared_communicator>();
    }
}
