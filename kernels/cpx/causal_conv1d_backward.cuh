// SPDX-License-Identifier: Apache-2.0
// Backward of the causal depthwise convolution of one rank's rows.
#pragma once

#include <cpx/conv_parts.cuh>

#include <algorithm>
#include <utility>

namespace cpx::kernels {

/// Returns how many blocks of `causal_conv1d_backward` a multiprocessor holds: with `parts` registers are short.
__host__ __device__ constexpr int conv_backward_resident(int vector, bool parts) {
    return vector == 8 ? 2 : vector == 4 && !parts ? 4 : 3;
}

/// What the backward reads and writes beside its `conv_input`. `after` is (segments, taps - 1): the rows of dz after a
/// segment, those of `edge` first, from `edges` on those of `dz_halo`, -1 for none. `sums` is null or (blocks of
/// strips, taps + 1, channels): of each block, the sums for dweight and for dbias.
template <class T, class Dy = conv_rows<T const>>
struct conv_backward {
    Dy dy;
    conv_rows<T> dx;
    conv_rows<float const> edge, dz_halo;
    std::int64_t edges;
    std::int64_t const* after;
    float* sums;
};

/// Computes the rows of dz that other segments need, here or elsewhere. `places` is (edges, taps): the rows of x that
/// each is computed from, as in `conv_input::before`, its own last. One thread a channel and edge.
template <class T, bool Silu, class Dy = conv_rows<T const>>
__global__ void __launch_bounds__(128)
    causal_conv1d_edge(conv_input<T> const in, Dy const dy, std::int64_t const* places, conv_rows<float> const edge) {
    using namespace conv;
    auto const tiles = static_cast<unsigned>((in.channels + blockDim.x - 1) / blockDim.x);
    std::int64_t const channel = static_cast<std::int64_t>(blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    std::int64_t const i = blockIdx.x / tiles;
    if (channel >= in.channels) return;
    std::int64_t const* const own = places + (i + 1) * in.taps - 1;
    auto const z_of = [&](std::int64_t of) {
        conv_weight<0, 1> const weight(in, of);
        float x[conv_max_taps][1], z[1];
#pragma unroll
        for (int age = 0; age < conv_max_taps; ++age) {
            T const* const from = weight.has(age) ? row_of(in, own[-age], of) : nullptr;
            x[age][0] = from ? widen(*from) : 0.0f;
        }
        weight.weigh(
            weight.bias, [&](int age) { return x[age]; }, z);
        return z[0];
    };
    auto const part = part_of(dy, channel);
    using element = typename std::remove_const_t<decltype(part)>::element; // of the result
    float const z = z_of(channel);
    float gradient = widen(*part.at(*own));
    constexpr int wide = 16 / sizeof(T); // channels of a thread of the other kernels
    if constexpr (may_normalise<Dy, wide>)
        if (part.lanes) { // the sums of the head, as a group of threads adds them
            std::int64_t const first = -(part.channel % (part.lanes * wide)); // of the head, from here
            float squares[32] = {}, products[32] = {};
            for (int lane = 0; lane < part.lanes; ++lane)
                for (int v = 0; v < wide; ++v) {
                    std::int64_t const there = first + lane * wide + v;
                    float const y = widen(static_cast<element>(activate<T, Silu>(z_of(channel + there))));
                    squares[lane] = fmaf(y, y, squares[lane]);
                    products[lane] = fmaf(y, widen(part.at(*own)[there]), products[lane]);
                }
            for (int apart = 1; apart < part.lanes; apart *= 2)
                for (int lane = 0; lane < part.lanes; lane += 2 * apart) {
                    squares[lane] += squares[lane + apart];
                    products[lane] += products[lane + apart];
                }
            float const y = widen(static_cast<element>(activate<T, Silu>(z)));
            gradient = normalise_backward(y, gradient, squares[0], products[0], part.epsilon);
        }
    if constexpr (!std::is_same_v<element, T>) gradient = __fmul_rn(gradient, factor_of(dy));
    *edge.at(i, channel) = activate_backward<T, Silu>(z, gradient);
}

namespace conv {

/// Loads dz of a row after a segment, number `number` of `out.after`, which another segment has computed, if one has.
template <class T, class Dy, std::size_t V>
__device__ __forceinline__ void look_ahead(conv_backward<T, Dy> const& out, std::int64_t number, std::int64_t channel,
                                           float (&dz)[V]) {
    std::int64_t const i = out.after[number];
    if (i < 0) return;
    float const* const known = i < out.edges ? out.edge.at(i, channel) : out.dz_halo.at(i - out.edges, channel);
#pragma unroll
    for (int v = 0; v < V; ++v) dz[v] = known[v];
}

/// Adds what a token gives to dweight and dbias. `token(age)`: x of the token `age` tokens ago.
template <std::size_t V, std::size_t Window, class F>
__device__ __forceinline__ void add_terms(float const (&dz)[V], F&& token, float (&dweight)[Window][V],
                                          float (&dbias)[V]) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
        dbias[v] += dz[v];
#pragma unroll
        for (int age = 0; age < Window; ++age) dweight[age][v] = fmaf(dz[v], token(age)[v], dweight[age][v]);
    }
}

/// Writes what the strips of a block add up to, in their order: of dweight and dbias, of V channels from `channel` on.
/// dweight: [Window][V], dbias: [V], block_sums: [(Window + 1) * V][128].
template <int V, int Window, class Weights, class Bias, class Sums>
__device__ __forceinline__ void write_sums(Weights const& dweight, Bias const& dbias, Sums& block_sums, int taps,
                                           std::int64_t channels, float* sums, std::int64_t block, std::int64_t channel,
                                           bool beyond) {
    __syncthreads();
    for (unsigned strip = 0; strip < blockDim.y; ++strip, __syncthreads()) // one after the other: always the same bits
        if (threadIdx.y == strip)
#pragma unroll
            for (int item = 0; item <= Window; ++item)
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    float const mine = item < Window ? dweight[item < Window ? item : 0][v] : dbias[v];
                    float& sum = block_sums[item * V + v][threadIdx.x];
                    sum = strip ? sum + mine : mine;
                }
    if (beyond) return;
    // The strips of the block share the writing.
    for (int item = static_cast<int>(threadIdx.y); item <= taps; item += static_cast<int>(blockDim.y)) {
        int const age = item < taps ? taps - 1 - item : Window;
        float* const to = sums + (block * (taps + 1) + item) * channels + channel;
        if constexpr (V % 4 == 0)
#pragma unroll
            for (int v = 0; v < V; v += 4)
                *reinterpret_cast<float4*>(to + v) =
                    make_float4(block_sums[age * V + v][threadIdx.x], block_sums[age * V + v + 1][threadIdx.x],
                                block_sums[age * V + v + 2][threadIdx.x], block_sums[age * V + v + 3][threadIdx.x]);
        else
#pragma unroll
            for (int v = 0; v < V; ++v) to[v] = block_sums[age * V + v][threadIdx.x];
    }
}

