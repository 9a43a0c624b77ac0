// SPDX-License-Identifier: Apache-2.0
// Communicators whose halos and carries are sent and received, or stored in memory that peers reach.
#pragma once

#include <cpx/cuda/shared_communicator.hpp>

#include <optional>

/// One rank's communicator; through the window where ranks reach each other's memory, which tests that are about the
/// window itself make sure of. Made and freed by all ranks together.
class either_way {
public:
    either_way(cpx::nccl& joined, cudaStream_t stream, bool window, cpx::index_t bytes = 1 << 24) {
        if (window) {
            memory_.emplace(joined, bytes);
            shared_.emplace(*memory_, stream);
        } else {
            sends_.emplace(joined, stream);
        }
    }
    cpx::cuda::communicator& comm() { return shared_ ? *shared_ : *sends_; }
    void wait() const { shared_ ? shared_->wait() : sends_->wait(); }

private:
    std::optional<cpx::cuda::shared_memory> memory_;
    std::optional<cpx::cuda::shared_communicator> shared_;
    std::optional<cpx::cuda::communicator> sends_;
};
