// SPDX-License-Identifier: Apache-2.0
// What all kernels of the causal depthwise convolution read, and how.
#pragma once

#include <cpx/core/search.hpp>
#include <cpx/pack.cuh>

#include <cuda_pipeline_primitives.h>

namespace cpx::kernels {

/// The most taps of a convolution.
inline constexpr int conv_max_taps = 8;

/// Rows of a launch: row i begins `i * stride` bytes after `data`.
template <class T>
struct conv_rows {
    T* data;
    std::int64_t stride;
    __device__ __forceinline__ T* at(std::int64_t row, std::int64_t channel) const {
        return after(data, row) + channel;
    }
    /// Returns the place `count` rows after `place`.
    __device__ __forceinline__ T* after(T* place, std::int64_t count = 1) const {
        using byte = std::conditional_t<std::is_const_v<T>, char const, char>;
        return reinterpret_cast<T*>(reinterpret_cast<byte*>(place) + count * stride);
    }
};

/// What every kernel of a convolution reads: z_t = bias + sum_j weight_j x_{t-(taps-1)+j}.
///
/// A thread computes V neighbouring channels of `strip` rows. `first` holds where each segment begins, and the number
/// of rows; `before` is (segments, taps - 1): the rows before a segment, from `rows` on those of the halo, -1 for none.
template <class T>
struct conv_input {
    std::int64_t rows, channels;
    int strip, segments;
    conv_rows<T const> x, halo;
    void const* weight; ///< (channels, taps), of float or of T
    void const* bias;   ///< null for zeros
    std::int64_t weight_stride;
    std::int64_t const* first;
    std::int64_t const* before;
    int taps;
    bool float_weight;
};

namespace conv {

/// Returns the segment of a row: the last that does not begin after it.
template <class T>
__device__ __forceinline__ int segment_of(conv_input<T> const& in, std::int64_t row) {
    return last_at_or_before(row, in.segments, [&](int s) { return in.first[s]; });
}

/// Returns where row `i` of the own rows followed by those of the halo begins, or null for -1.
template <class T>
__device__ __forceinline__ T const* row_of(conv_input<T> const& in, std::int64_t i, std::int64_t channel) {
    if (i < 0) return nullptr;
    return i < in.rows ? in.x.at(i, channel) : in.halo.at(i - in.rows, channel);
}

/// A thread's weights, of V channels: `at[age]` is that of the token `age` tokens ago.
///
/// Taps: 0 if known at run time only; then the weights of older tokens than there are taps are never used. An array of
/// `window` rows holds one token in each place; a token's place is its number modulo the window.
template <int Taps, int V>
struct conv_weight {
    static constexpr int window = Taps ? Taps : conv_max_taps;
    array<float, window, V> at;
    array<float, V> bias;
    int taps;

    template <class T>
    __device__ __forceinline__ conv_weight(conv_input<T> const& in, std::int64_t channel) : taps(in.taps) {
        if (std::is_same_v<T, float> || in.float_weight)
            read(static_cast<float const*>(in.weight), static_cast<float const*>(in.bias), in.weight_stride, channel);
        else
            read(static_cast<T const*>(in.weight), static_cast<T const*>(in.bias), in.weight_stride, channel);
    }

    __device__ __forceinline__ bool has(int age) const { return Taps || age < taps; }

    /// Computes `to = start + sum weight[age] * token(age)`, the oldest token first, as the host does; all kernels
    /// use this, so that z and dz have the same bits on whichever rank they are computed.
    template <class F>
    __device__ __forceinline__ void weigh(float const* start, F&& token, array<float, V>& to) const {
#pragma unroll
        for (int v = 0; v < V; ++v) to[v] = start ? start[v] : 0.0f;
#pragma unroll
        for (int age = window - 1; age >= 0; --age)
            if (has(age)) {
                float const* const values = token(age);
#pragma unroll
                for (int v = 0; v < V; ++v) to[v] = fmaf(at[age][v], values[v], to[v]);
            }
    }

private:
    template <class W>
    __device__ __forceinline__ void read(W const* weight, W const* from, std::int64_t stride, std::int64_t channel) {
        if constexpr (V > 1) { // dense and aligned: all of them are side by side
            constexpr int wide = 16 / sizeof(W);
            static_assert(Taps * V % wide == 0);
#pragma unroll
            for (int first = 0; first < Taps * V; first += wide) {
                float wide_weight[wide];
                widen<W, wide>(load<W, wide>(weight + channel * Taps + first), wide_weight);
#pragma unroll
                for (int i = 0; i < wide; ++i) at[Taps - 1 - (first + i) % Taps][(first + i) / Taps] = wide_weight[i];
            }
        } else {
#pragma unroll
            for (int age = 0; age < window; ++age)
                at[age][0] = has(age) ? widen(weight[channel * stride + taps - 1 - age]) : 0.0f;
        }
#pragma unroll
        for (int v = 0; v < V; ++v) bias[v] = from ? widen(from[channel + v]) : 0.0f;
    }
};

/// Fills `x` with the tokens before own row `row` of segment `s`.
template <class T, int Taps, int V, std::size_t Window>
__device__ __forceinline__ void look_back(conv_input<T> const& in, conv_weight<Taps, V> const& weight, int s,
                                          std::int64_t row, std::int64_t channel, array<float, V> (&x)[Window]) {
#pragma unroll
    for (int age = 1; age <= Window; ++age) {
        T const* from = nullptr;
        if (age < Window && weight.has(age)) {
            std::int64_t const token = row - age - in.first[s];
            from = row_of(in, token >= 0 ? row - age : in.before[(s + std::int64_t{1}) * (weight.taps - 1) + token],
                          channel);
        }
#pragma unroll
        for (int v = 0; v < V; ++v) x[Window - age][v] = 0.0f;
        if (from) widen<T, V>(load<T, V>(from), x[Window - age]);
    }
}

/// The rows that a thread reads of N tensors, one after the other, in groups of `Window`, each asked for while the one
/// before is used. They wait in registers or, where those are short, in shared memory (vectors only), where a thread
/// reads nothing but what it asked for.
template <class T, int V, int Window, int N, bool InShared>
struct rows_ahead {
    using stages = array<uint4, 2, Window, N, InShared ? 128 : 1>;

