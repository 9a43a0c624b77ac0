// SPDX-License-Identifier: Apache-2.0
// Every token gets the row of the token k after it, or k before it, on any sharding.
#pragma once

#include <cpx/core/overlap.hpp>
#include <cpx/ops/local/shape.hpp>
#include <cpx/plan/halo.hpp>
#include <cpx/transport/exchange.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <type_traits>
#include <vector>

namespace cpx {

namespace detail {

/// Returns a hash of an element's bytes, for ranks to compare; of elements with bytes that mean nothing none.
template <class T>
std::uint64_t hash_of(T const& x) {
    if constexpr (std::has_unique_object_representations_v<T> || std::same_as<T, float> || std::same_as<T, double>)
        return mix_all(0, std::bit_cast<std::array<unsigned char, sizeof(T)>>(x));
    return 0;
}

/// Of rows that a shift fills; those below it are of the halo, see `shifted_rows`.
inline constexpr index_t filled_row = -1;

/// Returns for every row of the plan's rank the row that a shift brings there: of its own, r; of the halo, -2 - r; or
/// `filled_row`.
template <any_sharding S>
std::vector<index_t> shifted_rows(halo_plan<S> const& plan) {
    thd const& batch = plan.sharding.batch();
    index_t const ahead = plan.where == side::after ? plan.reach : -plan.reach;
    std::vector<index_t> list(static_cast<std::size_t>(plan.sharding.rows(plan.rank)), filled_row);
    std::vector<index_t> beside; // the rows on that side of a segment, in the order of tokens
    for (std::size_t i = 0; i < plan.segments.size(); ++i) {
        segment const& s = plan.segments[i];
        beside.clear();
        for (std::size_t r = plan.begin[i]; r < plan.begin[i + 1]; ++r)
            for (index_t row = plan.runs[r].first; row < plan.runs[r].first + plan.runs[r].count; ++row)
                beside.push_back(plan.runs[r].halo ? -2 - row : row);
        auto const row = [&](index_t k) { // k counts from the segment's first
            if (k >= s.count) return beside[static_cast<std::size_t>(k - s.count)];
            return k < 0 ? beside[static_cast<std::size_t>(std::ssize(beside) + k)] : s.row + k;
        };
        index_t const valid = batch.valid(s.sequence);
        for (index_t k = 0; k < s.count; ++k) {
            index_t const token = s.token + k, other = token + ahead;
            if (token < valid && other < valid && other >= 0)
                list[static_cast<std::size_t>(s.row + k)] = row(k + ahead);
        }
    }
    return list;
}

template <class T, any_sharding S, class Comm>
void shift(char const* where, halo_plan<S> const& plan, sharded<T const, S> const& x, sharded<T, S> const& y,
           T const& fill, Comm& comm, caller here) {
    index_t const count = plan.sharding.rows(plan.rank), width = x.data().width();
    require_shape(where, "y", y.data(), count, width, here);
    require_apart(where, {{"y", y.data()}}, {{"x", x.data()}}, here);
    auto received = zeros<T>(where, {plan.target_rows, width}, here);
    rows<T> const halo(received.data(), plan.target_rows, width);
    exchange_rows(plan, x.data(), halo, comm, here, {where, {0, 0, hash_of(fill)}});

    index_t to = 0;
    for (index_t const from : shifted_rows(plan)) {
        T* const row = y.data().row(to++);
        if (from == filled_row)
            std::fill_n(row, width, fill);
        else
            std::copy_n(from < 0 ? halo.row(-2 - from) : x.data().row(from), width, row);
    }
}

} // namespace detail

/// Writes to every row of y the row of x that stands `plan.reach` tokens after it in its sequence, or before it,
/// wherever that lives: `y_t = x_{t+k}` by the plan `halo(sharding, rank, k, side::after)`, `y_t = x_{t-k}` by
/// `side::before`. Where either is no valid token of the sequence, y is `fill`.
///
/// Each is the backward of the other: gradients of embeddings that a prediction of several tokens looks ahead at go
/// back by `side::before`, to one row each, so no bits depend on the ranks.
/// x and y: (rows, width) of the plan's sharding, not overlapping. Collective: one exchange of the halo, at most k rows
/// a segment; none where every rank holds every row.
///
/// Throws `cpx::error` on shapes and shardings that do not fit and on overlapping memory, if ranks have other values of
/// `fill`, and what `exchange` throws.
template <any_sharding S, sharded_like X, sharded_like Y, transport Comm>
void shift_rows(halo_plan<S> const& plan, X const& x, Y&& y, Comm& comm, element_of<X> fill = {},
                caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<S, X, Y>, writes = detail::writes<Y, X>;
    static_assert(fits, "cpx: shift_rows of tensors that are not sharded as the plan; make the plan with "
                        "halo(x.sharding(), ...) and y of the same sharding");
    static_assert(!fits || writes, "cpx: shift_rows wants y of the elements of x, not const and with a name");
    if constexpr (fits && writes && detail::checked_element<element_of<X>>::value) {
        detail::require_place("shift_rows", "x", x.view(), plan.sharding, plan.rank, "the plan's", here);
        detail::require_place("shift_rows", "y", y.view(), plan.sharding, plan.rank, "the plan's", here);
        detail::require_shape("shift_rows", "x", x.view().data(), plan.sharding.rows(plan.rank),
                              x.view().data().width(), here);
        detail::shift<element_of<X>, S>("shift_rows", plan, x.view(), y.view(), fill, comm, here);
    }
}
template <class Plan = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused shift_rows(Plan const& = {}, Y1 const& = {}, Y2 const& = {}, detail::any = {}, detail::any = {},
                           detail::any = {}) {
    static_assert(detail::never<Plan, Y1, Y2>,
                  "cpx: shift_rows wants a halo_plan, tensors x and y, and a cpx::transport; make the plan with "
                  "halo(x.sharding(), rank, k, side::after)");
    return {};
}

} // namespace cpx
