// SPDX-License-Identifier: Apache-2.0
// The backward of a mixture of experts: gradients of rows first, from which those of the weights are added elsewhere.
#pragma once

#include <cpx/ops/local/moe.hpp>
#include <cpx/ops/local/sums.hpp>

#include <algorithm>
#include <span>
#include <string>

namespace cpx {
namespace rowwise {

/// The gradients of the outputs chosen: `doutput_s = w_s dy`, side by side.
template <class T>
struct weigh_choices {
    rows<wide<T> const> weights;
    rows<T const> dy;
    rows<T> doutput;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        doutput(row, j) = static_cast<T>(weights(row, j / dy.width()) * widen(dy(row, j % dy.width())));
    }
};

} // namespace rowwise

/// Gradients of what `moe` computes: of tokens a row each, of experts a row for each of `saved.at`.
///
/// With x, the input of `moe`, and what it saved, they give the gradients of the weights, those of experts on the rank
/// that has them:
///
///     gate                linear_backward_weight(dlogits, x, ...)
///     gate_up_proj        expert_linear_backward_weight(at.begins(), dgate_up, input, ...)
///     down_proj           expert_linear_backward_weight(at.begins(), doutput, activation, ...)
///     shared_gate_proj    linear_backward_weight(the first half of dshared_gate_up, x, ...)
///     shared_up_proj      linear_backward_weight(the second half of dshared_gate_up, x, ...)
///     shared_down_proj    linear_backward_weight(dshared_output, shared_activation, ...)
///     shared_expert_gate  linear_backward_weight(dshared_gate, x, ...)
template <class T>
struct moe_gradients {
    row_buffer<T> dlogits;         ///< (tokens, experts), zero for experts not chosen
    row_buffer<T> dgate_up;        ///< (rows of experts, 2 * inner)
    row_buffer<T> doutput;         ///< (rows of experts, hidden), `w_s dy`
    row_buffer<T> dshared_gate_up; ///< (tokens, 2 * shared inner)
    row_buffer<T> dshared_output;  ///< (tokens, hidden), `sigmoid(shared_gate) dy`
    row_buffer<T> dshared_gate;    ///< (tokens, 1)
};

namespace detail {

template <class T, class Experts>
moe_sizes require_moe_backward(char const* where, moe_weights<T> const& w, moe_saved<T, Experts> const& saved,
                               rows<T const> dy, rows<T> dx, rows<T const> dlogits, caller here) {
    auto const& at = saved.at;
    auto const n = require_moe<T>(where, w, at.experts(), at.own().size(), at.choices(), dy.width(), {"dx", dx}, here);
    index_t const count = at.tokens();
    require_shape(where, "dy", dy, count, n.hidden, here);
    require_shape(where, "dx", dx, count, n.hidden, here);
    require_apart(where, {{"dx", dx}}, {{"dy", dy}, {"dlogits", dlogits}}, here, in_place::yes);
    require_shape(where, "saved choices", saved.of_router.chosen.view(), count, n.choices, here);
    require_shape(where, "saved weights", saved.of_router.weights.view(), count, n.choices, here);
    require_shape(where, "saved gate_up", saved.gate_up.view(), at.count(), 2 * n.inner, here);
    require_shape(where, "saved output", saved.output.view(), count, n.choices * n.hidden, here);
    require_shape(where, "saved shared_gate_up", saved.shared_gate_up.view(), count, 2 * n.shared, here);
    require_shape(where, "saved shared_output", saved.shared_output.view(), count, n.hidden, here);
    require_shape(where, "saved shared_gate", saved.shared_gate.view(), count, 1, here);
    if (dlogits.count() > 0) require_shape(where, "dlogits", dlogits, count, n.experts, here);
    return n;
}

/// The backward of `open_gate`.
template <class T>
void open_gate_backward(rows<T const> gate_up, rows<T const> dy, rows<T> dgate_up) {
    index_t const width = dy.width();
    for_each_element(host_memory(), dy.count(), width,
                     rowwise::silu_mul_backward<T>{gate_up.columns(0, width), gate_up.columns(width, width), dy,
                                                   dgate_up.columns(0, width), dgate_up.columns(width, width)});
}

/// The backward of `add_terms`, and of the weights of the choices: writes `doutput` of every choice, (tokens, choices *
/// hidden), and of `g` what is of the logits and of the shared expert's output.
template <class T, class Experts>
void differentiate_terms(moe_sizes const& n, moe_saved<T, Experts> const& saved, rows<T const> dy,
                         rows<T const> dlogits, moe_gradients<T>& g, rows<T> of_choices, caller here) {
    index_t const count = dy.count();
    rows<index_t const> const chosen = saved.of_router.chosen.view();
    rows<T const> const weights = saved.of_router.weights.view();
    row_buffer<T> dweights(count, n.choices, here);
    for (index_t row = 0; row < count; ++row) {
        for (index_t s = 0; s < n.choices; ++s) {
            require_expert("moe_backward", chosen(row, s), n.experts, here);
            T const* const output = saved.output.view().row(row) + s * n.hidden;
            dweights.view()(row, s) = dot(dy.row(row), output, n.hidden);
        }
        T const shared_gate = saved.shared_gate.view()(row, 0), opened = sigmoid(shared_gate);
        T const dgate = dot(dy.row(row), saved.shared_output.view().row(row), n.hidden);
        g.dshared_gate.view()(row, 0) = sigmoid_backward(shared_gate, dgate);
        for (index_t j = 0; j < n.hidden; ++j) g.dshared_output.view()(row, j) = opened * dy(row, j);
    }
    for_each_element(host_memory(), count, 1,
                     rowwise::choose_experts_backward<T>{chosen, weights, dweights.view(), g.dlogits.view()});
    for_each_element(host_memory(), count, n.choices * n.hidden, rowwise::weigh_choices<T>{weights, dy, of_choices});
    for (index_t row = 0; row < dlogits.count(); ++row)
        for (index_t e = 0; e < n.experts; ++e) g.dlogits.view()(row, e) += dlogits(row, e);
}

/// The backward of the experts: makes of `doutput` of every choice the gradient of its input.
template <class T, class Experts>
void differentiate_experts(moe_sizes const& n, moe_weights<T> const& w, moe_saved<T, Experts> const& saved,
                           rows<T> of_choices, moe_gradients<T>& g, caller here) {
    auto const begins = saved.at.begins();
    g.doutput = saved.at.template to_experts<T>(of_choices, n.hidden, here);
    row_buffer<T> dactivation(saved.at.count(), n.inner, here), dinput(saved.at.count(), n.hidden, here);
    project_experts_backward_input<T>(begins, g.doutput.view(), w.down_proj, dactivation.view());
    open_gate_backward<T>(saved.gate_up.view(), dactivation.view(), g.dgate_up.view());
    project_experts_backward_input<T>(begins, g.dgate_up.view(), w.gate_up_proj, dinput.view());
    saved.at.template to_tokens<T>(dinput.view(), of_choices, here);
}

} // namespace detail

