// SPDX-License-Identifier: Apache-2.0
// Which rows of a per-channel weight a rank needs when channels are heads.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/layout/sharding.hpp>

#include <algorithm>

namespace cpx {

/// Returns the rows of `weight` that belong to the heads that `rank` holds of `sections`, in local order.
///
/// weight: (sum of heads * width over the sections, columns), such as the (channels, K) weight of a convolution over
/// q, k and v, or the (heads, 1) decay of a recurrence. All rows, unless the sharding is by heads.
template <class T, any_sharding S>
std::vector<T> local_rows(S const& sharding, int rank, std::span<section const> sections, rows<T const> weight) {
    std::vector<T> local;
    index first = 0;
    for (section const& s : sections) {
        range const heads = sharding.heads(rank, s.heads);
        for (index row = first + heads.first * s.width; row < first + heads.last * s.width; ++row)
            local.insert(local.end(), weight.row(row), weight.row(row) + weight.width());
        first += s.heads * s.width;
    }
    require(first == weight.count(), "local_rows", "rows of the weight", first, weight.count());
    return local;
}

/// Adds rows in local order to where `local_rows` took them from: the gradient of a weight from that of a rank's part.
template <class T, any_sharding S>
void add_local_rows(S const& sharding, int rank, std::span<section const> sections, rows<T const> local,
                    rows<T> weight) {
    index first = 0, taken = 0;
    for (section const& s : sections) {
        range const heads = sharding.heads(rank, s.heads);
        for (index row = first + heads.first * s.width; row < first + heads.last * s.width; ++row, ++taken)
            for (index column = 0; column < weight.width(); ++column) weight(row, column) += local(taken, column);
        first += s.heads * s.width;
    }
    require(first == weight.count() && taken == local.count(), "add_local_rows", "rows of the weight and of its part",
            std::to_string(first) + " and " + std::to_string(taken),
            std::to_string(weight.count()) + " and " + std::to_string(local.count()));
}

} // namespace cpx
