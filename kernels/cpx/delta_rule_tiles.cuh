// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit elements in shared memory and warpgroup products of them (sm_90a), by CUTLASS's wrappers.
#pragma once

#include <cpx/delta_rule_barriers.cuh>
#include <cpx/delta_rule_numbers.cuh>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/reg_reconfig.h>

#include <cuda/ptx>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace cpx::kernels::delta {

using cute::SM90::GMMA::ScaleOut;

/// A panel is 64 rows of 64 elements; column c of 8 elements of row r is at byte r 128 + ((c ^ (r & 7)) << 4), as the
/// copy engine's 128-byte swizzle has it. It begins at a multiple of 1024 bytes.
inline constexpr int panel_bytes = 8192;

__device__ __forceinline__ int swizzled(int row, int column) { return row * 128 + ((column ^ (row & 7)) << 4); }

/// Returns 2^x; what is below 2^-126 is 0.
__device__ __forceinline__ float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/// Returns where an operand of tensor cores begins, for its description, in units of 16 bytes of the block's own shared
/// memory: an address has the block's number in its cluster above that.
__device__ __forceinline__ std::uint64_t operand_at(void const* place) {
    return (cute::cast_smem_ptr_to_uint(place) & 0x3ffff) >> 4;
}

/// Describes a panel, or more of them one after the other, as an operand whose rows are 16 elements of the sum: at
/// 64-element panels along the sum. Step k of 16 begins `(k % 4) * 32` bytes into panel k / 4.
__device__ __forceinline__ std::uint64_t along_rows(void const* panel) {
    return operand_at(panel) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
/// The same, transposed: the sum goes down the rows, step k of 16 begins 2048 k bytes into the first panel; panels are
/// side by side in the other direction.
__device__ __forceinline__ std::uint64_t down_rows(void const* panel) {
    return operand_at(panel) | std::uint64_t{panel_bytes >> 4} << 16 | 64ull << 32 | 1ull << 62;
}
/// Returns the description of what lies `bytes` further on; only its lower half differs.
__device__ __forceinline__ std::uint64_t further(std::uint64_t first, int bytes) {
    return first & 0xffffffff00000000ull | static_cast<std::uint32_t>(first) + static_cast<std::uint32_t>(bytes >> 4);
}
__device__ __forceinline__ std::uint64_t step_along(std::uint64_t first, int k) {
    return further(first, k / 4 * panel_bytes + k % 4 * 32);
}
__device__ __forceinline__ std::uint64_t step_down(std::uint64_t first, int k) { return further(first, k * 2048); }

/// A state of 16-bit elements in memory: cores of 8 value channels by 8 key channels, 128 bytes, by rows; 16 cores side
/// by side have all key channels of 8 value channels. A warp has a core as one word of an operand.
inline constexpr int cores_bytes = 16 * 128, state_bytes = 16 * cores_bytes;

/// Describes a state as an operand whose rows are key channels, 16 a step: 256 bytes.
__device__ __forceinline__ std::uint64_t along_cores(void const* state) {
    return operand_at(state) | std::uint64_t{128 >> 4} << 16 | std::uint64_t{cores_bytes >> 4} << 32;
}
/// The same, transposed: the sum goes over value channels, 16 a step: two times `cores_bytes`.
__device__ __forceinline__ std::uint64_t down_cores(void const* state) {
    return operand_at(state) | std::uint64_t{cores_bytes >> 4} << 16 | std::uint64_t{128 >> 4} << 32;
}

/// A lower triangle of 64 x 64 elements is four strips of 16 columns, side by side, of rows of 32 bytes, in the copy
/// engine's 32-byte swizzle. Memory leaves out strip j's first 16 j rows, which are zeros; in shared memory they are
/// there from the beginning on.
inline constexpr int strip_bytes = 64 * 32, triangle_bytes = strip_bytes * 10 / 4;

/// Returns where 8 elements of a triangle in shared memory are, column c of them.
__device__ __forceinline__ int in_triangle(int row, int column) {
    return column / 2 * strip_bytes + row * 32 + ((column % 2 ^ (row >> 2 & 1)) << 4);
}
/// Describes a triangle as an operand whose sum goes along its rows: step k of 16 is strip k. And transposed: step k
/// begins 512 k bytes into the first one.
__device__ __forceinline__ std::uint64_t along_triangle(void const* triangle) {
    return operand_at(triangle) | 1ull << 16 | 16ull << 32 | 3ull << 62;
}
__device__ __forceinline__ std::uint64_t down_triangle(void const* triangle) {
    return operand_at(triangle) | std::uint64_t{strip_bytes >> 4} << 16 | 16ull << 32 | 3ull << 62;
}

/// Calls `f(place in shared memory, place in memory, bytes)` for what memory has of each strip.
template <class F>
__device__ __forceinline__ void for_each_strip(F&& f) {
    int from = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        int const skipped = j * strip_bytes / 4;
        f(j * strip_bytes + skipped, from, strip_bytes - skipped);
        from += strip_bytes - skipped;
    }
}
/// Zeroes what memory leaves out of N triangles, by a block, before it joins its threads.
template <std::size_t N>
__device__ __forceinline__ void clear_triangles(char (&triangles)[N][panel_bytes]) {
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(N) * 192; i += static_cast<int>(blockDim.x)) {
        int const number = i % 192, strip = number < 32 ? 1 : number < 96 ? 2 : 3; // of 512, 1024 and 1536 bytes
        int const at = strip * strip_bytes + (number - 16 * strip * (strip - 1)) * 16;
        *reinterpret_cast<uint4*>(triangles[i / 192] + at) = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
}
/// Copies a triangle from memory.
__device__ __forceinline__ void load_triangle(char const* memory, barrier& full, char* triangle) {
    for_each_strip([&](int to, int from, int bytes) {
        cute::SM90_BULK_COPY_G2S::copy(memory + from, reinterpret_cast<std::uint64_t*>(&full), triangle + to, bytes);
    });
}

