// SPDX-License-Identifier: Apache-2.0
// Relayouts, halos and carries that are prepared once, for every batch that comes.
#pragma once

#include <cpx/plan/capacity.hpp>
#include <cpx/transport/exchange.hpp>

#include <algorithm>
#include <concepts>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

namespace cpx {

namespace detail {

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
            exchange_rows(plans[static_cast<std::size_t>(number)], from, to, comm_, here, "movement");
        });
    }
    /// `rows_of(plan_of, number, here)`: returns how many rows an exchange takes, and how many it brings.
    template <class F>
    std::pair<index_t, index_t> rows_of(F&& plan_of, index_t number, caller) const {
        return kind::exchanges(plan_of(), width_, false, [&](std::span<plan const> plans) {
            plan const& p = plans[static_cast<std::size_t>(number)];
            return std::pair(p.source_rows, p.target_rows);
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

/// Moves rows of T by `relayout_plan`s, `halo_plan`s or `carry_plan`s, whichever batch they are of.
///
/// Made once, by all ranks: on devices it connects them and reserves memory for `most`. The plan of another batch is
/// made by `set`, or by a call with tensors of that batch: on the host, without device memory or a wait. On threads and
/// over MPI all ranks compare a new plan in its first call (see `agree`), for ranks that have no rows for each other
/// would not hear that theirs differ. Belongs to one thread; the transport outlives it.
template <class T, class Plan, any_transport Comm>
class movement {
    using kind = detail::moved<Plan>;

public:
    /// `first`: the plan of a first batch, at most as large as `most`; `width`: elements of a row, unless a sharding
    /// has sections, or those of states and maps; the same for all batches. Collective. Throws `cpx::error` as
    /// `exchange` does.
    movement(Plan first, typename kind::width width, capacity most, Comm& comm, caller here = caller::here())
        : plan_(std::move(first)), now_(kind::batch_of(plan_)), width_(width), most_(checked(most, here)),
          memory_(rank_memory(comm)), prepared_(plan_, width, most, comm, here) {}

    /// Makes ready for another batch, unless it is the last one. Every rank does so, none waits. Throws `cpx::error` if
    /// it has other ranks or sections than this movement was prepared for, or more rows or sequences; then all is as
    /// before. If ranks have different batches, the next call says so, on devices the wait after it.
    ///
    /// On devices the host counts rows of messages, where lanes tell what moves, or lists runs of rows: of a halo or a
    /// carry over the batch or beside sequences shorter than chunks times (reach + unit of the cut); of a relayout over
    /// the batch with a cut that is not `balanced`, or between scopes; of `by_length`. With 64 sequences over 2 ranks a
    /// list takes 2 to 15 us of host time, not 1 to 5, and up to four times that with cold caches; none waits.
    template <class... S>
    void set(std::tuple<S...> const& shardings, caller here = caller::here()) {
        constexpr bool fits = std::same_as<std::tuple<S...>, typename kind::batch>;
        static_assert(fits,
                      "cpx: movement::set of another kind of sharding than it was made for; give a relayout's two, "
                      "the source first, and of another plan its one");
        if constexpr (fits) {
            if (shardings == now_) return;
            require_alike(shardings, now_, std::make_index_sequence<std::tuple_size_v<typename kind::batch>>(), here);
            require_room(shardings, most_, here);
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
    }
    template <class S>
    void set(S const& sharding, caller here = caller::here()) {
        set(std::tuple<S>(sharding), here);
    }
    template <class From, class To>
    void set(From const& from, To const& to, caller here = caller::here()) {
        set(std::tuple<From, To>(from, to), here);
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
    /// movement was prepared for, or on the host if ranks have different batches; on devices the next wait tells that.
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

    /// Returns how many rows exchange `k` of the last batch takes, and brings. Lists no plan where none is wanted.
    std::pair<index_t, index_t> rows_of(index_t k = 0, caller here = caller::here())
        requires(!detail::is_relayout<Plan>)
    {
        require_exchange(k, here);
        return prepared_.rows_of([&]() -> Plan const& { return plan(here); }, k, here);
    }

    /// Brings the rows beside this rank's segments, as many as `rows_of` says: `set` comes first. Collective.
    template <sharded_anywhere X>
        requires(!detail::is_relayout<Plan>)
    void operator()(X const& from, rows<T> halo, caller here = caller::here()) {
        constexpr bool source = detail::sharded_as<decltype(plan_.sharding), X>;
        static_assert(source, "cpx: movement of a tensor that is not sharded as its plan; make it from the tensor's "
                              "kind of sharding");
        if constexpr (is_there<source, X>()) run(false, 0, data_of("the source", from.view(), here), halo, here);
    }
    /// Carries the gradients of such rows home, where they are added: `to` is written. Collective.
    template <sharded_anywhere Y>
        requires(!detail::is_relayout<Plan>)
    void transposed(rows<T const> halo, Y&& to, caller here = caller::here()) {
        constexpr bool target = detail::sharded_as<decltype(plan_.sharding), Y> && detail::writes<Y>;
        static_assert(target, "cpx: movement into a tensor that is not sharded as its plan, is const or ends with the "
                              "call; make it from the tensor's kind of sharding");
        if constexpr (is_there<target, Y>()) run(true, 0, halo, data_of("the target", to.view(), here), here);
    }
    /// Runs exchange `k` of a carry, from the segments before or after. Collective.
    void operator()(index_t k, side from, rows<T const> given, rows<T> got, caller here = caller::here()) {
        require_exchange(k, here);
        run(from == side::after, k, given, got, here);
    }

    template <class X = detail::any>
    explicit movement(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : movement(detail::lacking<Plan>(), typename kind::width(), capacity(), detail::lacking<Comm&>()) {
        static_assert(detail::never<X>, "cpx: movement(plan, width, capacity, comm) wants a plan of its type, the "
                                        "width of a row, a capacity and a cpx::transport");
    }

    template <class X, class Most = capacity>
        requires std::same_as<Most, capacity>
    explicit movement(X const& plan, detail::any, Most const&, detail::any = {}, detail::any = {}) : movement(plan) {}

    // Not of `detail::any`, which takes rows in braces as well as what wants them.
    template <class X, class... Rest>
        requires(!std::convertible_to<X, index_t> || sizeof...(Rest) != 3)
    detail::refused operator()(X const&, Rest&&...) {
        return unfit<X>();
    }
    template <class X = void>
    detail::refused transposed() {
        return unfit<X>();
    }
    template <class X, class... Rest>
        requires(detail::is_relayout<Plan> || !std::convertible_to<X, rows<T const>> || sizeof...(Rest) != 1)
    detail::refused transposed(X const&, Rest&&...) {
        return unfit<X>();
    }
    template <class X>
        requires(!any_sharding<X>)
    detail::refused make_tensor(X const&) const {
        return unfit<X>();
    }

    /// Returns a tensor for every batch that fits, of this one at first; see `tensor::hold`. It is where this movement
    /// can write: in memory that peers reach, if that is how it moves. Collective.
    template <any_sharding S>
    auto make_tensor(S const& sharding, caller here = caller::here()) const {
        auto const sections = plan_.from.sections().empty() ? plan_.to.sections() : plan_.from.sections();
        auto const width = [&](int rank) {
            return sections.empty() ? width_ : detail::local_width(sharding, rank, sections);
        };
        index_t widest = 0; // of all ranks, so that the next one is at the same place, too
        for (int rank = 0; rank < sharding.ranks(); ++rank) widest = std::max(widest, width(rank));
        index_t const most = detail::product("movement", "elements of a tensor", {widest, most_.rows}, here);
        return tensor<T, S, decltype(prepared_.memory())>(sharding, plan_.rank, width(plan_.rank), prepared_.memory(),
                                                          most, here);
    }

private:
    template <class X>
    static detail::refused unfit() {
        static_assert(
            detail::never<X>,
            "cpx: a movement takes, of a relayout, tensors x and y; of a halo, a tensor and rows, transposed "
            "rows and a tensor; of a carry, a number, a side and two rows; view memory as sharded, or as rows; "
            "make_tensor takes a sharding");
        return {};
    }
    /// Throws unless capacity and widths are sizes, and the first batch fits: before anything is prepared.
    capacity const& checked(capacity const& most, caller here) const {
        static_cast<void>(
            detail::product("movement", "elements of a tensor", {kind::row_width(width_), most.rows}, here));
        static_cast<void>(kind::room(plan_, width_, most, here));
        require_room(now_, most, here);
        return most;
    }
    void require_room(typename kind::batch const& shardings, capacity const& most, caller here) const {
        index_t const sequences = std::get<0>(shardings).batch().sequences();
        auto const largest = [&](auto const& rows) {
            return std::apply([&](auto const&... s) { return std::max({index_t{0}, rows(s)...}); }, shardings);
        };
        index_t const rows = largest([&](auto const& s) { return detail::about_rows(s, plan_.rank, most.rows); });
        auto const exactly = [&] { return std::to_string(largest([&](auto const& s) { return s.rows(plan_.rank); })); };
        require(rows <= most.rows && sequences <= most.sequences, "movement", "rows and sequences of the batch",
                detail::in_words("at most ", most.rows, ", ", most.sequences),
                detail::in_words(exactly, ", ", sequences), here);
    }
    void require_exchange(index_t k, caller here) const {
        index_t count = 1;
        if constexpr (requires { plan_.steps; }) count = plan_.steps;
        require(k >= 0 && (!listed_ || k < count), "movement", "exchange", // else what is prepared knows how many
                detail::in_words("less than ", count), k, here);
    }
    /// Throws unless shardings have the ranks and sections of others.
    template <std::size_t... I>
    static void require_alike(typename kind::batch const& shardings, typename kind::batch const& like,
                              std::index_sequence<I...>, caller here) {
        auto const alike = [&](auto const& a, auto const& b) {
            require(a.ranks() == b.ranks(), "movement", "ranks of the sharding", b.ranks(), a.ranks(), here);
            require(std::ranges::equal(a.sections(), b.sections()), "movement", "sections of the sharding",
                    "those it was made for", "others", here);
        };
        (alike(std::get<I>(shardings), std::get<I>(like)), ...);
    }
    template <class... X>
    void require_memory(caller here, X const&... x) const {
        require((detail::in_one_order(x.memory(), memory_) && ...), "movement", "memory of the tensors",
                "the transport's, in its stream", "another", here);
    }
    /// Returns whether a tensor that fits is in the transport's memory, or says that it is not.
    template <bool Fits, class X>
    static constexpr bool is_there() {
        constexpr bool there = detail::in_memory_of<Comm, X>;
        static_assert(!Fits || there, "cpx: movement of a tensor in another memory than that of the transport's ranks");
        return Fits && there;
    }
    /// Returns the rows of a tensor of the plan's sharding. Throws if it is of another rank, batch or memory.
    template <class X>
    auto data_of(char const* what, X const& x, caller here) const {
        detail::require_place("movement", what, x, std::get<0>(now_), plan_.rank, "the plan's", here);
        require_memory(here, x);
        return x.data();
    }
    void run(bool back, index_t number, rows<T const> from, rows<T> to, caller here) {
        if constexpr (std::same_as<typename kind::width, index_t>) // of a carry, the exchange checks
            if (std::apply([](auto const&... s) { return (s.sections().empty() && ...); }, now_))
                require(from.width() == width_ && to.width() == width_, "movement", "width of the rows", width_,
                        from.width() == width_ ? to.width() : from.width(), here);
        prepared_([&]() -> Plan const& { return plan(here); }, back, number, from, to, here);
    }
    template <bool Back, any_sharding From, any_sharding To, sharded_anywhere X, sharded_anywhere Y>
    void move(X const& from, Y&& to, caller here) {
        constexpr bool source = detail::sharded_as<From, X>, target = detail::sharded_as<To, Y>;
        constexpr bool writes = detail::writes<Y, X> && std::same_as<element_of<X>, T>;
        constexpr bool there = detail::in_memory_of<Comm, X, Y>;
        static_assert(source, "cpx: movement of a tensor that is not sharded as its source; make it from the tensor's "
                              "kind of sharding");
        static_assert(!source || target,
                      "cpx: movement into a tensor that is not sharded as its target; make it for the tensor's "
                      "kind of sharding");
        static_assert(!source || !target || writes,
                      "cpx: movement wants tensors of its elements, and a target that is not const and has a name");
        static_assert(!writes || there,
                      "cpx: movement of tensors in another memory than that of the transport's ranks; make them "
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
            require_memory(here, x, y);
            run(Back, 0, x.data(), y.data(), here);
        }
    }

    Plan plan_; ///< of the last batch, if it is listed
    typename kind::batch now_;
    bool listed_ = true;
    typename kind::width width_;
    capacity most_;
    rank_memory_of<Comm> memory_;
    typename detail::prepared_by<T, Plan, Comm>::type prepared_;
};

/// Says what elements are, and moves others in their place.
template <class T, class Plan, any_transport Comm>
    requires(!element<T>)
class movement<T, Plan, Comm> : public movement<typename detail::stand_in<T>::type, Plan, Comm> {
public:
    static_assert(detail::checked_element<T>::value || true);
    using movement<typename detail::stand_in<T>::type, Plan, Comm>::movement;
};
/// What a movement is deduced to be, which cannot tell its elements.
template <class Untold>
class movement<Untold, Untold, detail::no_transport> : public detail::refused {
public:
    movement(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
             detail::any = {}) {}
    static_assert(detail::never<Untold>,
                  "cpx: a movement cannot tell its elements; write make_movement<float>(from, to, "
                  "width, capacity, comm), or of a plan make_movement<float>(plan, width, ...)");
};
template <class X = detail::any>
movement(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> movement<detail::untold, detail::untold, detail::no_transport>;

/// Calls `f()`, which sets movements of `comm`. On devices the tables of those of one batch are made at once, when it
/// has returned or one of them is called: where a pair of layers wants several, that saves the host a launch for each.
template <class Comm, class F>
void set_together(Comm&& comm, F&& f, caller here = caller::here()) {
    constexpr bool fits = any_transport<std::remove_cvref_t<Comm>> && std::invocable<F&>;
    static_assert(fits, "cpx: set_together(comm, f) wants a cpx::transport and what sets movements: "
                        "[&] { there.set(from, to); halo.set(to); }");
    if constexpr (fits && requires { comm.tables().together(f, here); })
        comm.tables().together(f, here);
    else if constexpr (fits)
        f();
}

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
template <class T = void, class X = detail::any>
detail::refused make_movement(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                              detail::any = {}) {
    static_assert(detail::never<X>, "cpx: make_movement<T>(from, to, width, capacity, comm) wants two shardings, or "
                                    "make_movement<T>(plan, width, capacity, comm) a plan, and a cpx::transport");
    return {};
}
template <class T, class X, class Most = capacity>
    requires std::same_as<Most, capacity>
detail::refused make_movement(X const& from, detail::any, detail::any, Most const&, detail::any = {}) {
    return make_movement<T>(from);
}
template <class T, class X, class Most = capacity>
    requires std::same_as<Most, capacity>
detail::refused make_movement(X const& plan, detail::any, Most const&, detail::any = {}, detail::any = {}) {
    return make_movement<T>(plan);
}

} // namespace cpx
