// SPDX-License-Identifier: Apache-2.0
// Small tables that go to a device in stream order, while the host goes on.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <array>
#include <cstring>
#include <span>

namespace cpx::cuda {

/// Host memory from which tables are uploaded without a wait: a few at a time are on their way, and only when all are,
/// the host waits for the first.
class upload_ring {
public:
    /// Room for tables of `bytes`.
    explicit upload_ring(index_t bytes, caller here = caller::here()) : bytes_((bytes + 255) / 256 * 256) {
        auto const all = static_cast<std::size_t>(bytes_) * slots_.size();
        check(cudaHostAlloc(reinterpret_cast<void**>(&memory_), all, cudaHostAllocDefault), "cudaHostAlloc", here);
    }
    upload_ring(upload_ring const&) = delete;
    upload_ring& operator=(upload_ring const&) = delete;
    ~upload_ring() {
        for (event const& uploaded : slots_) static_cast<void>(cudaEventSynchronize(uploaded));
        static_cast<void>(cudaFreeHost(memory_));
    }

    /// Copies parts, one behind the other, to `to` in the order of the stream. Together they are at most `bytes`.
    void upload(std::span<std::span<std::byte const> const> parts, void* to, cudaStream_t in,
                caller here = caller::here()) {
        event& uploaded = slots_[next_];
        char* const from = memory_ + static_cast<index_t>(next_) * bytes_;
        check(cudaEventSynchronize(uploaded), "cudaEventSynchronize", here); // at once if it was never recorded
        std::size_t size = 0;
        for (auto const& part : parts) {
            if (!part.empty()) std::memcpy(from + size, part.data(), part.size());
            size += part.size();
        }
        check(cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, in), "cudaMemcpyAsync", here);
        uploaded.record(in, here);
        next_ = (next_ + 1) % slots_.size();
    }

private:
    std::array<event, 4> slots_;
    index_t bytes_;
    char* memory_ = nullptr;
    std::size_t next_ = 0;
};

} // namespace cpx::cuda
