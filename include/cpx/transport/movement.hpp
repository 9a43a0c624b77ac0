// SPDX-License-Identifier: Apache-2.0
// Relayouts, halos and carries that are prepared once, for every batch that comes.
#pragma once

#include <cpx/plan/carry.hpp>
#include <cpx/plan/halo.hpp>
#include <cpx/transport/exchange.hpp>

#include <bit>
#include <concepts>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace cpx {

/// The largest batch that a movement is prepared for: rows of a rank, and sequences.
struct capacity {
    index_t rows = 0, sequences = 0;
};

/// Elements of a state that is handed on, and of the map that goes with it where the carry is a `scan`.
struct carry_widths {
    index_t state = 0, map = 0;
};

/// What exchanges of any batch take at most.
struct movement_room {
    index_t runs = 0; ///< of rows, of all exchanges in one direction
    index_t rows = 0; ///< that leave a rank, or come, in one exchange
};

namespace detail {

/// Returns into how many runs of rows, over all ranks, a sharding cuts so many sequences, at most. `rows`: of a rank.
template <any_sharding S>
index_t most_runs(S const& s, capacity const& most, caller here) {
    index_t pieces = S::every_row ? 1 : most.rows; // of a sequence
    if constexpr (requires { s.policy().chunks(); }) pieces = s.policy().chunks();
    return product("movement", "runs", {most.sequences + 1, pieces}, here);
}

/// Returns how many segments a rank has of so many sequences, at most: the same on all ranks.
template <any_sharding S>
index_t most_segments(S const& s, capacity const& most, caller here) {
    index_t pieces = S::every_row ? 1 : most.rows; // of a sequence, on one rank
    if constexpr (requires { s.policy().owner(0); }) {
        std::vector<index_t> chunks(static_cast<std::size_t>(s.ranks()));
        for (int c = 0; c < s.policy().chunks(); ++c) ++chunks[static_cast<std::size_t>(s.policy().owner(c))];
        pieces = *std::ranges::max_element(chunks);
    }
    return product("movement", "segments", {most.sequences + 1, pieces}, here);
}

/// Returns how many rows beside segments a rank sends, or gets, at most. A row may go to several ranks, where segments
/// are shorter than `reach`.
template <any_sharding S>
index_t most_beside(S const& s, index_t reach, capacity const& most, caller here) {
    return product("movement", "rows of the halo", {most_segments(s, most, here), reach, (reach + 1) / 2 + 1}, here);
}

/// What a movement knows of a kind of plan: what tells a batch from others, the plan of another one, its exchanges in
/// one direction, by their numbers, and whether those back are the same messages the other way; what all of them take
/// at most, and the elements of a row of theirs.
template <class Plan>
struct moved;

/// Of a plan that is one exchange.
template <class Plan>
struct moved_at_once {
    using width = index_t;
    template <class F>
    static auto exchanges(plan const& p, index_t, bool back, F&& f) {
        if (!back) return f(std::span<plan const>(&p, 1)); // named: nvcc spells a deduced one as newer g++ refuse it
        plan const other = p.transposed();
        return f(std::span<plan const>(&other, 1));
    }
    static index_t row_width(index_t width) { return width; }
};

template <any_sharding From, any_sharding To>
struct moved<relayout_plan<From, To>> : moved_at_once<relayout_plan<From, To>> {
    using plan_type = relayout_plan<From, To>;
    using batch = std::tuple<From, To>;
    static batch batch_of(plan_type const& p) { return {p.from, p.to}; }
    static plan_type next(plan_type const& p, batch const& of, caller here) {
        return relayout(std::get<0>(of), std::get<1>(of), p.rank, here);
    }
    static bool mirrors(plan_type const& p) { return p.kind == flow::moves || p.kind == flow::selects; }
    static movement_room room(plan_type const& p, index_t, capacity const& most, caller here) {
        auto const runs = [&](auto const& s) { return std::min(most.rows, most_runs(s, most, here)); };
        return {runs(p.from) + runs(p.to), most.rows};
    }
};

template <any_sharding S>
struct moved<halo_plan<S>> : moved_at_once<halo_plan<S>> {
    using plan_type = halo_plan<S>;
    using batch = std::tuple<S>;
    static batch batch_of(plan_type const& p) { return {p.sharding}; }
    static plan_type next(plan_type const& p, batch const& of, caller here) {
        return halo(std::get<0>(of), p.rank, p.reach, p.where, here);
    }
    static bool mirrors(plan_type const&) { return false; }
    static movement_room room(plan_type const& p, index_t, capacity const& most, caller here) {
        index_t const rows = most_beside(p.sharding, p.reach, most, here);
        return {2 * rows, rows};
    }
};

template <carry_kind How, any_sharding S>
struct moved<carry_plan<How, S>> {
    using plan_type = carry_plan<How, S>;
    using width = carry_widths;
    using batch = std::tuple<S>;
    static constexpr bool scans = std::same_as<How, scan>;
    static batch batch_of(plan_type const& p) { return {p.sharding}; }
    static plan_type next(plan_type const& p, batch const& of, caller here) {
        return carry<How>(std::get<0>(of), p.rank, here);
    }
    static bool mirrors(plan_type const&) { return !scans; } // maps are not the same from both sides
    template <class F>
    static auto exchanges(plan_type const& p, carry_widths width, bool back, F&& f) {
        std::vector<plan> list;
        side const from = back ? side::after : side::before;
        for (index_t k = 0; k < p.steps; ++k)
            if constexpr (scans)
                list.push_back(p.step(k, from, width.state, width.map));
            else
                list.push_back(p.step(k, from));
        return f(std::span<plan const>(list));
    }
    static index_t row_width(carry_widths width) {
        if constexpr (scans) return plan_type::row_width(width.state, width.map);
        return width.state;
    }
    static movement_room room(plan_type const& p, carry_widths width, capacity const& most, caller here) {
        index_t const runs = most_segments(p.sharding, most, here); // in each exchange of a scan, in one of a series
        auto const pieces = static_cast<std::size_t>(most_runs(p.sharding, most, here));
        index_t const times = scans ? static_cast<index_t>(std::bit_width(pieces)) : 1;
        index_t const rows = scans ? (width.state + width.map) / row_width(width) : 1;
        return {2 * runs * times, product("movement", "rows of states", {runs, rows}, here)};
    }
};

/// What ranks prepare to run a plan, and others later. On the host that is nothing.
template <class T, class Plan, class Comm>
class prepared {
    using kind = moved<Plan>;

public:
    prepared(Plan const&, typename kind::width width, capacity const&, Comm& comm, caller)
        : comm_(comm), width_(width) {}
    /// `plan_of()`: returns the plan of the batch, which need not be made before.
    template <class F>
    void set(typename kind::batch const&, F&& plan_of, caller) {
        plan_of();
    }
    template <class F>
    void operator()(F&& plan_of, bool back, index_t number, rows<T const> from, rows<T> to, caller here) {
        kind::exchanges(plan_of(), width_, back, [&](std::span<plan const> plans) {
            exchange_rows(plans[static_cast<std::size_t>(number)], from, to, comm_, here);
        });
    }
    host_memory memory() const { return {}; }

private:
    Comm& comm_;
    typename kind::width width_;
};

template <class T, class Plan, class Comm>
struct prepared_by {
    using type = prepared<T, Plan, Comm>;
};
/// On devices it is what their transport makes.
template <class T, class Plan, device_transport Comm>
struct prepared_by<T, Plan, Comm> {
    using type = typename Comm::template prepared<T, Plan>;
};

template <class Plan>
inline constexpr bool is_relayout = requires(Plan const& p) { p.to; };

} // namespace detail

