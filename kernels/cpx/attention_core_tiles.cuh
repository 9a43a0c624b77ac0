// SPDX-License-Identifier: Apache-2.0
// Tiles of elements of 16 bits in shared memory, and products of them on tensor cores, of which attention is made.
//
// A row of D elements is 16-byte columns, column c of row r at place c ^ (r & 7): the matrices that a warp loads lie in
// all banks. A warp has 16 rows of a result: lane l has rows l / 4 and l / 4 + 8 and, of every 8 columns, 2 (l % 4) and
// the next, as elements 2r and 2r + 1.
#pragma once

#include <cpx/attention.cuh>
#include <cpx/tensor_cores.cuh>

#include <cstddef>

namespace cpx::kernels::attention {

inline constexpr int core_warps = 8, core_threads = 32 * core_warps;
inline constexpr int core_rows = 16 * core_warps; ///< queries of a block

/// Returns the bytes of shared memory of as many rows of D elements.
__host__ __device__ constexpr int core_bytes(int rows, int D) { return 2 * rows * D; }

/// What a block has in shared memory behind its tiles, in the same array. Beside it, as variables of their own, these
/// would move it: code that is not optimised (-G, -Ofc max) begins an array where variables end, whatever multiple it
/// asks for.
template <class Own, class Seen, int Slots>
struct core_notes {
    Own own;
    array<Seen, Slots> seen; ///< of steps, those ahead, too
    unsigned long long marks;
};

inline constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

/// Returns where 16 bytes of a tile are. It begins at a multiple of its rows' 2D bytes, so that another column, if both
/// are even or the one is 0, is an exclusive or of its 16 times.
template <int D>
__device__ __forceinline__ std::uint32_t in_tile(std::uint32_t tile, int row, int column) {
    return tile + static_cast<std::uint32_t>(row * 2 * D + ((column ^ (row & 7)) << 4));
}

__device__ __forceinline__ int core_lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int core_warp() { return static_cast<int>(threadIdx.x) / 32; }

/// Returns 2^x; what is below 2^-126 is 0.
__device__ __forceinline__ float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/// Begins to copy `dim` columns from `column` on of the tile's rows, and zeros around them.
template <class T, int D, int Rows>
__device__ __forceinline__ void load_core_tile(tile_rows<Rows> const& at, rows<T const> const& from,
                                               std::int64_t column, int dim, std::uint32_t to) {
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < Rows * (D / 8); i += core_threads) {
        int const row = i / (D / 8), c = i % (D / 8);
        bool const there = row < at.count && 8 * c < dim;
        copy_later(in_tile<D>(to, row, c), there ? from.row(at.row[row]) + column + 8 * c : from.data(), there);
    }
}

/// sum = a b^T, of 16 rows of a tile from `row` on and N groups of 8 rows of another one.
template <class T, int D, std::size_t N>
__device__ __forceinline__ void multiply_rows(std::uint32_t a, int row, std::uint32_t b, float (&sum)[N][4]) {
    int const lane = core_lane();
    std::uint32_t const of_a = in_tile<D>(a, row + lane % 16, lane / 16),
                        of_b = in_tile<D>(b, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        std::uint32_t x[4], y[4];
        load_matrices(x, of_a ^ 32 * k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            load_matrices(y, (of_b ^ 32 * k) + 16 * D * n);
            multiply<T>(sum[n], x, y[0], y[1]);
            multiply<T>(sum[n + 1], x, y[2], y[3]);
        }
    }
}

