// SPDX-License-Identifier: Apache-2.0
// The backward of a mixture of experts: gradients of rows first, from which those of the weights are added elsewhere.
#pragma once

#include <cpx/ops/local/moe.hpp>

#include <algorithm>
#include <span>
#include <string>

namespace cpx {

/// Computes `dx_s = dy_s W_e` for every choice s of every row, the gradient of the input of `expert_linear`.
///
/// chosen: (rows, choices); dy: (rows, choices * out); weight: (experts * out, in); dx: (rows, choices * in), not
/// overlapping dy. A choice's columns of dx are a function of its own columns of dy and its expert's weight alone, bit
/// for bit. Where all choices of a row share their input, its gradient is the sum of their columns.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps or a choice is no expert.
template <class T>
void expert_linear_backward_input(rows<index_t const> chosen, index_t experts, rows<T const> dy, rows<T const> weight,
                                  rows<T> dx, caller here = caller::here()) {
    char const* const where = "expert_linear_backward_input";
    index_t const out = detail::outputs_of_expert(where, "rows of weight", weight.count(), experts, here);
    detail::require_shape(where, "dy", dy, chosen.count(), chosen.width() * out, here);
    detail::require_shape(where, "dx", dx, chosen.count(), chosen.width() * weight.width(), here);
    detail::require_apart(where, {{"dx", dx}}, {{"chosen", chosen}, {"dy", dy}, {"weight", weight}}, here);
    detail::for_each_expert(where, here, chosen, experts, [&](index_t expert, std::span<detail::choice const> choices) {
        auto const of_outputs = detail::gather(choices, dy, out);
        row_buffer<T> result(of_outputs.count(), weight.width());
        linear_backward_input<T>(of_outputs.view(), weight.sub(expert * out, out), result.view());
        detail::scatter<T>(result.view(), choices, dx);
    });
}

/// Computes `dW_e += dy_s x_s^T` for every choice s of every row, the gradient of the weight of `expert_linear`.
///
/// chosen: (rows, choices); x: (rows, in) or (rows, choices * in), as in `expert_linear`; dweight: (experts * out, in).
/// dy: (rows, choices * n), the gradients of the outputs `[first, first + n)` of each expert; other outputs are left
/// alone. An element of dweight is a function of what it holds and of its columns of chosen, dy and x alone, bit for
/// bit: neither the other outputs nor how many an expert has count. Rows are added one after the other, so they may be
/// split between calls, in order, without changing a bit.
/// Cost: rows * choices * n * in multiplications, and a copy of x and dy. Experts not chosen are left alone.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps or a choice is no expert.
template <class T>
void expert_linear_backward_weight(rows<index_t const> chosen, index_t experts, rows<T const> dy, rows<T const> x,
                                   rows<T> dweight, index_t first = 0, caller here = caller::here()) {
    char const* const where = "expert_linear_backward_weight";
    index_t const out = detail::outputs_of_expert(where, "rows of dweight", dweight.count(), experts, here);
    require(chosen.width() >= 1, where, "choices", "at least 1", chosen.width(), here);
    index_t const n = dy.width() / chosen.width();
    detail::require_shape(where, "dy", dy, chosen.count(), chosen.width() * n, here);
    require(first >= 0 && first + n <= out, where, "outputs", "at least 0 and at most " + std::to_string(out),
            std::to_string(first) + " to " + std::to_string(first + n), here);
    detail::require_of_choices(where, "x", x, chosen, dweight.width(), here);
    detail::require_apart(where, {{"dweight", dweight}}, {{"chosen", chosen}, {"dy", dy}, {"x", x}}, here);
    detail::for_each_expert(where, here, chosen, experts, [&](index_t expert, std::span<detail::choice const> choices) {
        auto const of_outputs = detail::gather(choices, dy, n);
        auto const in = detail::gather(choices, x, dweight.width());
        linear_backward_weight<T>(of_outputs.view(), in.view(), dweight.sub(expert * out + first, n));
    });
}

/// Gradients of what `moe` computes from each row, a row for each row. Columns of a choice stand together.
///
/// With x, the input of `moe`, and what it saved, they give the gradients of the weights:
///
///     gate                linear_backward_weight(dlogits, x, ...)
///     gate_up_proj        expert_linear_backward_weight(chosen, experts, dgate_up, x, ...)
///     down_proj           expert_linear_backward_weight(chosen, experts, doutput, activation, ...)
///     shared_gate_proj    linear_backward_weight(the first half of dshared_gate_up, x, ...)
///     shared_up_proj      linear_backward_weight(the second half of dshared_gate_up, x, ...)
///     shared_down_proj    linear_backward_weight(dshared_output, shared_activation, ...)
///     shared_expert_gate  linear_backward_weight(dshared_gate, x, ...)
template <class T>
struct moe_gradients {
    row_buffer<T> dlogits;         ///< (rows, experts), zero for experts not chosen
    row_buffer<T> dgate_up;        ///< (rows, choices * 2 * inner)
    row_buffer<T> doutput;         ///< (rows, choices * hidden), `w_s dy`
    row_buffer<T> dshared_gate_up; ///< (rows, 2 * shared inner)
    row_buffer<T> dshared_output;  ///< (rows, hidden), `sigmoid(shared_gate) dy`
    row_buffer<T> dshared_gate;    ///< (rows, 1)
};

/// Computes `dx`, the gradient of the input of `moe`, and returns those from which the caller adds up the weights'.
///
/// dy, dx: (rows, hidden), dx may be dy. Every row of the results is a function of its rows of dy and of what was saved
/// alone, bit for bit: terms of dx are added choice after choice, then the logits', then those of the shared expert.
/// The choice itself has no gradient. Cost: as `moe`.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps in another way or a choice is no expert.
template <class T>
moe_gradients<T> moe_backward(moe_weights<T> const& w, moe_saved<T> const& saved, rows<T const> dy, rows<T> dx,
                              caller here = caller::here()) {
    char const* const where = "moe_backward";
    rows<index_t const> const chosen = saved.chosen.view();
    index_t const count = chosen.count(), choices = chosen.width();
    auto const n = detail::require_moe<T>(where, w, dy.width(), choices, {"dx", dx}, here);
    detail::require_experts(where, chosen, n.experts, here);
    detail::require_shape(where, "dy", dy, count, n.hidden, here);
    detail::require_shape(where, "dx", dx, count, n.hidden, here);
    detail::require_apart(where, {{"dx", dx}}, {{"dy", dy}}, here, detail::in_place::yes);
    detail::require_shape(where, "saved weights", saved.weights.view(), count, choices, here);
    detail::require_shape(where, "saved gate_up", saved.gate_up.view(), count, choices * 2 * n.inner, here);
    detail::require_shape(where, "saved output", saved.output.view(), count, choices * n.hidden, here);
    detail::require_shape(where, "saved shared_gate_up", saved.shared_gate_up.view(), count, 2 * n.shared, here);
    detail::require_shape(where, "saved shared_output", saved.shared_output.view(), count, n.hidden, here);
    detail::require_shape(where, "saved shared_gate", saved.shared_gate.view(), count, 1, here);
    moe_gradients<T> g{.dlogits = {count, n.experts, here},
                       .dgate_up = {count, choices * 2 * n.inner, here},
                       .doutput = {count, choices * n.hidden, here},
                       .dshared_gate_up = {count, 2 * n.shared, here},
                       .dshared_output = {count, n.hidden, here},
                       .dshared_gate = {count, 1, here}};

    for (index_t row = 0; row < count; ++row) {
        T const* const weight = saved.weights.view().row(row);
        T* const dlogit = g.dlogits.view().row(row);
        // Divided by their sum, the largest probabilities are the softmax of their own logits: the others cancel.
        T mean = 0;
        for (index_t s = 0; s < choices; ++s) {
            T const* const output = saved.output.view().row(row) + s * n.hidden;
            dlogit[chosen(row, s)] = detail::dot(dy.row(row), output, n.hidden);
            mean += weight[s] * dlogit[chosen(row, s)];
        }
        for (index_t s = 0; s < choices; ++s) dlogit[chosen(row, s)] = weight[s] * (dlogit[chosen(row, s)] - mean);

        T const shared_gate = saved.shared_gate.view()(row, 0), opened = sigmoid(shared_gate);
        T const dgate = detail::dot(dy.row(row), saved.shared_output.view().row(row), n.hidden);
        g.dshared_gate.view()(row, 0) = sigmoid_backward(shared_gate, dgate);
        for (index_t j = 0; j < n.hidden; ++j) {
            for (index_t s = 0; s < choices; ++s) g.doutput.view()(row, s * n.hidden + j) = weight[s] * dy(row, j);
            g.dshared_output.view()(row, j) = opened * dy(row, j);
        }
    }

    row_buffer<T> dactivation(count, choices * n.inner, here), terms(count, choices * n.hidden, here);
    expert_linear_backward_input<T>(chosen, n.experts, g.doutput.view(), w.down_proj, dactivation.view());
    auto const open = [](rows<T const> gate_up, rows<T const> of_activation, rows<T> of_gate_up) {
        index_t const width = of_activation.width();
        silu_mul_backward<T>(gate_up.columns(0, width), gate_up.columns(width, width), of_activation,
                             of_gate_up.columns(0, width), of_gate_up.columns(width, width));
    };
    for (index_t s = 0; s < choices; ++s)
        open(saved.gate_up.view().columns(s * 2 * n.inner, 2 * n.inner),
             dactivation.view().columns(s * n.inner, n.inner), g.dgate_up.view().columns(s * 2 * n.inner, 2 * n.inner));
    expert_linear_backward_input<T>(chosen, n.experts, g.dgate_up.view(), w.gate_up_proj, terms.view());

    row_buffer<T> dshared_activation(count, n.shared, here), term(count, n.hidden, here);
    linear_backward_input<T>(g.dshared_output.view(), w.shared_down_proj, dshared_activation.view());
    open(saved.shared_gate_up.view(), dshared_activation.view(), g.dshared_gate_up.view());

    for (index_t row = 0; row < count; ++row) std::fill_n(dx.row(row), n.hidden, T(0));
    auto const add = [&](rows<T const> some) {
        for (index_t row = 0; row < count; ++row)
            for (index_t j = 0; j < n.hidden; ++j) dx(row, j) += some(row, j);
    };
    auto const add_input_of = [&](rows<T const> of_outputs, rows<T const> weight) {
        linear_backward_input<T>(of_outputs, weight, term.view());
        add(term.view());
    };
    for (index_t s = 0; s < choices; ++s) add(terms.view().columns(s * n.hidden, n.hidden));
    add_input_of(g.dlogits.view(), w.gate);
    add_input_of(g.dshared_gate_up.view().columns(0, n.shared), w.shared_gate_proj);
    add_input_of(g.dshared_gate_up.view().columns(n.shared, n.shared), w.shared_up_proj);
    add_input_of(g.dshared_gate.view(), w.shared_expert_gate);
    return g;
}

} // namespace cpx
