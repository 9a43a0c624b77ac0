// SPDX-License-Identifier: Apache-2.0
// Mixture of experts: every token chooses some of them, and each expert sees only the rows of tokens that chose it.
#pragma once

#include <cpx/core/field.hpp>
#include <cpx/ops/local/activation.hpp>
#include <cpx/ops/local/lanes.hpp>
#include <cpx/ops/local/router.hpp>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace cpx {

/// Weights of a mixture of experts, named as in the checkpoint; projections are (out, in).
///
/// Experts are stacked, one after the other, and of the rank's own experts only; of their 2 * inner outputs of
/// gate_up_proj the first half is the gate.
template <class T>
struct moe_weights {
    field<rows<T const>> gate;               ///< (all experts, hidden), the logits of the experts
    field<rows<T const>> gate_up_proj;       ///< (experts * 2 * inner, hidden)
    field<rows<T const>> down_proj;          ///< (experts * hidden, inner)
    field<rows<T const>> shared_gate_proj;   ///< (shared inner, hidden)
    field<rows<T const>> shared_up_proj;     ///< (shared inner, hidden)
    field<rows<T const>> shared_down_proj;   ///< (hidden, shared inner)
    field<rows<T const>> shared_expert_gate; ///< (1, hidden)
    detail::no_more end = {};
};

/// What the backward of `moe` needs of its forward. Of tokens a row each; of experts a row for each of `at`, by
/// `expert_rows` or `expert_exchange`.
template <class T, class Experts = expert_rows>
struct moe_saved {
    expert_choices<T> of_router;
    Experts at;
    row_buffer<T> input;             ///< (rows of experts, hidden)
    row_buffer<T> gate_up;           ///< (rows of experts, 2 * inner)
    row_buffer<T> activation;        ///< (rows of experts, inner), the input of down_proj
    row_buffer<T> output;            ///< (tokens, choices * hidden), choice after choice, before its weight
    row_buffer<T> shared_gate_up;    ///< (tokens, 2 * shared inner)
    row_buffer<T> shared_activation; ///< (tokens, shared inner), the input of shared_down_proj
    row_buffer<T> shared_output;     ///< (tokens, hidden), before its gate
    row_buffer<T> shared_gate;       ///< (tokens, 1), the gate before its sigmoid
};

