// SPDX-License-Identifier: Apache-2.0
// The number type of cpx, where a token lives, and half-open ranges of rows, tokens, columns or heads.
#pragma once

#include <cpx/core/config.hpp>

#include <cstdint>

namespace cpx {

/// Counts and offsets of tokens, rows, elements and bytes: 64 bits everywhere, because a shard of 2^19 tokens
/// by 4096 channels already has 2^31 elements.
using index_t = std::int64_t;

/// Where a token lives: the rank that holds it and its row in that rank's local buffer.
struct slot {
    int rank = 0;
    index_t row = 0;
    friend constexpr bool operator==(slot, slot) = default;
};

/// Numbers `first, first + 1, ..., last - 1`.
struct range {
    index_t first = 0;
    index_t last = 0;
    CPX_HOST_DEVICE constexpr index_t size() const { return last - first; }
    CPX_HOST_DEVICE constexpr bool empty() const { return last <= first; }
    friend constexpr bool operator==(range, range) = default;
};

/// Returns the numbers that lie in both ranges; empty if none does.
CPX_HOST_DEVICE constexpr range intersect(range a, range b) {
    index_t const first = a.first > b.first ? a.first : b.first;
    index_t const last = a.last < b.last ? a.last : b.last;
    return {first, last > first ? last : first};
}

} // namespace cpx
