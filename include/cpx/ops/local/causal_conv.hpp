// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution of one segment.
#pragma once

#include <cpx/ops/local/activation.hpp>
#include <cpx/ops/local/lanes.hpp>
#include <cpx/ops/local/shape.hpp>

#include <algorithm>
#include <vector>

namespace cpx {
namespace detail {

/// Returns row `token` of x, or of the rows just before or after it, or `zeros` where there is none.
template <class T>
T const* row_near(rows<T const> before, rows<T const> x, rows<T const> after, index_t token,
                  std::vector<T> const& zeros) {
    if (token < 0) return token + before.count() >= 0 ? before.row(token + before.count()) : zeros.data();
    if (token < x.count()) return x.row(token);
    return token - x.count() < after.count() ? after.row(token - x.count()) : zeros.data();
}

/// Throws `cpx::error` unless there are at most K - 1 rows of history or future, as wide as the segment.
template <class T>
void require_near(char const* where, char const* name, rows<T const> near, rows<T const> weight, index_t channels,
                  caller here) {
    index_t const taps = weight.width();
    require(taps >= 1, where, "width of weight", "at least 1", taps, here);
    require_shape(where, "weight", weight, channels, taps, here);
    require(near.count() < taps, where, (std::string("rows of ") + name).c_str(), "at most " + std::to_string(taps - 1),
            near.count(), here);
    if (near.count() > 0) require_shape(where, name, near, near.count(), channels, here);
}

/// Returns the weight as (K, channels).
template <class T>
padded<T> by_tap(rows<T const> weight) {
    padded<T> result(weight.width(), weight.count());
    for (index_t channel = 0; channel < weight.count(); ++channel)
        for (index_t j = 0; j < weight.width(); ++j) result(j, channel) = weight(channel, j);
    return result;
}

/// Computes `y = bias + sum_j weight_j window[j]`, all terms in ascending j.
template <class T>
void weigh(std::vector<T const*> const& window, padded<T> const& weight, T const* bias, index_t channels, T* y) {
    for (index_t channel = 0; channel < channels; channel += lane_count<T>) {
        index_t const valid = channels - channel;
        lanes<T> z{}, w, values;
        if (bias != nullptr) load<T>(bias + channel, valid, z);
        for (index_t j = 0; j < weight.count(); ++j) {
            load<T>(weight.row(j) + channel, w);
            load<T>(window[static_cast<std::size_t>(j)] + channel, valid, values);
            z += w * values;
        }
        store<T>(z, y + channel, valid);
    }
}

} // namespace detail

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
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void convolve_segment(rows<T const> history, rows<T const> x, rows<T const> weight, T const* bias, activation act,
                      rows<T> y, caller here = caller::here()) {
    char const* const where = "convolve_segment";
    index_t const taps = weight.width(), channels = x.width();
    detail::require_near(where, "history", history, weight, channels, here);
    detail::require_shape(where, "y", y, x.count(), channels, here);
    detail::require_apart(where, {{"y", y}},
                          {{"x", x}, {"history", history}, {"weight", weight}, {"bias", rows(bias, 1, channels)}},
                          here);

    auto const by_tap = detail::by_tap(weight);
    std::vector<T> const zeros(static_cast<std::size_t>(channels));
    std::vector<T const*> window(static_cast<std::size_t>(taps));
    for (index_t t = 0; t < x.count(); ++t) {
        for (index_t j = 0; j < taps; ++j)
            window[static_cast<std::size_t>(j)] = detail::row_near<T>(history, x, {}, t - (taps - 1) + j, zeros);
        detail::weigh(window, by_tap, bias, channels, y.row(t));
        if (act == activation::silu)
            for (index_t channel = 0; channel < channels; ++channel) y(t, channel) = silu(y(t, channel));
    }
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T const>, T const*, activation, rows<T>), X...>)
void convolve_segment(X&&...) {
    static_assert(detail::never<void(X...)>,
                  "cpx: convolve_segment<T>(history, x, weight, bias, activation, y) wants rows of T and a pointer to "
                  "the bias, not const where they are written; take rows with view() or data()");
}

