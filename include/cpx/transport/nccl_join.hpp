// SPDX-License-Identifier: Apache-2.0
// Joins a communicator of NCCL with a deadline.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/transport/nccl_watchdog.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>

namespace cpx::detail {

/// Makes a device the current one and begins to use it, which wants memory; says why it cannot be used.
inline void use_device(int device, caller here) {
    cudaError_t const begun = cudaSetDevice(device);
    if (begun != cudaSuccess) static_cast<void>(cudaGetLastError()); // the next call does not report it again
    require(begun == cudaSuccess, "nccl", ("device " + std::to_string(device)).c_str(), "one that can be used",
            cudaGetErrorString(begun), here);
}

/// A rank that joins. NCCL does not give up joining, so a thread does it that may outlive this object.
class joining_comm {
public:
    joining_comm(ncclUniqueId const& id, int rank, int ranks, int device) : state_(std::make_shared<state>()) {
        std::thread([state = state_, id, rank, ranks, device] {
            ncclComm_t comm = nullptr;
            ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
            config.blocking = 1;
            ncclResult_t result = ncclUnhandledCudaError;
            if (cudaSetDevice(device) == cudaSuccess) result = ncclCommInitRankConfig(&comm, ranks, id, rank, &config);
            std::lock_guard const lock(state->guard);
            state->result = result;
            state->comm = comm;
            state->done = true;
            if (state->abandoned && result == ncclSuccess) static_cast<void>(ncclCommAbort(comm));
            state->changed.notify_all();
        }).detach();
    }
    joining_comm(joining_comm const&) = delete;
    joining_comm& operator=(joining_comm const&) = delete;
    ~joining_comm() {
        std::lock_guard const lock(state_->guard); // perhaps nobody has waited for the thread
        if (state_->comm && !state_->abandoned) static_cast<void>(ncclCommAbort(state_->comm));
        state_->abandoned = true;
    }

    /// Returns NCCL's result, or nothing if there is none by the deadline: then the rank has given up.
    std::optional<ncclResult_t> wait(std::chrono::milliseconds deadline) {
        std::unique_lock lock(state_->guard);
        bool const done = state_->changed.wait_for(lock, deadline, [&] { return state_->done; });
        state_->abandoned = !done;
        return done ? std::optional(state_->result) : std::nullopt;
    }
    /// Returns the communicator, which is the caller's from now on.
    ncclComm_t take() {
        std::lock_guard const lock(state_->guard);
        return std::exchange(state_->comm, nullptr);
    }

private:
    struct state {
        std::mutex guard;
        std::condition_variable changed;
        bool done = false, abandoned = false;
        ncclResult_t result = ncclInProgress;
        ncclComm_t comm = nullptr;
    };
    std::shared_ptr<state> state_;
};

/// Returns the name of the page of the ranks that share `id`; `again` tells communicators of one id from each other.
inline std::string page_name(std::span<char const> id, int again = 0) {
    std::uint64_t hash = 14695981039346656037ull;
    for (char const c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    return "cpx." + std::to_string(hash) + '.' + std::to_string(again);
}

} // namespace cpx::detail
