// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of the heads of several tensors that share their rows' positions.
#pragma once

#include <cpx/neighbours.cuh>
#include <cpx/previous_kernel.cuh>
#include <cpx/row_map.cuh>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

namespace cpx::kernels {

/// Positions of rows: of three kinds, the first that is not null counts.
struct row_positions {
    std::int64_t const* wide; ///< (1 or 3, rows)
    std::int32_t const* narrow;
    segment_begin const* segments; ///< ascending by row
    index_t axis_stride;           ///< numbers from axis to axis, 0: one position a row
    int segment_count;
};

/// Heads side by side in rows of x, and where they go; y may be x.
struct rotated_rows {
    char const* x;
    char* y;
    index_t x_stride, y_stride; ///< bytes from row to row
    int first_head;             ///< heads of the tensors before this one
};

inline constexpr int most_rotated = 4;

struct rotary_call {
    rotated_rows tensor[most_rotated]; ///< of those that are not there `first_head` is `heads`
    row_positions positions;
    std::uint64_t const* turns; ///< (half): turns from one position to the next, times 2^64
    std::uint8_t const* axes;   ///< (half): whose position turns a pair; null: the first
    index_t rows;
    int heads;                     ///< of all tensors
    int lanes;                     ///< threads of a block beside each other in a head
    int head_bytes, half, rotated; ///< rotated: channels of a head that are turned, 2 * half
    int others;                    ///< channels of a head that are not turned and move, 0: none do
    float direction;               ///< 1, or -1 to turn back
    bool round_each; ///< cosine and sine, each product and their sum are rounded to T, and not the result alone
};

/// Heads of a thread, most threads of a block, and blocks of a multiprocessor at once: the fastest on an H200.
inline constexpr int rotary_heads = 3, rotary_threads = 128, rotary_resident = 8;

/// The most angles that a block computes, for all of its heads: rows times pairs.
inline constexpr int most_angles = 8 * rotary_threads;

/// Returns the position of a row on an axis.
__device__ __forceinline__ std::uint64_t position(row_positions const& p, index_t row, int axis) {
    if (p.wide) return static_cast<std::uint64_t>(p.wide[axis * p.axis_stride + row]);
    if (p.narrow) return static_cast<std::uint64_t>(static_cast<index_t>(p.narrow[axis * p.axis_stride + row]));
    return static_cast<std::uint64_t>(token_of(p.segments, p.segment_count, row));
}

/// Reads what is touched once. WholeLine: other threads want the rest of its line of 128 bytes, so the memory is asked
/// for the line at once; asking for half of it at a time costs 3 % of the kernel on an H200.
template <bool WholeLine, class Words>
__device__ __forceinline__ Words read_once(void const* from) {
    if constexpr (sizeof(Words) < 16) {
        return *static_cast<Words const*>(from);
    } else {
        Words v;
        auto& e = v.element;
        if constexpr (WholeLine)
            asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3])
                         : "l"(from));
        else
            asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3])
                         : "l"(from));
        return v;
    }
}
template <class Words>
__device__ __forceinline__ void write_once(void* to, Words const& v) {
    if constexpr (sizeof(Words) == 16)
        asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.element[0]),
                     "r"(v.element[1]), "r"(v.element[2]), "r"(v.element[3])
                     : "memory");
    else
        *static_cast<Words*>(to) = v;
}