/// A strip's walk over its rows, segment by segment: dx is written, sums are added up. A thread's.
template <class T, int Taps, int V, bool Silu, class Dy>
struct back_strip {
    static constexpr bool normalises = may_normalise<Dy, V>;
    using weights = conv_weight<Taps, V>;
    static constexpr int window = weights::window, lag = window - 1; ///< dx of a token is known `lag` tokens later
    using ahead = rows_ahead<T, V, window, 2, (V > 1)>;
    using stages = typename ahead::stages;
    using part = decltype(part_of(std::declval<Dy const&>(), 0));
    using element = typename part::element; ///< of the result

    conv_input<T> const& in;
    conv_backward<T, Dy> const& out;
    conv_place<T, V, normalises> const& place;
    stages& staged; ///< of the block
    array<float, window, V>& dweight;
    array<float, V>& dbias;
    weights const weight{in, place.channel};
    part const dy = part_of(out.dy, place.channel);
    bool const heads = normalises && __any_sync(~0u, dy.lanes);
    // Of the last tokens:
    array<float, window, V> x, dz;
    T* to; ///< the row of dx that is next

    /// Returns where the result's gradient is as rows are read ahead, which know no type but T: what was read is taken
    /// for what it is.
    __device__ __forceinline__ static T const* as_read(element const* gradient) {
        static_assert(sizeof(element) == sizeof(T));
        return reinterpret_cast<T const*>(gradient);
    }
    /// Turns the gradient of a result into that of z.
    template <class OfHeads>
    __device__ __forceinline__ void backward(OfHeads, array<float, V> const& z, array<float, V>& gradient) const {
        if constexpr (OfHeads::value) normalise_backward<T, element, Silu>(z, gradient, dy.lanes, dy.epsilon);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if constexpr (!std::is_same_v<element, T>) gradient[v] = __fmul_rn(gradient[v], factor_of(out.dy));
            gradient[v] = activate_backward<T, Silu>(z[v], gradient[v]);
        }
    }
    __device__ __forceinline__ void write(array<float, V> const& values, bool ready) {
        if (ready && (!normalises || !place.beyond)) store<T, V>(values, to);
        to = out.dx.after(to);
    }
    /// Walks over as many of `count` rows from `row` on as are in whole groups; returns how many.
    __device__ __forceinline__ int whole_groups(std::int64_t row, int count) {
        ahead x_and_dy{staged,
                       {in.x, conv_rows<T const>{as_read(dy.rows.data), dy.rows.stride}},
                       {in.x.at(row, place.channel), as_read(dy.at(row))}};
        float result[V];
        int done = 0;
        if (count >= window) x_and_dy.begin();
        for (; done + window <= count; done += window) {
            x_and_dy.group(done + 2 * window <= count);
            with_heads<Dy, V>(heads, [&](auto of_heads) {
#pragma unroll
                for (int k = 0; k < window; ++k) {
                    auto const x_of = [&](int age) { return x[(k - age + window) % window]; };
                    x_and_dy.template take<T>(k, 0, x[k]);
                    x_and_dy.template take<element>(k, 1, dz[k]);
                    weight.weigh(weight.bias, x_of, result);
                    backward(of_heads, result, dz[k]);
                    add_terms(dz[k], x_of, dweight, dbias);
                    weight.weigh( // dx of the token `lag` tokens ago
                        nullptr, [&](int age) { return dz[(k - lag + age + window) % window]; }, result);
                    write(result, k == lag || done > 0);
                }
            });
        }
        return done;
    }
    /// Walks over the rest of `count` rows, `done` of them are, and the tokens after them, of which segment `s`, which
    /// ends before row `next`, may hold some. Returns the row after them.
    __device__ __forceinline__ std::int64_t rest(int s, std::int64_t row, std::int64_t next, int done, int count) {
        int const reach = weight.taps - 1;
        float result[V];
        auto const x_of = [&](int age) { return x[lag - age]; };
#pragma unroll 1
        for (; done < count + lag; ++done, ++row) {
            shift(x);
            shift(dz);
#pragma unroll
            for (int v = 0; v < V; ++v) x[lag][v] = dz[lag][v] = 0.0f;
            if (row < next && done < count + reach) {
                widen<T, V>(load<T, V>(in.x.at(row, place.channel)), x[lag]);
                widen<element, V>(load<element, V>(dy.at(row)), dz[lag]);
                weight.weigh(weight.bias, x_of, result);
                with_heads<Dy, V>(heads, [&](auto of_heads) { backward(of_heads, result, dz[lag]); });
            } else if (done < count + reach) {
                look_ahead(out, std::int64_t{s} * reach + row - next, place.channel, dz[lag]);
            }
            if (done < count) add_terms(dz[lag], x_of, dweight, dbias);
            weight.weigh(
                nullptr, [&](int age) { return dz[age]; }, result);
            write(result, done >= lag);
        }
        return row;
    }
    __device__ __forceinline__ void walk() {
        std::int64_t row = place.row;
        for (int s = segment_of(in, row); row < place.last; ++s) {
            std::int64_t const next = in.first[s + 1];
            int const count = static_cast<int>((next < place.last ? next : place.last) - row);
#pragma unroll
            for (auto& token : dz)
#pragma unroll
                for (float& value : token) value = 0;
            look_back(in, weight, s, row, place.channel, x);
            to = out.dx.at(row - lag, place.channel); // written from the own rows on
            int const done = whole_groups(row, count);
            row = rest(s, row + done, next, done, count) - lag;
        }
    }
};

} // namespace conv

