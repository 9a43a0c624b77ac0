// SPDX-License-Identifier: Apache-2.0
// Lists of rows, by their numbers.
#pragma once

#include <cpx/core/memory.hpp>
#include <cpx/core/overlap.hpp>
#include <cpx/core/rows.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace cpx {

/// A type of the numbers of a list of rows.
template <class I>
concept row_number = std::same_as<I, std::int32_t> || std::same_as<I, std::int64_t>;

/// A list of rows with equal numbers side by side, and where each of its numbers stood before, ascending where equal.
template <row_number I>
struct grouped_rows {
    std::vector<I> list, order;
};

/// Returns a list on the host as `scatter_add_rows` wants it: sorted, stably. Cost: O(n log n).
template <row_number I>
grouped_rows<I> grouped(std::span<I const> list) {
    grouped_rows<I> result{{}, std::vector<I>(list.size())};
    std::iota(result.order.begin(), result.order.end(), I{0});
    std::ranges::stable_sort(result.order, {}, [&](I i) { return list[static_cast<std::size_t>(i)]; });
    for (I const i : result.order) result.list.push_back(list[static_cast<std::size_t>(i)]);
    return result;
}

namespace detail {

/// Throws `cpx::error` unless `listed` has a row for every number of the list, and these are rows of `all`.
template <class T>
void require_listed(char const* where, rows<T const> from, std::span<index_t const> list, rows<T> to, index_t listed,
                    index_t all, caller here) {
    require(from.width() == to.width(), where, "width of to", from.width(), to.width(), here);
    require(std::ssize(list) == listed, where, "numbers in the list", listed, list.size(), here);
    for (index_t const row : list)
        require(
            0 <= row && row < all, where, "row", [&] { return "from 0 to " + std::to_string(all - 1); }, row, here);
    require_apart(where, {{"to", to}}, {{"from", from}}, here);
}

} // namespace detail

/// Copies row list[i] of `from` to row i of `to`, which has as many rows as the list numbers.
///
/// Of the host; `cuda::gather_rows` takes a device's memory in its place. Throws `cpx::error` if shapes do not fit, a
/// number is no row or memory overlaps.
template <class T>
void gather_rows(host_memory, std::type_identity_t<rows<T const>> from, std::span<index_t const> list, rows<T> to,
                 caller here = caller::here()) {
    detail::require_listed("gather_rows", from, list, to, to.count(), from.count(), here);
    for (index_t i = 0; i < to.count(); ++i)
        std::copy_n(from.row(list[static_cast<std::size_t>(i)]), to.width(), to.row(i));
}
/// Copies row i of `from` to row list[i] of `to`; the other rows stay. The numbers differ. All else as above.
template <class T>
void scatter_rows(host_memory, std::type_identity_t<rows<T const>> from, std::span<index_t const> list, rows<T> to,
                  caller here = caller::here()) {
    detail::require_listed("scatter_rows", from, list, to, from.count(), to.count(), here);
    for (index_t i = 0; i < from.count(); ++i)
        std::copy_n(from.row(i), to.width(), to.row(list[static_cast<std::size_t>(i)]));
}
template <class T = void>
    requires std::same_as<T, void> // else T in brackets and rows in braces would fit both
detail::refused gather_rows(host_memory, detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<T>, "cpx: gather_rows(memory, from, list, to) wants rows, a span of index_t and rows "
                                    "of the same elements, not const; take rows with view() or data()");
    return {};
}
template <class T = void>
    requires std::same_as<T, void> // else T in brackets and rows in braces would fit both
detail::refused scatter_rows(host_memory, detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<T>, "cpx: scatter_rows(memory, from, list, to) wants rows, a span of index_t and rows "
                                    "of the same elements, not const; take rows with view() or data()");
    return {};
}

} // namespace cpx