/// Moves rows of elements T by plans of one kind, whichever batch they are of: a `relayout_plan`, a `halo_plan` or a
/// `carry_plan`.
///
/// Made once, by all ranks: on devices it connects them and reserves memory for `most`. The plan of another batch is
/// made by `set`, or by a call with tensors of that batch: on the host, without device memory, and without a wait for
/// the device or another rank. Belongs to one thread; the transport outlives it.
template <class T, class Plan, any_transport Comm>
class movement {
    using kind = detail::moved<Plan>;

public:
    /// `first`: the plan of a first batch, at most as large as `most`; `width`: elements of a row, unless a sharding
    /// has sections, or those of states and maps; the same for all batches. Collective. Throws `cpx::error` as
    /// `exchange` does.
    movement(Plan first, typename kind::width width, capacity most, Comm& comm, caller here = caller::here())
        : plan_(std::move(first)), now_(kind::batch_of(plan_)), width_(width), most_(most),
          prepared_(plan_, width, most, comm, here) {
        static_cast<void>(kind::room(plan_, width, most, here)); // throws if that is no capacity, also on the host
    }

    /// Makes ready for another batch, unless it is the last one. Every rank does so, none waits. Throws `cpx::error` if
    /// it is not what this movement was prepared for; then all is as before. If ranks have different batches, the wait
    /// after the next call says so.
    template <any_sharding... S>
        requires std::same_as<std::tuple<S...>, typename kind::batch>
    void set(std::tuple<S...> const& shardings, caller here = caller::here()) {
        if (shardings == now_) return;
        std::optional<Plan> made;
        auto const plan_of = [&]() -> Plan const& {
            if (!made) made.emplace(kind::next(plan_, shardings, here));
            return *made;
        };
        prepared_.set(shardings, plan_of, here);
        listed_ = made.has_value();
        if (listed_) plan_ = std::move(*made);
        now_ = shardings;
    }
    template <any_sharding S>
    Plan const& set(S const& sharding, caller here = caller::here()) {
        set(std::tuple(sharding), here);
        return plan(here);
    }
    template <any_sharding From, any_sharding To>
    void set(From const& from, To const& to, caller here = caller::here()) {
        set(std::tuple(from, to), here);
    }
    /// Returns the plan of the last batch. Where nothing has asked for it yet, makes it.
    Plan const& plan(caller here = caller::here()) {
        if (!listed_) plan_ = kind::next(plan_, now_, here);
        listed_ = true;
        return plan_;
    }

