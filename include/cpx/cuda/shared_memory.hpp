// SPDX-License-Identifier: Apache-2.0
// Targets of relayouts: by one kernel where ranks reach each other's memory, by send and receive elsewhere.
#pragma once

#include <cpx/cuda/exchange.hpp>
#include <cpx/cuda/relayout.hpp>
#include <cpx/transport/nccl_window.hpp>

#include <memory>
#include <optional>

namespace cpx::cuda {

/// As many bytes on every rank, into which relayouts move rows.
///
/// All ranks of the communicator reach each other's memory (one host with NVLink), or none is asked to: the ranks agree
/// on it when the memory is made. Made and freed by all ranks in the same order.
class shared_memory {
public:
    /// `windows` false: as where ranks do not reach each other. `blocks`: of a kernel, one a multiprocessor at most,
    /// the same on every rank; 0: up to 128. Fewer leave room for other kernels beside it. Collective. Throws
    /// `cpx::error` as `nccl_window` does.
    shared_memory(nccl& comm, index bytes, bool windows = true, int blocks = 0, caller here = caller::here())
        : comm_(comm) {
        if (windows && nccl_window::supported(comm, here))
            window_ = std::make_unique<nccl_window>(comm, bytes, blocks, here);
        else
            plain_ = buffer<char>(bytes, here);
    }

    nccl& comm() const { return comm_; }
    /// Returns whether relayouts into this memory are one kernel.
    bool one_kernel() const { return window_ != nullptr; }
    char* data() const { return window_ ? window_->data() : plain_.data(); }
    index bytes() const { return window_ ? window_->bytes() : plain_.size(); }

    /// Returns the memory as the one-kernel relayout wants it. Throws if an earlier kernel missed a rank.
    peer_memory peers(caller here = caller::here()) const {
        peer_memory m;
        for (int rank = 0; rank < comm_.ranks(); ++rank) m.base[rank] = window_->of(rank);
        m.bytes = window_->bytes();
        m.blocks = window_->blocks();
        m.meeting = window_->meeting(here);
        return m;
    }
    /// Waits until `stream` has done all it was given. Throws `cpx::error` that names the ranks that did not come.
    void wait(cudaStream_t stream, caller here = caller::here()) const {
        if (window_)
            window_->wait(stream, here);
        else
            comm_.wait(stream, here);
    }

private:
    nccl& comm_;
    std::unique_ptr<nccl_window> window_;
    buffer<char> plain_;
};

/// A relayout into shared memory, whichever way that moves.
template <class T, any_sharding From, any_sharding To>
class shared_relayout {
public:
    /// `offset`: bytes in the memory at which the target begins. Collective. Throws `cpx::error` as `relayout` and
    /// `exchange` do.
    shared_relayout(relayout_plan<From, To> const& plan, index width, shared_memory& memory, index offset = 0,
                    caller here = caller::here())
        : memory_(memory), offset_(offset), rows_(plan.target_rows),
          width_(plan.target_width ? plan.target_width : width) {
        index const bytes = rows_ * width_ * static_cast<index>(sizeof(T));
        require(offset >= 0 && offset % 16 == 0 && offset + bytes <= memory.bytes(), "shared_relayout",
                "place of the target",
                "a multiple of 16 with " + std::to_string(bytes) + " bytes after it in the memory", offset, here);
        if (memory.one_kernel())
            kernel_.emplace(plan, width, here);
        else
            exchange_ = std::make_unique<exchange<T>>(plan, width, memory.comm(), 0, 0, here);
    }

    /// Returns where this rank's rows of the target are.
    rows<T> target() const { return {reinterpret_cast<T*>(memory_.data() + offset_), rows_, width_}; }

    /// Moves this rank's rows of `from`, dense; `batch`: the plan's, in device memory. Collective, in stream order.
    void operator()(rows<T const> from, packed_offsets batch, cudaStream_t stream, caller here = caller::here()) {
        if (kernel_) {
            (*kernel_)(from, memory_.peers(here), offset_, batch, stream, here);
            memory_.comm().begin_call(here); // counted once it is enqueued: what was refused was no call
            return;
        }
        cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
        check(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing", here);
        require(capturing == cudaStreamCaptureStatusNone, "shared_relayout", "stream",
                "one that does not capture: by send and receive, the plan's offsets stay", "a capture", here);
        (*exchange_)(from, target(), stream, here);
    }

private:
    shared_memory& memory_;
    index offset_, rows_, width_;
    std::optional<relayout<T, From, To>> kernel_;
    std::unique_ptr<exchange<T>> exchange_;
};

} // namespace cpx::cuda