/// sum += a b, of a in registers, rounded, and G groups of 8 columns from `first` on of the 8N rows of a tile. `Wide`:
/// a is rounded as its T but keeps the exponents of float.
template <class T, int D, bool Wide, std::size_t N, std::size_t G>
__device__ __forceinline__ void add_product(float const (&a)[N][4], std::uint32_t b, int first, float (&sum)[G][4]) {
    int const lane = core_lane();
    std::uint32_t const of_b = in_tile<D>(b, lane % 16, lane / 16) ^ static_cast<std::uint32_t>(2 * first);
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        auto const each_group = [&](auto&& f) {
#pragma unroll
            for (int g = 0; g < G; g += 2) {
                std::uint32_t y[4];
                load_transposed(y, (of_b ^ 16 * g) + 16 * D * k);
                f(sum[g], y[0], y[1]);
                f(sum[g + 1], y[2], y[3]);
            }
        };
        if constexpr (Wide && std::is_same_v<T, __half>) {
            std::uint32_t x[2][4]; // columns 2l and 2l + 1 of a, and such rows of b, take the places of l and l + 4
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[half][e] = to_tf32(a[k + half][e % 2 * 2 + e / 2]);
            each_group([&](float(&to)[4], std::uint32_t y0, std::uint32_t y1) {
                array<float, 8> of_b;
                widen<__half, 8>({{y0, y1, 0, 0}}, of_b);
                multiply_tf32(to, x[0], __float_as_uint(of_b[0]), __float_as_uint(of_b[1]));
                multiply_tf32(to, x[1], __float_as_uint(of_b[2]), __float_as_uint(of_b[3]));
            });
        } else {
            std::uint32_t const x[4] = {two_elements<T>(a[k][0], a[k][1]), two_elements<T>(a[k][2], a[k][3]),
                                        two_elements<T>(a[k + 1][0], a[k + 1][1]),
                                        two_elements<T>(a[k + 1][2], a[k + 1][3])};
            each_group([&](float(&to)[4], std::uint32_t y0, std::uint32_t y1) { multiply<T>(to, x, y0, y1); });
        }
    }
}

/// Zeroes what is infinite or NaN in a tile of which some rows see some only: a sum over what they do not see would
/// be NaN, even with weights of 0. Returns the rows, as bits, that had any. `marks`: in shared memory, 0. All threads
/// call it, after a barrier; it ends with one.
template <class T, int D, int Rows>
__device__ __forceinline__ std::uint64_t clear_no_numbers(char* tile, unsigned long long& marks) {
    static_assert(Rows <= 64);
    constexpr std::uint32_t exponent = std::is_same_v<T, __half> ? 0x7c00 : 0x7f80;
    bool found = false;
    auto* const words = reinterpret_cast<std::uint32_t*>(tile);
    for (int i = static_cast<int>(threadIdx.x); i < Rows * D / 2; i += core_threads) {
        std::uint32_t const word = words[i];
        bool const low = (word & exponent) == exponent, high = (word >> 16 & exponent) == exponent;
        if (!low && !high) continue;
        words[i] = word & (low ? 0xffff0000u : ~0u) & (high ? 0xffffu : ~0u);
        atomicOr(&marks, 1ull << (i / (D / 2)));
        found = true;
    }
    if (!__syncthreads_or(found)) return 0;
    std::uint64_t const rows = marks;
    __syncthreads();
    if (threadIdx.x == 0) marks = 0;
    return rows;
}
/// Notes which rows of this lane see what was cleared, for `sees(r, row of the tile)`: their sums are NaN.
template <class F>
__device__ __forceinline__ void spoil(std::uint64_t rows, bool (&spoilt)[2], F const& sees) {
    for (; rows != 0; rows &= rows - 1)
#pragma unroll
        for (int r = 0; r < 2; ++r) spoilt[r] |= sees(r, __ffsll(static_cast<long long>(rows)) - 1);
}

/// Calls `f(row, column of the head, sum, row of this lane)` for the sums of a warp: 16 rows of a tile from `row` on,
/// of the columns from `first` on.
template <int Rows, std::size_t G, class F>
__device__ __forceinline__ void each_core_sum(tile_rows<Rows> const& at, int row, int dim, int first,
                                              float const (&sum)[G][4], F const& f) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int const i = row + core_lane() / 4 + 8 * r;
        if (i >= at.count) continue;
        std::int64_t const place = at.row[i];
#pragma unroll
        for (int g = 0; g < G; ++g)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (first + 8 * g < dim) f(place, first + 8 * g + core_lane() % 4 * 2 + e, sum[g][2 * r + e], r);
    }
}

#endif

} // namespace cpx::kernels::attention