__device__ __forceinline__ float2 pair_of(__nv_bfloat16, std::uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ __forceinline__ float2 pair_of(__half, std::uint32_t word) {
    __half2 both;
    std::memcpy(&both, &word, sizeof word);
    return __half22float2(both);
}
__device__ __forceinline__ std::uint32_t word_of(__nv_bfloat16, float2 pair) {
    __nv_bfloat162 const both = __float22bfloat162_rn(pair);
    std::uint32_t word;
    std::memcpy(&word, &both, sizeof word);
    return word;
}
__device__ __forceinline__ std::uint32_t word_of(__half, float2 pair) {
    __half2 const both = __float22half2_rn(pair);
    std::uint32_t word;
    std::memcpy(&word, &both, sizeof word);
    return word;
}

template <class T>
__device__ __forceinline__ float rounded_to(float value) {
    return static_cast<float>(static_cast<T>(value));
}

/// Returns a channel turned with the other one of its pair, by float: the same bits in all kernels.
template <class T, bool RoundEach>
__device__ __forceinline__ float turned(float own, float other, float cosine, float signed_sine) {
    float const second = __fmul_rn(other, signed_sine);
    if constexpr (RoundEach) return rounded_to<T>(__fmul_rn(own, cosine)) + rounded_to<T>(second);
    return fmaf(own, cosine, second);
}

/// Calls f with whether each operation is rounded, as a constant: of elements of 32 bits float's own rounding is all.
template <class T, class F>
__device__ __forceinline__ void with_rounding(rotary_call const& a, F&& f) {
    if constexpr (sizeof(T) < 4)
        if (a.round_each) return f(std::true_type());
    f(std::false_type());
}

/// Rotates the low and the high halves' elements in place.
template <class T, int N, bool RoundEach, class Words>
__device__ __forceinline__ void turn(Words& low, Words& high, array<float, N> const& cosine,
                                     array<float, N> const& sine) {
    auto const rotate = [&](float& a, float& b, int k) {
        float const was = a;
        a = turned<T, RoundEach>(was, b, cosine[k], -sine[k]);
        b = turned<T, RoundEach>(b, was, cosine[k], sine[k]);
    };
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            float a = __uint_as_float(low.element[k]), b = __uint_as_float(high.element[k]);
            rotate(a, b, k);
            low.element[k] = __float_as_uint(a), high.element[k] = __float_as_uint(b);
        }
    } else if constexpr (N == 1) {
        float2 a = pair_of(T(), low.element[0]), b = pair_of(T(), high.element[0]);
        rotate(a.x, b.x, 0);
        low.element[0] = static_cast<std::uint16_t>(word_of(T(), a));
        high.element[0] = static_cast<std::uint16_t>(word_of(T(), b));
    } else {
#pragma unroll
        for (int w = 0; w < N / 2; ++w) {
            float2 a = pair_of(T(), low.element[w]), b = pair_of(T(), high.element[w]);
            rotate(a.x, b.x, 2 * w);
            rotate(a.y, b.y, 2 * w + 1);
            low.element[w] = word_of(T(), a), high.element[w] = word_of(T(), b);
        }
    }
}

/// Computes the cosine and the sine of the angle of a pair of a row.
template <class T>
__device__ __forceinline__ void find_angle(rotary_call const& a, index_t row, int pair, float& cosine, float& sine) {
    std::uint64_t const here = position(a.positions, row, a.axes ? a.axes[pair] : 0);
    auto const turn = static_cast<int>((here * a.turns[pair]) >> 32); // 2^32 is a turn, 2^31 is pi
    sincospif(static_cast<float>(turn) * 0x1p-31f, &sine, &cosine);
    sine *= a.direction;
    if constexpr (sizeof(T) < 4)
        if (a.round_each) cosine = rounded_to<T>(cosine), sine = rounded_to<T>(sine);
}

/// Where the heads of a row are.
struct heads_of_row {
    rotary_call const& a;
    index_t row;

    __device__ __forceinline__ rotated_rows const& tensor_of(int head) const {
        int t = 0;
#pragma unroll
        for (int k = 1; k < most_rotated; ++k) t += head >= a.tensor[k].first_head;
        return a.tensor[t];
    }
    template <class T>
    __device__ __forceinline__ T const* source(rotated_rows const& t, int head) const {
        return reinterpret_cast<T const*>(t.x + row * t.x_stride +
                                          static_cast<index_t>(head - t.first_head) * a.head_bytes);
    }
    template <class T>
    __device__ __forceinline__ T* target(rotated_rows const& t, int head) const {
        return reinterpret_cast<T*>(t.y + row * t.y_stride + static_cast<index_t>(head - t.first_head) * a.head_bytes);
    }
};

