// SPDX-License-Identifier: Apache-2.0
// A relayout that is prepared once, for every batch that comes.
#pragma once

#include <cpx/transport/exchange.hpp>

#include <utility>

namespace cpx {

/// The largest batch that a movement is prepared for: rows of a rank, and sequences.
struct capacity {
    index_t rows = 0, sequences = 0;
};

namespace detail {

/// What ranks prepare to run a plan, and others later. On the host that is nothing.
template <class T, class Comm>
struct prepared_exchange {
    prepared_exchange(plan const& p, index_t, index_t, capacity, Comm& to, caller) : comm(to), now(p) {}
    void set(plan const& p, caller) { now = p; }
    void operator()(rows<T const> from, rows<T> to, caller here) { exchange_rows(now, from, to, comm, here); }

    Comm& comm;
    plan now;
};
/// On devices it is what their transport makes.
template <class T, device_transport Comm>
struct prepared_exchange<T, Comm> {
    prepared_exchange(plan const& p, index_t width, index_t runs, capacity const& most, Comm& comm, caller here)
        : move(comm.template prepare<T>(p, width, runs, most, here)) {}
    void set(plan const& p, caller here) { move.set(p, here); }
    void operator()(rows<T const> from, rows<T> to, caller here) { move(from, to, here); }

    typename Comm::template prepared<T> move;
};

/// Returns the most runs of rows into which a batch of so many sequences and rows of a rank is cut.
template <any_sharding S>
index_t most_runs(S const& s, capacity const& most, caller here) {
    index_t pieces = S::every_row ? 1 : most.rows; // of a sequence
    if constexpr (requires { s.policy().chunks(); }) pieces = s.policy().chunks();
    return std::min(most.rows, product("movement", "runs", {most.sequences + 1, pieces}, here));
}

} // namespace detail

/// Moves tensors of elements T from one kind of sharding to another, whichever their batches are.
///
/// Made once, by all ranks: on devices it connects them and reserves memory for `most`. A call with tensors of another
/// batch than the call before makes the plan of that batch, on the host; it allocates no device memory, and waits for
/// neither the device nor another rank. Belongs to one thread; the transport outlives it.
template <class T, any_sharding From, any_sharding To, any_transport Comm>
class movement {
public:
    /// `from` and `to`: shardings of a first batch; `width`: elements of a row, unless a sharding has sections, the
    /// same for all batches; `most`: see `capacity`, at least the first batch. Collective. Throws `cpx::error` as
    /// `relayout` and `exchange` do.
    movement(From const& from, To const& to, index_t width, capacity most, Comm& comm, caller here = caller::here())
        : plan_(relayout(from, to, comm.rank(), here)),
          prepared_(plan_, width, detail::most_runs(from, most, here) + detail::most_runs(to, most, here), most, comm,
                    here) {}

    /// Moves this rank's rows of `from` to where they belong in everybody's `to`; they must not overlap. Collective.
    ///
    /// Throws `cpx::error` before anything moves if tensors and batches do not fit each other, or not what this
    /// movement was prepared for; later, at the next wait, if ranks have different batches.
    template <sharded_anywhere X, sharded_anywhere Y>
    void operator()(X const& from, Y&& to, caller here = caller::here()) {
        constexpr bool source = detail::sharded_as<From, X>, target = detail::sharded_as<To, Y>;
        constexpr bool writes = detail::writes<Y, X> && std::same_as<element_of<X>, T>;
        constexpr bool there = detail::in_memory_of<Comm, X, Y>;
        static_assert(source, "cpx: movement of a tensor that is not sharded as its source; make it from the tensor's "
                              "kind of sharding");
        static_assert(target, "cpx: movement into a tensor that is not sharded as its target; make it for the tensor's "
                              "kind of sharding");
        static_assert(writes, "cpx: movement wants tensors of its elements, and a target that is not const and has a "
                              "name");
        static_assert(there, "cpx: movement of tensors in another memory than that of the transport's ranks; make them "
                             "with make_tensor<T>(sharding, comm, width)");
        if constexpr (source && target && writes && there) {
            auto const x = from.view();
            auto const y = to.view();
            if (!(x.sharding() == plan_.from && y.sharding() == plan_.to)) {
                auto next = relayout(x.sharding(), y.sharding(), plan_.rank, here);
                prepared_.set(next, here); // throws if it does not fit; then the plan before is still that
                plan_ = std::move(next);
            }
            detail::require_place("movement", "the source", x, plan_.from, plan_.rank, "the plan's", here);
            detail::require_place("movement", "the target", y, plan_.to, plan_.rank, "the plan's", here);
            prepared_(x.data(), y.data(), here);
        }
    }

    /// The plan of the batch that was moved last.
    relayout_plan<From, To> const& plan() const { return plan_; }

private:
    relayout_plan<From, To> plan_;
    detail::prepared_exchange<T, Comm> prepared_;
};

/// Returns a movement: `make_movement<float>(from, to, width, capacity, comm)`.
template <class T, any_sharding From, any_sharding To, any_transport Comm>
movement<T, From, To, Comm> make_movement(From const& from, To const& to, index_t width, capacity most, Comm& comm,
                                          caller here = caller::here()) {
    return {from, to, width, most, comm, here};
}

} // namespace cpx
