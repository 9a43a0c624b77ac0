// SPDX-License-Identifier: Apache-2.0
// Hands the states of any recurrence S -> M S + E along the segments of its sequences.
#pragma once

#include <cpx/ops/eigen.hpp>
#include <cpx/plan/carry.hpp>
#include <cpx/transport/exchange.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace cpx::detail {

/// A state S or E is (keys, values) a head, a map M (keys, keys).
struct state_shape {
    index_t heads = 1, keys = 1, values = 1;
    index_t state_width() const { return heads * keys * values; }
    index_t map_width() const { return heads * keys * keys; }
};

/// Adds `map x` to `sum`, head by head; x, sum: (keys, columns) a head.
template <class T>
void add_products(state_shape const& shape, T const* map, T const* x, index_t columns, T* sum) {
    index_t const n = shape.keys;
    for (index_t h = 0; h < shape.heads; ++h, map += n * n, x += n * columns, sum += n * columns)
        as_matrix(rows<T>(sum, n, columns)).noalias() +=
            as_matrix(rows<T const>(map, n, n)) * as_matrix(rows<T const>(x, n, columns));
}

/// Room of `width` elements for each of those segments of a rank that need it.
template <class T>
class per_segment {
public:
    template <class Needs>
    per_segment(std::vector<carry_link> const& links, index_t width, char const* where, caller here, Needs needs)
        : width_(width) {
        index_t count = 0;
        for (carry_link const& l : links) rows_.push_back(needs(l) ? count++ : -1);
        values_ = zeros<T>(where, {count, width}, here);
    }
    T* operator[](std::size_t segment) { return values_.data() + rows_[segment] * width_; }

private:
    index_t width_;
    std::vector<index_t> rows_;
    std::vector<T> values_;
};

/// Returns how many segments of a rank lie between two others.
inline index_t inner_segments(std::vector<carry_link> const& links) {
    return std::ranges::count_if(links, [](carry_link const& l) { return l.map_row >= 0; });
}

/// Returns the states that reach the segments of one rank that are not the first on their way.
///
/// `maps` and `ends` hold what each segment does to the state, of the first on the way the state that leaves it.
template <class T, any_sharding S, class Comm>
per_segment<T> join_steps(char const* where, carry_plan<scan, S> const& plan, side from, state_shape const& shape,
                          std::vector<T> const& maps, per_segment<T>& ends, Comm& comm, caller here) {
    index_t const width = shape.state_width(), map_width = shape.map_width();
    index_t const row = plan.row_width(width, map_width);
    // What the segments before each do to the state together, of ever more of them until the first is among them.
    per_segment<T> reaching(plan.links, width, where, here, [&](carry_link const& l) { return l.beside(from) > 0; });
    per_segment<T> reaching_maps(plan.links, map_width, where, here,
                                 [&](carry_link const& l) { return l.beside(from) > 1; });
    auto joined = zeros<T>(where, {map_width}, here);
    for (index_t k = 0; k < plan.steps; ++k) {
        index_t const reach = index_t{1} << k;
        cpx::plan const step = plan.step(k, from, width, map_width);
        auto given = zeros<T>(where, {step.source_rows, row}, here);
        auto got = zeros<T>(where, {step.target_rows, row}, here);
        T* give = given.data();
        for (std::size_t i = 0; i < plan.links.size(); ++i) {
            carry_link const& l = plan.links[i];
            index_t const passed = l.beside(from);
            if (l.beside(opposite(from)) < reach) continue;
            T const* const map = maps.data() + l.map_row * map_width; // if it is not the first
            std::copy_n(ends[i], width, give);
            if (k > 0 && passed > 0) add_products<T>(shape, map, reaching[i], shape.values, give);
            give += width;
            if (passed < reach) continue;
            if (k == 0)
                std::copy_n(map, map_width, give);
            else
                add_products<T>(shape, map, reaching_maps[i], shape.keys, give);
            give += map_width;
        }
        exchange(step, rows<T const>(given.data(), step.source_rows, row), rows<T>(got.data(), step.target_rows, row),
                 comm, here);
        T const* get = got.data();
        for (std::size_t i = 0; i < plan.links.size(); ++i) {
            index_t const passed = plan.links[i].beside(from);
            if (passed < reach) continue;
            if (k == 0)
                std::copy_n(get, width, reaching[i]);
            else
                add_products<T>(shape, reaching_maps[i], get, shape.values, reaching[i]);
            get += width;
            if (passed < 2 * reach) continue;
            if (k == 0) {
                std::copy_n(get, map_width, reaching_maps[i]);
            } else {
                std::ranges::fill(joined, T{});
                add_products<T>(shape, reaching_maps[i], get, shape.keys, joined.data());
                std::ranges::copy(joined, reaching_maps[i]);
            }
            get += map_width;
        }
    }
    return reaching;
}