    stages& staged; ///< of the block
    array<conv_rows<T const>, N> tensors;
    array<T const*, N> from; ///< the rows to ask for next
    int side = 0;            ///< the stage of the next group or, after `group`, of this one
    array<pack<T, V>, Window, N> kept = {};

    /// Asks for the first group.
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int k = 0; k < Window; ++k)
#pragma unroll
            for (int n = 0; n < N; ++n) ask(k, n);
        commit();
    }
    /// Begins to use a group; asks for the next one if there are `more`.
    __device__ __forceinline__ void group(bool more) {
        if constexpr (InShared) {
            more ? begin() : commit(); // an empty one, so that the next line waits for the group before it
            __pipeline_wait_prior(1);
        } else if (!more) { // `take` then asks for rows again that nobody reads
#pragma unroll
            for (int n = 0; n < N; ++n) from[n] = tensors[n].after(from[n], -Window);
        }
    }
    /// Reads row `k` of this group, of elements U.
    template <class U = T>
    __device__ __forceinline__ void take(int k, int n, array<float, V>& to) {
        pack<T, V> got = kept[k][n];
        if constexpr (InShared) memcpy(&got, &staged[side][k][n][thread()], 16);
        widen<U, V>(got, to);
        if constexpr (!InShared) ask(k, n);
    }

private:
    __device__ __forceinline__ static unsigned thread() { return threadIdx.y * blockDim.x + threadIdx.x; }
    __device__ __forceinline__ void ask(int k, int n) {
        if constexpr (InShared)
            __pipeline_memcpy_async(&staged[side][k][n][thread()], from[n], 16);
        else
            kept[k][n] = load<T, V>(from[n]);
        from[n] = tensors[n].after(from[n]);
    }
    __device__ __forceinline__ void commit() {
        if constexpr (InShared) __pipeline_commit();
        side ^= 1;
    }
};

/// Makes room for one more token in a window that begins with its oldest one.
template <std::size_t V, std::size_t Window>
__device__ __forceinline__ void shift(float (&values)[Window][V]) {
#pragma unroll
    for (int i = 0; i + 1 < Window; ++i)
#pragma unroll
        for (int v = 0; v < V; ++v) values[i][v] = values[i + 1][v];
}

/// Which channels and rows are a thread's: lanes of blocks go along the channels, then the blocks' y along the strips.
///
/// A thread beyond the channels has no rows or, of `WholeWarps`, the last channels: it computes them for the sake of
/// those that share sums with all of their warp, but is not to write them.
template <class T, int V, bool WholeWarps = false>
struct conv_place {
    std::int64_t channel, row, last;
    std::int64_t block; ///< of strips
    bool beyond;
    __device__ __forceinline__ explicit conv_place(conv_input<T> const& in) {
        std::int64_t const wide = static_cast<std::int64_t>(blockDim.x) * V;
        auto const tiles = static_cast<unsigned>((in.channels + wide - 1) / wide);
        channel = blockIdx.x % tiles * wide + threadIdx.x * V;
        block = blockIdx.x / tiles;
        row = (block * blockDim.y + threadIdx.y) * in.strip;
        last = row + in.strip < in.rows ? row + in.strip : in.rows;
        beyond = channel >= in.channels;
        if (beyond && WholeWarps) channel = in.channels - V;
        if (beyond && !WholeWarps) last = row;
    }
};

} // namespace conv

} // namespace cpx::kernels
