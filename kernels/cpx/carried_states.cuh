// SPDX-License-Identifier: Apache-2.0
// States and maps of segments: copied, joined and transposed, as many at once as a launch can name.
#pragma once

#include <cpx/launch_list.cuh>
#include <cpx/previous_kernel.cuh>

#include <cstdint>

namespace cpx::kernels {

struct state_copy {
    float const* from; ///< null: zeros
    float* to;
    std::int64_t count;
};

/// A copy for each row of the grid. By 16 bytes where both places are multiples of these: others wait for states.
///
/// The next kernel comes when all blocks have ended, not before: clusters of two that come while these are on every
/// second multiprocessor get one each of two pairs, beside blocks that disturb them, and walk along 40 % slower.
static __global__ void __launch_bounds__(256) copy_states(launch_list<state_copy, 128> const list) {
    wait_for_previous_kernel();
    state_copy const c = list.items[blockIdx.y];
    std::int64_t const step = std::int64_t{gridDim.x} * 256, first = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
    std::int64_t done = 0;
    if ((reinterpret_cast<std::uintptr_t>(c.from) | reinterpret_cast<std::uintptr_t>(c.to)) % 16 == 0) {
        done = c.count / 4 * 4;
#pragma unroll 4
        for (std::int64_t i = first; i < c.count / 4; i += step)
            reinterpret_cast<float4*>(c.to)[i] =
                c.from ? reinterpret_cast<float4 const*>(c.from)[i] : make_float4(0, 0, 0, 0);
    }
    for (std::int64_t i = done + first; i < c.count; i += step) c.to[i] = c.from ? c.from[i] : 0.0f;
}

/// `sum += map x`.
struct state_join {
    float const *map, *x;
    float* sum;
};

/// Sides of a tile of sums of `join_states`, and how many products of each are added between two meetings.
inline constexpr int joined_tile = 64, joined_depth = 32;

/// Adds M X for the heads of a list: M (rows, rows), X and the sum (rows, columns), products in ascending order. A grid
/// of (tiles of 64 by 64, heads, joins) blocks of (32, 8) threads, of which each has four rows and four columns.
static __global__ void __launch_bounds__(256)
    join_states(launch_list<state_join, 128> const list, int rows, int columns) {
    constexpr int tile = joined_tile, depth = joined_depth, loads = tile * depth / 256;
    __shared__ float map[tile][depth + 1];
    __shared__ __align__(16) float x[depth][tile];
    state_join const j = list.items[blockIdx.z];
    int const across = (columns + tile - 1) / tile, lane = static_cast<int>(threadIdx.x);
    int const warp = static_cast<int>(threadIdx.y), thread = warp * 32 + lane;
    int const row0 = static_cast<int>(blockIdx.x) / across * tile,
              column0 = static_cast<int>(blockIdx.x) % across * tile;
    float const* const m = j.map + std::int64_t{blockIdx.y} * rows * rows;
    float const* const from = j.x + std::int64_t{blockIdx.y} * rows * columns;
    float* const to = j.sum + std::int64_t{blockIdx.y} * rows * columns;
    float next_map[loads], next_x[loads]; // on their way while others are multiplied
    auto const load = [&](int inner0) {
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            int const row = row0 + warp + 8 * i, of_row = inner0 + lane;
            next_map[i] = row < rows && of_row < rows ? m[std::int64_t{row} * rows + of_row] : 0.0f;
            int const inner = inner0 + thread / tile + 256 / tile * i, column = column0 + thread % tile;
            next_x[i] = inner < rows && column < columns ? from[std::int64_t{inner} * columns + column] : 0.0f;
        }
    };
    int const row = thread / 16, column = thread % 16 * 4;
    float sum[4][4] = {};
    load(0);
    for (int inner0 = 0; inner0 < rows; inner0 += depth) {
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            map[warp + 8 * i][lane] = next_map[i];
            x[thread / tile + 256 / tile * i][thread % tile] = next_x[i];
        }
        __syncthreads();
        if (inner0 + depth < rows) load(inner0 + depth);
#pragma unroll 4
        for (int k = 0; k < depth; ++k) { // of rows that there are not zeros are added
            float4 const of_x = *reinterpret_cast<float4 const*>(&x[k][column]);
            float const four[4] = {of_x.x, of_x.y, of_x.z, of_x.w};
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) sum[r][c] = fmaf(map[row + 16 * r][k], four[c], sum[r][c]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (row0 + row + 16 * r < rows && column0 + column + c < columns)
                to[std::int64_t{row0 + row + 16 * r} * columns + column0 + column + c] += sum[r][c];
}

/// The same of maps that are `map_rows` numbers, one a row of X, or one for all. A row of the grid for each join, of
/// `count` rows over all heads.
static __global__ void __launch_bounds__(256)
    scale_states(launch_list<state_join, 128> const list, std::int64_t count, int rows, int columns, bool one) {
    state_join const j = list.items[blockIdx.y];
    std::int64_t const step = std::int64_t{gridDim.x} * 256;
    for (std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x; i < count * columns; i += step) {
        std::int64_t const row = i / columns;
        j.sum[i] = fmaf(j.map[one ? row / rows : row], j.x[i], j.sum[i]);
    }
}

/// Transposes matrices of `n` rows and columns. A grid of (tiles of 32 by 32, heads, copies) blocks of (32, 8) threads.
static __global__ void __launch_bounds__(256) transpose_maps(launch_list<state_copy, 128> const list, int n) {
    __shared__ float tile[32][33];
    state_copy const c = list.items[blockIdx.z];
    int const across = (n + 31) / 32, lane = static_cast<int>(threadIdx.x);
    int const row0 = static_cast<int>(blockIdx.x) / across * 32, column0 = static_cast<int>(blockIdx.x) % across * 32;
    std::int64_t const head = std::int64_t{blockIdx.y} * n * n;
    for (int i = static_cast<int>(threadIdx.y); i < 32; i += 8)
        if (row0 + i < n && column0 + lane < n)
            tile[i][lane] = c.from[head + std::int64_t{row0 + i} * n + column0 + lane];
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.y); i < 32; i += 8)
        if (column0 + i < n && row0 + lane < n)
            c.to[head + std::int64_t{column0 + i} * n + row0 + lane] = tile[lane][i];
}

} // namespace cpx::kernels
