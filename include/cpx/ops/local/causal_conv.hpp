// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution of one segment.
#pragma once

#include <cpx/ops/local/activation.hpp>
#include <cpx/ops/local/lanes.hpp>
#include <cpx/ops/local/shape.hpp>

#include <algorithm>
#include <vector>

namespace cpx {

/// Convolves every channel with its own K weights over the tokens up to its own:
///
///     z_t = bias + sum_{j < K} weight_j x_{t-(K-1)+j},    y_t = act(z_t)
///
/// x, y: (tokens, channels), not overlapping; weight: (channels, K), K >= 1; bias: one a channel, or nullptr.
/// history: (up to K - 1, channels), the tokens just before the segment, the nearest one last; those missing are zero.
///
/// All K terms are added in ascending j, the zeros too, so that y is the same bit for bit however a sequence is cut.
/// Cost: tokens * channels * K multiplications; copies the weight once.
///
/// Throws `cpx::error` if the shapes do not fit.
template <class T>
void convolve_segment(rows<T const> history, rows<T const> x, rows<T const> weight, T const* bias, activation act,
                      rows<T> y) {
    char const* const where = "convolve_segment";
    index const taps = weight.width(), channels = x.width(), known = history.count();
    require(taps >= 1, where, "width of weight", "at least 1", taps);
    require(known < taps, where, "rows of history", "at most " + std::to_string(taps - 1), known);
    detail::require_shape(where, "weight", weight, channels, taps);
    if (known > 0) detail::require_shape(where, "history", history, known, channels);
    detail::require_shape(where, "y", y, x.count(), channels);

    detail::padded<T> by_tap(taps, channels);
    for (index channel = 0; channel < channels; ++channel)
        for (index j = 0; j < taps; ++j) by_tap(j, channel) = weight(channel, j);
    std::vector<T> const zeros(static_cast<std::size_t>(channels));
    std::vector<T const*> window(static_cast<std::size_t>(taps));
    for (index t = 0; t < x.count(); ++t) {
        for (index j = 0; j < taps; ++j) {
            index const token = t - (taps - 1) + j;
            window[static_cast<std::size_t>(j)] = token >= 0           ? x.row(token)
                                                  : token + known >= 0 ? history.row(token + known)
                                                                       : zeros.data();
        }
        for (index channel = 0; channel < channels; channel += detail::lane_count<T>) {
            index const valid = channels - channel;
            detail::lanes<T> z{}, w, values;
            if (bias != nullptr) detail::load<T>(bias + channel, valid, z);
            for (index j = 0; j < taps; ++j) {
                detail::load<T>(by_tap.row(j) + channel, w);
                detail::load<T>(window[static_cast<std::size_t>(j)] + channel, valid, values);
                z += w * values;
            }
            detail::store<T>(z, y.row(t) + channel, valid);
        }
        if (act == activation::silu)
            for (index channel = 0; channel < channels; ++channel) y(t, channel) = silu(y(t, channel));
    }
}

} // namespace cpx
