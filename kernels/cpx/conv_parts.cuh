// SPDX-License-Identifier: Apache-2.0
// The result of a convolution in parts, each with rows of its own, some with heads of norm 1.
#pragma once

#include <cpx/conv_input.cuh>

namespace cpx::kernels {

/// The most parts of a convolution's result.
inline constexpr int conv_most_parts = 4;

/// The parts of a result, one after the other along the channels, or of its gradient. T: that of what is convolved, or
/// another of as many bytes.
///
/// `end[p]`: the channel after part p; for the last part and for unused ones, the number of channels. `lanes[p]`: how
/// many threads of V channels share a head that is divided by its norm; 0 if the part stays as it is. `factor`: of a
/// gradient of other elements than those of what is convolved.
template <class T>
struct conv_parts {
    conv_rows<T> rows[conv_most_parts];
    std::int64_t end[conv_most_parts];
    int lanes[conv_most_parts];
    float epsilon, factor;
};

namespace conv {

template <class T>
__device__ __forceinline__ float factor_of(conv_rows<T> const&) {
    return 1;
}
template <class T>
__device__ __forceinline__ float factor_of(conv_parts<T> const& parts) {
    return parts.factor;
}

/// A channel's place in its part.
template <class T>
struct own_part {
    using element = std::remove_const_t<T>;
    conv_rows<T> rows;
    std::int64_t channel; ///< of the part
    int lanes;
    float epsilon;

    __device__ __forceinline__ T* at(std::int64_t row) const { return rows.at(row, channel); }
};

template <class T>
__device__ __forceinline__ own_part<T> part_of(conv_rows<T> const& whole, std::int64_t channel) {
    return {whole, channel, 0, 0.0f};
}
template <class T>
__device__ __forceinline__ own_part<T> part_of(conv_parts<T> const& parts, std::int64_t channel) {
    own_part<T> own{parts.rows[0], channel, parts.lanes[0], parts.epsilon};
#pragma unroll
    for (int p = 1; p < conv_most_parts; ++p)
        if (channel >= parts.end[p - 1]) {
            own.rows = parts.rows[p];
            own.channel = channel - parts.end[p - 1];
            own.lanes = parts.lanes[p];
        }
    return own;
}

/// Whether heads may have to be normalised: not where a thread has a single channel.
template <class Out, int V>
inline constexpr bool may_normalise = false;
template <class T, int V>
inline constexpr bool may_normalise<conv_parts<T>, V> = (V > 1);

/// Calls `f` with whether channels of this warp are of a head, as std::true_type or std::false_type.
template <class Out, int V, class F>
__device__ __forceinline__ void with_heads(bool heads_in_warp, F&& f) {
    if constexpr (may_normalise<Out, V>) {
        if (heads_in_warp) {
            f(std::true_type{});
            return;
        }
    }
    f(std::false_type{});
}

/// Adds what the threads of a head have, in pairs of neighbours, then of pairs: every thread gets the same bits. All
/// threads of a warp call it, those of no head, too: a mask of some costs ten times the sum.
template <std::size_t N>
__device__ __forceinline__ void add_over_head(float (&sums)[N], int lanes) {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2)
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float const both = sums[n] + __shfl_xor_sync(~0u, sums[n], apart);
            sums[n] = apart < lanes ? both : sums[n];
        }
}

/// Returns the sum of products that a thread adds to its head's.
template <std::size_t V>
__device__ __forceinline__ float dot(float const (&a)[V], float const (&b)[V]) {
    float sum = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) sum = fmaf(a[v], b[v], sum);
    return sum;
}

/// Rounds y to T, the result's type, and, if that is of a head, divides it by the norm. All threads of a warp call it.
template <class T, std::size_t V>
__device__ __forceinline__ void normalise(float (&y)[V], int lanes, float epsilon) {
    widen<T, V>(narrow<T, V>(y), y);
    float squares[] = {dot(y, y)};
    add_over_head(squares, lanes);
    float const scale = lanes ? rsqrtf(squares[0] + epsilon) : 1.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] *= scale;
}

/// Returns the gradient of y, given that of its normalised value, and over its head the sums of y y and of y dn.
__device__ __forceinline__ float normalise_backward(float y, float dn, float squares, float products, float epsilon) {
    float const scale = rsqrtf(squares + epsilon);
    float const along = __fmul_rn(__fmul_rn(scale, scale), products);
    return __fmul_rn(scale, fmaf(-y, along, dn));
}

/// The same for the V channels of a thread, if they are of a head; `dn` becomes the gradient of y. All threads of a
/// warp call it.
template <class T, class Y, bool Silu, std::size_t V>
__device__ __forceinline__ void normalise_backward(float const (&z)[V], float (&dn)[V], int lanes, float epsilon) {
    float y[V];
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] = activate<T, Silu>(z[v]);
    widen<Y, V>(narrow<Y, V>(y), y);
    float sums[] = {dot(y, y), dot(y, dn)};
    add_over_head(sums, lanes);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        float const of_head = normalise_backward(y[v], dn[v], sums[0], sums[1], epsilon);
        dn[v] = lanes ? of_head : dn[v];
    }
}

} // namespace conv

} // namespace cpx::kernels
