// SPDX-License-Identifier: Apache-2.0
// Ranks on the GPUs of this process.
#pragma once

#include <cpx/layout/sharding.hpp>
#include <cpx/transport/nccl.hpp>

#include <doctest/doctest.h>

#include "gpus.hpp"

#include <barrier>
#include <memory>
#include <string>
#include <thread>
#include <vector>

/// The ranks of this process, one a GPU, or several, see `gpu_of`.
class group {
public:
    explicit group(int ranks, std::chrono::milliseconds deadline = std::chrono::seconds(60)) {
        std::vector<int> devices;
        for (int d = 0; d < ranks; ++d) devices.push_back(gpu_of(d));
        comms_ = cpx::nccl::all(devices, deadline);
    }
    int ranks() const { return static_cast<int>(comms_.size()); }

    /// Calls `program(comm, meet)` in a thread a rank. No rank allocates or frees memory while another one's exchange
    /// may wait for it: `meet()` returns when all have called it.
    template <class F>
    void run(F&& program) {
        std::barrier everyone(ranks());
        std::vector<std::string> errors(comms_.size());
        {
            std::vector<std::jthread> threads;
            for (auto& comm : comms_)
                threads.emplace_back([&] {
                    try {
                        cpx::cuda::use_device(comm->device());
                        program(*comm, [&] { everyone.arrive_and_wait(); });
                    } catch (std::exception const& e) {
                        errors[static_cast<std::size_t>(comm->rank())] = e.what();
                    }
                    everyone.arrive_and_drop(); // the others do not wait for a rank that has failed
                });
        }
        for (std::string const& error : errors) REQUIRE(error == "");
    }

private:
    std::vector<std::unique_ptr<cpx::nccl>> comms_;
};

/// Returns the rows of a whole tensor that `rank` holds, side by side.
template <class T, cpx::any_sharding S>
std::vector<T> take(std::vector<T> const& whole, cpx::index_t width, S const& sharding, int rank) {
    std::vector<T> local;
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        local.insert(local.end(), whole.begin() + piece.first * width, whole.begin() + piece.last * width);
    });
    return local;
}
