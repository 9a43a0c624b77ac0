// SPDX-License-Identifier: Apache-2.0
// Where a token lives, and half-open ranges of rows, tokens, columns or heads.
#pragma once

#include <cpx/core/config.hpp>

namespace cpx {

/// Where a token lives: the rank that holds it and its row in that rank's local buffer.
struct slot {
    int rank = 0;
    index row = 0;
    friend constexpr bool operator==(slot, slot) = default;
};

/// Numbers `first, first + 1, ..., last - 1`.
struct range {
    index first = 0;
    index last = 0;
    CPX_HOST_DEVICE constexpr index size() const { return last - first; }
    CPX_HOST_DEVICE constexpr bool empty() const { return last <= first; }
    friend constexpr bool operator==(range, range) = default;
};

/// Returns the numbers that lie in both ranges; empty if none does.
CPX_HOST_DEVICE constexpr range intersect(range a, range b) {
    index const first = a.first > b.first ? a.first : b.first;
    index const last = a.last < b.last ? a.last : b.last;
    return {first, last > first ? last : first};
}

} // namespace cpx