/// Computes `dx`, the gradient of the input of `moe`, and returns those from which the caller adds up the weights'.
///
/// dy, dx: (tokens, hidden), dx may be dy. Every row of the results is a function of its rows of dy and of what was
/// saved alone, bit for bit: terms of dx are added choice after choice, then the logits', then those of the shared
/// expert. The choice itself has no gradient. `dlogits`: added to that of the router, such as that of a
/// `balance_loss`; (tokens, experts), or empty. Cost and who must call: as `moe`.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps in another way.
template <class T, class Experts>
moe_gradients<T> moe_backward(moe_weights<T> const& w, moe_saved<T, Experts> const& saved,
                              std::type_identity_t<rows<T const>> dy, std::type_identity_t<rows<T>> dx,
                              std::type_identity_t<rows<T const>> dlogits = {}, caller here = caller::here()) {
    auto const n = detail::require_moe_backward<T>("moe_backward", w, saved, dy, dx, dlogits, here);
    index_t const count = saved.at.tokens(), rows_of_experts = saved.at.count();
    moe_gradients<T> g{.dlogits = {count, n.experts, here},
                       .dgate_up = {rows_of_experts, 2 * n.inner, here},
                       .doutput = {},
                       .dshared_gate_up = {count, 2 * n.shared, here},
                       .dshared_output = {count, n.hidden, here},
                       .dshared_gate = {count, 1, here}};
    row_buffer<T> of_choices(count, n.choices * n.hidden, here);
    detail::differentiate_terms<T>(n, saved, dy, dlogits, g, of_choices.view(), here);
    detail::differentiate_experts<T>(n, w, saved, of_choices.view(), g, here);
    row_buffer<T> dshared_activation(count, n.shared, here), term(count, n.hidden, here);
    detail::project_backward_input<T>(g.dshared_output.view(), w.shared_down_proj, dshared_activation.view());
    detail::open_gate_backward<T>(saved.shared_gate_up.view(), dshared_activation.view(), g.dshared_gate_up.view());

    for (index_t row = 0; row < count; ++row) std::fill_n(dx.row(row), n.hidden, T(0));
    auto const add_input_of = [&](rows<T const> of_outputs, rows<T const> weight) {
        detail::project_backward_input<T>(of_outputs, weight, term.view());
        for_each_element(host_memory(), count, n.hidden, rowwise::add<T>{term.view(), dx});
    };
    for_each_element(host_memory(), count, n.hidden, rowwise::add<T>{of_choices.view(), dx});
    add_input_of(g.dlogits.view(), w.gate);
    add_input_of(g.dshared_gate_up.view().columns(0, n.shared), w.shared_gate_proj);
    add_input_of(g.dshared_gate_up.view().columns(n.shared, n.shared), w.shared_up_proj);
    add_input_of(g.dshared_gate.view(), w.shared_expert_gate);
    return g;
}
template <class X = void>
detail::refused moe_backward(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                             detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: moe_backward(weights, saved, dy, dx, dlogits) wants moe_weights, what moe returned, and rows "
                  "of their elements; take rows with view() or data()");
    return {};
}

} // namespace cpx