/// Computes `dz = dy act'(z)`, the gradient of the sums z of `convolve_segment`, from which the other gradients follow.
///
/// dy, dz: (tokens, channels), dz not overlapping the others; the rest as in `convolve_segment`, with the same
/// guarantee.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void convolve_segment_backward_sums(rows<T const> history, rows<T const> x, rows<T const> weight, T const* bias,
                                    activation act, rows<T const> dy, rows<T> dz, caller here = caller::here()) {
    char const* const where = "convolve_segment_backward_sums";
    detail::require_shape(where, "dy", dy, x.count(), x.width(), here);
    detail::require_shape(where, "dz", dz, x.count(), x.width(), here);
    detail::require_apart(where, {{"dz", dz}}, {{"x", x}, {"dy", dy}}, here);
    if (act == activation::silu) convolve_segment<T>(history, x, weight, bias, activation::none, dz, here);
    for (index_t t = 0; t < dz.count(); ++t)
        for (index_t channel = 0; channel < dz.width(); ++channel)
            dz(t, channel) = act == activation::silu ? silu_backward(dz(t, channel), dy(t, channel)) : dy(t, channel);
}

/// Computes `dx_t = sum_{j < K} weight_j dz_{t+(K-1)-j}`, the gradient of the input of `convolve_segment`.
///
/// dz, dx: (tokens, channels), not overlapping; weight: (channels, K).
/// future: (up to K - 1, channels), dz of the tokens just after the segment, the nearest one first; those missing,
/// behind the end of the sequence, are zero.
/// All K terms are added in ascending j, the zeros too, so that dx is the same bit for bit however a sequence is cut.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void convolve_segment_backward_input(rows<T const> dz, rows<T const> future, rows<T const> weight, rows<T> dx,
                                     caller here = caller::here()) {
    char const* const where = "convolve_segment_backward_input";
    index_t const taps = weight.width(), channels = dz.width();
    detail::require_near(where, "future", future, weight, channels, here);
    detail::require_shape(where, "dx", dx, dz.count(), channels, here);
    detail::require_apart(where, {{"dx", dx}}, {{"dz", dz}, {"future", future}, {"weight", weight}}, here);
    auto const by_tap = detail::by_tap(weight);
    std::vector<T> const zeros(static_cast<std::size_t>(channels));
    std::vector<T const*> window(static_cast<std::size_t>(taps));
    for (index_t t = 0; t < dz.count(); ++t) {
        for (index_t j = 0; j < taps; ++j)
            window[static_cast<std::size_t>(j)] = detail::row_near<T>({}, dz, future, t + (taps - 1) - j, zeros);
        detail::weigh<T>(window, by_tap, nullptr, channels, dx.row(t));
    }
}

/// Computes `dweight_j += sum_t dz_t x_{t-(K-1)+j}` and `dbias += sum_t dz_t`.
///
/// history, x: as in `convolve_segment`; dz: (tokens, channels); dweight: (channels, K); dbias: one a channel, or
/// nullptr. Tokens are added one after the other, so they may be split between calls, in order and each with its
/// history, without changing a bit.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void convolve_segment_backward_weight(rows<T const> history, rows<T const> x, rows<T const> dz, rows<T> dweight,
                                      T* dbias, caller here = caller::here()) {
    char const* const where = "convolve_segment_backward_weight";
    index_t const taps = dweight.width(), channels = x.width();
    detail::require_near<T>(where, "history", history, dweight, channels, here);
    detail::require_shape(where, "dz", dz, x.count(), channels, here);
    detail::require_apart(where, {{"dweight", dweight}, {"dbias", rows(dbias, 1, channels)}},
                          {{"x", x}, {"history", history}, {"dz", dz}}, here);
    auto by_tap = detail::by_tap<T>(dweight);
    std::vector<T> const zeros(static_cast<std::size_t>(channels));
    for (index_t t = 0; t < x.count(); ++t) {
        for (index_t j = 0; j < taps; ++j) {
            T const* const from = detail::row_near<T>(history, x, {}, t - (taps - 1) + j, zeros);
            for (index_t channel = 0; channel < channels; channel += detail::lane_count<T>) {
                index_t const valid = channels - channel;
                detail::lanes<T> sum, gradient, values;
                detail::load<T>(by_tap.row(j) + channel, sum);
                detail::load<T>(dz.row(t) + channel, valid, gradient);
                detail::load<T>(from + channel, valid, values);
                detail::store<T>(sum + gradient * values, by_tap.row(j) + channel);
            }
        }
        if (dbias != nullptr)
            for (index_t channel = 0; channel < channels; ++channel) dbias[channel] += dz(t, channel);
    }
    for (index_t channel = 0; channel < channels; ++channel)
        for (index_t j = 0; j < taps; ++j) dweight(channel, j) = by_tap(j, channel);
}

} // namespace cpx
