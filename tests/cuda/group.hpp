// SPDX-License-Identifier: Apache-2.0
// Ranks on GPUs: all in this process, or one of them where processes were launched together.
#pragma once

#include <cpx/layout/sharding.hpp>
#include <cpx/transport/nccl.hpp>

#include <doctest/doctest.h>

#include "gpus.hpp"

#include <barrier>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

/// Ranks that are threads of this process, one a GPU, or several, see `gpu_of`. Of as many ranks as processes were
/// launched together, this process has one.
class group {
public:
    explicit group(int ranks, std::chrono::milliseconds deadline = std::chrono::seconds(60))
        : ranks_(ranks), apart_(ranks > 1 && ranks == launched_ranks()) {
        if (apart_) {
            comms_.push_back(cpx::nccl::from_environment(deadline));
            return;
        }
        std::vector<int> devices;
        for (int d = 0; d < ranks; ++d) devices.push_back(gpu_of(d));
        comms_ = cpx::nccl::all(devices, deadline);
    }
    int ranks() const { return ranks_; }
    /// Returns the ranks that are of this process.
    std::vector<int> own() const {
        std::vector<int> list;
        for (auto const& comm : comms_) list.push_back(comm->rank());
        return list;
    }

    /// Calls `program(comm, meet)` in a thread a rank. No rank allocates or frees memory while another one's exchange
    /// may wait for it: `meet()` returns when all have called it.
    template <class F>
    void run(F&& program) {
        std::barrier everyone(std::ssize(comms_));
        auto const meet = [&] {
            everyone.arrive_and_wait();
            if (!apart_) return;
            char const here = 1;
            std::vector<char> all(static_cast<std::size_t>(ranks_));
            others().gather(&here, all.data(), 1);
        };
        std::vector<std::string> errors(static_cast<std::size_t>(ranks_));
        {
            std::vector<std::jthread> threads;
            for (auto& comm : comms_)
                threads.emplace_back([&] {
                    try {
                        cpx::cuda::use_device(comm->device());
                        program(*comm, meet);
                    } catch (std::exception const& e) {
                        errors[static_cast<std::size_t>(comm->rank())] = e.what();
                    }
                    everyone.arrive_and_drop(); // the others do not wait for a rank that has failed
                });
        }
        for (std::string const& error : errors) REQUIRE(error == "");
    }

    /// Gives every process the elements that one of them has written: NaN is what the others have there.
    template <class T>
    void share(std::vector<T>& whole) const {
        if (!apart_ || whole.empty()) return;
        std::vector<T> all(whole.size() * static_cast<std::size_t>(ranks_));
        others().gather(whole.data(), all.data(), whole.size() * sizeof(T));
        for (std::size_t i = 0; i < all.size(); ++i)
            if (!std::isnan(all[i])) whole[i % whole.size()] = all[i];
    }

private:
    /// A communicator between processes that no test breaks. It is not freed: CUDA may be gone at the end of a process.
    static cpx::nccl& others() {
        static cpx::nccl* const joined = cpx::nccl::from_environment(std::chrono::seconds(60)).release();
        return *joined;
    }

    int ranks_;
    bool apart_;
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
