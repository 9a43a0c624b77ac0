// SPDX-License-Identifier: Apache-2.0
// States of recurrences in device memory, handed on between GPUs.
#pragma once

#include <cpx/cuda/carried_states.hpp>
#include <cpx/cuda/communicator.hpp>
#include <cpx/ops/carried_states.hpp>
#include <cpx/transport/movement.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <typeindex>
#include <utility>
#include <vector>

namespace cpx::cuda {

/// How many calls have run segments of a gated delta rule, or of a decay a head, on tensor cores and by plain kernels,
/// and how many were steps of decoding, a token of every sequence, see `gated_delta_rule_step`. `in_parts`: of the
/// first those of backwards that began before gradients of states had come, or handed them on before they made others.
struct rule_calls {
    index_t on_tensor_cores = 0, plain = 0, steps = 0, in_parts = 0;
};

/// What recurrences need to hand states on between GPUs: made once, for every layer and batch of one kind of carry,
/// whose states and maps are as large; and what else layers around them make for one call and keep for others.
///
/// An operator that is given one instead of a communicator only enqueues its work, from its second call on; a layer
/// that is given one without `most`, from the second call of a batch: graphs of it end before that of another. Belongs
/// to the communicator, which outlives it; calls are collective, in the same order on all ranks.
class state_exchange {
public:
    template <class T>
    using buffer = block<T>;

    /// `most`: of the batches that come, on the sharding where recurrences run, where by heads a rank has all rows;
    /// none: what the first batch wants. `through`: `comm.through()`, for states to go through memory that all ranks
    /// reach; null: they are sent, which takes as long and leaves multiprocessors to others while a rank that is early
    /// waits. The first call of a batch is not captured, and a graph is replayed while no call is of another one.
    /// Layers are captured with a memory resource whose memory is there before, for what a capture allocates is not.
    explicit state_exchange(communicator& comm, capacity most = {}, peer_resource* through = nullptr)
        : comm_(comm), most_(most), through_(through) {}
    template <class X = void>
    explicit state_exchange(cpx::detail::any = {}, cpx::detail::any = {})
        : state_exchange(cpx::detail::lacking<communicator&>()) {
        static_assert(cpx::detail::never<X>, "cpx: cuda::state_exchange(comm, most) wants a cuda::communicator");
    }

    rule_calls calls = {}; ///< of all operators so far

    communicator& ranks() const { return comm_; }
    capacity const& most() const { return most_; }
    cuda::memory const& memory() const { return comm_.memory(); }
    cudaStream_t stream() const { return comm_.stream(); }

    /// Gets ready for all exchanges of a plan, unless the last one was of that batch and recurrence. `alike`: what all
    /// ranks have of the recurrence. Collective the first time: ranks compare plans and recurrences, and connect; later
    /// it enqueues only, see `exchange::set`. Throws `cpx::error` if they differ, and if plan and communicator, or what
    /// it was prepared for, do not fit.
    template <carry_kind How, any_sharding S>
    void prepare(carry_plan<How, S> const& plan, state_shape const& shape, identity::arguments const& alike,
                 caller here = caller::here()) {
        using kind = cpx::detail::moved<carry_plan<How, S>>;
        char const* const where = "cuda::state_exchange";
        cpx::detail::require_own(where, "rank of the plan", plan.rank, plan.sharding.ranks(), comm_.rank(),
                                 comm_.ranks(), here);
        carry_widths const widths{shape.state_width(), shape.map_width()};
        identity id = plan.id;
        id.set_arguments(alike);
        auto const batch = id.fingerprint();
        if (plan.steps == 0 || (move_ && batch == batch_)) return;
        auto const elements = [](carry_widths of) {
            return [of] { return std::to_string(of.state) + " and " + std::to_string(of.map); };
        };
        require(!move_ || widths == widths_, where, "elements of states and maps", elements(widths_), elements(widths),
                here);
        auto const list = [&](auto&& use) {
            std::vector<cpx::plan> plans; // from the segments before, then from those after
            for (bool const back : {false, true})
                kind::exchanges(plan, widths, back, [&](std::span<cpx::plan const> more) {
                    plans.insert(plans.end(), more.begin(), more.end());
                });
            for (cpx::plan& p : plans) p.id.set_arguments(alike);
            use(std::span<cpx::plan const>(plans));
        };
        if (move_) {
            first_.set_batch(plan.sharding.batch());
            move_->set(plan.sharding.batch(), first_ == id, list, here);
        } else {
            first_ = id, widths_ = widths;
            auto room = most_.rows > 0 ? kind::room(plan, widths, most_, here) : movement_room{};
            room.runs *= 2, room.exchanges *= 2;
            list([&](std::span<cpx::plan const> plans) {
                move_ = std::make_unique<batch_exchange<float>>(
                    plans, kind::lanes(plan, widths, false), kind::lanes(plan, widths, true), kind::row_width(widths),
                    comm_, exchange_options{.room = room, .through = through_}, here);
            });
        }
        batch_ = batch;
    }

