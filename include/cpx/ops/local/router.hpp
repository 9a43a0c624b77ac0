// SPDX-License-Identifier: Apache-2.0
// The router of a mixture of experts: which experts a token chooses, and with which weights.
#pragma once

#include <cpx/core/elements.hpp>
#include <cpx/ops/local/expert_rows.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

namespace cpx {

namespace detail {

/// Writes the softmax of a row of `count` logits.
template <class T>
CPX_HOST_DEVICE void softmax(T const* logits, index_t count, wide<T>* probabilities) {
    wide<T> highest = widen(logits[0]), total = 0;
    for (index_t e = 1; e < count; ++e) highest = highest < widen(logits[e]) ? widen(logits[e]) : highest;
    for (index_t e = 0; e < count; ++e) total += probabilities[e] = std::exp(widen(logits[e]) - highest);
    for (index_t e = 0; e < count; ++e) probabilities[e] /= total;
}

/// Divides the weights of a row by their sum.
template <class T>
CPX_HOST_DEVICE void renormalise(T* weights, index_t choices) {
    T of_chosen = 0;
    for (index_t number = 0; number < choices; ++number) of_chosen += weights[number];
    for (index_t number = 0; number < choices; ++number) weights[number] /= of_chosen;
}

CPX_HOST_DEVICE inline bool is_among(index_t const* own, index_t count, index_t expert) {
    bool found = false;
    for (index_t number = 0; number < count; ++number) found |= own[number] == expert;
    return found;
}

inline void require_choice_count(char const* where, index_t choices, index_t experts, caller here) {
    require(choices >= 1 && choices <= experts, where, "choices", "1 to the experts, " + std::to_string(experts),
            choices, here);
}

template <class T>
void require_router(char const* where, rows<T const> logits, rows<index_t const> chosen, rows<T> weights, caller here) {
    index_t const choices = chosen.width();
    require_choice_count(where, choices, logits.width(), here);
    require_shape(where, "chosen", chosen, logits.count(), choices, here);
    require_shape(where, "weights", weights, logits.count(), choices, here);
    require_apart(where, {{"chosen", chosen}, {"weights", weights}}, {{"logits", logits}}, here);
}

} // namespace detail

namespace rowwise {

/// The choices of a row, see `cpx::choose_experts`.
template <class T>
struct choose_experts {
    rows<T const> logits;
    rows<wide<T>> probabilities; ///< as logits, written
    rows<index_t> chosen;
    rows<wide<T>> weights;
    CPX_HOST_DEVICE void operator()(index_t row, index_t) const {
        wide<T>* const all = probabilities.row(row);
        index_t* const own = chosen.row(row);
        detail::softmax(logits.row(row), logits.width(), all);
        for (index_t number = 0; number < chosen.width(); ++number) {
            // Not a sort: this is right for NaN, too, in that it chooses experts, and none of them twice.
            index_t best = -1;
            for (index_t e = 0; e < logits.width(); ++e)
                if (!detail::is_among(own, number, e))
                    if (best < 0 || all[e] > all[best]) best = e;
            own[number] = best;
            weights(row, number) = all[best];
        }
        detail::renormalise(weights.row(row), weights.width());
    }
};
/// The gradients of a row's logits; of experts not chosen they are left alone.
template <class T>
struct choose_experts_backward {
    rows<index_t const> chosen;
    rows<wide<T> const> weights, dweights;
    rows<T> dlogits;
    CPX_HOST_DEVICE void operator()(index_t row, index_t) const {
        // Divided by their sum, the largest probabilities are the softmax of their own logits: the others cancel.
        wide<T> mean = 0;
        for (index_t s = 0; s < weights.width(); ++s) mean += weights(row, s) * dweights(row, s);
        for (index_t s = 0; s < weights.width(); ++s)
            dlogits(row, chosen(row, s)) = static_cast<T>(weights(row, s) * (dweights(row, s) - mean));
    }
};

} // namespace rowwise

namespace detail {

/// As `choose_experts`, of arguments that fit.
template <class T>
void choose_by_logits(rows<T const> logits, rows<index_t> chosen, rows<T> weights, caller here) {
    row_buffer<T> probabilities(logits.count(), logits.width(), here);
    for_each_element(host_memory(), logits.count(), 1,
                     rowwise::choose_experts<T>{logits, probabilities.view(), chosen, weights});
}

/// As `weigh_experts`, of shapes that fit; checks the choices.
template <class T>
void weigh_by_logits(char const* where, rows<T const> logits, rows<index_t const> chosen, rows<T> weights,
                     caller here) {
    std::vector<T> all(static_cast<std::size_t>(logits.width()));
    T const least = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon(); // with all its digits
    for (index_t row = 0; row < logits.count(); ++row) {
        index_t const* const own = chosen.row(row);
        softmax(logits.row(row), logits.width(), all.data());
        for (index_t number = 0; number < chosen.width(); ++number) {
            bool const fits = own[number] >= 0 && own[number] < logits.width() && !is_among(own, number, own[number]);
            require(
                fits, where, "chosen expert",
                [&] {
                    return "one of 0 to " + std::to_string(logits.width() - 1) + ", each once in row " +
                           std::to_string(row);
                },
                own[number], here);
            weights(row, number) = all[static_cast<std::size_t>(own[number])];
        }
        if (std::accumulate(weights.row(row), weights.row(row) + weights.width(), T(0)) < least) {
            // Nothing is left of choices far below the highest: theirs is the highest then.
            T const* const of = logits.row(row);
            T highest = of[own[0]];
            for (index_t number = 1; number < chosen.width(); ++number) highest = std::max(highest, of[own[number]]);
            for (index_t number = 0; number < chosen.width(); ++number)
                weights(row, number) = std::exp(of[own[number]] - highest);
        }
        renormalise(weights.row(row), weights.width());
    }
}

} // namespace detail

/// Computes the softmax of each row of `logits`, chooses its largest probabilities and divides them by their sum.
///
/// logits: (rows, experts); chosen, weights: (rows, choices), by descending probability, the lower expert first among
/// equals. A row of the results is a function of its row of logits alone, bit for bit.
/// Cost: rows * experts * choices comparisons.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps or there are fewer experts than choices.
template <class T>
void choose_experts(rows<T const> logits, rows<index_t> chosen, rows<T> weights, caller here = caller::here()) {
    detail::require_router<T>("choose_experts", logits, chosen, weights, here);
    detail::choose_by_logits(logits, chosen, weights, here);
}

/// Computes the weights of choices that were made before, such as by the engine that sampled the tokens: as
/// `choose_experts` does, in the order given.
///
/// Throws `cpx::error` as that does, and if a choice is no expert or a row chooses one twice.
template <class T>
void weigh_experts(rows<T const> logits, rows<index_t const> chosen, rows<T> weights, caller here = caller::here()) {
    detail::require_router<T>("weigh_experts", logits, chosen, weights, here);
    detail::weigh_by_logits("weigh_experts", logits, chosen, weights, here);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<index_t const>, rows<T>), X...>)
