// SPDX-License-Identifier: Apache-2.0
// Which cells of a run move between two layouts: what plans between them scale by the length of each sequence.
#pragma once

#include <cpx/layout/algorithm.hpp>

#include <array>
#include <cstddef>
#include <numeric>

namespace cpx {

/// Cells `first` to `last` of a run, which rank `from` holds and rank `to` is to hold.
struct route {
    int from = 0, to = 0;
    int first = 0, last = 0;
    friend constexpr bool operator==(route, route) = default;
};

/// Returns into how many equal cells both layouts cut a run: the least common multiple of their chunks.
///
/// With balanced cuts every chunk of either layout is a whole number of cells, whatever the length of the run, because
/// floor(n (k c) / (k C)) = floor(n c / C).
template <layout From, layout To>
constexpr index_t cells(From const& from, To const& to) {
    return std::lcm(index_t{from.chunks()}, index_t{to.chunks()});
}

/// Calls `f(route)` for what chunk `chunk` of `from` has in common with each chunk of `to`, in token order.
/// Requires less than 2^31 cells.
template <layout From, layout To, class F>
constexpr void for_each_route(From const& from, To const& to, int chunk, F&& f) {
    int const all = static_cast<int>(cells(from, to)), own = all / from.chunks(), other = all / to.chunks();
    for (int first = chunk * own, end = first + own; first < end;) {
        int const target = first / other, last = (target + 1) * other < end ? (target + 1) * other : end;
        f(route{from.owner(chunk), to.owner(target), first, last});
        first = last;
    }
}

namespace detail {

/// Calls `f(route)` for what changes hands between layouts that are known at compile time, in token order.
template <static_layout From, static_layout To, class F>
consteval void for_each_moved(F&& f) {
    for (int chunk = 0; chunk < From{}.chunks(); ++chunk)
        for_each_route(From{}, To{}, chunk, [&](route r) {
            if (r.from != r.to) f(r);
        });
}

template <static_layout From, static_layout To>
consteval std::size_t count_routes() {
    std::size_t count = 0;
    for_each_moved<From, To>([&](route) { ++count; });
    return count;
}

} // namespace detail

/// Returns what changes hands between two layouts, in token order, as a constant; lengths only scale it.
///
///     static_assert(cpx::routes<cpx::zigzag<2>, cpx::sequential<2>>().size() == 2);
///
/// Both layouts cut the same runs (one scope) with the same cut. Then the plans of `relayout` are these, scaled by
/// every length, and what stays.
template <class From, class To>
consteval auto routes() {
    constexpr bool known = static_layout<From> && static_layout<To>;
    static_assert(known, "cpx: routes between layouts that are known at run time only; give sizes in types: zigzag<4>");
    if constexpr (known) {
        static_assert(From{}.ranks() == To{}.ranks(),
                      "cpx: routes between layouts over different numbers of ranks; give both the same ranks");
        std::array<route, detail::count_routes<From, To>()> moved{};
        std::size_t count = 0;
        detail::for_each_moved<From, To>([&](route r) { moved[count++] = r; });
        return moved;
    } else {
        return std::array<route, 0>{};
    }
}

template <class X = void>
consteval detail::refused routes() {
    static_assert(detail::never<X>, "cpx: routes wants two layouts: routes<zigzag<4>, sequential<4>>()");
    return {};
}

/// The same of two layouts that are given: `routes(zigzag<4>{}, sequential<4>{})`.
template <class From, class To>
constexpr auto routes(From const&, To const&) {
    constexpr bool known = static_layout<From> && static_layout<To>; // said here: a level less to read
    static_assert(known, "cpx: routes between layouts that are known at run time only; give sizes in types: zigzag<4>");
    if constexpr (known) {
        constexpr bool alike = From{}.ranks() == To{}.ranks();
        static_assert(alike, "cpx: routes between layouts over different numbers of ranks; give both the same ranks");
        if constexpr (alike)
            return routes<From, To>();
        else
            return std::array<route, 0>{};
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