    /// Moves this rank's rows of `from` to where they belong in everybody's `to`; they must not overlap. Collective.
    ///
    /// Throws `cpx::error` before anything moves if tensors and batches do not fit each other, or not what this
    /// movement was prepared for; later, at the next wait, if ranks have different batches.
    template <sharded_anywhere X, sharded_anywhere Y>
        requires detail::is_relayout<Plan>
    void operator()(X const& from, Y&& to, caller here = caller::here()) {
        move<false, decltype(plan_.from), decltype(plan_.to)>(from, std::forward<Y>(to), here);
    }
    /// Moves rows back: the backward of the above, which adds what was copied.
    template <sharded_anywhere X, sharded_anywhere Y>
        requires detail::is_relayout<Plan>
    void transposed(X const& from, Y&& to, caller here = caller::here()) {
        move<true, decltype(plan_.to), decltype(plan_.from)>(from, std::forward<Y>(to), here);
    }

    /// Brings the rows beside this rank's segments, as many as the plan says: `set` comes first. Collective.
    template <sharded_anywhere X>
        requires(!detail::is_relayout<Plan>)
    void operator()(X const& from, rows<T> halo, caller here = caller::here()) {
        constexpr bool source = detail::sharded_as<decltype(plan_.sharding), X>;
        static_assert(source, "cpx: movement of a tensor that is not sharded as its plan; make it from the tensor's "
                              "kind of sharding");
        if constexpr (source) {
            require_place("the source", from.view(), here);
            run(false, 0, from.view().data(), halo, here);
        }
    }
    /// Carries the gradients of such rows home, where they are added: `to` is written. Collective.
    template <sharded_anywhere Y>
        requires(!detail::is_relayout<Plan>)
    void transposed(rows<T const> halo, Y&& to, caller here = caller::here()) {
        constexpr bool target = detail::sharded_as<decltype(plan_.sharding), Y> && detail::writes<Y>;
        static_assert(target, "cpx: movement into a tensor that is not sharded as its plan, is const or ends with the "
                              "call; make it from the tensor's kind of sharding");
        if constexpr (target) {
            require_place("the target", to.view(), here);
            run(true, 0, halo, to.view().data(), here);
        }
    }
    /// Runs exchange `k` of a carry, from the segments before or after. Collective.
    void operator()(index_t k, side from, rows<T const> given, rows<T> got, caller here = caller::here()) {
        require(k >= 0 && k < plan_.steps, "movement", "exchange", "less than " + std::to_string(plan_.steps), k, here);
        run(from == side::after, k, given, got, here);
    }

