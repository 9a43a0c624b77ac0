// SPDX-License-Identifier: Apache-2.0
// Lists of rows, by their numbers.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
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

} // namespace cpx
