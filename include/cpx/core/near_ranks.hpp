// SPDX-License-Identifier: Apache-2.0
// Groups of neighbouring ranks that reach each other, as the ranks of a host do.
#pragma once

#include <cpx/core/index.hpp>

#include <algorithm>
#include <vector>

namespace cpx::detail {

/// Returns the neighbours of `rank`, itself among them, with which it is `near(r)` without a rank between them that is
/// not: `most` ranks at most, counted from the first of them on.
template <class F>
range near_ranks(int rank, int ranks, index_t most, F&& near) {
    range group{rank, rank + 1};
    while (group.first > 0 && near(static_cast<int>(group.first) - 1)) --group.first;
    while (group.last < ranks && near(static_cast<int>(group.last))) ++group.last;
    group.first += (rank - group.first) / most * most;
    return {group.first, std::min(group.last, group.first + most)};
}

/// Returns of every rank the group that it has `found`, if all members of that have found the same; else, where hosts
/// look different from different ranks, a group of its own.
inline std::vector<range> agreed_groups(std::vector<range> const& found) {
    std::vector<range> groups;
    for (range const own : found) {
        index_t const rank = std::ssize(groups);
        bool const agreed = std::all_of(found.begin() + own.first, found.begin() + own.last,
                                        [&](range theirs) { return theirs == own; });
        groups.push_back(agreed ? own : range{rank, rank + 1});
    }
    return groups;
}

} // namespace cpx::detail
