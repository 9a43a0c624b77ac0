// SPDX-License-Identifier: Apache-2.0
// Hands the states of any recurrence S -> M S + E along the segments of its sequences, in any memory.
#pragma once

#include <cpx/ops/local/linear.hpp>
#include <cpx/ops/local/recurrence.hpp>
#include <cpx/plan/carry.hpp>
#include <cpx/transport/exchange.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace cpx::detail {

/// A segment of a rank that a pass visits, by its number, and where its state lies.
template <class T>
struct visit {
    std::size_t segment = 0;
    T* state = nullptr; ///< null: of a whole sequence, whose state nobody else wants to know; or not there yet
    T* map = nullptr;
    bool handed_on = false; ///< whether another segment comes after it
    // The pass says these, which may be null.
    T const* before = nullptr; ///< the state that reaches the segment, null: zeros; may be `state`
    T* start = nullptr;        ///< where a forward keeps that for its backward
    T* taken = nullptr;        ///< takes, too, the state that leaves it
    bool stays = false;        ///< whether `before` is the carry's own, and stays as it is while the pass goes on
};

template <class T>
struct copied {
    T const* from; ///< null: zeros
    T* to;
    index_t count;
};

/// `sum += map x` for every head.
template <class T>
struct joined {
    T const *map, *x;
    T* sum;
};

/// States in the host's memory, between the ranks of a transport. Those on devices have these functions, too, which
/// only enqueue their work.
template <class Comm>
struct states_on_host {
    template <class T>
    using buffer = std::vector<T>;

    Comm& comm;
    identity::arguments alike = {}; ///< of the recurrence, on all ranks

    /// Called before anything is read or written: ranks on devices get ready for the exchanges of a plan.
    template <class Plan>
    void prepare(Plan const&, state_shape const&, identity::arguments const& of, caller) {
        alike = of;
    }

    template <class T>
    std::vector<T> zeros(char const* where, std::initializer_list<index_t> counts, caller here) const {
        return detail::zeros<T>(where, counts, here);
    }
    /// The same of what passes on devices write before it is read, where it need not be zeros.
    template <class T>
    std::vector<T> room(char const* where, std::initializer_list<index_t> counts, caller here) const {
        return detail::zeros<T>(where, counts, here);
    }
    template <class T>
    void copy(std::vector<copied<T>> const& list) const {
        for (copied<T> const& c : list)
            if (c.from)
                std::copy_n(c.from, c.count, c.to);
            else
                std::fill_n(c.to, c.count, T{});
    }
    template <class T>
    void renew(std::vector<T>& to, char const* where, std::initializer_list<index_t> counts, caller here) const {
        to = detail::zeros<T>(where, counts, here);
    }
    /// Copies maps transposed.
    template <class T>
    void transpose(state_shape const& shape, std::vector<copied<T>> const& list) const {
        index_t const map_rows = shape.map_rows(), map_columns = shape.map_columns();
        bool const matrix = shape.map == map_kind::matrix; // others are their own transposes
        for (copied<T> const& c : list)
            for (index_t h = 0; h < shape.heads; ++h) {
                rows<T const> const from(c.from + h * map_rows * map_columns, map_rows, map_columns);
                rows<T> const to(c.to + h * map_rows * map_columns, map_rows, map_columns);
                for (index_t i = 0; i < map_rows; ++i)
                    for (index_t j = 0; j < map_columns; ++j) to(i, j) = matrix ? from(j, i) : from(i, j);
            }
    }
    /// x and sum are (count, width) a head: states or maps.
    template <class T>
    void join(state_shape const& shape, index_t count, index_t width, std::vector<joined<T>> const& list) const {
        index_t const map_rows = shape.map_rows(), map_columns = shape.map_columns();
        for (joined<T> const& j : list)
            for (index_t h = 0; h < shape.heads; ++h) {
                rows<T const> const map(j.map + h * map_rows * map_columns, map_rows, map_columns);
                rows<T const> const x(j.x + h * count * width, count, width);
                rows<T> const sum(j.sum + h * count * width, count, width);
                if (shape.map == map_kind::matrix)
                    add_products<T>(map, x, sum);
                else
                    for (index_t row = 0; row < count; ++row)
                        for (index_t c = 0; c < width; ++c)
                            sum(row, c) += map(shape.map == map_kind::vector ? row : 0, 0) * x(row, c);
            }
    }
    /// Passes over an exchange that moves nothing between this rank and others, if a rank may, and returns whether it
    /// did: what it would bring is here. `within`: every rank knows that it moves nothing between any. On the host all
    /// ranks run every exchange.
    bool passes_over(plan const&, bool /*within*/, caller) const { return false; }
    /// Runs an exchange of a carry for `where`, the one of `exchange_number`.
    template <class T>
    void exchange(char const* where, plan const& p, index_t, rows<T const> from, rows<T> to, caller here) const {
        exchange_rows(p, from, to, comm, here, {where, alike});
    }
};

