// SPDX-License-Identifier: Apache-2.0
// A transport whose relayouts go through memory that ranks write to each other.
#pragma once

#include <cpx/cuda/communicator.hpp>
#include <cpx/cuda/shared_memory.hpp>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace cpx::cuda {

template <class T, class Plan>
class shared_plans;

/// A `communicator` with memory that peers write, into which its movements relay out: their targets are made by
/// `movement::make_tensor`. Where all ranks reach each other, halos and carries go there, too, also those of operators:
/// whoever brings them takes as many bytes of it as one exchange takes, or brings, at most. What it does otherwise is
/// as a `communicator` does. The memory outlives it; of several on one memory, events order the streams.
class shared_communicator : public communicator {
public:
    template <class T, class Plan>
    using prepared = shared_plans<T, Plan>;

    shared_communicator(shared_memory& shared, cudaStream_t in, memory_resource& from = default_resource())
        : communicator(shared.comm(), in, from, shared.one_kernel() ? &shared : nullptr), shared_(shared) {}

    shared_memory& shared() const { return shared_; }
    /// As `communicator::wait`; a batch that differs between ranks, or does not fit, breaks nothing.
    void wait(caller here = caller::here()) const { shared_.wait(stream(), here); }

private:
    shared_memory& shared_;
};

/// What its movements prepare: halos and carries, where all ranks reach each other, through the memory; else to send
/// and receive, but for relayouts between shardings whose addresses can be computed on a device (not of `table` and
/// `by_length`).
template <class T, class Plan>
class shared_plans : public prepared_plans<T, Plan> {
public:
    using prepared_plans<T, Plan>::prepared_plans;
};

/// Relayouts by one kernel where ranks reach each other's memory; elsewhere, and where rows are added, by messages.
///
/// By the kernel alone, a call that is captured moves, when it is replayed, rows of the batch that was set last before
/// the replay; its tensors have room for every batch that fits. Else the batch is captured, too.
template <class T, any_sharding From, any_sharding To>
    requires(detail::computed_on_device<From> && detail::computed_on_device<To>)
class shared_plans<T, relayout_plan<From, To>> {
public:
    using plan_type = relayout_plan<From, To>;
    using batch = std::tuple<From, To>;
    shared_plans(plan_type const& p, index_t width, capacity const& most, shared_communicator& comm, caller here)
        : comm_(comm), most_(most) {
        bool const adds = p.kind == flow::sums || p.kind == flow::copies; // there, or back
        shared_memory const& all = comm.shared();
        bool const by_kernel = all.one_kernel() || (all.any_kernel() && !adds);
        if (by_kernel) {
            detail::agree(comm.nccl_communicator(), p.id.template for_elements<T>(width), p, here);
            if (p.kind != flow::sums) there_.emplace(p, width, here);
            if (p.kind != flow::copies) back_.emplace(p.transposed(), width, here);
            offsets_ = buffer<index_t>(most.sequences + 1, here);
            load_write_numbers(here);
            upload(p.from, p.to, here);
        }
        if (!by_kernel || !all.one_kernel() || adds)
            sent_.emplace(p, width, most, comm, here, by_kernel && !all.one_kernel() ? all.group() : range{});
    }
    template <class F>
    void set(batch const& of, F&& plan_of, caller here) {
        if (there_ || back_) upload(std::get<0>(of), std::get<1>(of), here);
        if (sent_) sent_->set(of, plan_of, here);
    }
    template <class F>
    void operator()(F&& plan_of, bool back, index_t, rows<T const> const& from, rows<T> const& to, caller here) {
        auto const send = [&] { (*sent_)(plan_of, back, 0, from, to, here); };
        if (!back && there_) return push(*there_, from, to, send, here);
        if (back && back_) return push(*back_, from, to, send, here);
        send();
    }
    cuda::memory memory() const {
        return there_ || back_ ? cuda::memory(comm_.stream(), comm_.shared()) : comm_.memory();
    }

private:
    /// Gives the kernels the batch, behind whose sequences empty ones stand.
    void upload(From const& from, To const& to, caller here) {
        thd const& given = from.batch();
        cpx::detail::require_batch("relayout", "batch of the target", "the source's", given, to.batch(), here);
        if (there_) there_->set(from, to);
        if (back_) back_->set(to, from);
        cpx::detail::lane_work copied{.numbers = {{offsets_.data(), 0, offsets_.size(), 1}}};
        if (comm_.tables().add(given, std::move(copied), here)) return;
        comm_.tables().write(here); // of the batch before, perhaps
        std::vector<index_t> offsets(given.offsets().begin(), given.offsets().end());
        offsets.resize(static_cast<std::size_t>(offsets_.size()), offsets.back());
        write_numbers(offsets, offsets_.data(), comm_.stream(), here);
    }
    /// `send()`: sends and receives the rows that the kernel does not reach.
    template <class Kernel, class F>
    void push(Kernel const& move, rows<T const> from, rows<T> to, F&& send, caller here) {
        if (to.width() == 0 || most_.rows == 0) return; // on all ranks
        comm_.tables().write(here);
        shared_memory& shared = comm_.shared();
        if (captures(comm_.stream(), here)) {
            require(shared.one_kernel(), "movement", "stream", "one that does not capture, unless one kernel moves all",
                    "a capture", here);
            from = {from.data(), most_.rows, from.width(), from.stride()}; // of any batch that is replayed
        }
        range const place = shared.place(to.data(), here);
        auto peers = shared.peers(here);
        peers.bytes = place.last;
        std::span<index_t const> const batch(offsets_.data(), static_cast<std::size_t>(offsets_.size()));
        move.check_call(from, peers, place.first, batch, here);
        if (sent_ && !shared.one_kernel()) {
            // Before the kernel, not beside it: its blocks wait for those of other ranks, so all must find room.
            send();
            shared.sent(comm_.stream(), here);
        }
        move(from, peers, place.first, batch, comm_.stream(), here);
        shared.begin_call(here); // counted once it is enqueued: what was refused was no call
    }

    shared_communicator& comm_;
    capacity most_;
    std::optional<relayout<T, From, To>> there_;
    std::optional<relayout<T, To, From>> back_;
    buffer<index_t> offsets_; ///< of the batch, in device memory
    std::optional<prepared_plans<T, plan_type>> sent_;
};

} // namespace cpx::cuda
