// SPDX-License-Identifier: Apache-2.0
// Ranks whose memory is of another kind than the host's, without a GPU.
#pragma once

#include <cpx/core/elements.hpp>
#include <cpx/core/memory.hpp>
#include <cpx/transport/movement.hpp>
#include <cpx/transport/threads.hpp>

namespace support {

/// Memory that plays to be elsewhere, with a stream that tells two of them apart.
struct far_memory {
    template <class T>
    using block = std::vector<T>;
    template <class T>
    using sum = T;
    int stream = 0;

    template <class T>
    block<T> zeros(char const* where, std::initializer_list<cpx::index_t> counts, cpx::caller here) const {
        return cpx::host_memory().zeros<T>(where, counts, here);
    }
    template <class T>
    void write(T* to, std::span<T const> from, cpx::caller here) const {
        cpx::host_memory().write(to, from, here);
    }
    template <class T>
    std::vector<T> read(std::span<T const> from, cpx::caller here) const {
        return cpx::host_memory().read(from, here);
    }
    friend bool operator==(far_memory, far_memory) = default;
};

template <class F>
void for_each_element(far_memory, cpx::index_t count, cpx::index_t width, F const& f,
                      cpx::caller = cpx::caller::here()) {
    cpx::for_each_element(cpx::host_memory(), count, width, f);
}

inline void require_there(far_memory, auto const&...) {} // all memory is

/// Ranks with such memory, which run plans themselves: in truth on threads.
class far_ranks {
public:
    using memory_type = far_memory;
    explicit far_ranks(cpx::threads& comm) : comm_(comm) {}
    int rank() const { return comm_.rank(); }
    int ranks() const { return comm_.ranks(); }
    far_memory memory() const { return {7}; }
    template <class T>
    void exchange(cpx::plan const& p, cpx::rows<T const> const& from, cpx::rows<T> const& to, cpx::caller here) {
        ++plans;
        cpx::exchange(p, from, to, comm_, here);
    }
    void wait(cpx::caller = cpx::caller::here()) const {} // no call returns before it is done
    int plans = 0;

    /// What a movement prepares: one plan at a time, of at most some runs.
    template <class T, class Plan>
    struct prepared {
        using kind = cpx::detail::moved<Plan>;
        far_ranks& comm;
        typename kind::width width;
        cpx::index_t most;
        prepared(Plan const& p, typename kind::width wide, cpx::capacity const& of, far_ranks& to, cpx::caller here)
            : comm(to), width(wide), most(kind::room(p, wide, of, here).runs) {}
        template <class F>
        void set(typename kind::batch const&, F&& plan_of, cpx::caller here) {
            kind::exchanges(plan_of(), width, false, [&](std::span<cpx::plan const> plans) {
                cpx::index_t runs = 0;
                for (auto const& p : plans)
                    for (auto const* messages : {&p.sends, &p.receives})
                        for (auto const& m : *messages) runs += std::ssize(m.rows);
                cpx::require(runs <= 2 * most, "far_ranks", "runs", 2 * most, runs, here);
            });
        }
        template <class F>
        void operator()(F&& plan_of, bool back, cpx::index_t number, cpx::rows<T const> const& from,
                        cpx::rows<T> const& to, cpx::caller here) {
            kind::exchanges(plan_of(), width, back, [&](std::span<cpx::plan const> plans) {
                comm.exchange(plans[static_cast<std::size_t>(number)], from, to, here);
            });
        }
        far_memory memory() const { return comm.memory(); }
    };

private:
    cpx::threads& comm_;
};

} // namespace support
