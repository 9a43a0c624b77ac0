// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution of one rank's rows, forward and backward.
#pragma once

#include <cpx/pack.cuh>

namespace cpx::kernels {

/// The most taps of a convolution.
inline constexpr int conv_max_taps = 8;

/// Rows of a launch: row i begins at `data + i * stride`.
template <class T>
struct conv_rows {
    T* data;
    std::int64_t stride;
    __device__ T* at(std::int64_t row, std::int64_t channel) const { return data + row * stride + channel; }
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

/// What the backward reads and writes besides. `after` is (segments, taps - 1): the rows of dz after a segment, those
/// of `edge` first, from `edges` on those of `dz_halo`, -1 for none. `sums` is null or (blocks of strips, taps + 1,
/// channels): of each block, the sums for dweight and for dbias.
template <class T>
struct conv_backward {
    conv_rows<T const> dy;
    conv_rows<T> dx;
    conv_rows<float const> edge, dz_halo;
    std::int64_t edges;
    std::int64_t const* after;
    float* sums;
};

namespace conv {

/// Returns the segment of a row: the last that does not begin after it.
template <class T>
__device__ __forceinline__ int segment_of(conv_input<T> const& in, std::int64_t row) {
    int low = 0, high = in.segments;
    while (high - low > 1) {
        int const middle = low + (high - low) / 2;
        (in.first[middle] <= row ? low : high) = middle;
    }
    return low;
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
    float at[window][V], bias[V];
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
    __device__ __forceinline__ void weigh(float const* start, F&& token, float (&to)[V]) const {
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
                auto const part = load<W, wide>(weight + channel * Taps + first);
#pragma unroll
                for (int i = 0; i < wide; ++i)
                    at[Taps - 1 - (first + i) % Taps][(first + i) / Taps] = widen(part.at[i]);
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
template <class T, int Taps, int V, int Window>
__device__ __forceinline__ void look_back(conv_input<T> const& in, conv_weight<Taps, V> const& weight, int s,
                                          std::int64_t row, std::int64_t channel, float (&x)[Window][V]) {
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
        if (from) widen(load<T, V>(from), x[Window - age]);
    }
}

/// Makes room for one more token in a window that begins with its oldest one.
template <int V, int Window>
__device__ __forceinline__ void shift(float (&values)[Window][V]) {
#pragma unroll
    for (int i = 0; i + 1 < Window; ++i)
#pragma unroll
        for (int v = 0; v < V; ++v) values[i][v] = values[i + 1][v];
}

/// Which channels and rows are a thread's: lanes of blocks go along the channels, then the blocks' y along the strips.
template <class T, int V>
struct conv_place {
    std::int64_t channel, row, last;
    std::int64_t block; ///< of strips
    __device__ __forceinline__ explicit conv_place(conv_input<T> const& in) {
        std::int64_t const wide = static_cast<std::int64_t>(blockDim.x) * V;
        auto const tiles = static_cast<unsigned>((in.channels + wide - 1) / wide);
        channel = blockIdx.x % tiles * wide + threadIdx.x * V;
        block = blockIdx.x / tiles;
        row = (block * blockDim.y + threadIdx.y) * in.strip;
        last = row + in.strip < in.rows ? row + in.strip : in.rows;
        if (channel >= in.channels) last = row;
    }
};

} // namespace conv

/// Computes y. Vectors of V > 1 need `Taps`, a dense weight, and addresses and strides that are multiples of 16 bytes.
///
/// Reads every row once, but for the taps - 1 before a strip. Loads are a group of tokens ahead of their use.
template <class T, int Taps, int V, bool Silu>
__global__ void __launch_bounds__(128, 3) causal_conv1d(conv_input<T> const in, conv_rows<T> const y) {
    using namespace conv;
    conv_place<T, V> const place(in);
    std::int64_t row = place.row;
    if (row >= place.last) return;
    conv_weight<Taps, V> const weight(in, place.channel);
    constexpr int window = weight.window;
    T const* from = in.x.at(row, place.channel);
    T* to = y.at(row, place.channel);
    for (int s = segment_of(in, row); row < place.last; ++s) {
        std::int64_t const next = in.first[s + 1];
        int left = static_cast<int>((next < place.last ? next : place.last) - row);
        float x[window][V], z[V];
        look_back(in, weight, s, row, place.channel, x);
        row += left;
        pack<T, V> ahead[window];
        if (left >= window)
#pragma unroll
            for (int k = 0; k < window; ++k, from += in.x.stride) ahead[k] = load<T, V>(from);
        for (; left >= window; left -= window) {
            bool const more = left >= 2 * window;
#pragma unroll
            for (int k = 0; k < window; ++k, to += y.stride) {
                widen(ahead[k], x[k]);
                if (more) {
                    ahead[k] = load<T, V>(from);
                    from += in.x.stride;
                }
                weight.weigh(
                    weight.bias, [&](int age) { return x[(k - age + window) % window]; }, z);
#pragma unroll
                for (int v = 0; v < V; ++v) z[v] = activate<T, Silu>(z[v]);
                store<T, V>(z, to);
            }
        }
#pragma unroll 1
        for (; left > 0; --left, from += in.x.stride, to += y.stride) {
            shift(x);
            widen(load<T, V>(from), x[window - 1]);
            weight.weigh(
                weight.bias, [&](int age) { return x[window - 1 - age]; }, z);
#pragma unroll
            for (int v = 0; v < V; ++v) z[v] = activate<T, Silu>(z[v]);
            store<T, V>(z, to);
        }
    }
}

/// Computes the rows of dz that other segments need, here or elsewhere. `places` is (edges, taps): the rows of x that
/// each is computed from, as in `conv_input::before`, its own last. One thread a channel and edge.
template <class T, bool Silu>
__global__ void __launch_bounds__(128) causal_conv1d_edge(conv_input<T> const in, conv_rows<T const> const dy,
                                                          std::int64_t const* places, conv_rows<float> const edge) {
    using namespace conv;
    auto const tiles = static_cast<unsigned>((in.channels + blockDim.x - 1) / blockDim.x);
    std::int64_t const channel = static_cast<std::int64_t>(blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    std::int64_t const i = blockIdx.x / tiles;
    if (channel >= in.channels) return;
    conv_weight<0, 1> const weight(in, channel);
    std::int64_t const* const own = places + (i + 1) * in.taps - 1;
    float x[conv_max_taps][1], z[1];
#pragma unroll
    for (int age = 0; age < conv_max_taps; ++age) {
        T const* const from = weight.has(age) ? row_of(in, own[-age], channel) : nullptr;
        x[age][0] = from ? widen(*from) : 0.0f;
    }
    weight.weigh(
        weight.bias, [&](int age) { return x[age]; }, z);
    *edge.at(i, channel) = activate_backward<T, Silu>(z[0], widen(*dy.at(*own, channel)));
}

/// Computes dx and, of each block, the sums for dweight and dbias; needs what `causal_conv1d` needs.
///
/// Reads x and dy and writes dx once, but for the taps - 1 rows on both sides of a strip: dz is recomputed, never
/// written. Blocks are 32 lanes by any number of strips.
template <class T, int Taps, int V, bool Silu>
__global__ void __launch_bounds__(128, V == 8 ? 2 : 3)
    causal_conv1d_backward(conv_input<T> const in, conv_backward<T> const out) {
    using namespace conv;
    conv_place<T, V> const place(in);
    std::int64_t row = place.row;
    constexpr int window = conv_weight<Taps, V>::window, lag = window - 1;
    float dweight[window][V] = {}, dbias[V] = {};
    if (row < place.last) {
        conv_weight<Taps, V> const weight(in, place.channel);
        int const reach = weight.taps - 1;
        for (int s = segment_of(in, row); row < place.last; ++s) {
            std::int64_t const next = in.first[s + 1];
            int const count = static_cast<int>((next < place.last ? next : place.last) - row);
            int done = 0;
            float x[window][V], dz[window][V] = {}, result[V];
            look_back(in, weight, s, row, place.channel, x);
            T const *from = in.x.at(row, place.channel), *from_dy = out.dy.at(row, place.channel);
            T* to = out.dx.at(row, place.channel);
            pack<T, V> ahead[window], ahead_dy[window];
            if (count >= window)
#pragma unroll
                for (int k = 0; k < window; ++k, from += in.x.stride, from_dy += out.dy.stride) {
                    ahead[k] = load<T, V>(from);
                    ahead_dy[k] = load<T, V>(from_dy);
                }
            for (; done + window <= count; done += window) {
                bool const more = done + 2 * window <= count;
#pragma unroll
                for (int k = 0; k < window; ++k) {
                    widen(ahead[k], x[k]);
                    widen(ahead_dy[k], dz[k]);
                    if (more) {
                        ahead[k] = load<T, V>(from);
                        ahead_dy[k] = load<T, V>(from_dy);
                        from += in.x.stride;
                        from_dy += out.dy.stride;
                    }
                    weight.weigh(
                        weight.bias, [&](int age) { return x[(k - age + window) % window]; }, result);
#pragma unroll
                    for (int v = 0; v < V; ++v) {
                        dz[k][v] = activate_backward<T, Silu>(result[v], dz[k][v]);
                        dbias[v] += dz[k][v];
#pragma unroll
                        for (int age = 0; age < window; ++age)
                            dweight[age][v] = fmaf(dz[k][v], x[(k - age + window) % window][v], dweight[age][v]);
                    }
                    if (k == lag || done > 0) { // dx of the token `lag` tokens ago
                        weight.weigh(
                            nullptr, [&](int age) { return dz[(k - lag + age + window) % window]; }, result);
                        store<T, V>(result, to);
                        to += out.dx.stride;
                    }
                }
            }
            // The rest, and the tokens after them, of which this segment may hold some.
            row += done;
#pragma unroll 1
            for (; done < count + lag; ++done, ++row) {
                shift(x);
                shift(dz);
#pragma unroll
                for (int v = 0; v < V; ++v) x[lag][v] = dz[lag][v] = 0.0f;
                if (row < next && done < count + reach) {
                    widen(load<T, V>(in.x.at(row, place.channel)), x[lag]);
                    widen(load<T, V>(out.dy.at(row, place.channel)), dz[lag]);
                    weight.weigh(
                        weight.bias, [&](int age) { return x[lag - age]; }, result);
#pragma unroll
                    for (int v = 0; v < V; ++v) dz[lag][v] = activate_backward<T, Silu>(result[v], dz[lag][v]);
                } else if (done < count + reach) {
                    std::int64_t const i = out.after[std::int64_t{s} * reach + row - next];
                    if (i >= 0) {
                        float const* const known = i < out.edges ? out.edge.at(i, place.channel)
                                                                 : out.dz_halo.at(i - out.edges, place.channel);
#pragma unroll
                        for (int v = 0; v < V; ++v) dz[lag][v] = known[v];
                    }
                }
                if (done < count)
#pragma unroll
                    for (int v = 0; v < V; ++v) {
                        dbias[v] += dz[lag][v];
#pragma unroll
                        for (int age = 0; age < window; ++age)
                            dweight[age][v] = fmaf(dz[lag][v], x[lag - age][v], dweight[age][v]);
                    }
                if (done >= lag) {
                    weight.weigh(
                        nullptr, [&](int age) { return dz[age]; }, result);
                    store<T, V>(result, to);
                    to += out.dx.stride;
                }
            }
            row -= lag;
        }
    }
    if (!out.sums) return;
    __shared__ float block_sums[(window + 1) * V][32];
    for (unsigned strip = 0; strip < blockDim.y; ++strip, __syncthreads()) // one after the other: always the same bits
        if (threadIdx.y == strip)
#pragma unroll
            for (int item = 0; item <= window; ++item)
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    float const mine = item < window ? dweight[item < window ? item : 0][v] : dbias[v];
                    float& sum = block_sums[item * V + v][threadIdx.x];
                    sum = strip ? sum + mine : mine;
                }
    if (place.channel >= in.channels) return;
    // The strips of the block share the writing.
    for (int item = static_cast<int>(threadIdx.y); item <= in.taps; item += static_cast<int>(blockDim.y)) {
        int const age = item < in.taps ? in.taps - 1 - item : window;
        float* const to = out.sums + (place.block * (in.taps + 1) + item) * in.channels + place.channel;
        if constexpr (V % 4 == 0)
#pragma unroll
            for (int v = 0; v < V; v += 4)
                *reinterpret_cast<float4*>(to + v) =
                    make_float4(block_sums[age * V + v][threadIdx.x], block_sums[age * V + v + 1][threadIdx.x],
                                block_sums[age * V + v + 2][threadIdx.x], block_sums[age * V + v + 3][threadIdx.x]);
        else
            *to = block_sums[age][threadIdx.x];
    }
}

/// Adds the sums of all blocks, in their order, to dweight (channels, taps) and dbias, either of which may be null.
template <class = void>
__global__ void __launch_bounds__(128)
    causal_conv1d_add_sums(float const* sums, std::int64_t blocks, int taps, std::int64_t channels,
                           conv_rows<float> const dweight, float* dbias) {
    std::int64_t const i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= (taps + 1) * channels) return;
    std::int64_t const item = i / channels, channel = i % channels;
    float sum = 0;
#pragma unroll 8
    for (std::int64_t b = 0; b < blocks; ++b) sum += sums[b * (taps + 1) * channels + i];
    if (item < taps && dweight.data)
        *dweight.at(channel, item) += sum;
    else if (item == taps && dbias)
        dbias[channel] += sum;
}

} // namespace cpx::kernels
