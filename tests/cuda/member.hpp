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

/// A communicator between the ranks of another one, as a framework makes and keeps it.
class framework {
public:
    explicit framework(cpx::nccl& world, bool blocks = true) {
        cpx::detail::comm_id_for_now const own; // which NCCL makes
        ncclUniqueId const mine = cpx::nccl::new_id();
        auto const all = std::make_unique<ncclUniqueId[]>(static_cast<std::size_t>(world.ranks()));
        world.gather(&mine, all.get(), sizeof mine);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = blocks;
        done(ncclCommInitRankConfig(&comm_, world.ranks(), all[0], world.rank(), &config));
    }
    framework(framework const&) = delete;
    framework& operator=(framework const&) = delete;
    ~framework() {
        if (!comm_) return;
        done(ncclCommFinalize(comm_));
        static_cast<void>(ncclCommDestroy(comm_));
    }
    ncclComm_t get() const { return comm_; }
    /// It is gone, or is to go at once.
    void forget() { comm_ = nullptr; }
    void abort() { static_cast<void>(ncclCommAbort(std::exchange(comm_, nullptr))); }
    /// Waits for a call that may be in progress.
    void done(ncclResult_t result) const {
        while (result == ncclInProgress) ncclCommGetAsyncError(comm_, &result);
        cpx::nccl::check(result, "a framework's call");
    }

private:
    ncclComm_t comm_ = nullptr;
};