/// Copies what is not turned of heads `[first, last)`, N channels at once, unless y is x: by `across` threads.
template <class T, int N>
__device__ __forceinline__ void copy_others(heads_of_row const& of, int first, int last, int across) {
    using vector = bytes_at_once<N* static_cast<int>(sizeof(T))>;
    int const vectors = of.a.others / N, all = (last - first) * vectors;
    constexpr int unroll = 4;
    for (int i = static_cast<int>(threadIdx.x); i < all; i += unroll * across) {
        vector held[unroll];
        auto const with = [&](int u, auto&& f) {
            int const at = i + u * across, h = at / vectors, head = first + h;
            if (at >= all) return;
            rotated_rows const& t = of.tensor_of(head);
            if (t.x != t.y) f(t, head, of.a.rotated + (at - h * vectors) * N);
        };
#pragma unroll
        for (int u = 0; u < unroll; ++u)
            with(u, [&](rotated_rows const& t, int head, int c) {
                held[u] = *reinterpret_cast<vector const*>(of.source<T>(t, head) + c);
            });
#pragma unroll
        for (int u = 0; u < unroll; ++u)
            with(u, [&](rotated_rows const& t, int head, int c) {
                *reinterpret_cast<vector*>(of.target<T>(t, head) + c) = held[u];
            });
    }
}

/// Turns channel i of every head with channel i + half by the angle of pair i of its row.
///
/// A thread holds N neighbouring pairs of `rotary_heads` heads of one row, which it loads at once; while they are
/// on their way the block computes the angles of its rows. N * sizeof(T) divides all beginnings, strides, heads and
/// halves. The angle is exact to 2^-32 of a turn at any position: position * turns wraps around in 64 bits, as turns
/// do. Channels that are not turned are copied unless y is x.
/// Block (lanes * groups, rows): lanes * N * rows <= most_angles. Grid (rows, heads / (groups * rotary_heads), pairs).
/// WholeLines: every line of 128 bytes is turned as a whole.
template <class T, int N, bool WholeLines>
__global__ void __launch_bounds__(rotary_threads, rotary_resident) rotary(__grid_constant__ rotary_call const a) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    using vector = bytes_at_once<N* static_cast<int>(sizeof(T))>; // two elements a word if T has 16 bits
    __shared__ alignas(16) float cosines[most_angles], sines[most_angles];
    int const across = static_cast<int>(blockDim.x), groups = across / a.lanes;
    int const group = static_cast<int>(threadIdx.x) / a.lanes, lane = static_cast<int>(threadIdx.x) - group * a.lanes;
    index_t const first_row = static_cast<index_t>(blockIdx.x) * blockDim.y, row = first_row + threadIdx.y;
    int const first = static_cast<int>(blockIdx.y) * groups * rotary_heads,
              last = min(first + groups * rotary_heads, a.heads);
    int const first_pair = static_cast<int>(blockIdx.z) * a.lanes * N, pairs = min(a.lanes * N, a.half - first_pair);
    heads_of_row const of{a, row};

    bool const turns = row < a.rows && lane * N < pairs;
    vector low[rotary_heads], high[rotary_heads];
    T* to[rotary_heads];
#pragma unroll
    for (int u = 0; u < rotary_heads; ++u)
        if (int const head = first + u * groups + group; turns && head < last) {
            rotated_rows const& t = of.tensor_of(head);
            T const* const x = of.source<T>(t, head) + first_pair + lane * N;
            to[u] = of.target<T>(t, head) + first_pair + lane * N;
            low[u] = read_once<WholeLines, vector>(x);
            high[u] = read_once<WholeLines, vector>(x + a.half);
        }

    int const rows = static_cast<int>(min(static_cast<index_t>(blockDim.y), a.rows - first_row));
    for (int i = static_cast<int>(threadIdx.y) * across + static_cast<int>(threadIdx.x); i < rows * pairs;
         i += across * static_cast<int>(blockDim.y)) {
        int const r = i / pairs, pair = first_pair + i - r * pairs;
        find_angle<T>(a, first_row + r, pair, cosines[i], sines[i]);
    }
    __syncthreads();

    if (turns) {
        float cosine[N], sine[N];
        int const angle = static_cast<int>(threadIdx.y) * pairs + lane * N;
        constexpr int wide = N < 4 ? N : 4;
#pragma unroll
        for (int k = 0; k < N; k += wide) {
            auto const c = *reinterpret_cast<neighbours<float, wide> const*>(cosines + angle + k);
            auto const s = *reinterpret_cast<neighbours<float, wide> const*>(sines + angle + k);
#pragma unroll
            for (int j = 0; j < wide; ++j) cosine[k + j] = c.element[j], sine[k + j] = s.element[j];
        }
        with_rounding<T>(a, [&](auto each) {
#pragma unroll
            for (int u = 0; u < rotary_heads; ++u)
                if (int const head = first + u * groups + group; head < last) {
                    T* const y = to[u];
                    turn<T, N, each()>(low[u], high[u], cosine, sine);
                    write_once(y, low[u]);
                    write_once(y + a.half, high[u]);
                }
        });
    }

    if (a.others != 0 && row < a.rows && blockIdx.z == 0) copy_others<T, N>(of, first, last, across);
}