/// Keeps the compiler from moving uses of accumulators across.
template <std::size_t N>
__device__ __forceinline__ void keep(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) cute::warpgroup_fence_operand(x[i]);
}

template <class Mma, std::size_t N, std::size_t... I>
__device__ __forceinline__ void fma_registers(float (&sum)[N], std::uint32_t const* a, std::uint64_t b, ScaleOut scale,
                                              std::index_sequence<I...>) {
    Mma::fma(a[0], a[1], a[2], a[3], b, sum[I]..., scale);
}
template <class Mma, std::size_t N, std::size_t... I>
__device__ __forceinline__ void fma_shared(float (&sum)[N], std::uint64_t a, std::uint64_t b, ScaleOut scale,
                                           std::index_sequence<I...>) {
    Mma::fma(a, b, sum[I]..., scale);
}

/// sum (+)= a b^T over 16 Steps, a in registers, b's rows along the sum. Issued, not awaited. `Apart`: so many steps
/// are under way while what the others read of a is computed; without it the compiler has all of a first.
template <class T, int Steps, int Apart = 0, std::size_t N>
__device__ __forceinline__ void multiply_along(float (&sum)[N], std::uint32_t const* a, void const* b, bool add) {
    std::uint64_t const first = along_rows(b);
#pragma unroll
    for (int k = 0; k < Steps; ++k) {
        if (Apart > 0 && k == Apart) cute::warpgroup_arrive();
        fma_registers<registers_by<T, Major::K, N>>(sum, a + 4 * k, step_along(first, k),
                                                    add || k ? ScaleOut::One : ScaleOut::Zero,
                                                    std::make_index_sequence<N>());
    }
}
/// sum (+)= a b over 64, a in registers, the sum going down the rows of b. Apart: as above.
template <class T, int Apart = 0, std::size_t N>
__device__ __forceinline__ void multiply_down(float (&sum)[N], std::uint32_t const* a, void const* b, bool add) {
    std::uint64_t const first = down_rows(b);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (Apart > 0 && k == Apart) cute::warpgroup_arrive();
        fma_registers<registers_by<T, Major::MN, N>>(sum, a + 4 * k, step_down(first, k),
                                                     add || k ? ScaleOut::One : ScaleOut::Zero,
                                                     std::make_index_sequence<N>());
    }
}

