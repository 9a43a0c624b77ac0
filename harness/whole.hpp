// SPDX-License-Identifier: Apache-2.0
// Whole tensors whose every element is known, and what a rank holds of them.
#pragma once

#include <cpx/cpx.hpp>

#include <algorithm>
#include <vector>

namespace whole {

using cpx::index_t;

/// A number for every element of the whole tensor.
template <class T>
T element(index_t row, index_t column) {
    return static_cast<T>((row * 1009 + column * 31 + 7) % 65521);
}

/// Returns the columns of whole rows that `rank` holds, in local order.
template <class S>
std::vector<index_t> columns(S const& s, int rank, std::vector<cpx::section> const& sections) {
    std::vector<index_t> held;
    index_t first = 0;
    for (cpx::section const& group : sections) {
        cpx::range const heads = s.heads(rank, group.heads);
        for (index_t c = heads.first * group.width; c < heads.last * group.width; ++c) held.push_back(first + c);
        first += group.heads * group.width;
    }
    return held;
}

/// Returns what `rank` holds of the whole tensor, rows `stride` apart.
template <class T, class S>
std::vector<T> take(S const& s, int rank, std::vector<cpx::section> const& sections, index_t stride = 0) {
    auto const held = columns(s, rank, sections);
    stride = std::max<index_t>(stride, std::ssize(held));
    std::vector<T> local(static_cast<std::size_t>(s.rows(rank) * stride));
    index_t row = 0;
    s.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t g = piece.first; g < piece.last; ++g, ++row)
            for (std::size_t c = 0; c < held.size(); ++c)
                local[static_cast<std::size_t>(row * stride) + c] = element<T>(g, held[c]);
    });
    return local;
}

} // namespace whole