/// Returns the place of exchange `k` of a carry among all: those of a forward, then those of a backward.
inline index_t exchange_number(carry_steps const& plan, index_t k, side from) {
    return from == side::before ? k : plan.steps + k;
}

/// Returns how many segments of a rank lie between two others.
inline index_t inner_segments(std::vector<carry_link> const& links) {
    return std::ranges::count_if(links, [](carry_link const& l) { return l.map_row >= 0; });
}

/// What one exchange of a scan copies and joins before it, or after it.
template <class T>
struct scan_work {
    std::vector<copied<T>> copies = {};
    std::vector<joined<T>> states = {}, maps = {};

    template <class Memory>
    void run(Memory& memory, state_shape const& shape) const {
        memory.copy(copies);
        memory.join(shape, shape.keys, shape.values, states);
        memory.join(shape, shape.map_rows(), shape.map_columns(), maps);
    }
};

/// What the segments of one rank do to states, by scan, and what they do together, from one side. Of a segment each,
/// null of those that have none.
template <class T, class Memory>
class joined_steps {
    using buffer = typename Memory::template buffer<T>;

public:
    /// Of segments that others reach E or, of the first on the way, the state that leaves it, and M of those that are
    /// not the first: places in what is given to others.
    std::vector<T*> ends, maps;
    std::vector<T*> reaching; ///< the states that reach segments, once steps are joined

    joined_steps(char const* where, carry_exchanges<scan> const& plan, side from, state_shape const& shape,
                 Memory& memory, caller here)
        : ends(plan.links.size()), maps(ends), reaching(ends), where_(where), plan_(plan), from_(from), shape_(shape),
          memory_(memory), here_(here), width_(shape.state_width()), map_width_(shape.map_width()),
          row_(plan.row_width(width_, map_width_)) {
        if (plan.steps == 0) return;
        given_ = room(step(0).source_rows);
        T* place = given_.data();
        for (std::size_t i = 0; i < ends.size(); ++i) {
            if (plan.links[i].beside(opposite(from)) == 0) continue;
            ends[i] = std::exchange(place, place + width_);
            if (plan.links[i].beside(from) > 0) maps[i] = std::exchange(place, place + map_width_);
        }
    }

