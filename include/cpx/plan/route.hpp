// SPDX-License-Identifier: Apache-2.0
// Which cells of a run move between two layouts that are known at compile time.
#pragma once

#include <cpx/layout/concept.hpp>

#include <array>
#include <cstddef>
#include <numeric>

namespace cpx {

/// Cell `cell` goes from rank `from` to rank `to`.
struct route {
    int cell = 0;
    int from = 0;
    int to = 0;
    friend constexpr bool operator==(route, route) = default;
};

/// Returns into how many equal cells both layouts cut a run: the least common multiple of their chunks.
///
/// With balanced cuts every chunk of either layout is a whole number of cells, whatever the length of the run, because
/// floor(n (k c) / (k C)) = floor(n c / C).
template <class From, class To>
consteval int cells() {
    constexpr bool known = static_layout<From> && static_layout<To>;
    static_assert(known, "cpx: routes between layouts that are known at run time only; give sizes in types: zigzag<4>");
    if constexpr (known) return std::lcm(From{}.chunks(), To{}.chunks());
    return 0;
}

namespace detail {

template <static_layout From, static_layout To>
constexpr route route_of(int cell) {
    constexpr From from;
    constexpr To to;
    int const n = cells<From, To>();
    return {cell, from.owner(cell / (n / from.chunks())), to.owner(cell / (n / to.chunks()))};
}

template <static_layout From, static_layout To>
consteval std::size_t count_routes() {
    std::size_t count = 0;
    for (int cell = 0; cell < cells<From, To>(); ++cell) {
        route const r = route_of<From, To>(cell);
        count += r.from != r.to;
    }
    return count;
}

} // namespace detail

/// Returns the cells that change hands, in token order; lengths only scale them.
///
///     static_assert(cpx::routes<cpx::zigzag<2>, cpx::sequential<2>>().size() == 2);
///
/// Both layouts cut the same runs (one scope) with balanced cuts.
template <class From, class To>
consteval auto routes() {
    if constexpr (constexpr int n = cells<From, To>(); n > 0) {
        static_assert(From{}.ranks() == To{}.ranks(),
                      "cpx: routes between layouts over different numbers of ranks; give both the same ranks");
        std::array<route, detail::count_routes<From, To>()> moved{};
        std::size_t count = 0;
        for (int cell = 0; cell < n; ++cell) {
            route const r = detail::route_of<From, To>(cell);
            if (r.from != r.to) moved[count++] = r;
        }
        return moved;
    } else {
        return std::array<route, 0>{};
    }
}

/// Returns how many messages one exchange between the layouts takes in all: the pairs of ranks between which cells
/// move.
template <class From, class To>
consteval int route_messages() {
    constexpr auto moved = routes<From, To>();
    int count = 0;
    for (std::size_t i = 0; i < moved.size(); ++i) {
        bool first = true;
        for (std::size_t k = 0; k < i; ++k)
            if (moved[k].from == moved[i].from && moved[k].to == moved[i].to) first = false;
        count += first;
    }
    return count;
}

} // namespace cpx
