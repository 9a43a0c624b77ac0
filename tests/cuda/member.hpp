// SPDX-License-Identifier: Apache-2.0
// One of several ranks, a process and a GPU each, and what tests of them share.
#pragma once

#include <cpx/cuda/shared_communicator.hpp>

#include <doctest/doctest.h>

#include <support/skipped.hpp>

#include "../../harness/processes.hpp"
#include "../../harness/whole.hpp"

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// Returns whether there are `wanted` GPUs, without touching them: ranks are forked.
inline bool enough_gpus(int wanted) {
    return support::enough(wanted, processes::gpus(), "GPUs that run this build's code");
}

inline void check_codes(std::vector<int> const& codes, int killed = -1) {
    for (std::size_t r = 0; r < codes.size(); ++r) {
        CAPTURE(r);
        CHECK(codes[r] == (static_cast<int>(r) == killed ? processes::was_killed : 0));
    }
}

/// One rank's communicator, window, stream, and what it found wrong.
struct member {
    std::unique_ptr<cpx::nccl> comm;
    std::unique_ptr<cpx::cuda::shared_memory> window;
    cpx::cuda::stream stream;
    std::string problem;

    explicit member(std::chrono::milliseconds deadline = std::chrono::minutes(1), cpx::index_t bytes = 1 << 24)
        : member(cpx::nccl::from_environment(deadline), bytes) {}
    explicit member(std::unique_ptr<cpx::nccl> joined, cpx::index_t bytes = 1 << 24)
        : comm(std::move(joined)), window(std::make_unique<cpx::cuda::shared_memory>(*comm, bytes)) {}

    template <class T>
    void check(std::vector<T> const& got, std::vector<T> const& expected, std::string const& what) {
        if (problem.empty() && (got.size() < expected.size() ||
                                std::memcmp(got.data(), expected.data(), expected.size() * sizeof(T)) != 0))
            problem = what + " gave other bytes";
    }

    /// Returns when every rank has called this.
    void meet() const {
        char const here = 1;
        std::vector<char> all(static_cast<std::size_t>(comm->ranks()));
        comm->gather(&here, all.data(), 1);
    }
};
