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

/// Computes `to_t = act(start + sum_j weight_j x_{place(t, j)})`; the rows before and after x are `before` and `after`.
template <class T, class F>
void weigh_rows(rows<T const> before, rows<T const> x, rows<T const> after, padded<T> const& weight, T const* start,
                activation act, rows<T> to, F&& place) {
    std::vector<T> const zeros(static_cast<std::size_t>(x.width()));
    std::vector<T const*> window(static_cast<std::size_t>(weight.count()));
    for (index_t t = 0; t < x.count(); ++t) {
        for (index_t j = 0; j < weight.count(); ++j)
            window[static_cast<std::size_t>(j)] = row_near<T>(before, x, after, place(t, j), zeros);
        weigh(window, weight, start, x.width(), to.row(t));
        if (act == activation::silu)
            for (index_t channel = 0; channel < to.width(); ++channel) to(t, channel) = silu(to(t, channel));
    }
}

/// What segments are convolved with, of arguments that fit: made once for all of them.
template <class T>
struct conv_weights {
    padded<T> weight; // (K, channels)
    T const* bias;    // one a channel, or nullptr
    activation act;

    /// As `convolve_segment`, `convolve_segment_backward_sums` and `convolve_segment_backward_input`.
    void forward(rows<T const> history, rows<T const> x, rows<T> y) const { weigh(history, x, act, y); }
    void backward_sums(rows<T const> history, rows<T const> x, rows<T const> dy, rows<T> dz) const {
        if (act == activation::silu) weigh(history, x, activation::none, dz);
        for (index_t t = 0; t < dz.count(); ++t)
            for (index_t channel = 0; channel < dz.width(); ++channel)
                dz(t, channel) =
                    act == activation::silu ? silu_backward(dz(t, channel), dy(t, channel)) : dy(t, channel);
    }
    void backward_input(rows<T const> dz, rows<T const> future, rows<T> dx) const {
        auto const place = [&](index_t t, index_t j) { return t + (weight.count() - 1) - j; };
        weigh_rows<T>({}, dz, future, weight, nullptr, activation::none, dx, place);
    }

private:
    void weigh(rows<T const> history, rows<T const> x, activation then, rows<T> to) const {
        auto const place = [&](index_t t, index_t j) { return t - (weight.count() - 1) + j; };
        weigh_rows<T>(history, x, {}, weight, bias, then, to, place);
    }
};

/// As `convolve_segment_backward_weight`, of arguments that fit.
template <class T>
void add_weight_terms(rows<T const> history, rows<T const> x, rows<T const> dz, rows<T> dweight, T* dbias) {
    index_t const taps = dweight.width(), channels = x.width();
    auto sums = by_tap<T>(dweight);
    std::vector<T> const zeros(static_cast<std::size_t>(channels));
    for (index_t t = 0; t < x.count(); ++t) {
        for (index_t j = 0; j < taps; ++j) {
            T const* const from = row_near<T>(history, x, {}, t - (taps - 1) + j, zeros);
            for (index_t channel = 0; channel < channels; channel += lane_count<T>) {
                index_t const valid = channels - channel;
                lanes<T> sum, gradient, values;
                load<T>(sums.row(j) + channel, sum);
                load<T>(dz.row(t) + channel, valid, gradient);
                load<T>(from + channel, valid, values);
                store<T>(sum + gradient * values, sums.row(j) + channel);
            }
        }
        if (dbias != nullptr)
            for (index_t channel = 0; channel < channels; ++channel) dbias[channel] += dz(t, channel);
    }
    for (index_t channel = 0; channel < channels; ++channel)
        for (index_t j = 0; j < taps; ++j) dweight(channel, j) = sums(j, channel);
}

/// Throws `cpx::error` unless what a segment is convolved with fits, and `y`, which is called `what`.
template <class T>
void require_convolution(char const* where, rows<T const> history, rows<T const> x, rows<T const> weight, T const* bias,
                         char const* what, rows<T> y, caller here) {
    require_near(where, "history", history, weight, x.width(), here);
    require_shape(where, what, y, x.count(), x.width(), here);
    require_apart(where, {{what, y}},
                  {{"x", x}, {"history", history}, {"weight", weight}, {"bias", rows(bias, 1, x.width())}}, here);
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
    detail::require_convolution("convolve_segment", history, x, weight, bias, "y", y, here);
    detail::conv_weights<T>{detail::by_tap(weight), bias, act}.forward(history, x, y);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T const>, T const*, activation, rows<T>), X...>)
detail::refused convolve_segment(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: convolve_segment<T>(history, x, weight, bias, activation, y) wants rows of T and a pointer to "
                  "the bias, not const where they are written; take rows with view() or data()");
    return {};
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
    detail::require_apart(where, {{"dz", dz}}, {{"dy", dy}}, here);
    detail::require_convolution(where, history, x, weight, bias, "dz", dz, here);
    detail::conv_weights<T>{detail::by_tap(weight), bias, act}.backward_sums(history, x, dy, dz);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<
             void(rows<T const>, rows<T const>, rows<T const>, T const*, activation, rows<T const>, rows<T>), X...>)
detail::refused convolve_segment_backward_sums(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: convolve_segment_backward_sums<T>(history, x, weight, bias, activation, dy, dz) wants rows of "
                  "T and a pointer to the bias, not const where they are written; take rows with view() or data()");
    return {};
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
    detail::require_near(where, "future", future, weight, dz.width(), here);
    detail::require_shape(where, "dx", dx, dz.count(), dz.width(), here);
    detail::require_apart(where, {{"dx", dx}}, {{"dz", dz}, {"future", future}, {"weight", weight}}, here);
    detail::conv_weights<T>{detail::by_tap(weight), nullptr, activation::none}.backward_input(dz, future, dx);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T const>, rows<T>), X...>)
detail::refused convolve_segment_backward_input(X&&...) {
    static_assert(detail::never<X...>, "cpx: convolve_segment_backward_input<T>(dz, future, weight, dx) wants rows of "
                                       "T, not const where they are written; take rows with view() or data()");
    return {};
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
    index_t const channels = x.width();
    detail::require_near<T>(where, "history", history, dweight, channels, here);
    detail::require_shape(where, "dz", dz, x.count(), channels, here);
    detail::require_apart(where, {{"dweight", dweight}, {"dbias", rows(dbias, 1, channels)}},
                          {{"x", x}, {"history", history}, {"dz", dz}}, here);
    detail::add_weight_terms(history, x, dz, dweight, dbias);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T const>, rows<T>, T*), X...>)
detail::refused convolve_segment_backward_weight(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: convolve_segment_backward_weight<T>(history, x, dz, dweight, dbias) wants rows of T and a "
                  "pointer to dbias, not const where they are written; take rows with view() or data()");
    return {};
}

} // namespace cpx
