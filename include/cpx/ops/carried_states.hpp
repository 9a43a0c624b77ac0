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

/// Room of `width` elements for each of those segments of a rank that need it.
template <class T, class Memory>
class per_segment {
public:
    template <class Needs>
    per_segment(std::vector<carry_link> const& links, index_t width, char const* where, Memory& memory, caller here,
                Needs needs)
        : width_(width) {
        index_t count = 0;
        for (carry_link const& l : links) rows_.push_back(needs(l) ? count++ : -1);
        values_ = memory.template zeros<T>(where, {count, width}, here);
    }
    T* operator[](std::size_t segment) { return values_.data() + rows_[segment] * width_; }

private:
    index_t width_;
    std::vector<index_t> rows_;
    typename Memory::template buffer<T> values_;
};

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

/// Returns the states that reach the segments of one rank that are not the first on their way.
///
/// `maps` and `ends` hold what each segment does to the state, of the first on the way the state that leaves it.
template <class T, class Memory>
per_segment<T, Memory> join_steps(char const* where, carry_exchanges<scan> const& plan, side from,
                                  state_shape const& shape, T const* maps, per_segment<T, Memory>& ends, Memory& memory,
                                  caller here) {
    index_t const width = shape.state_width(), map_width = shape.map_width();
    index_t const row = plan.row_width(width, map_width);
    // What the segments before each do to the state together, of ever more of them until the first is among them.
    auto const room = [&](index_t of, index_t more_than) {
        return per_segment<T, Memory>(plan.links, of, where, memory, here,
                                      [&](carry_link const& l) { return l.beside(from) > more_than; });
    };
    auto reaching = room(width, 0), reaching_maps = room(map_width, 1);
    for (index_t k = 0; k < plan.steps; ++k) {
        index_t const reach = index_t{1} << k;
        cpx::plan const step = plan.step(k, from, width, map_width);
        auto given = memory.template zeros<T>(where, {step.source_rows, row}, here);
        auto got = memory.template zeros<T>(where, {step.target_rows, row}, here);
        auto longer = room(map_width, 1);
        scan_work<T> giving, getting;
        T* give = given.data();
        T const* get = got.data();
        for (std::size_t i = 0; i < plan.links.size(); ++i) {
            carry_link const& l = plan.links[i];
            index_t const passed = l.beside(from);
            bool const gives = l.beside(opposite(from)) >= reach;
            T const* const map = l.map_row < 0 ? nullptr : maps + l.map_row * map_width;
            if (gives) {
                giving.copies.push_back({ends[i], give, width});
                if (k > 0 && passed > 0) giving.states.push_back({map, reaching[i], give});
                give += width;
            }
            if (gives && passed >= reach) {
                if (k == 0)
                    giving.copies.push_back({map, give, map_width});
                else
                    giving.maps.push_back({map, reaching_maps[i], give});
                give += map_width;
            }
            if (passed >= reach) {
                if (k == 0)
                    getting.copies.push_back({get, reaching[i], width});
                else
                    getting.states.push_back({reaching_maps[i], get, reaching[i]});
                get += width;
            }
            if (passed >= 2 * reach) {
                if (k == 0)
                    getting.copies.push_back({get, longer[i], map_width});
                else
                    getting.maps.push_back({reaching_maps[i], get, longer[i]});
                get += map_width;
            }
        }
        giving.run(memory, shape);
        memory.exchange(where, step, exchange_number(plan, k, from), rows<T const>(given.data(), step.source_rows, row),
                        rows<T>(got.data(), step.target_rows, row), here);
        getting.run(memory, shape);
        std::swap(reaching_maps, longer); // who gets no map now wants none later
    }
    return reaching;
}

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
    /// Gives the steps of the segments that others reach, where they are wanted: the maps M and, in states that are
    /// zero on entry, E. Next, it goes over these segments.
    virtual void fold(std::vector<visit<T>> const& visits) const = 0;
    /// Does what `over` has left, also of segments whose states it has made, once these are on their way.
    virtual void rest() const {}

protected:
    ~states_pass() = default;
};

/// Hands states along: from the segments before, as in a forward, or from those after, as in a backward.
///
/// `maps` takes the M of segments that lie between two others, in rows `carry_link::map_row`; only with `scan`.
template <class T, class Memory>
void carry_states(char const* where, carry_exchanges<serial> const& plan, side from, states_pass<T> const& pass,
                  typename Memory::template buffer<T>&, Memory& memory, caller here) {
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
    auto states = memory.template zeros<T>(where, {std::ssize(plan.level(level_of(0))), width}, here);
    for (index_t k = 0; k <= plan.steps; ++k) {
        auto const visits = visits_of(k, states.data());
        pass.over(visits);
        if (k == plan.steps) break;
        if (std::ranges::none_of(visits, &visit<T>::handed_on)) pass.expect(visits_of(k + 1, nullptr));
        index_t const lower = std::min(level_of(k), level_of(k + 1));
        cpx::plan const step = plan.step(lower, from);
        auto next = memory.template zeros<T>(where, {step.target_rows, width}, here);
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
                  typename Memory::template buffer<T>& maps, Memory& memory, caller here) {
    state_shape const shape = pass.shape();
    memory.renew(maps, where, {inner_segments(plan.links), shape.map_width()}, here);
    per_segment<T, Memory> ends(plan.links, shape.state_width(), where, memory, here,
                                [&](carry_link const& l) { return l.beside(opposite(from)) > 0; });
    std::vector<visit<T>> known, folded, reached; // where the state is known its step is not wanted
    for (std::size_t i = 0; i < plan.links.size(); ++i) {
        carry_link const& l = plan.links[i];
        bool const more = l.beside(opposite(from)) > 0;
        T* const end = more ? ends[i] : nullptr;
        if (l.beside(from) == 0)
            known.push_back({i, end, nullptr, more});
        else
            folded.push_back({i, end, more ? maps.data() + l.map_row * shape.map_width() : nullptr});
    }
    pass.over(known);
    pass.fold(folded);
    auto reaching = join_steps(where, plan, from, shape, maps.data(), ends, memory, here);
    for (std::size_t i = 0; i < plan.links.size(); ++i)
        if (plan.links[i].beside(from) > 0)
            reached.push_back({i, reaching[i], nullptr, plan.links[i].beside(opposite(from)) > 0});
    pass.over(reached);
    pass.rest();
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
