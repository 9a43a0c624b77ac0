// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads and share a GPU, whatever their number: what they exchange goes by the host.
#pragma once

#include <cpx/cuda/memory.hpp>
#include <cpx/transport/exchange.hpp>
#include <cpx/transport/movement.hpp>
#include <cpx/transport/threads.hpp>

class threads_on_gpu {
public:
    using memory_type = cpx::cuda::memory;

    threads_on_gpu(cpx::threads& comm, cudaStream_t in) : threads_on_gpu(comm, cpx::cuda::memory(in)) {}
    threads_on_gpu(cpx::threads& comm, cpx::cuda::memory const& in) : comm_(comm), memory_(in) {}
    int rank() const { return comm_.rank(); }
    int ranks() const { return comm_.ranks(); }
    cpx::cuda::memory const& memory() const { return memory_; }

    template <class T>
    void exchange(cpx::plan const& p, cpx::rows<T const> const& from, cpx::rows<T> const& to,
                  cpx::caller here = cpx::caller::here()) {
        auto const span = [](auto const& r) {
            cpx::index_t const last = r.count() > 0 ? (r.count() - 1) * r.stride() + r.width() : 0;
            return std::span(r.data(), static_cast<std::size_t>(last));
        };
        auto const given = memory_.read<T>(span(from), here);
        auto got = memory_.read<T>(span(to), here);
        cpx::detail::exchange_rows(p, cpx::rows<T const>(given.data(), from.count(), from.width(), from.stride()),
                                   cpx::rows<T>(got.data(), to.count(), to.width(), to.stride()), comm_, here);
        memory_.write<T>(to.data(), got, here);
    }
    void wait(cpx::caller here = cpx::caller::here()) const {
        cpx::cuda::check(cudaStreamSynchronize(memory_.stream()), "cudaStreamSynchronize", here);
    }

    template <class T, class Plan>
    class prepared {
        using kind = cpx::detail::moved<Plan>;

    public:
        prepared(Plan const&, typename kind::width width, cpx::capacity const&, threads_on_gpu& comm, cpx::caller)
            : comm_(comm), width_(width) {}
        template <class F>
        void set(typename kind::batch const&, F&& plan_of, cpx::caller) {
            plan_of();
        }
        template <class F>
        void operator()(F&& plan_of, bool back, cpx::index_t number, cpx::rows<T const> const& from,
                        cpx::rows<T> const& to, cpx::caller here) {
            kind::exchanges(plan_of(), width_, back, [&](std::span<cpx::plan const> plans) {
                comm_.exchange<T>(plans[static_cast<std::size_t>(number)], from, to, here);
            });
        }
        cpx::cuda::memory memory() const { return comm_.memory(); }

    private:
        threads_on_gpu& comm_;
        typename kind::width width_;
    };

private:
    cpx::threads& comm_;
    cpx::cuda::memory memory_;
};
