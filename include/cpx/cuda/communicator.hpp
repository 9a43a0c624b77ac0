// SPDX-License-Identifier: Apache-2.0
// The transport of tensors on devices: an NCCL communicator in a stream.
#pragma once

#include <cpx/cuda/exchange.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/transport/movement.hpp>

#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace cpx::cuda {

template <class T, class Plan>
class prepared_plans;

/// One rank of an NCCL communicator, whose tensors are in device memory and whose work is in one stream: a
/// `device_transport`, which `cpx::exchange` and operators take as they take the host's transports.
///
/// Belongs to the communicator's device and to one thread; the communicator, the stream and the memory outlive it.
/// Calls with a plan prepare it first: ranks compare what they are about to run, tables are uploaded. What is called
/// again and again prepares once, see `cpx::movement`.
class communicator {
public:
    using memory_type = cuda::memory;
    template <class T, class Plan>
    using prepared = prepared_plans<T, Plan>;

    explicit communicator(nccl& comm, cudaStream_t in, memory_resource& from = default_resource())
        : comm_(comm), memory_(in, from) {}

    int rank() const { return comm_.rank(); }
    int ranks() const { return comm_.ranks(); }
    cuda::memory const& memory() const { return memory_; }
    cudaStream_t stream() const { return memory_.stream(); }
    nccl& nccl_communicator() const { return comm_; }

    /// Runs a plan in the stream; `cpx::exchange` calls it. Collective.
    template <class T>
    void exchange(plan const& p, rows<T const> const& from, rows<T> const& to, caller here = caller::here()) {
        auto const stride = [](auto const& r) { return r.count() > 1 ? r.stride() : 0; };
        auto made =
            std::make_unique<cuda::exchange<T>>(p, from.width(), comm_, stride(from), stride(to), range{}, here);
        (*made)(from, to, stream(), 0, here);
        keep(std::move(made), here);
    }

    /// Keeps what the stream needs until it has come here. Frees what it no longer needs.
    template <class Kept>
    void keep(std::unique_ptr<Kept> kept, caller here = caller::here()) {
        while (!kept_.empty() && cudaEventQuery(kept_.front().first) == cudaSuccess) kept_.pop_front();
        static_cast<void>(cudaGetLastError()); // not ready is no error
        event end;
        end.record(stream(), here);
        kept_.emplace_back(std::move(end), std::shared_ptr<Kept>(std::move(kept)));
    }

    /// Waits until the stream has done all it was given. Throws `cpx::error` that names the ranks that did not come
    /// within the communicator's deadline, that moved rows of another batch, or another error of NCCL's or the
    /// device's.
    void wait(caller here = caller::here()) const { comm_.wait(stream(), here); }

private:
    nccl& comm_;
    cuda::memory memory_;
    std::deque<std::pair<event, std::shared_ptr<void>>> kept_;
};

namespace detail {

/// Makes ready to send and receive by plans, and by those of other batches.
template <class T>
std::unique_ptr<exchange<T>> ready_to_send(std::vector<plan> const& plans, index_t width, movement_room room,
                                           communicator const& comm, range others, caller here) {
    char const* const where = "cuda::communicator";
    index_t columns = 1, elements = width;
    for (plan const& p : plans) {
        elements = std::max({elements, p.source_width, p.target_width});
        for (auto const* messages : {&p.sends, &p.receives})
            for (message const& m : *messages) columns = std::max(columns, std::ssize(m.columns) + 1);
    }
    index_t const bytes =
        cpx::detail::product(where, "bytes", {room.rows, elements, static_cast<index_t>(sizeof(T))}, here);
    exchange_room const most{2 * columns * (room.runs + 2 * comm.ranks()), bytes + 256 * comm.ranks()};
    return std::make_unique<exchange<T>>(plans, width, comm.nccl_communicator(), most, 0, others, here);
}

} // namespace detail

/// What a `cpx::movement` prepares on devices: to send and receive rows.
template <class T, class Plan>
class prepared_plans {
public:
    prepared_plans(Plan const&, std::vector<plan> const& plans, index_t width, movement_room room, capacity const&,
                   communicator& comm, caller here)
        : memory_(comm.memory()), sent_(detail::ready_to_send<T>(plans, width, room, comm, {}, here)) {}
    void set(Plan const&, std::vector<plan> const& plans, caller here) { sent_->set(plans, memory_.stream(), here); }
    void operator()(index_t number, rows<T const> const& from, rows<T> const& to, caller here) {
        (*sent_)(from, to, memory_.stream(), number, here);
    }
    cuda::memory memory() const { return memory_; }

private:
    cuda::memory memory_;
    std::unique_ptr<exchange<T>> sent_;
};

} // namespace cpx::cuda
