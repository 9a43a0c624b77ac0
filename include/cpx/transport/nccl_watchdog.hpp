// SPDX-License-Identifier: Apache-2.0
// A communicator of NCCL: it is joined, and its calls end, within a deadline.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/cuda/nvcc.hpp>

#if !__has_include(<nccl.h>)
#error "cpx: this header needs NCCL 2.28 or newer; link cpx::nccl (find_package(cpx COMPONENTS nccl))"
#include "end of compilation"
#endif
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cpx {

/// What becomes of a communicator that was adopted when a call has failed, or has lasted for the deadline.
enum class adopted { is_left, is_aborted };

namespace detail {

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

/// The communicators of one process. NCCL ends them only together, so the last that leaves ends all.
class ended_together {
public:
    explicit ended_together(std::size_t ranks) : ranks_(ranks) {}
    ended_together(ended_together const&) = delete;
    ended_together& operator=(ended_together const&) = delete;
    ~ended_together() {
        if (left_.size() == ranks_) {
            each(ncclCommFinalize);
            each(ncclCommDestroy);
        } else {
            each(ncclCommAbort); // if one has failed, the others would wait for it without an abort
        }
    }
    void leave(ncclComm_t comm) {
        std::lock_guard const lock(guard_);
        left_.push_back(comm);
    }

private:
    void each(ncclResult_t (*call)(ncclComm_t)) const {
        static_cast<void>(ncclGroupStart());
        for (ncclComm_t const comm : left_) static_cast<void>(call(comm));
        static_cast<void>(ncclGroupEnd());
    }
    std::size_t ranks_;
    std::mutex guard_;
    std::vector<ncclComm_t> left_;
};

/// A communicator, its calls under a watchdog: a thread that aborts it if one does not end by the deadline.
class watched_comm {
public:
    using clock = std::chrono::steady_clock;

    watched_comm(ncclComm_t comm, int device, std::chrono::milliseconds deadline,
                 std::shared_ptr<ended_together> together, std::optional<adopted> lent = {})
        : comm_(comm), deadline_(deadline), together_(std::move(together)), lent_(lent), watchdog_([this, device] {
              static_cast<void>(cudaSetDevice(device));
              while (watching_) {
                  std::this_thread::sleep_for(std::chrono::milliseconds(20));
                  auto until = busy_until_.load();
                  if (until == 0 || clock::now().time_since_epoch().count() <= until) continue;
                  // from here on the call counts as failed, however it ends
                  if (busy_until_.compare_exchange_strong(until, late)) abort();
              }
          }) {}
    watched_comm(watched_comm const&) = delete;
    watched_comm& operator=(watched_comm const&) = delete;
    ~watched_comm() {
        if (!lent_ && !aborted_ && !together_) static_cast<void>(in_time([this] { return ncclCommFinalize(comm_); }));
        watching_ = false;
        watchdog_.join();
        if (lent_ || aborted_) return;
        together_ ? together_->leave(comm_) : static_cast<void>(ncclCommDestroy(comm_));
    }

    /// Returns NCCL's handle, or null after an abort.
    ncclComm_t get() const { return aborted_ ? nullptr : comm_; }
    /// Returns whether what the device was given may wait for other ranks for ever: `lent`, it was not aborted.
    bool left_waiting() const { return aborted_ && lent_ == adopted::is_left; }

    /// Returns what `f()`, a call of NCCL's, returns, or nothing if the deadline passed meanwhile: then it is aborted.
    template <class F>
    std::optional<ncclResult_t> in_time(F&& f) {
        struct call { // ends the call even if f throws: an abort waits for the end
            watched_comm& of;
            bool late = false;
            explicit call(watched_comm& comm) : of(comm) {
                of.busy_until_ = (clock::now() + of.deadline_).time_since_epoch().count();
            }
            ~call() { end(); }
            bool end() {
                late = of.busy_until_.exchange(0) == watched_comm::late || late;
                of.busy_until_.notify_all();
                return late;
            }
        } now(*this);
        ncclResult_t result = f();
        while (result == ncclInProgress && !aborted_ && busy_until_ != late) { // one that does not block
            std::this_thread::sleep_for(std::chrono::microseconds(10));
            static_cast<void>(ncclCommGetAsyncError(comm_, &result));
        }
        return now.end() ? std::nullopt : std::optional(result);
    }

    /// Aborts, once, what may be aborted; returns when it has been done, by whichever thread came first.
    void abort() {
        std::lock_guard const lock(guard_);
        if (aborted_.exchange(true)) return;
        for (auto const& [who, stop] : stops_) stop();
        if (lent_ == adopted::is_left) return;
        // In a group, NCCL tells all calls that wait to give up at once, but frees what they use only at the end of the
        // group: by then the call in flight has returned.
        static_cast<void>(ncclGroupStart());
        static_cast<void>(ncclCommAbort(comm_));
        busy_until_.wait(late);
        static_cast<void>(ncclGroupEnd());
    }

    /// Makes an abort call `stop()` first, perhaps in another thread, until `forget(who)`.
    void before_abort(void const* who, std::function<void()> stop) {
        std::lock_guard const lock(guard_);
        stops_.emplace_back(who, std::move(stop));
    }
    void forget(void const* who) {
        std::lock_guard const lock(guard_);
        std::erase_if(stops_, [=](auto const& s) { return s.first == who; });
    }

private:
    static constexpr clock::rep late = -1;

    ncclComm_t comm_;
    std::chrono::milliseconds deadline_;
    std::shared_ptr<ended_together> together_; ///< of all communicators of a process, or none
    std::optional<adopted> lent_;              ///< by its owner
    std::atomic<clock::rep> busy_until_ = 0; ///< when the call in flight must have ended; 0 if there is none, or `late`
    std::atomic<bool> aborted_ = false, watching_ = true;
    std::mutex guard_;
    std::vector<std::pair<void const*, std::function<void()>>> stops_;
    std::thread watchdog_; ///< last: it uses the others
};

/// What a call has on the device. Freed when an error is thrown, too: by then an abort has ended what used it.
struct scratch {
    watched_comm const& user;
    char* memory = nullptr;
    cudaStream_t stream = nullptr;
    ~scratch() {
        if (user.left_waiting()) return;
        if (stream) static_cast<void>(cudaStreamDestroy(stream));
        static_cast<void>(cudaFree(memory));
    }
};

} // namespace detail

} // namespace cpx
