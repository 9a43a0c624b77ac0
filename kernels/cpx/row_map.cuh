// SPDX-License-Identifier: Apache-2.0
// Which token lives in which row of a rank: a table of segments, which may be computed from policies and cu_seqlens.
#pragma once

#include <cpx/core/search.hpp>
#include <cpx/layout/algorithm.hpp>

#include <cpx/previous_kernel.cuh>

#include <limits>

namespace cpx::kernels {

/// A segment as rows see it: row `row` is token `token`, and the rows after it go on, until the next segment begins.
struct segment_begin {
    index_t row, token;
};

/// Returns the token of a row, of `count` segments that ascend by row. Of those that begin in one row, the last counts.
__device__ __forceinline__ index_t token_of(segment_begin const* segments, int count, index_t row) {
    segment_begin const s = segments[last_at_or_before(row, count, [&](int i) { return segments[i].row; })];
    return s.token + row - s.row;
}

/// Writes where the chunks of a rank begin, empty ones too, in every sequence of `offsets`, cu_seqlens of `sequences`
/// sequences; behind them, up to `capacity`, segments in which no row lies. One warp. Offsets that descend make
/// sequences without tokens.
template <listed_layout P, cut Cut, class I>
__global__ void __launch_bounds__(32) find_segments(P const policy, Cut const cut, int rank, I const* offsets,
                                                    int sequences, segment_begin* segments, int capacity) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    int const lane = static_cast<int>(threadIdx.x), chunks = policy.chunks(rank);
    index_t before = 0; // rows of the sequences before those of the warp
    for (int first = 0; first < sequences; first += 32) {
        int const s = first + lane;
        index_t const length = s < sequences ? index_t{offsets[s + 1]} - index_t{offsets[s]} : 0;
        index_t const n = length > 0 ? length : 0, own = rows_of(policy, rank, n, cut);
        index_t sum = own;
        for (int step = 1; step < 32; step *= 2) {
            index_t const left = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += left;
        }
        index_t row = before + sum - own;
        for (int i = 0; i < chunks && s < sequences; ++i) {
            range const tokens = tokens_of(policy, policy.chunk(rank, i), n, cut);
            segments[s * chunks + i] = {row, tokens.first};
            row += tokens.size();
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    for (int i = sequences * chunks + lane; i < capacity; i += 32)
        segments[i] = {std::numeric_limits<index_t>::max(), 0};
}

} // namespace cpx::kernels