detail::refused weigh_experts(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: weigh_experts<T>(logits, chosen, weights) wants rows of T, and of index_t the choices, not "
                  "const where they are written; take rows with view() or data()");
    return {};
}

/// What the router says of some rows.
template <class T>
struct expert_choices {
    row_buffer<T> logits;       ///< (rows, experts)
    row_buffer<index_t> chosen; ///< (rows, choices), by descending weight, unless they were given
    row_buffer<T> weights;      ///< (rows, choices), of sum 1
};

namespace detail {

template <class T>
void require_gate(char const* where, rows<T const> gate, rows<T const> x, caller here) {
    require(gate.width() == x.width(), where, "width of gate", "that of x, " + std::to_string(x.width()), gate.width(),
            here);
}

/// As `choose_experts`, of a gate and choices that fit.
template <class T>
expert_choices<T> choose_by_gate(rows<T const> gate, rows<T const> x, index_t choices, caller here) {
    expert_choices<T> r{{x.count(), gate.count(), here}, {x.count(), choices, here}, {x.count(), choices, here}};
    project<T>(x, gate, r.logits.view());
    choose_by_logits<T>(r.logits.view(), r.chosen.view(), r.weights.view(), here);
    return r;
}

} // namespace detail

/// Lets every row of x choose experts. gate: (experts, hidden); x: (rows, hidden). Throws as `choose_experts` does.
template <class T>
expert_choices<T> choose_experts(rows<T const> gate, rows<T const> x, index_t choices, caller here = caller::here()) {
    detail::require_choice_count("choose_experts", choices, gate.count(), here);
    detail::require_gate("choose_experts", gate, x, here);
    return detail::choose_by_gate(gate, x, choices, here);
}

template <class X = void>
detail::refused choose_experts(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: choose_experts<T>(gate, x, choices) wants rows of T and how many experts a row chooses, or "
                  "logits, chosen and weights; take rows with view() or data()");
    return {};
}

/// The same with choices that were made before, which go where their tokens go: (rows, choices). Throws as
/// `weigh_experts` does.
template <class T, class I>
    requires std::same_as<std::remove_const_t<I>, index_t>
expert_choices<T> replay_experts(rows<T const> gate, rows<T const> x, rows<I> chosen, caller here = caller::here()) {
    char const* const where = "replay_experts";
    detail::require_gate(where, gate, x, here);
    detail::require_shape(where, "chosen", chosen, x.count(), chosen.width(), here);
    detail::require_choice_count(where, chosen.width(), gate.count(), here);
    expert_choices<T> r{
        {x.count(), gate.count(), here}, {x.count(), chosen.width(), here}, {x.count(), chosen.width(), here}};
    for (index_t row = 0; row < chosen.count(); ++row)
        std::copy_n(chosen.row(row), chosen.width(), r.chosen.view().row(row));
    detail::project<T>(x, gate, r.logits.view());
    detail::weigh_by_logits<T>(where, r.logits.view(), chosen, r.weights.view(), here);
    return r;
}
template <class X = void>
detail::refused replay_experts(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: replay_experts<T>(gate, x, chosen) wants rows of T, and of index_t the "
                                    "experts that each row has chosen; take rows with view() or data()");
    return {};
}

} // namespace cpx
