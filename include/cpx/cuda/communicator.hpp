// SPDX-License-Identifier: Apache-2.0
// The transport of tensors on devices: an NCCL communicator in a stream.
#pragma once

#include <cpx/cuda/exchange.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/transport/movement.hpp>

#include <deque>
#include <memory>
#include <utility>

namespace cpx::cuda {

/// One rank of an NCCL communicator, whose tensors are in device memory and whose work is in one stream: a
/// `device_transport`, which `cpx::exchange` and operators take as they take the host's transports.
///
/// Belongs to the communicator's device and to one thread; the communicator, the stream and the resource outlive it.
/// Calls with a plan prepare it first: ranks compare what they are about to run, tables are uploaded. What is called
/// again and again prepares once, see `cuda::exchange`.
class communicator {
public:
    using memory_type = cuda::memory;

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
        (*made)(from, to, stream(), here);
        keep(std::move(made), here);
    }

    /// A plan and those that come later, ready to run in the stream; `cpx::movement` has one.
    template <class T>
    class prepared {
    public:
        prepared(plan const& p, index_t width, exchange_room const& room, communicator& comm, caller here)
            : exchange_(std::make_unique<cuda::exchange<T>>(p, width, comm.comm_, room, here)), in_(comm.stream()) {}
        void set(plan const& p, caller here) { exchange_->set(p, in_, here); }
        void operator()(rows<T const> const& from, rows<T> const& to, caller here) {
            (*exchange_)(from, to, in_, here);
        }

    private:
        std::unique_ptr<cuda::exchange<T>> exchange_;
        cudaStream_t in_;
    };

    /// Prepares plans of at most `runs` runs of rows. Collective.
    template <class T>
    prepared<T> prepare(plan const& p, index_t width, index_t runs, capacity const& most, caller here) {
        char const* const where = "cuda::communicator";
        index_t const elements = std::max({p.source_width, p.target_width, width});
        index_t const element = static_cast<index_t>(sizeof(T));
        index_t const bytes = cpx::detail::product(where, "bytes", {most.rows, elements, element}, here);
        index_t columns = 1;
        for (auto const* messages : {&p.sends, &p.receives})
            for (message const& m : *messages) columns = std::max(columns, std::ssize(m.columns) + 1);
        exchange_room const room{2 * columns * (runs + ranks()), bytes + 256 * ranks()};
        return {p, width, room, *this, here};
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
    /// within the communicator's deadline, or another error of NCCL's or the device's.
    void wait(caller here = caller::here()) const { comm_.wait(stream(), here); }

private:
    nccl& comm_;
    cuda::memory memory_;
    std::deque<std::pair<event, std::shared_ptr<void>>> kept_;
};

} // namespace cpx::cuda
