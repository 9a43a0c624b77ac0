// SPDX-License-Identifier: Apache-2.0
// Lists of rows, by their numbers.
#pragma once

#include <cpx/core/memory.hpp>
#include <cpx/core/rows.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
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

/// Copies row list[i] of `from` to row i of `to`. They do not overlap, and have the list's numbers of rows.
///
/// Of the host; `cuda::gather_rows` takes a device's memory in its place.
template <class T>
void gather_rows(host_memory, std::type_identity_t<rows<T const>> from, std::span<index_t const> list, rows<T> to,
                 caller = caller::here()) {
    for (index_t i = 0; i < to.count(); ++i)
        std::copy_n(from.row(list[static_cast<std::size_t>(i)]), to.width(), to.row(i));
}
/// Copies row i of `from` to row list[i] of `to`; the other rows stay. The numbers differ. All else as above.
template <class T>
void scatter_rows(host_memory, std::type_identity_t<rows<T const>> from, std::span<index_t const> list, rows<T> to,
                  caller = caller::here()) {
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