/// Hands states along: from the segments before, as in a forward, or from those after, as in a backward.
///
/// `pass` goes over the rank's segments. `first(i, state)` sets the state that reaches segment i, the first on the way;
/// `over(i, state)` makes of the state that reaches segment i the one that leaves it; `last(i, state)` is shown the
/// state that leaves the last; `fold(i, end, map)` gives the step of a segment, on entry E is zero.
/// `maps` takes the M of segments that lie between two others, in rows `carry_link::map_row`; only with `scan`.
template <class T, any_sharding S, class Pass, class Comm>
void carry_states(char const* where, carry_plan<serial, S> const& plan, side from, Pass& pass, std::vector<T>&,
                  Comm& comm, caller here) {
    index_t const width = pass.shape().state_width();
    std::vector<T> states;
    for (index_t k = 0; k <= plan.steps; ++k) {
        index_t const level = from == side::before ? k : plan.steps - k;
        auto const members = plan.level(level);
        if (k == 0) states = zeros<T>(where, {std::ssize(members), width}, here);
        for (std::size_t m = 0; m < members.size(); ++m) {
            auto const i = static_cast<std::size_t>(members[m]);
            T* const state = states.data() + static_cast<index_t>(m) * width;
            if (plan.links[i].beside(from) == 0) pass.first(i, state);
            pass.over(i, state);
            if (plan.links[i].beside(opposite(from)) == 0) pass.last(i, state);
        }
        if (k == plan.steps) break;
        cpx::plan const step = plan.step(from == side::before ? level : level - 1, from);
        auto next = zeros<T>(where, {step.target_rows, width}, here);
        exchange(step, rows<T const>(states.data(), step.source_rows, width),
                 rows<T>(next.data(), step.target_rows, width), comm, here);
        states = std::move(next);
    }
}

template <class T, any_sharding S, class Pass, class Comm>
void carry_states(char const* where, carry_plan<scan, S> const& plan, side from, Pass& pass, std::vector<T>& maps,
                  Comm& comm, caller here) {
    state_shape const shape = pass.shape();
    side const to = opposite(from);
    maps = zeros<T>(where, {inner_segments(plan.links), shape.map_width()}, here);
    per_segment<T> ends(plan.links, shape.state_width(), where, here,
                        [&](carry_link const& l) { return l.beside(to) > 0; });
    auto state = zeros<T>(where, {shape.state_width()}, here);
    for (std::size_t i = 0; i < plan.links.size(); ++i) {
        carry_link const& l = plan.links[i];
        if (l.beside(from) == 0) { // the state that reaches it is known: no need to fold it
            T* const end = l.beside(to) > 0 ? ends[i] : state.data();
            pass.first(i, end);
            pass.over(i, end);
            if (l.beside(to) == 0) pass.last(i, end);
        } else if (l.beside(to) > 0) {
            pass.fold(i, ends[i], maps.data() + l.map_row * shape.map_width());
        }
    }
    auto reaching = join_steps(where, plan, from, shape, maps, ends, comm, here);
    for (std::size_t i = 0; i < plan.links.size(); ++i) {
        if (plan.links[i].beside(from) == 0) continue;
        pass.over(i, reaching[i]);
        if (plan.links[i].beside(to) == 0) pass.last(i, reaching[i]);
    }
}

} // namespace cpx::detail