namespace detail {

/// Sizes of a mixture of experts: of all, those of this rank.
struct moe_sizes {
    index_t experts = 1, choices = 1, hidden = 1, inner = 1, shared = 1;
};

/// Throws `cpx::error` that names `where` unless the weights fit each other, rows of `hidden` channels and so many
/// experts, `own` of them this rank's, and lie apart from what is written.
template <class T>
moe_sizes require_moe(char const* where, moe_weights<T> const& w, index_t experts, index_t own, index_t choices,
                      index_t hidden, operand written, caller here) {
    moe_sizes const n{experts, choices, hidden, w.down_proj.width(), w.shared_gate_proj.count()};
    require_shape(where, "gate", w.gate, experts, hidden, here);
    require_shape(where, "gate_up_proj", w.gate_up_proj, own * 2 * n.inner, hidden, here);
    require_shape(where, "down_proj", w.down_proj, own * hidden, n.inner, here);
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

/// Computes `silu(gate) up` of gates and, beside them, ups.
template <class T>
void open_gate(rows<T const> gate_up, rows<T> y) {
    index_t const width = y.width();
    for_each_element(host_memory(), y.count(), width,
                     rowwise::silu_mul<T>{gate_up.columns(0, width), gate_up.columns(width, width), y});
}

/// Adds up the terms of every token: of its choices, then of the shared expert.
template <class T, class Experts>
void add_terms(moe_sizes const& n, moe_saved<T, Experts> const& saved, rows<T> y) {
    std::vector<T> factors(static_cast<std::size_t>(n.choices + 1));
    padded<T> terms(n.choices + 1, n.hidden), sum(1, n.hidden);
    for (index_t row = 0; row < y.count(); ++row) {
        for (index_t s = 0; s < n.choices; ++s) {
            factors[static_cast<std::size_t>(s)] = saved.of_router.weights.view()(row, s);
            std::copy_n(saved.output.view().row(row) + s * n.hidden, n.hidden, terms.row(s));
        }
        factors.back() = sigmoid(saved.shared_gate.view()(row, 0));
        std::copy_n(saved.shared_output.view().row(row), n.hidden, terms.row(n.choices));
        combine(factors.data(), n.choices + 1, terms, T(0), sum.row(0));
        std::copy_n(sum.row(0), n.hidden, y.row(row));
    }
}

/// As `moe`, of arguments that fit.
template <class T, class Experts>
moe_saved<T, Experts> run_moe(moe_sizes const& n, moe_weights<T> const& w, rows<T const> x, expert_choices<T> of_router,
                              Experts at, rows<T> y, caller here) {
    index_t const count = x.count();
    moe_saved<T, Experts> saved{.of_router = std::move(of_router),
                                .at = std::move(at),
                                .input = {},
                                .gate_up = {},
                                .activation = {},
                                .output = {count, n.choices * n.hidden, here},
                                .shared_gate_up = {count, 2 * n.shared, here},
                                .shared_activation = {count, n.shared, here},
                                .shared_output = {count, n.hidden, here},
                                .shared_gate = {count, 1, here}};
    saved.input = saved.at.to_experts(x, n.hidden, here);
    index_t const own_rows = saved.input.count();
    auto const begins = saved.at.begins();
    saved.gate_up = {own_rows, 2 * n.inner, here};
    saved.activation = {own_rows, n.inner, here};
    row_buffer<T> of_experts(own_rows, n.hidden, here);
    project_experts<T>(begins, saved.input.view(), w.gate_up_proj, saved.gate_up.view());
    open_gate<T>(saved.gate_up.view(), saved.activation.view());
    project_experts<T>(begins, saved.activation.view(), w.down_proj, of_experts.view());
    saved.at.template to_tokens<T>(of_experts.view(), saved.output.view(), here);
    project<T>(x, w.shared_gate_proj, saved.shared_gate_up.view().columns(0, n.shared));
    project<T>(x, w.shared_up_proj, saved.shared_gate_up.view().columns(n.shared, n.shared));
    open_gate<T>(saved.shared_gate_up.view(), saved.shared_activation.view());
    project<T>(saved.shared_activation.view(), w.shared_down_proj, saved.shared_output.view());
    project<T>(x, w.shared_expert_gate, saved.shared_gate.view());
    add_terms(n, saved, y);
    return saved;
}

} // namespace detail

/// Computes a mixture of experts, and returns what its backward needs.
///
///     y = sum_s w_s down_e(silu(gate_e x) * up_e x)  +  sigmoid(shared_expert_gate x) down(silu(gate x) * up x)
///
/// The sum is over the experts e that the router has chosen, with its weights w_s. x, y: (tokens, hidden), y may be x.
/// at: `expert_rows(chosen, experts)`; or an `expert_exchange`, then experts are spread over ranks and calls are
/// collective. Terms are added choice after choice, then the shared expert. So a row of y is a function of its row of x
/// and its choices alone, bit for bit, wherever the experts are.
/// Cost: that of the experts chosen, not of all; about rows * (3 * inner + hidden) elements of experts are kept.
/// Source: Shazeer et al., "Outrageously Large Neural Networks", 2017, arXiv 1701.06538; the shared expert and the
/// shapes as in Hugging Face transformers' Qwen3_5MoeSparseMoeBlock.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps in another way.
template <class T, rows_of_experts Experts>
moe_saved<T, Experts> moe(moe_weights<T> const& w, std::type_identity_t<rows<T const>> x,
                          std::type_identity_t<expert_choices<T>> of_router, Experts at,
                          std::type_identity_t<rows<T>> y, caller here = caller::here()) {
    auto const n =
        detail::require_moe<T>("moe", w, at.experts(), at.own().size(), at.choices(), x.width(), {"y", y}, here);
    detail::require_shape("moe", "y", y, x.count(), n.hidden, here);
    detail::require_shape("moe", "weights of the choices", of_router.weights.view(), x.count(), n.choices, here);
    detail::require_shape("moe", "tokens that chose", x, at.tokens(), n.hidden, here);
    detail::require_apart("moe", {{"y", y}}, {{"x", x}}, here, detail::in_place::yes);
    return detail::run_moe<T>(n, w, x, std::move(of_router), std::move(at), y, here);
}

/// The same where this rank has all experts and lets its tokens choose `choices` of them each.
///
/// Throws `cpx::error` if there are fewer experts than choices, too.
template <class T>
moe_saved<T> moe(moe_weights<T> const& w, std::type_identity_t<rows<T const>> x, index_t choices,
                 std::type_identity_t<rows<T>> y, caller here = caller::here()) {
    index_t const experts = w.gate.count();
    detail::require_choice_count("moe", choices, experts, here);
    auto const n = detail::require_moe<T>("moe", w, experts, experts, choices, x.width(), {"y", y}, here);
    detail::require_shape("moe", "y", y, x.count(), n.hidden, here);
    detail::require_apart("moe", {{"y", y}}, {{"x", x}}, here, detail::in_place::yes);
    auto chosen = detail::choose_by_gate<T>(w.gate, x, choices, here);
    expert_rows at(chosen.chosen.view(), experts, {}, here);
    return detail::run_moe<T>(n, w, x, std::move(chosen), std::move(at), y, here);
}
template <class X = void>
detail::refused moe(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                    detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: moe(weights, x, choices, y), or moe(weights, x, expert_choices, experts, y), wants moe_weights "
                  "and rows of their elements; take rows with view() or data()");
    return {};
}

} // namespace cpx
