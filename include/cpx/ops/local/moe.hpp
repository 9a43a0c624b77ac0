// SPDX-License-Identifier: Apache-2.0
// Mixture of experts: every row chooses some of them, and each expert sees only the rows that chose it.
#pragma once

#include <cpx/ops/local/activation.hpp>
#include <cpx/ops/local/lanes.hpp>
#include <cpx/ops/local/linear.hpp>
#include <cpx/ops/local/shape.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

namespace cpx {

/// Owns a dense (count, width) matrix that begins with zeros.
template <class T>
class row_buffer {
public:
    row_buffer() = default;
    row_buffer(index_t count, index_t width, caller here = caller::here())
        : count_(count), width_(width), values_(detail::zeros<T>("row_buffer", {count, width}, here)) {}

    rows<T> view() { return {values_.data(), count_, width_}; }
    rows<T const> view() const { return {values_.data(), count_, width_}; }
    index_t count() const { return count_; }
    index_t width() const { return width_; }

private:
    index_t count_ = 0, width_ = 0;
    std::vector<T> values_;
};

namespace detail {

/// The expert of `chosen(row, number)`.
struct choice {
    index_t row = 0, number = 0;
};

/// Throws `cpx::error` unless every choice is an expert.
inline void require_experts(char const* where, rows<index_t const> chosen, index_t experts, caller here) {
    for (index_t row = 0; row < chosen.count(); ++row)
        for (index_t number = 0; number < chosen.width(); ++number)
            if (index_t const expert = chosen(row, number); expert < 0 || expert >= experts)
                require(false, where, "chosen expert", "0 to " + std::to_string(experts - 1), expert, here);
}

/// Calls `f(expert, choices)` for every expert that a row chose, ascending, its choices by ascending rows.
///
/// Throws `cpx::error` before the first call if a choice is no expert. Cost: O(choices + experts).
template <class F>
void for_each_expert(char const* where, caller here, rows<index_t const> chosen, index_t experts, F f) {
    require_experts(where, chosen, experts, here);
    std::vector<std::size_t> begin(static_cast<std::size_t>(experts) + 1);
    for (index_t row = 0; row < chosen.count(); ++row)
        for (index_t number = 0; number < chosen.width(); ++number)
            ++begin[static_cast<std::size_t>(chosen(row, number)) + 1];
    for (std::size_t expert = 1; expert < begin.size(); ++expert) begin[expert] += begin[expert - 1];
    std::vector<choice> all(begin.back());
    auto next = begin;
    for (index_t row = 0; row < chosen.count(); ++row)
        for (index_t number = 0; number < chosen.width(); ++number)
            all[next[static_cast<std::size_t>(chosen(row, number))]++] = {row, number};
    for (std::size_t expert = 0; expert + 1 < begin.size(); ++expert)
        if (auto const count = begin[expert + 1] - begin[expert]; count > 0)
            f(static_cast<index_t>(expert), std::span<choice const>(all).subspan(begin[expert], count));
}

/// Copies the `width` columns of each choice into rows of their own. `from` has `width` columns, the same for all
/// choices of a row, or `width` for each choice in turn.
template <class T>
row_buffer<T> gather(std::span<choice const> choices, rows<T const> from, index_t width) {
    row_buffer<T> to(std::ssize(choices), width);
    for (index_t i = 0; i < to.count(); ++i) {
        auto const [row, number] = choices[static_cast<std::size_t>(i)];
        std::copy_n(from.row(row) + (from.width() == width ? 0 : number * width), width, to.view().row(i));
    }
    return to;
}

/// Copies rows back to the columns of their choices.
template <class T>
void scatter(rows<T const> from, std::span<choice const> choices, rows<T> to) {
    for (index_t i = 0; i < from.count(); ++i) {
        auto const [row, number] = choices[static_cast<std::size_t>(i)];
        std::copy_n(from.row(i), from.width(), to.row(row) + number * from.width());
    }
}

/// Returns the outputs of each expert. Throws `cpx::error` unless `stacked` holds a matrix of some for each.
inline index_t outputs_of_expert(char const* where, char const* what, index_t stacked, index_t experts, caller here) {
    require(experts > 0, where, "experts", "at least 1", experts, here);
    require(stacked % experts == 0, where, what, "a multiple of the experts, " + std::to_string(experts), stacked,
            here);
    return stacked / experts;
}

/// Throws `cpx::error` unless `x` has `width` columns for all choices or for each.
template <class T>
void require_of_choices(char const* where, char const* name, rows<T> x, rows<index_t const> chosen, index_t width,
                        caller here) {
    if (x.width() != width) require_shape(where, name, x, chosen.count(), chosen.width() * width, here);
    require_shape(where, name, x, chosen.count(), x.width(), here);
}

} // namespace detail

/// Computes `y_s = W_e x_s` for every choice s of every row, where e is the expert chosen.
///
/// chosen: (rows, choices), experts from 0; x: (rows, in), the same for all choices of a row, or (rows, choices * in);
/// weight: (experts * out, in), expert after expert; y: (rows, choices * out), choice after choice, not overlapping x.
/// A choice's columns of y are a function of its own columns of x and its expert's weight alone, bit for bit.
/// Cost: rows * choices * out * in multiplications, and a copy of x and y; weights of experts not chosen are not read.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps or a choice is no expert.
template <class T>
void expert_linear(rows<index_t const> chosen, index_t experts, rows<T const> x, rows<T const> weight, rows<T> y,
                   caller here = caller::here()) {
    char const* const where = "expert_linear";
    index_t const out = detail::outputs_of_expert(where, "rows of weight", weight.count(), experts, here);
    detail::require_of_choices(where, "x", x, chosen, weight.width(), here);
    detail::require_shape(where, "y", y, chosen.count(), chosen.width() * out, here);
    detail::require_apart(where, {{"y", y}}, {{"chosen", chosen}, {"x", x}, {"weight", weight}}, here);
    detail::for_each_expert(where, here, chosen, experts, [&](index_t expert, std::span<detail::choice const> choices) {
        auto const in = detail::gather(choices, x, weight.width());
        row_buffer<T> result(in.count(), out);
        linear<T>(in.view(), weight.sub(expert * out, out), result.view());
        detail::scatter<T>(result.view(), choices, y);
    });
}

/// Computes the softmax of each row of `logits`, chooses its largest probabilities and divides them by their sum.
///
/// logits: (rows, experts); chosen, weights: (rows, choices), by descending probability, the lower expert first among
/// equals. A row of the results is a function of its row of logits alone, bit for bit.
/// Cost: rows * experts * choices comparisons.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps or there are fewer experts than choices.
template <class T>
void choose_experts(rows<T const> logits, rows<index_t> chosen, rows<T> weights, caller here = caller::here()) {
    char const* const where = "choose_experts";
    index_t const experts = logits.width(), choices = chosen.width();
    require(choices >= 1 && choices <= experts, where, "choices", "1 to the experts, " + std::to_string(experts),
            choices, here);
    detail::require_shape(where, "chosen", chosen, logits.count(), choices, here);
    detail::require_shape(where, "weights", weights, logits.count(), choices, here);
    detail::require_apart(where, {{"chosen", chosen}, {"weights", weights}}, {{"logits", logits}}, here);
    std::vector<T> probabilities(static_cast<std::size_t>(experts));
    for (index_t row = 0; row < logits.count(); ++row) {
        T const* const logit = logits.row(row);
        T const highest = *std::max_element(logit, logit + experts);
        T total = 0;
        for (index_t e = 0; e < experts; ++e)
            total += probabilities[static_cast<std::size_t>(e)] = std::exp(logit[e] - highest);
        for (T& p : probabilities) p /= total;
        T of_chosen = 0;
        for (index_t number = 0; number < choices; ++number) {
            // Not a sort: this is right for NaN, too, in that it chooses experts, and none of them twice.
            index_t best = -1;
            for (index_t e = 0; e < experts; ++e) {
                auto const end = chosen.row(row) + number;
                if (std::find(chosen.row(row), end, e) != end) continue;
                if (best < 0 || probabilities[static_cast<std::size_t>(e)] > weights(row, number)) {
                    best = e;
                    weights(row, number) = probabilities[static_cast<std::size_t>(e)];
                }
            }
            chosen(row, number) = best;
            of_chosen += weights(row, number);
        }
        for (index_t number = 0; number < choices; ++number) weights(row, number) /= of_chosen;
    }
}

/// Weights of a mixture of experts, whole on every rank, named as in the checkpoint; projections are (out, in).
///
/// Experts are stacked, one after the other; of their 2 * inner outputs of gate_up_proj the first half is the gate.
template <class T>
struct moe_weights {
    rows<T const> gate;               ///< (experts, hidden), the logits of the experts
    rows<T const> gate_up_proj;       ///< (experts * 2 * inner, hidden)
    rows<T const> down_proj;          ///< (experts * hidden, inner)
    rows<T const> shared_gate_proj;   ///< (shared inner, hidden)
    rows<T const> shared_up_proj;     ///< (shared inner, hidden)
    rows<T const> shared_down_proj;   ///< (hidden, shared inner)
    rows<T const> shared_expert_gate; ///< (1, hidden)
};

/// What the backward of `moe` needs of its forward, a row for each row. Columns of a choice stand together, choice
/// after choice.
template <class T>
struct moe_saved {
    row_buffer<index_t> chosen;      ///< (rows, choices), the experts, by descending weight
    row_buffer<T> weights;           ///< (rows, choices)
    row_buffer<T> gate_up;           ///< (rows, choices * 2 * inner)
    row_buffer<T> activation;        ///< (rows, choices * inner), the input of down_proj
    row_buffer<T> output;            ///< (rows, choices * hidden), before its weight
    row_buffer<T> shared_gate_up;    ///< (rows, 2 * shared inner)
    row_buffer<T> shared_activation; ///< (rows, shared inner), the input of shared_down_proj
    row_buffer<T> shared_output;     ///< (rows, hidden), before its gate
    row_buffer<T> shared_gate;       ///< (rows, 1), the gate before its sigmoid
};

namespace detail {

/// Sizes of a mixture of experts.
struct moe_sizes {
    index_t experts = 1, choices = 1, hidden = 1, inner = 1, shared = 1;
};

/// Throws `cpx::error` that names `where` unless the weights fit each other and rows of `hidden` channels, and
/// lie apart from what is written.
template <class T>
moe_sizes require_moe(char const* where, moe_weights<T> const& w, index_t hidden, index_t choices, operand written,
                      caller here) {
    moe_sizes const n{w.gate.count(), choices, hidden, w.down_proj.width(), w.shared_gate_proj.count()};
    require(choices >= 1 && choices <= n.experts, where, "choices", "1 to the experts, " + std::to_string(n.experts),
            choices, here);
    require_shape(where, "gate", w.gate, n.experts, hidden, here);
    require_shape(where, "gate_up_proj", w.gate_up_proj, n.experts * 2 * n.inner, hidden, here);
    require_shape(where, "down_proj", w.down_proj, n.experts * hidden, n.inner, here);
    require_shape(where, "shared_gate_proj", w.shared_gate_proj, n.shared, hidden, here);
    require_shape(where, "shared_up_proj", w.shared_up_proj, n.shared, hidden, here);
    require_shape(where, "shared_down_proj", w.shared_down_proj, hidden, n.shared, here);
    require_shape(where, "shared_expert_gate", w.shared_expert_gate, 1, hidden, here);
    require_apart(where, {written},
                  {{"gate", w.gate},
                   {"gate_up_proj", w.gate_up_proj},
                   {"down_proj", w.down_proj},
                   {"shared_gate_proj", w.shared_gate_proj},
                   {"shared_up_proj", w.shared_up_proj},
                   {"shared_down_proj", w.shared_down_proj},
                   {"shared_expert_gate", w.shared_expert_gate}},
                  here);
    return n;
}

} // namespace detail

/// Computes a mixture of experts, and returns what its backward needs.
///
///     y = sum_s w_s down_e(silu(gate_e x) * up_e x)  +  sigmoid(shared_expert_gate x) down(silu(gate x) * up x)
///
/// The sum is over the `choices` experts e of the largest probabilities, whose weights w_s are these probabilities
/// over their sum (`choose_experts`). x, y: (rows, hidden), y may be x.
/// Terms are added by descending w_s, the lower expert first among equals, then the shared expert. So a row of y, and
/// of what is saved, is a function of its row of x alone, bit for bit.
/// Cost: that of the experts chosen, not of all; about rows * choices * (hidden + 3 * inner) elements are kept.
/// Source: Shazeer et al., "Outrageously Large Neural Networks", 2017, arXiv 1701.06538; the shared expert and the
/// shapes as in Hugging Face transformers' Qwen3_5MoeSparseMoeBlock.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps in another way or there are fewer experts than choices.
template <class T>
moe_saved<T> moe(moe_weights<T> const& w, rows<T const> x, index_t choices, rows<T> y, caller here = caller::here()) {
    auto const n = detail::require_moe<T>("moe", w, x.width(), choices, {"y", y}, here);
    index_t const count = x.count();
    detail::require_shape("moe", "y", y, count, n.hidden, here);
    detail::require_apart("moe", {{"y", y}}, {{"x", x}}, here, detail::in_place::yes);
    moe_saved<T> saved{.chosen = {count, choices, here},
                       .weights = {count, choices, here},
                       .gate_up = {count, choices * 2 * n.inner, here},
                       .activation = {count, choices * n.inner, here},
                       .output = {count, choices * n.hidden, here},
                       .shared_gate_up = {count, 2 * n.shared, here},
                       .shared_activation = {count, n.shared, here},
                       .shared_output = {count, n.hidden, here},
                       .shared_gate = {count, 1, here}};
    row_buffer<T> logits(count, n.experts, here);
    linear<T>(x, w.gate, logits.view());
    choose_experts<T>(logits.view(), saved.chosen.view(), saved.weights.view());

    rows<index_t const> const chosen = saved.chosen.view();
    expert_linear<T>(chosen, n.experts, x, w.gate_up_proj, saved.gate_up.view());
    for (index_t s = 0; s < choices; ++s) {
        auto const gate_up = saved.gate_up.view().columns(s * 2 * n.inner, 2 * n.inner);
        silu_mul<T>(gate_up.columns(0, n.inner), gate_up.columns(n.inner, n.inner),
                    saved.activation.view().columns(s * n.inner, n.inner));
    }
    expert_linear<T>(chosen, n.experts, saved.activation.view(), w.down_proj, saved.output.view());

    auto const gate = saved.shared_gate_up.view().columns(0, n.shared);
    auto const up = saved.shared_gate_up.view().columns(n.shared, n.shared);
    linear<T>(x, w.shared_gate_proj, gate);
    linear<T>(x, w.shared_up_proj, up);
    silu_mul<T>(gate, up, saved.shared_activation.view());
    linear<T>(saved.shared_activation.view(), w.shared_down_proj, saved.shared_output.view());
    linear<T>(x, w.shared_expert_gate, saved.shared_gate.view());

    std::vector<T> factors(static_cast<std::size_t>(choices + 1));
    detail::padded<T> terms(choices + 1, n.hidden), sum(1, n.hidden);
    for (index_t row = 0; row < count; ++row) {
        for (index_t s = 0; s < choices; ++s) {
            factors[static_cast<std::size_t>(s)] = saved.weights.view()(row, s);
            std::copy_n(saved.output.view().row(row) + s * n.hidden, n.hidden, terms.row(s));
        }
        factors.back() = sigmoid(saved.shared_gate.view()(row, 0));
        std::copy_n(saved.shared_output.view().row(row), n.hidden, terms.row(choices));
        detail::combine(factors.data(), choices + 1, terms, T(0), sum.row(0));
        std::copy_n(sum.row(0), n.hidden, y.row(row));
    }
    return saved;
}

} // namespace cpx