    /// Returns a tensor for every batch that fits, of this one at first; see `tensor::hold`. It is where this movement
    /// can write: in memory that peers reach, if that is how it moves. Collective.
    template <any_sharding S>
    auto make_tensor(S const& sharding, caller here = caller::here()) const {
        auto const sections = plan_.from.sections().empty() ? plan_.to.sections() : plan_.from.sections();
        auto const width = [&](int rank) {
            return sections.empty() ? width_ : detail::local_width(sharding, rank, sections);
        };
        index_t most = 0; // the same on all ranks, so that the next one is at the same place, too
        for (int rank = 0; rank < sharding.ranks(); ++rank) most = std::max(most, width(rank) * most_.rows);
        return tensor<T, S, decltype(prepared_.memory())>(sharding, plan_.rank, width(plan_.rank), prepared_.memory(),
                                                          most, here);
    }

private:
    template <class X>
    void require_place(char const* what, X const& x, caller here) const {
        detail::require_place("movement", what, x, plan_.sharding, plan_.rank, "the plan's", here);
    }
    void run(bool back, index_t number, rows<T const> from, rows<T> to, caller here) {
        prepared_([&]() -> Plan const& { return plan(here); }, back, number, from, to, here);
    }
    template <bool Back, any_sharding From, any_sharding To, sharded_anywhere X, sharded_anywhere Y>
    void move(X const& from, Y&& to, caller here) {
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
            if constexpr (Back)
                set(y.sharding(), x.sharding(), here);
            else
                set(x.sharding(), y.sharding(), here);
            detail::require_place("movement", "the source", x, x.sharding(), plan_.rank, "the plan's", here);
            detail::require_place("movement", "the target", y, y.sharding(), plan_.rank, "the plan's", here);
            run(Back, 0, x.data(), y.data(), here);
        }
    }

    Plan plan_; ///< of the last batch, if it is listed
    typename kind::batch now_;
    bool listed_ = true;
    typename kind::width width_;
    capacity most_;
    typename detail::prepared_by<T, Plan, Comm>::type prepared_;
};

/// Returns a movement: `make_movement<float>(plan, width, capacity, comm)`.
template <class T, class Plan, any_transport Comm>
movement<T, Plan, Comm> make_movement(Plan const& first, typename detail::moved<Plan>::width width, capacity most,
                                      Comm& comm, caller here = caller::here()) {
    return {first, width, most, comm, here};
}
/// The same of the relayout between two shardings: `make_movement<float>(from, to, width, capacity, comm)`.
template <class T, any_sharding From, any_sharding To, any_transport Comm>
movement<T, relayout_plan<From, To>, Comm> make_movement(From const& from, To const& to, index_t width, capacity most,
                                                         Comm& comm, caller here = caller::here()) {
    return {relayout(from, to, comm.rank(), here), width, most, comm, here};
}

} // namespace cpx