/// sum (+)= a b over 16 Steps, both panels: Major::K says that the sum goes along an operand's rows, Major::MN down
/// them. Issued, not awaited.
template <class T, Major A, Major B, int Steps, std::size_t N>
__device__ __forceinline__ void multiply_panels(float (&sum)[N], void const* a, void const* b, bool add) {
    std::uint64_t const left = A == Major::K ? along_rows(a) : down_rows(a);
    std::uint64_t const right = B == Major::K ? along_rows(b) : down_rows(b);
#pragma unroll
    for (int k = 0; k < Steps; ++k)
        fma_shared<shared_by<T, A, B, N>>(sum, A == Major::K ? step_along(left, k) : step_down(left, k),
                                          B == Major::K ? step_along(right, k) : step_down(right, k),
                                          add || k ? ScaleOut::One : ScaleOut::Zero, std::make_index_sequence<N>());
}

/// sum = a b^T over 128, of key channels: a in panels, b the value channels of a state from core row `state` on.
template <class T, std::size_t N>
__device__ __forceinline__ void multiply_keys(float (&sum)[N], char const* a, char const* state) {
    std::uint64_t const left = along_rows(a), right = along_cores(state);
#pragma unroll
    for (int k = 0; k < 8; ++k)
        fma_shared<shared_by<T, Major::K, Major::K, N>>(sum, step_along(left, k), further(right, 256 * k),
                                                        k ? ScaleOut::One : ScaleOut::Zero,
                                                        std::make_index_sequence<N>());
}
/// sum (+)= a b over 128, of value channels: b the key channels of a state from core `state` on, a in panels or in
/// registers.
template <class T, std::size_t N>
__device__ __forceinline__ void multiply_values(float (&sum)[N], char const* a, char const* state) {
    std::uint64_t const left = along_rows(a), right = down_cores(state);
#pragma unroll
    for (int k = 0; k < 8; ++k)
        fma_shared<shared_by<T, Major::K, Major::MN, N>>(sum, step_along(left, k), further(right, 2 * k * cores_bytes),
                                                         k ? ScaleOut::One : ScaleOut::Zero,
                                                         std::make_index_sequence<N>());
}
template <class T, std::size_t N>
__device__ __forceinline__ void multiply_values(float (&sum)[N], std::uint32_t const* a, char const* state, bool add) {
    std::uint64_t const right = down_cores(state);
#pragma unroll
    for (int k = 0; k < 8; ++k)
        fma_registers<registers_by<T, Major::MN, N>>(sum, a + 4 * k, further(right, 2 * k * cores_bytes),
                                                     add || k ? ScaleOut::One : ScaleOut::Zero,
                                                     std::make_index_sequence<N>());
}

/// sum (+)= a b, a in registers, b a triangle.
template <class T>
__device__ __forceinline__ void multiply_triangle(float (&sum)[32], std::uint32_t const* a, char const* b, bool add) {
    std::uint64_t const right = down_triangle(b);
#pragma unroll
    for (int k = 0; k < 4; ++k)
        fma_registers<registers_by<T, Major::MN, 32>>(sum, a + 4 * k, further(right, 512 * k),
                                                      add || k ? ScaleOut::One : ScaleOut::Zero,
                                                      std::make_index_sequence<32>());
}
/// sum = a b over 64, one of them a triangle, the other a panel: Major::K says that the sum goes along an operand's
/// rows, Major::MN down them.
template <class T, Major A, Major B, bool LeftIsTriangle>
__device__ __forceinline__ void multiply_squares(float (&sum)[32], char const* a, char const* b) {
    auto const along = [](char const* x, bool triangle, int k) {
        return triangle ? further(along_triangle(x), k * strip_bytes) : step_along(along_rows(x), k);
    };
    auto const down = [](char const* x, bool triangle, int k) {
        return triangle ? further(down_triangle(x), 512 * k) : step_down(down_rows(x), k);
    };
#pragma unroll
    for (int k = 0; k < 4; ++k)
        fma_shared<shared_64<T, A, B>>(sum, A == Major::K ? along(a, LeftIsTriangle, k) : down(a, LeftIsTriangle, k),
                                       B == Major::K ? along(b, !LeftIsTriangle, k) : down(b, !LeftIsTriangle, k),
                                       k ? ScaleOut::One : ScaleOut::Zero, std::make_index_sequence<32>());
}

