// SPDX-License-Identifier: Apache-2.0
// Ranks that share a GPU do what a transport of devices owes: its test works on a device's memory.
#include <cpx/testing/transport.hpp>

#include <doctest/doctest.h>

#include "gpus.hpp"
#include "threads_on_gpu.hpp"

TEST_SUITE("cuda") {
    TEST_CASE("threads that share a GPU do all that a transport of devices owes") {
        if (!has_gpus()) return;
        auto const run = [](auto const& program, std::chrono::milliseconds deadline) {
            cpx::threads::run(
                3,
                [&](cpx::threads& comm) {
                    cpx::cuda::stream const stream;
                    threads_on_gpu ranks(comm, stream);
                    program(ranks);
                },
                deadline);
        };
        auto const found = cpx::testing::check_transport(run);
        CHECK_MESSAGE(found.all_duties(), found.text());
        CHECK(found.findings.size() == 16);
    }
}