    template <class T>
    block<T> zeros(char const* where, std::initializer_list<index_t> counts, caller here) const {
        return memory().template zeros<T>(where, counts, here);
    }
    template <class T>
    block<T> room(char const* where, std::initializer_list<index_t> counts, caller here) const {
        return cpx::detail::unwritten<T>(memory(), where, counts, here);
    }
    /// Gives `to` as many elements, all of which will be written: room, or what it was lent, if it is as much.
    template <class T>
    void renew(block<T>& to, char const* where, std::initializer_list<index_t> counts, caller here) const {
        if (!to.lent() || to.size() != cpx::detail::product(where, "elements", counts, here))
            to = room<T>(where, counts, here);
    }
    /// Returns numbers of the host in device memory.
    block<index_t> numbers(std::span<index_t const> list, caller here) const {
        return numbers_on_device(memory(), list, here);
    }
    void copy(std::vector<cpx::detail::copied<float>> const& list) const {
        std::vector<kernels::state_copy> copies;
        for (auto const& c : list) copies.push_back({c.from, c.to, c.count});
        copy_states(copies, stream());
    }
    void transpose(state_shape const& shape, std::vector<cpx::detail::copied<float>> const& list) const {
        if (shape.map != map_kind::matrix) return copy(list);
        std::vector<kernels::state_copy> copies;
        for (auto const& c : list) copies.push_back({c.from, c.to, c.count});
        transpose_maps(shape.heads, shape.keys, copies, stream());
    }
    void join(state_shape const& shape, index_t count, index_t width,
              std::vector<cpx::detail::joined<float>> const& list) const {
        std::vector<kernels::state_join> joins;
        for (auto const& j : list) joins.push_back({j.map, j.x, j.sum});
        join_states(shape.heads, count, width, shape.map_rows(), shape.map_columns(), joins, stream());
    }
    /// Passes over an exchange that moves nothing between this rank and others, and returns whether it did: what it
    /// would bring is here. Where states are sent ranks count it, for others may run it; in memory that ranks reach all
    /// of them meet, or, `within`, none does.
    bool passes_over(plan const& p, bool within, caller here) {
        auto const own = [&](message const& m) { return m.peer == p.rank; };
        if (through_) return within;
        if (!std::ranges::all_of(p.sends, own) || !std::ranges::all_of(p.receives, own)) return false;
        comm_.nccl_communicator().begin_call(here);
        return true;
    }
    void exchange(char const*, plan const&, index_t number, rows<float const> from, rows<float> to, caller here) {
        (*move_)(from, to, {number}, here);
    }

    /// Returns the X that is kept for calls of one kind, if `fits(x)`; else what `make()` returns, in its place.
    template <class X, class Fits, class Make>
    X& kept(std::array<index_t, 4> const& of, Fits&& fits, Make&& make, caller here) {
        std::type_index const type = typeid(X);
        auto const at = std::ranges::find_if(kept_, [&](kept_one const& k) { return k.type == type && k.of == of; });
        if (at != kept_.end()) {
            X& there = *static_cast<X*>(at->what.get());
            if (fits(std::as_const(there))) return there;
            comm_.keep(std::make_unique<std::shared_ptr<void>>(std::move(at->what)), here); // it may be at work
            kept_.erase(at);
        }
        std::shared_ptr<X> const made = make();
        kept_.push_back({type, of, made});
        return *made;
    }

private:
    struct kept_one {
        std::type_index type;
        std::array<index_t, 4> of;
        std::shared_ptr<void> what;
    };

    communicator& comm_;
    capacity most_;
    peer_resource* through_;
    std::uint64_t batch_ = 0; ///< for which, and for which recurrence, it is ready
    identity first_ = {};     ///< of the plan for which it was made
    carry_widths widths_ = {};
    std::unique_ptr<batch_exchange<float>> move_;
    std::vector<kept_one> kept_;
};

} // namespace cpx::cuda

namespace cpx::detail {

/// What carries states on devices: a `cuda::state_exchange`, made once, or a communicator, which makes one for a call.
template <class By>
concept carries_states = std::derived_from<By, cuda::state_exchange> || std::derived_from<By, cuda::communicator>;

} // namespace cpx::detail