/// Returns the thread's number; what is made of it is not kept in registers from one call to the next.
__device__ __forceinline__ unsigned thread_again() {
    unsigned thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

/// Where a lane's 16 bytes are for words 4i to 4i + 3 of an operand of 64 rows, of which a warp has 16.
__device__ __forceinline__ int place_straight(int i, unsigned thread = threadIdx.x) {
    int const lane = thread % 32, warp = thread / 32 % 4;
    return swizzled(16 * warp + lane % 16, lane / 16) ^ 32 * i;
}
/// The same in a panel that holds the operand's transpose.
__device__ __forceinline__ int place_transposed(int i, unsigned thread = threadIdx.x) {
    int const lane = thread % 32, warp = thread / 32 % 4;
    return swizzled(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2) + 2048 * i;
}

/// Writes 16 words of an operand to a panel.
__device__ __forceinline__ void store_operand(std::uint32_t const* a, char* panel, unsigned thread = threadIdx.x) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        cute::SM90_U32x4_STSM_N::copy(a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                                      *reinterpret_cast<cute::uint128_t*>(panel + place_straight(i, thread)));
}
/// Sends the 16 rows of a panel that a warp has written, and fenced, to the same place in another block of the cluster,
/// whose warp of that number sends as many here, of another panel. Each barrier `full` awaits what comes to its block.
__device__ __forceinline__ void share_rows(char* panel, barrier& full, int block) {
    constexpr std::uint32_t bytes = panel_bytes / 4;
    char* const rows = panel + threadIdx.x / 32 % 4 * bytes;
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    full.expect_transaction(bytes);
    ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_cluster, ::cuda::ptx::space_shared, of_block(rows, block), rows,
                               bytes, reinterpret_cast<std::uint64_t*>(of_block(&full, block)));
}
__device__ __forceinline__ void load_operand(char const* panel, std::uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(panel + place_straight(i)), a[4 * i],
                                      a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]);
}
/// The same from a triangle.
__device__ __forceinline__ void load_triangle_operand(char const* triangle, std::uint32_t* a,
                                                      unsigned thread = threadIdx.x) {
    int const lane = thread % 32, row = thread / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        cute::SM75_U32x4_LDSM_N::copy(
            *reinterpret_cast<cute::uint128_t const*>(triangle + in_triangle(row, 2 * i + lane / 16)), a[4 * i],
            a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]);
}
/// Its transpose.
__device__ __forceinline__ void load_triangle_transposed(char const* triangle, std::uint32_t (&a)[16],
                                                         unsigned thread = threadIdx.x) {
    int const lane = thread % 32, warp = thread / 32 % 4;
    char const* const from = triangle + in_triangle(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(from + 512 * i), a[4 * i], a[4 * i + 1],
                                      a[4 * i + 2], a[4 * i + 3]);
}
__device__ __forceinline__ void store_transposed(std::uint32_t const (&a)[16], char* panel) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        cute::SM90_U16x8_STSM_T::copy(a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                                      *reinterpret_cast<cute::uint128_t*>(panel + place_transposed(i)));
}
__device__ __forceinline__ void load_transposed(char const* panel, std::uint32_t (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(panel + place_transposed(i)), a[4 * i],
                                      a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]);
}

/// Zeroes rows of a panel from n on, by a warp, before tensor cores read them: they may be another sequence's, and sums
/// go over them.
__device__ __forceinline__ void clear_rows(char* panel, int n) {
#pragma unroll 1
    for (int i = n * 8 + static_cast<int>(threadIdx.x % 32); i < 512; i += 32)
        *reinterpret_cast<uint4*>(panel + swizzled(i / 8, i % 8)) = make_uint4(0, 0, 0, 0);
}

/// Copies panels of a head's rows from `row` on: panel `first` of its channels and, side by side, those after it.
/// Heads may have less than 128 channels: what is beyond them is zero, as are heads and rows that there are not.
template <int Panels>
__device__ __forceinline__ void load_panels(CUtensorMap const& map, barrier& full, char* to, int head, int row,
                                            int first = 0) {
#pragma unroll
    for (int p = 0; p < Panels; ++p)
        cute::SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<std::uint64_t*>(&full),
                                     static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     to + p * panel_bytes, 64 * (first + p), row, head);
}

} // namespace cpx::kernels::delta
