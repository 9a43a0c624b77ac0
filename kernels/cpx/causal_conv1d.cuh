// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution of one rank's rows.
#pragma once

#include <cpx/conv_parts.cuh>

namespace cpx::kernels {

/// Blocks of `causal_conv1d` that a multiprocessor holds at once.
inline constexpr int conv_resident = 4;

/// Computes y. Vectors of V > 1 need `Taps`, a dense weight, and addresses and strides that are multiples of 16 bytes.
///
/// Reads every row once, but for the taps - 1 before a strip. Loads are a group of tokens ahead of their use.
/// Out: `conv_rows`, or `conv_parts`, whose heads are normalised on the way if V > 1.
template <class T, int Taps, int V, bool Silu, class Out = conv_rows<T>>
__global__ void __launch_bounds__(128, conv_resident) causal_conv1d(conv_input<T> const in, Out const out) {
    using namespace conv;
    constexpr bool normalises = may_normalise<Out, V>;
    conv_place<T, V, normalises> const place(in);
    std::int64_t row = place.row;
    int rows = static_cast<int>(place.last - row); // of the strip, not done yet
    if (rows <= 0) return;
    conv_weight<Taps, V> const weight(in, place.channel);
    constexpr int window = weight.window;
    using ahead = rows_ahead<T, V, window, 1, normalises>;
    __shared__ typename ahead::stages staged;
    auto const y = part_of(out, place.channel);
    using element = typename std::remove_const_t<decltype(y)>::element; // of the result
    element* to = y.at(row);
    bool const heads = normalises && __any_sync(~0u, y.lanes);
    auto const finish = [&](auto of_heads, float(&z)[V]) {
#pragma unroll
        for (int v = 0; v < V; ++v) z[v] = activate<T, Silu>(z[v]);
        if constexpr (of_heads.value) normalise<element>(z, y.lanes, y.epsilon);
        if (!normalises || !place.beyond) store<element, V>(z, to);
    };
    for (int s = segment_of(in, row); rows > 0; ++s) {
        std::int64_t const next = in.first[s + 1] - row;
        int left = next < rows ? static_cast<int>(next) : rows;
        rows -= left;
        float x[window][V], z[V];
        look_back(in, weight, s, row, place.channel, x);
        ahead x_ahead{staged, {in.x}, {in.x.at(row, place.channel)}};
        row += left;
        if (left >= window) x_ahead.begin();
        for (; left >= window; left -= window) {
            x_ahead.group(left >= 2 * window);
            with_heads<Out, V>(heads, [&](auto of_heads) {
#pragma unroll
                for (int k = 0; k < window; ++k, to = y.rows.after(to)) {
                    x_ahead.take(k, 0, x[k]);
                    weight.weigh(
                        weight.bias, [&](int age) { return x[(k - age + window) % window]; }, z);
                    finish(of_heads, z);
                }
            });
        }
#pragma unroll 1
        for (T const* from = x_ahead.from[0]; left > 0; --left, from = in.x.after(from), to = y.rows.after(to)) {
            shift(x);
            widen<T, V>(load<T, V>(from), x[window - 1]);
            weight.weigh(
                weight.bias, [&](int age) { return x[window - 1 - age]; }, z);
            with_heads<Out, V>(heads, [&](auto of_heads) { finish(of_heads, z); });
        }
    }
}

} // namespace cpx::kernels