/// Computes dx and, of each block, the sums for dweight and dbias; needs what `causal_conv1d` needs.
///
/// Reads x and dy and writes dx once, but for the taps - 1 rows on both sides of a strip: dz is recomputed, never
/// written. Loads are a group of tokens ahead of their use: of vectors in shared memory, where each thread reads only
/// what it asked for, since the registers are full.
template <class T, int Taps, int V, bool Silu, class Dy = conv_rows<T const>>
__global__ void __launch_bounds__(128, conv_backward_resident(V, conv::may_normalise<Dy, V>))
    causal_conv1d_backward(conv_input<T> const in, conv_backward<T, Dy> const out) {
    using namespace conv;
    using strip = back_strip<T, Taps, V, Silu, Dy>;
    constexpr int window = strip::window;
    using stages = typename strip::stages;
    using all_sums = float[(window + 1) * V][128];
    __shared__ __align__(16) unsigned char shared[std::max(sizeof(stages), sizeof(all_sums))];
    auto& staged = reinterpret_cast<stages&>(shared); // until the rows are done
    auto& block_sums = reinterpret_cast<all_sums&>(shared);
    conv_place<T, V, strip::normalises> const place(in);
    float dweight[window][V] = {}, dbias[V] = {};
    if (place.row < place.last) strip{in, out, place, staged, dweight, dbias}.walk();
    if (!out.sums) return;
    write_sums<V, window>(dweight, dbias, block_sums, in.taps, in.channels, out.sums, place.block, place.channel,
                          place.beyond);
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
#pragma unroll 16
    for (std::int64_t b = 0; b < blocks; ++b) sum += sums[b * (taps + 1) * channels + i];
    if (item < taps && dweight.data)
        *dweight.at(channel, item) += sum;
    else if (item == taps && dbias)
        dbias[channel] += sum;
}

} // namespace cpx::kernels
