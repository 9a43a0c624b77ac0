// SPDX-License-Identifier: Apache-2.0
// Places: a rank's rows numbered in the order of sequences and tokens, as kernels of attention read them.
#pragma once

#include <cpx/plan/segments.hpp>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace cpx {

/// Where a rank's rows stand, in tiles of so many places, each of one sequence. Cost: O(segments log segments +
/// sequences).
struct place_lists {
    std::vector<index_t> first, first_tile; ///< place and tile of every sequence, and their numbers at the end
    std::vector<index_t> place, row, token; ///< of every segment, by its first place

    template <any_sharding S>
    place_lists(S const& sharding, int rank, index_t rows_of_tile, caller here = caller::here()) {
        auto list = segments(sharding, rank, here);
        std::ranges::sort(list, {}, [](segment const& s) { return std::pair(s.sequence, s.token); });
        auto const sequences = static_cast<std::size_t>(sharding.batch().sequences());
        first.resize(sequences + 1);
        first_tile.resize(sequences + 1);
        index_t count = 0;
        for (segment const& s : list) {
            place.push_back(count);
            row.push_back(s.row);
            token.push_back(s.token);
            first[static_cast<std::size_t>(s.sequence) + 1] += s.count;
            count += s.count;
        }
        for (std::size_t s = 0; s < sequences; ++s) {
            first_tile[s + 1] = first_tile[s] + (first[s + 1] + rows_of_tile - 1) / rows_of_tile;
            first[s + 1] += first[s];
        }
    }
    index_t tiles() const { return first_tile.back(); }
};

} // namespace cpx
