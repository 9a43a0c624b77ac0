// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of labels under softmax, row by row.
#pragma once

#include <cpx/core/elements.hpp>
#include <cpx/ops/local/shape.hpp>

#include <cmath>
#include <cstddef>
#include <span>

namespace cpx {

/// The label of a row that has none: padding, the last token of a sequence, a token that the loss leaves out.
inline constexpr index_t ignored = -1;

namespace detail {

/// What softmax subtracts and divides by: p_j = exp(z_j - highest) / total.
template <class T>
struct softmax_scale {
    T highest = 0;
    double total = 0;
};

/// Reads one row of `width` > 0 logits, in the order of its columns; the total is a double for the sake of vocabularies
/// of 10^5 floats. A NaN in any column makes the total NaN.
template <class T>
CPX_HOST_DEVICE softmax_scale<wide<T>> scale_of(T const* logits, index_t width) {
    softmax_scale<wide<T>> s{widen(logits[0])};
    for (index_t j = 1; j < width; ++j) s.highest = s.highest < widen(logits[j]) ? widen(logits[j]) : s.highest;
    for (index_t j = 0; j < width; ++j) s.total += static_cast<double>(std::exp(widen(logits[j]) - s.highest));
    return s;
}

/// Throws `cpx::error` that names the first row whose label is neither `ignored` nor one of `vocabulary` tokens.
inline void require_labels(char const* where, std::span<index_t const> labels, index_t count, index_t vocabulary,
                           caller here) {
    require(std::ssize(labels) == count, where, "number of labels", count, labels.size(), here);
    for (std::size_t row = 0; row < labels.size(); ++row)
        if (labels[row] < ignored || labels[row] >= vocabulary)
            throw error(where, "label of row " + std::to_string(row), "-1 to " + std::to_string(vocabulary - 1),
                        std::to_string(labels[row]), here);
}

} // namespace detail

namespace rowwise {

/// log softmax(logits)[label] of a row, and 0 where there is no label. labels: one a row.
template <class T>
struct log_probability {
    rows<T const> logits;
    index_t const* labels;
    rows<wide<T>> logp; ///< (rows, 1)
    CPX_HOST_DEVICE void operator()(index_t row, index_t) const {
        index_t const label = labels[row];
        logp(row, 0) = 0;
        if (label == ignored) return;
        auto const scale = detail::scale_of(logits.row(row), logits.width());
        auto const above = static_cast<double>(widen(logits(row, label)) - scale.highest);
        logp(row, 0) = static_cast<wide<T>>(above - std::log(scale.total));
    }
};
/// dlogp (onehot(label) - softmax(logits)) of a row, and zeros where there is no label.
template <class T>
struct log_probability_backward {
    rows<T const> logits;
    index_t const* labels;
    rows<wide<T> const> dlogp; ///< (rows, 1)
    rows<T> dlogits;
    CPX_HOST_DEVICE void operator()(index_t row, index_t) const {
        index_t const label = labels[row];
        if (label == ignored) {
            for (index_t j = 0; j < dlogits.width(); ++j) dlogits(row, j) = T(0);
            return;
        }
        auto const scale = detail::scale_of(logits.row(row), logits.width());
        wide<T> const gradient = dlogp(row, 0), divisor = static_cast<wide<T>>(scale.total);
        for (index_t j = 0; j < logits.width(); ++j) {
            wide<T> const p = std::exp(widen(logits(row, j)) - scale.highest) / divisor;
            dlogits(row, j) = static_cast<T>(gradient * (j == label ? 1 - p : -p));
        }
    }
};

} // namespace rowwise

/// Computes `out_i = log softmax(logits_i)[labels_i]`, and 0 where the label is `ignored`.
///
/// logits: (rows, vocabulary), labels and out: one a row. An element of out is a function of its row of logits and its
/// label, bit for bit, so rows may be split between calls. A logit of -inf is an impossible token; a NaN anywhere in a
/// row with a label makes its result NaN. Cost: one exponential a logit, no memory.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps or a label is no token, before it writes.
template <class T>
void log_probabilities(rows<T const> logits, std::span<index_t const> labels, std::span<T> out,
                       caller here = caller::here()) {
    detail::require_labels("log_probabilities", labels, logits.count(), logits.width(), here);
    require(out.size() == labels.size(), "log_probabilities", "size of out", labels.size(), out.size(), here);
    detail::require_apart("log_probabilities", {{"out", out}}, {{"logits", logits}, {"labels", labels}}, here);
    rows<T> const logp(out, 1);
    for_each_element(host_memory(), logits.count(), 1, rowwise::log_probability<T>{logits, labels.data(), logp});
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, std::span<index_t const>, std::span<T>), X...>)
detail::refused log_probabilities(X&&...) {
    static_assert(detail::never<X...>, "cpx: log_probabilities<T>(logits, labels, out) wants rows of T, labels "
                                       "of index_t and a span of T to write; take rows with view() or data()");
    return {};
}

/// Computes `dlogits_i = dlogp_i (onehot(labels_i) - softmax(logits_i))`, the gradient of `log_probabilities`, and rows
/// of 0 where the label is `ignored`, whatever they hold.
///
/// dlogp: one a row; dlogits: as logits, may be logits. Bits, NaN and cost as in the forward, with two exponentials a
/// logit instead of memory for the probabilities.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps or a label is no token, before it writes.
template <class T>
void log_probabilities_backward(rows<T const> logits, std::span<index_t const> labels, std::span<T const> dlogp,
                                rows<T> dlogits, caller here = caller::here()) {
    char const* const where = "log_probabilities_backward";
    detail::require_labels(where, labels, logits.count(), logits.width(), here);
    require(dlogp.size() == labels.size(), where, "size of dlogp", labels.size(), dlogp.size(), here);
    detail::require_shape(where, "dlogits", dlogits, logits.count(), logits.width(), here);
    detail::require_apart(where, {{"dlogits", dlogits}}, {{"logits", logits}}, here, detail::in_place::yes);
    detail::require_apart(where, {{"dlogits", dlogits}}, {{"labels", labels}, {"dlogp", dlogp}}, here);
    for_each_element(host_memory(), logits.count(), 1,
                     rowwise::log_probability_backward<T>{logits, labels.data(), rows<T const>(dlogp, 1), dlogits});
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, std::span<index_t const>, std::span<T const>, rows<T>), X...>)
detail::refused log_probabilities_backward(X&&...) {
    static_assert(detail::never<X...>, "cpx: log_probabilities_backward<T>(logits, labels, dlogp, dlogits) wants "
                                       "rows and spans of T, labels of index_t; take rows with view() or data()");
    return {};
}

} // namespace cpx
