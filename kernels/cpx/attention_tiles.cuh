// SPDX-License-Identifier: Apache-2.0
// Tiles of queries and keys in shared memory, from which attention is computed.
#pragma once

#include <cpx/core/rows.hpp>
#include <cpx/core/search.hpp>
#include <cpx/pack.cuh>

#include <cstdint>

namespace cpx::kernels {

/// Where the rows of a rank stand in their sequences. Places number them in the order of sequences and tokens.
struct attended_places {
    std::int64_t const *first, *first_tile;  ///< place and tile of every sequence, and their numbers at the end
    std::int64_t const *place, *row, *token; ///< of every segment, by its first place
    int sequences, segments;

    /// Returns the segment of a place that there is.
    __device__ int segment_of(std::int64_t at) const {
        return last_at_or_before(at, segments, [&](int i) { return place[i]; });
    }
    __device__ std::int64_t token_of(std::int64_t at) const {
        int const s = segment_of(at);
        return token[s] + at - place[s];
    }
    /// Returns the first place of a sequence whose token is not before `from`; the next sequence's, if there is none.
    __device__ std::int64_t place_from(int sequence, std::int64_t from) const {
        std::int64_t const begin = first[sequence], count = first[sequence + 1] - begin;
        if (count == 0 || token_of(begin) >= from) return begin;
        return begin + 1 + last_at_or_before(from - 1, count, [&](std::int64_t i) { return token_of(begin + i); });
    }
};

namespace attention {

inline constexpr int tile = 32, warps = 8, threads = 32 * warps; ///< rows of a tile; of a block
inline constexpr int own_rows = tile / warps;                    ///< of a tile, that a warp has: w, w + 8, ...

/// Returns the floats from a row of a tile to the next: bits of 16 bytes of neighbouring rows lie in other banks.
__host__ __device__ constexpr int tile_stride(int dim) { return ((dim + 3) / 4 | 1) * 4; }
/// Returns the bytes of shared memory of a block that holds `count` tiles of heads and two of scores.
constexpr int tile_bytes(int count, std::int64_t dim) {
    return 4 * (count * tile * tile_stride(static_cast<int>(dim)) + 2 * tile * (tile + 1));
}

/// Which rows a tile of as many has; rows behind the last are none.
template <int Rows = tile>
struct tile_rows {
    array<std::int64_t, Rows> row, token;
    int count;

    /// All threads call it, before and after a barrier.
    __device__ void find(attended_places const& of, std::int64_t place, std::int64_t end) {
        int const i = static_cast<int>(threadIdx.x);
        if (i == 0) count = static_cast<int>(min(end - place, std::int64_t{Rows}));
        if (i < Rows && place + i < end) {
            int const s = of.segment_of(place + i);
            row[i] = of.row[s] + place + i - of.place[s];
            token[i] = of.token[s] + place + i - of.place[s];
        }
    }
    __device__ std::int64_t last_token() const { return token[count - 1]; }
};

/// Copies `dim` columns from `column` on of a tile's rows, with zeros around them up to a multiple of 4.
template <class T>
__device__ void load_tile(tile_rows<> const& at, rows<T const> const& from, std::int64_t column, int dim, float* to) {
    int const stride = tile_stride(dim), wide = (dim + 3) / 4 * 4;
    for (int i = static_cast<int>(threadIdx.x) / 32; i < tile; i += warps) {
        T const* const row = i < at.count ? from.row(at.row[i]) + column : nullptr;
        for (int d = static_cast<int>(threadIdx.x) % 32; d < wide; d += 32)
            to[i * stride + d] = row && d < dim ? widen(row[d]) : 0.0f;
    }
}

/// Writes `scores(i, j) = a_i . b_j`, each by one thread, columns ascending: the same bits whatever else is in a tile.
__device__ inline void multiply_tiles(float const* a, float const* b, int dim, float* scores) {
    int const stride = tile_stride(dim), i = static_cast<int>(threadIdx.x) / 16, j = static_cast<int>(threadIdx.x) % 16;
    float sum[2][2] = {};
    for (int d = 0; d < dim; d += 4) {
        float4 x[2], y[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            x[r] = *reinterpret_cast<float4 const*>(a + (i + 16 * r) * stride + d);
            y[r] = *reinterpret_cast<float4 const*>(b + (j + 16 * r) * stride + d);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                sum[r][c] = fmaf(x[r].x, y[c].x, sum[r][c]);
                sum[r][c] = fmaf(x[r].y, y[c].y, sum[r][c]);
                sum[r][c] = fmaf(x[r].z, y[c].z, sum[r][c]);
                sum[r][c] = fmaf(x[r].w, y[c].w, sum[r][c]);
            }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) scores[(i + 16 * r) * (tile + 1) + j + 16 * c] = sum[r][c];
}

/// A warp's rows of a result: lane l has columns l, l + 32, ... of each.
template <int C>
struct own_sums {
    array<float, own_rows, C> of;

    __device__ own_sums() { fill(0.0f); }
    __device__ void fill(float x) {
#pragma unroll
        for (int r = 0; r < own_rows; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c) of[r][c] = x;
    }
    __device__ static int row(int r) { return static_cast<int>(threadIdx.x) / 32 + warps * r; }
    __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

    /// Adds `sum_j weights(row, j) x_j` over j in [begin[r], end[r]), ascending, one after the other.
    __device__ void add(float const* weights, float const* x, int dim, int const (&begin)[own_rows],
                        int const (&end)[own_rows]) {
        int const stride = tile_stride(dim);
        int first = tile, last = 0;
#pragma unroll
        for (int r = 0; r < own_rows; ++r) {
            first = min(first, begin[r]);
            last = max(last, end[r]);
        }
        for (int j = first; j < last; ++j) {
            float column[C];
#pragma unroll
            for (int c = 0; c < C; ++c) column[c] = lane() + 32 * c < dim ? x[j * stride + lane() + 32 * c] : 0.0f;
#pragma unroll
            for (int r = 0; r < own_rows; ++r) {
                if (j < begin[r] || j >= end[r]) continue; // what is masked may be NaN
                float const weight = weights[row(r) * (tile + 1) + j];
#pragma unroll
                for (int c = 0; c < C; ++c) of[r][c] = fmaf(weight, column[c], of[r][c]);
            }
        }
    }
    __device__ void add(own_sums const& other) {
#pragma unroll
        for (int r = 0; r < own_rows; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c) of[r][c] += other.of[r][c];
    }
    template <class T>
    __device__ void write(tile_rows<> const& at, rows<T> const& to, std::int64_t column, int dim) const {
#pragma unroll
        for (int r = 0; r < own_rows; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c)
                if (row(r) < at.count && lane() + 32 * c < dim)
                    to.row(at.row[row(r)])[column + lane() + 32 * c] = static_cast<T>(of[r][c]);
    }
};

} // namespace attention

} // namespace cpx::kernels
