// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of the heads of several tensors that share their rows' positions.
#pragma once

#include <cpx/row_gather.cuh>

#include <cstring>
#include <type_traits>

namespace cpx::kernels {

/// A segment as rows see it: row `row` is token `token`, and the rows after it go on, until the next segment begins.
struct segment_begin {
    index row, token;
};

/// Positions of rows: of three kinds, the first that is not null counts.
struct row_positions {
    std::int64_t const* wide; ///< (1 or 3, rows)
    std::int32_t const* narrow;
    segment_begin const* segments; ///< ascending by row
    index axis_stride;             ///< numbers from axis to axis, 0: one position a row
    int segment_count;
};

/// Heads side by side in rows of x, and where they go; y may be x.
struct rotated_rows {
    char const* x;
    char* y;
    index x_stride, y_stride; ///< bytes from row to row
    int first_head;           ///< heads of the tensors before this one
};

inline constexpr int most_rotated = 4;

struct rotary_call {
    rotated_rows tensor[most_rotated]; ///< of those that are not there `first_head` is `heads`
    row_positions positions;
    std::uint64_t const* turns; ///< (half): turns from one position to the next, times 2^64
    std::uint8_t const* axes;   ///< (half): whose position turns a pair; null: the first
    index rows;
    int heads, heads_each;         ///< of all tensors, and those that a block's rows are given at once
    int head_bytes, half, rotated; ///< rotated: channels of a head that are turned, 2 * half
    float direction;               ///< 1, or -1 to turn back
};

/// Returns the position of a row on an axis.
__device__ __forceinline__ std::uint64_t position(row_positions const& p, index row, int axis) {
    if (p.wide) return static_cast<std::uint64_t>(p.wide[axis * p.axis_stride + row]);
    if (p.narrow) return static_cast<std::uint64_t>(static_cast<index>(p.narrow[axis * p.axis_stride + row]));
    int low = 0;
    for (int high = p.segment_count; high - low > 1;) {
        int const middle = (low + high) / 2;
        (p.segments[middle].row <= row ? low : high) = middle;
    }
    segment_begin const s = p.segments[low];
    return static_cast<std::uint64_t>(s.token + row - s.row);
}

/// N neighbouring elements as the words that are read and written, two elements a word if T has 16 bits.
template <class T, int N>
struct words {
    static constexpr int bytes = N * static_cast<int>(sizeof(T));
    using type =
        std::conditional_t<bytes == 2, neighbours<std::uint16_t, 1>, neighbours<std::uint32_t, (bytes + 3) / 4>>;
};

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

/// Rotates the low and the high halves' elements in place: by float, rounded once.
template <class T, int N, class Words>
__device__ __forceinline__ void turn(Words& low, Words& high, float const (&cosine)[N], float const (&sine)[N]) {
    auto const rotate = [&](float& a, float& b, int k) {
        float const was = a;
        a = was * cosine[k] - b * sine[k];
        b = b * cosine[k] + was * sine[k];
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

/// Turns channel i of every head with channel i + half by the angle of pair i of its row.
///
/// A thread holds the cosines and sines of N neighbouring pairs of one row and goes through heads with them; N *
/// sizeof(T) divides all beginnings, strides, heads and halves. The angle is exact to 2^-32 of a turn at any position:
/// position * turns wraps around in 64 bits, as turns do. Channels that are not turned are copied unless y is x.
/// Block (pairs / N, rows) of up to 128, grid (rows, heads), any size.
template <class T, int N>
__global__ void __launch_bounds__(128, 8) rotary(__grid_constant__ rotary_call const a) {
    using vector = typename words<T, N>::type;
    constexpr int unroll = 3; // heads in flight; with 4 registers spill
    index const row = static_cast<index>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= a.rows) return;
    int const first = static_cast<int>(blockIdx.y) * a.heads_each, last = min(first + a.heads_each, a.heads);
    auto const tensor_of = [&](int head) -> rotated_rows const& {
        int t = 0;
#pragma unroll
        for (int k = 1; k < most_rotated; ++k) t += head >= a.tensor[k].first_head;
        return a.tensor[t];
    };
    auto const source = [&](rotated_rows const& t, int head) {
        return reinterpret_cast<T const*>(t.x + row * t.x_stride +
                                          static_cast<index>(head - t.first_head) * a.head_bytes);
    };
    auto const target = [&](rotated_rows const& t, int head) {
        return reinterpret_cast<T*>(t.y + row * t.y_stride + static_cast<index>(head - t.first_head) * a.head_bytes);
    };

    for (int pair = static_cast<int>(threadIdx.x) * N; pair < a.half; pair += static_cast<int>(blockDim.x) * N) {
        vector low[unroll], high[unroll];
        auto const load = [&](int head) {
#pragma unroll
            for (int u = 0; u < unroll; ++u)
                if (head + u < last) {
                    T const* const x = source(tensor_of(head + u), head + u) + pair;
                    low[u] = *reinterpret_cast<vector const*>(x);
                    high[u] = *reinterpret_cast<vector const*>(x + a.half);
                }
        };
        load(first); // on their way while the angles are computed
        float cosine[N], sine[N];
        std::uint64_t at = position(a.positions, row, 0), at_axis[2] = {at, at};
        if (a.axes) {
            at_axis[0] = position(a.positions, row, 1);
            at_axis[1] = position(a.positions, row, 2);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            int const axis = a.axes ? a.axes[pair + k] : 0;
            std::uint64_t const here = axis == 0 ? at : axis == 1 ? at_axis[0] : at_axis[1];
            auto const turned = static_cast<int>((here * a.turns[pair + k]) >> 32); // 2^32 is a turn, 2^31 is pi
            sincospif(static_cast<float>(turned) * 0x1p-31f, &sine[k], &cosine[k]);
            sine[k] *= a.direction;
        }
        for (int head = first; head < last; head += unroll) {
            if (head > first) load(head);
#pragma unroll
            for (int u = 0; u < unroll; ++u)
                if (head + u < last) {
                    T* const y = target(tensor_of(head + u), head + u) + pair;
                    turn<T, N>(low[u], high[u], cosine, sine);
                    *reinterpret_cast<vector*>(y) = low[u];
                    *reinterpret_cast<vector*>(y + a.half) = high[u];
                }
        }
    }
    int const others = a.head_bytes / static_cast<int>(sizeof(T)) - a.rotated;
    for (int c = static_cast<int>(threadIdx.x) * N; c < others; c += static_cast<int>(blockDim.x) * N)
        for (int head = first; head < last; head += 4) {
            vector held[4];
            auto const moves = [&](int h) { return h < last && tensor_of(h).x != tensor_of(h).y; };
#pragma unroll
            for (int u = 0; u < 4; ++u)
                if (int const h = head + u; moves(h))
                    held[u] = *reinterpret_cast<vector const*>(source(tensor_of(h), h) + a.rotated + c);
#pragma unroll
            for (int u = 0; u < 4; ++u)
                if (int const h = head + u; moves(h))
                    *reinterpret_cast<vector*>(target(tensor_of(h), h) + a.rotated + c) = held[u];
        }
}

} // namespace cpx::kernels