    /// Exchanges and joins steps, of ever more segments until the first on the way is among them.
    void join() {
        std::vector<T*> reaching_maps(ends.size()), longer(ends.size()); // what so many segments before do
        std::vector<T*> given_states(ends.size()), given_maps(ends.size());
        buffer maps_room, longer_room;
        for (index_t k = 0; k < plan_.steps; ++k) {
            index_t const reach = index_t{1} << k;
            auto const gives = [&](carry_link const& l) { return l.beside(opposite(from_)) >= reach; };
            auto const gives_map = [&](carry_link const& l) { return gives(l) && l.beside(from_) >= reach; };
            auto const gets_map = [&](carry_link const& l) { return l.beside(from_) >= 2 * reach; };
            cpx::plan const now = step(k);
            bool const stays = k > 0 && width_ > 0 && memory_.passes_over(now, plan_.within >> k & 1, here_);
            auto const makes = [&](carry_link const& l) { return gives(l) && (!stays || l.beside(from_) > 0); };
            buffer given, got = room(stays ? 0 : now.target_rows);
            if (k > 0) { // what is first given, and got, is there as it is; sums of maps begin with zeros
                given = std::ranges::any_of(plan_.links, gives_map)
                            ? memory_.template zeros<T>(where_, {now.source_rows, row_}, here_)
                            : room(std::ranges::any_of(plan_.links, makes) ? now.source_rows : 0);
                longer_room = memory_.template zeros<T>(
                    where_, {std::ranges::count_if(plan_.links, gets_map), map_width_}, here_);
            }
            scan_work<T> giving, getting;
            T *give = given.data(), *get = got.data(), *next = longer_room.data();
            for (std::size_t i = 0; i < ends.size(); ++i) {
                carry_link const& l = plan_.links[i];
                index_t const passed = l.beside(from_);
                if (k == 0 || !gives(l)) continue;
                given_states[i] = makes(l) ? give : ends[i];
                if (!makes(l)) continue;
                giving.copies.push_back({ends[i], give, width_});
                if (passed > 0) giving.states.push_back({maps[i], reaching[i], give});
                give += width_;
                if (!gives_map(l)) continue;
                given_maps[i] = std::exchange(give, give + map_width_);
                giving.maps.push_back({maps[i], reaching_maps[i], given_maps[i]});
            }
            for (std::size_t i = 0; i < ends.size(); ++i) {
                carry_link const& l = plan_.links[i];
                if (l.beside(from_) < reach) continue;
                std::size_t const giver = stays ? own_giver(i, reach) : i;
                T* const state = stays ? given_states[giver] : std::exchange(get, get + width_);
                if (k == 0)
                    reaching[i] = state;
                else
                    getting.states.push_back({reaching_maps[i], state, reaching[i]});
                if (!gets_map(l)) continue;
                T* const map = stays ? given_maps[giver] : std::exchange(get, get + map_width_);
                longer[i] = k == 0 ? map : std::exchange(next, next + map_width_);
                if (k > 0) getting.maps.push_back({reaching_maps[i], map, longer[i]});
            }
            giving.run(memory_, shape_);
            if (!stays)
                memory_.exchange(where_, now, exchange_number(plan_, k, from_),
                                 rows<T const>((k > 0 ? given : given_).data(), now.source_rows, row_),
                                 rows<T>(got.data(), now.target_rows, row_), here_);
            getting.run(memory_, shape_);
            if (k == 0) got_ = std::move(got);
            std::swap(maps_room, longer_room);
            std::swap(reaching_maps, longer); // who gets no map now wants none later
        }
    }

private:
    /// Returns the segment `reach` before segment i on the way, which the rank has, too: a sequence's are in order.
    std::size_t own_giver(std::size_t i, index_t reach) const {
        index_t const level = plan_.links[i].level - (from_ == side::before ? reach : -reach);
        while (plan_.links[i].level != level) from_ == side::before ? --i : ++i;
        return i;
    }
    cpx::plan step(index_t k) const { return plan_.step(k, from_, width_, map_width_); }
    buffer room(index_t count) const { return memory_.template room<T>(where_, {count, row_}, here_); }

    char const* where_;
    carry_exchanges<scan> const& plan_;
    side from_;
    state_shape shape_;
    Memory& memory_;
    caller here_;
    index_t width_, map_width_, row_;
    buffer given_, got_; ///< of the first exchange
};

/// One rank's way through its segments, as `carry_states` asks for it.
template <class T>
struct states_pass {
    /// Of the states that the rank holds.
    virtual state_shape const& shape() const = 0;
    /// Makes of the states that reach segments the ones that leave them; of segments that are the first on the way it
    /// sets the state itself. What nobody waits for may be left to `rest`.
    virtual void over(std::vector<visit<T>> visits) const = 0;
    /// Says over which segments it goes next, whose states have not come: where no segment waits for what it has just
    /// gone over.
    virtual void expect(std::vector<visit<T>> const&) const {}
    /// Gives the steps of the segments that others reach, where they are wanted: the maps M and E, in the host's memory
    /// in states that are zero on entry. Next, it goes over these segments.
    virtual void fold(std::vector<visit<T>> const& visits) const = 0;
    /// Does what `over` has left, also of segments whose states it has made, once these are on their way.
    virtual void rest() const {}

protected:
    ~states_pass() = default;
};