/// Most warps of a block of `rotary_lines`, and blocks of a multiprocessor at once.
inline constexpr int line_warps = 4, line_resident = 12, line_heads = 8;

/// As `rotary`, in place, where what is turned of a head is 128 bytes, and far from that of the next: one line, which
/// neighbours ask for as a whole. Such accesses are slow when many are on their way at once: a warp holds `line_heads`
/// heads, 32 bytes a thread, computes the row's angles for itself and waits for no other.
/// Block (32, warps of a row, rows), grid (rows, warps of a row).
template <class T>
__global__ void __launch_bounds__(32 * line_warps, line_resident) rotary_lines(__grid_constant__ rotary_call const a) {
    wait_for_previous_kernel();
    let_next_kernel_come();
    constexpr int N = 16 / static_cast<int>(sizeof(T)), pairs = 4 * N, at_once = line_heads / 4;
    using vector = bytes_at_once<N* static_cast<int>(sizeof(T))>; // two elements a word if T has 16 bits
    __shared__ alignas(16) float angles[line_warps][2][pairs];    // cosines, sines
    auto& of_warp = angles[threadIdx.z * blockDim.y + threadIdx.y];
    index_t const row = static_cast<index_t>(blockIdx.x) * blockDim.z + threadIdx.z;
    int const lane = static_cast<int>(threadIdx.x % 8), first_pair = lane % 4 * N;
    auto const warp = static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y);
    auto const warps = static_cast<int>(gridDim.y * blockDim.y); // they take 4 heads each in turn
    if (row >= a.rows) return;

    vector own[at_once];
    char* place[at_once];
#pragma unroll
    for (int u = 0; u < at_once; ++u) {
        int const h = 4 * (u * warps + warp) + static_cast<int>(threadIdx.x / 8);
        rotated_rows const* t = a.tensor;
#pragma unroll
        for (int k = 1; k < most_rotated; ++k) t += h >= a.tensor[k].first_head;
        place[u] = nullptr;
        if (h >= a.heads) continue;
        place[u] = t->y + row * t->y_stride + static_cast<index_t>(h - t->first_head) * a.head_bytes + 16 * lane;
        own[u] = read_once<true, vector>(place[u]);
    }
    int const pair = static_cast<int>(threadIdx.x);
    if (pair < pairs) find_angle<T>(a, row, pair, of_warp[0][pair], of_warp[1][pair]);
    __syncwarp();

    float const sign = lane < 4 ? -1.0f : 1.0f;
    with_rounding<T>(a, [&](auto each) {
#pragma unroll
        for (int u = 0; u < at_once; ++u) {
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                std::uint32_t& word = own[u].element[w];
                std::uint32_t const other = __shfl_xor_sync(~0u, word, 4);
                auto const turn_by = [&](float x, float y, float c, float s) {
                    return turned<T, each()>(x, y, c, sign * s);
                };
                if constexpr (sizeof(T) == 4) {
                    float const c = of_warp[0][first_pair + w], s = of_warp[1][first_pair + w];
                    word = __float_as_uint(turn_by(__uint_as_float(word), __uint_as_float(other), c, s));
                } else {
                    auto const c = *reinterpret_cast<float2 const*>(&of_warp[0][first_pair + 2 * w]);
                    auto const s = *reinterpret_cast<float2 const*>(&of_warp[1][first_pair + 2 * w]);
                    float2 const x = pair_of(T(), word), y = pair_of(T(), other);
                    word = word_of(T(), {turn_by(x.x, y.x, c.x, s.x), turn_by(x.y, y.y, c.y, s.y)});
                }
            }
            if (place[u]) write_once(place[u], own[u]);
        }
    });
}

} // namespace cpx::kernels
