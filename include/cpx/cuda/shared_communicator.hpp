// SPDX-License-Identifier: Apache-2.0
// A transport whose relayouts go through memory that ranks write to each other.
#pragma once

#include <cpx/cuda/communicator.hpp>
#include <cpx/cuda/shared_memory.hpp>

#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

namespace cpx::cuda {

template <class T, class Plan>
class shared_plans;

/// A `communicator` with memory that peers write, into which its movements relay out: their targets are made by
/// `movement::make_tensor`. What it does otherwise is as there. The memory outlives it.
class shared_communicator : public communicator {
public:
    template <class T, class Plan>
    using prepared = shared_plans<T, Plan>;

    shared_communicator(shared_memory& shared, cudaStream_t in, memory_resource& from = default_resource())
        : communicator(shared.comm(), in, from), shared_(shared) {}

    shared_memory& shared() const { return shared_; }
    /// As `communicator::wait`; a batch that differs between ranks, or does not fit, breaks nothing.
    void wait(caller here = caller::here()) const { shared_.wait(stream(), here); }

private:
    shared_memory& shared_;
};

/// What its movements prepare.
template <class T, class Plan>
class shared_plans : public prepared_plans<T, Plan> {
public:
    using prepared_plans<T, Plan>::prepared_plans;
};

/// Relayouts: by one kernel between ranks that reach each other's memory, where addresses can be computed on a device
/// (not of `table` and `by_length`); rows are sent and received elsewhere, and where they are added.
///
/// By the kernel alone, a call that is captured moves, when it is replayed, rows of the batch that was set last before
/// the replay; its tensors have room for every batch that fits. Else the batch is captured, too.
template <class T, any_sharding From, any_sharding To>
class shared_plans<T, relayout_plan<From, To>> {
public:
    using plan_type = relayout_plan<From, To>;
    shared_plans(plan_type const& p, std::vector<plan> const& plans, index_t width, movement_room room,
                 capacity const& most, shared_communicator& comm, caller here)
        : comm_(comm), width_(width), most_(most) {
        bool const adds = p.kind == flow::sums || plans[1].kind == flow::sums;
        shared_memory const& all = comm.shared();
        by_kernel_ = computed && (all.one_kernel() || (all.any_kernel() && !adds));
        if (by_kernel_) {
            detail::agree(comm.nccl_communicator(), p.id.template for_elements<T>(width), p, here);
            offsets_ = buffer<std::int64_t>(most.sequences + 1, here);
            ring_.emplace(offsets_.size() * static_cast<index_t>(sizeof(std::int64_t)), here);
        }
        if (!by_kernel_ || !all.one_kernel() || adds)
            sent_ = detail::ready_to_send<T>(plans, width, room, comm,
                                             by_kernel_ && !all.one_kernel() ? all.group() : range{}, here);
        if (by_kernel_) upload(p, here);
    }
    void set(plan_type const& p, std::vector<plan> const& plans, caller here) {
        if (by_kernel_) upload(p, here);
        if (sent_) sent_->set(plans, comm_.stream(), here);
    }
    void operator()(index_t number, rows<T const> const& from, rows<T> const& to, caller here) {
        if constexpr (computed) {
            if (number == 0 && there_) return push(*there_, number, from, to, here);
            if (number == 1 && back_) return push(*back_, number, from, to, here);
        }
        (*sent_)(from, to, comm_.stream(), number, here);
    }
    cuda::memory memory() const { return by_kernel_ ? cuda::memory(comm_.stream(), comm_.shared()) : comm_.memory(); }

private:
    static constexpr bool computed = detail::computed_on_device<From> && detail::computed_on_device<To>;
    struct none {};
    template <any_sharding A, any_sharding B>
    using kernel = std::optional<std::conditional_t<computed, relayout<T, A, B>, none>>;

    /// Gives the kernels the batch, behind whose sequences empty ones stand.
    void upload(plan_type const& p, caller here) {
        if constexpr (computed) {
            require(p.batch.sequences() <= most_.sequences && std::max(p.source_rows, p.target_rows) <= most_.rows,
                    "movement", "rows and sequences of the batch",
                    "at most " + std::to_string(most_.rows) + ", " + std::to_string(most_.sequences),
                    std::to_string(std::max(p.source_rows, p.target_rows)) + ", " + std::to_string(p.batch.sequences()),
                    here);
            if (p.kind != flow::sums) there_.emplace(p, width_, here);
            if (p.kind != flow::copies) back_.emplace(p.transposed(), width_, here);
            auto const given = p.batch.offsets();
            std::vector<std::int64_t> offsets(given.begin(), given.end());
            offsets.resize(static_cast<std::size_t>(offsets_.size()), offsets.back());
            std::span<std::byte const> const parts[] = {std::as_bytes(std::span(offsets))};
            ring_->upload(parts, offsets_.data(), comm_.stream(), here);
        }
    }
    template <class Kernel>
    void push(Kernel const& move, index_t number, rows<T const> from, rows<T> to, caller here) {
        if (to.width() == 0 || most_.rows == 0) return; // on all ranks
        cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
        check(cudaStreamIsCapturing(comm_.stream(), &capturing), "cudaStreamIsCapturing", here);
        bool const captured = capturing != cudaStreamCaptureStatusNone;
        shared_memory& shared = comm_.shared();
        if (captured) {
            require(shared.one_kernel(), "movement", "stream", "one that does not capture, unless one kernel moves all",
                    "a capture", here);
            from = {from.data(), most_.rows, from.width(), from.stride()}; // of any batch that is replayed
        }
        range const place = shared.place(to.data(), here);
        auto peers = shared.peers(here);
        peers.bytes = place.last;
        packed_offsets const batch(offsets_.data(), static_cast<int>(most_.sequences));
        move.check_call(from, peers, place.first, batch, here);
        if (sent_ && !shared.one_kernel()) {
            // Before the kernel, not beside it: its blocks wait for those of other ranks, so all must find room at
            // once.
            (*sent_)(from, to, comm_.stream(), number, here);
            shared.sent(comm_.stream(), here);
        }
        move.enqueue(from, peers, place.first, batch, comm_.stream(), here);
        shared.begin_call(here); // counted once it is enqueued: what was refused was no call
    }

    shared_communicator& comm_;
    index_t width_;
    capacity most_;
    bool by_kernel_ = false;
    kernel<From, To> there_;
    kernel<To, From> back_;
    buffer<std::int64_t> offsets_; ///< of the batch, in device memory
    std::optional<upload_ring> ring_;
    std::unique_ptr<exchange<T>> sent_;
};

} // namespace cpx::cuda