/// Hands states along: from the segments before, as in a forward, or from those after, as in a backward.
///
/// `maps`, unless null, takes the M of segments that lie between two others, in rows `carry_link::map_row`; only with
/// `scan`.
template <class T, class Memory>
void carry_states(char const* where, carry_exchanges<serial> const& plan, side from, states_pass<T> const& pass,
                  typename Memory::template buffer<T>*, Memory& memory, caller here) {
    index_t const width = pass.shape().state_width();
    auto const level_of = [&](index_t k) { return from == side::before ? k : plan.steps - k; };
    auto const visits_of = [&](index_t k, T* states) {
        std::vector<visit<T>> visits;
        for (index_t const member : plan.level(level_of(k))) {
            auto const i = static_cast<std::size_t>(member);
            visits.push_back({i, states, nullptr, plan.links[i].beside(opposite(from)) > 0});
            if (states) states += width;
        }
        return visits;
    };
    auto states = memory.template room<T>(where, {std::ssize(plan.level(level_of(0))), width}, here);
    for (index_t k = 0; k <= plan.steps; ++k) {
        auto const visits = visits_of(k, states.data());
        pass.over(visits);
        if (k == plan.steps) break;
        if (std::ranges::none_of(visits, &visit<T>::handed_on)) pass.expect(visits_of(k + 1, nullptr));
        index_t const lower = std::min(level_of(k), level_of(k + 1));
        cpx::plan const step = plan.step(lower, from);
        auto next = memory.template room<T>(where, {step.target_rows, width}, here);
        memory.exchange(where, step, exchange_number(plan, lower, from),
                        rows<T const>(states.data(), step.source_rows, width),
                        rows<T>(next.data(), step.target_rows, width), here);
        pass.rest();
        states = std::move(next);
    }
    pass.rest();
}

template <class T, class Memory>
void carry_states(char const* where, carry_exchanges<scan> const& plan, side from, states_pass<T> const& pass,
                  typename Memory::template buffer<T>* maps, Memory& memory, caller here) {
    joined_steps<T, Memory> steps(where, plan, from, pass.shape(), memory, here);
    std::vector<visit<T>> known, folded, reached; // where the state is known its step is not wanted
    auto const handed_on = [&](std::size_t i) { return plan.links[i].beside(opposite(from)) > 0; };
    for (std::size_t i = 0; i < plan.links.size(); ++i)
        if (plan.links[i].beside(from) == 0)
            known.push_back({i, steps.ends[i], nullptr, handed_on(i)});
        else
            folded.push_back({i, steps.ends[i], steps.maps[i]});
    pass.over(known);
    pass.fold(folded);
    steps.join();
    for (visit<T> const& v : folded)
        reached.push_back({v.segment, steps.reaching[v.segment], nullptr, handed_on(v.segment)});
    pass.over(reached);
    pass.rest();
    if (!maps) return;
    index_t const width = pass.shape().map_width();
    memory.renew(*maps, where, {inner_segments(plan.links), width}, here);
    std::vector<copied<T>> list;
    for (visit<T> const& v : folded)
        if (v.map) list.push_back({v.map, maps->data() + plan.links[v.segment].map_row * width, width});
    memory.copy(list);
}

/// Returns the segments that a pass runs by one call, of each that runs any: of those that it goes over together first
/// the ones whose states others wait for, then the rest.
inline std::vector<std::vector<std::size_t>> run_together(carry_exchanges<serial> const& plan, side from) {
    std::vector<std::vector<std::size_t>> groups;
    for (index_t k = 0; k <= plan.steps; ++k) {
        std::vector<std::size_t> handed_on, rest;
        for (index_t const i : plan.level(from == side::before ? k : plan.steps - k)) {
            auto const segment = static_cast<std::size_t>(i);
            (plan.links[segment].beside(opposite(from)) > 0 ? handed_on : rest).push_back(segment);
        }
        groups.insert(groups.end(), {std::move(handed_on), std::move(rest)});
    }
    std::erase_if(groups, [](auto const& g) { return g.empty(); });
    return groups;
}
inline std::vector<std::vector<std::size_t>> run_together(carry_exchanges<scan> const& plan, side from) {
    std::vector<std::vector<std::size_t>> groups(4); // the first of their sequences, and those that others reach
    for (std::size_t i = 0; i < plan.links.size(); ++i) {
        carry_link const& l = plan.links[i];
        std::size_t const reached = l.beside(from) > 0 ? 2 : 0, last = l.beside(opposite(from)) > 0 ? 0 : 1;
        groups[reached + last].push_back(i);
    }
    std::erase_if(groups, [](auto const& g) { return g.empty(); });
    return groups;
}

} // namespace cpx::detail
