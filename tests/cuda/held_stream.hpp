// SPDX-License-Identifier: Apache-2.0
// A stream that does nothing until it is told to: what only enqueues work does not wait for it.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <atomic>
#include <chrono>
#include <thread>

/// Holds a stream from its last piece of work on, for 5 seconds at most.
class held_stream {
public:
    explicit held_stream(cudaStream_t stream) {
        cpx::cuda::check(cudaLaunchHostFunc(
                             stream,
                             [](void* of) {
                                 auto& self = *static_cast<held_stream*>(of);
                                 auto const last = std::chrono::steady_clock::now() + std::chrono::seconds(5);
                                 while (!self.open_ && !self.gave_up_) {
                                     self.gave_up_ = std::chrono::steady_clock::now() > last;
                                     std::this_thread::sleep_for(std::chrono::microseconds(50));
                                 }
                                 self.done_ = true;
                             },
                             this),
                         "cudaLaunchHostFunc");
    }
    held_stream(held_stream const&) = delete;
    held_stream& operator=(held_stream const&) = delete;
    /// Waits until the stream has gone on, as it does within 5 seconds, unless a kernel has failed: then it never does.
    ~held_stream() {
        static_cast<void>(let_go());
        auto const last = std::chrono::steady_clock::now() + std::chrono::seconds(6);
        while (!done_ && std::chrono::steady_clock::now() < last)
            std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    /// Lets the stream go on, and returns whether it has not done so before.
    bool let_go() {
        open_ = true;
        return !gave_up_;
    }

private:
    std::atomic<bool> open_ = false, gave_up_ = false, done_ = false;
};
