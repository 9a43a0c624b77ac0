// SPDX-License-Identifier: Apache-2.0
// The router of a mixture of experts: which experts a token chooses, and with which weights.
#pragma once

#include <cpx/ops/local/expert_rows.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace cpx {

namespace detail {

/// Writes the softmax of a row of `count` logits.
template <class T>
void softmax(T const* logits, index_t count, T* probabilities) {
    T const highest = *std::max_element(logits, logits + count);
    T total = 0;
    for (index_t e = 0; e < count; ++e) total += probabilities[e] = std::exp(logits[e] - highest);
    for (index_t e = 0; e < count; ++e) probabilities[e] /= total;
}

/// Calls `choose(row, probabilities)` for every row, which writes the row's `weights`, and divides them by their sum.
template <class T, class F>
void weigh(char const* where, rows<T const> logits, rows<index_t const> chosen, rows<T> weights, caller here,
           F&& choose) {
    index_t const experts = logits.width(), choices = chosen.width();
    require(choices >= 1 && choices <= experts, where, "choices", "1 to the experts, " + std::to_string(experts),
            choices, here);
    require_shape(where, "chosen", chosen, logits.count(), choices, here);
    require_shape(where, "weights", weights, logits.count(), choices, here);
    require_apart(where, {{"chosen", chosen}, {"weights", weights}}, {{"logits", logits}}, here);
    std::vector<T> probabilities(static_cast<std::size_t>(experts));
    T const least = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon(); // with all its digits
    for (index_t row = 0; row < logits.count(); ++row) {
        softmax(logits.row(row), experts, probabilities.data());
        choose(row, probabilities);
        T of_chosen = 0;
        for (index_t number = 0; number < choices; ++number) of_chosen += weights(row, number);
        if (of_chosen < least) { // nothing is left of choices far below the highest: theirs is the highest then
            T const* const all = logits.row(row);
            T highest = all[chosen(row, 0)];
            for (index_t number = 1; number < choices; ++number) highest = std::max(highest, all[chosen(row, number)]);
            of_chosen = 0;
            for (index_t number = 0; number < choices; ++number)
                of_chosen += weights(row, number) = std::exp(all[chosen(row, number)] - highest);
        }
        for (index_t number = 0; number < choices; ++number) weights(row, number) /= of_chosen;
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
    detail::weigh<T>("choose_experts", logits, chosen, weights, here, [&](index_t row, std::vector<T> const& all) {
        index_t* const own = chosen.row(row);
        for (index_t number = 0; number < chosen.width(); ++number) {
            // Not a sort: this is right for NaN, too, in that it chooses experts, and none of them twice.
            index_t best = -1;
            for (index_t e = 0; e < logits.width(); ++e)
                if (std::find(own, own + number, e) == own + number)
                    if (best < 0 || all[static_cast<std::size_t>(e)] > all[static_cast<std::size_t>(best)]) best = e;
            own[number] = best;
            weights(row, number) = all[static_cast<std::size_t>(best)];
        }
    });
}

/// Computes the weights of choices that were made before, such as by the engine that sampled the tokens: as
/// `choose_experts` does, in the order given.
///
/// Throws `cpx::error` as that does, and if a choice is no expert or a row chooses one twice.
template <class T>
void weigh_experts(rows<T const> logits, rows<index_t const> chosen, rows<T> weights, caller here = caller::here()) {
    char const* const where = "weigh_experts";
    detail::weigh<T>(where, logits, chosen, weights, here, [&](index_t row, std::vector<T> const& all) {
        index_t const* const own = chosen.row(row);
        for (index_t number = 0; number < chosen.width(); ++number) {
            bool const fits = own[number] >= 0 && own[number] < logits.width() &&
                              std::find(own, own + number, own[number]) == own + number;
            require(
                fits, where, "chosen expert",
                [&] {
                    return "one of 0 to " + std::to_string(logits.width() - 1) + ", each once in row " +
                           std::to_string(row);
                },
                own[number], here);
            weights(row, number) = all[static_cast<std::size_t>(own[number])];
        }
    });
}

/// What the router says of some rows.
template <class T>
struct expert_choices {
    row_buffer<T> logits;       ///< (rows, experts)
    row_buffer<index_t> chosen; ///< (rows, choices), by descending weight, unless they were given
    row_buffer<T> weights;      ///< (rows, choices), of sum 1
};

/// Lets every row of x choose experts. gate: (experts, hidden); x: (rows, hidden). Throws as `choose_experts` does.
template <class T>
expert_choices<T> choose_experts(rows<T const> gate, rows<T const> x, index_t choices, caller here = caller::here()) {
    require(choices >= 1 && choices <= gate.count(), "choose_experts", "choices",
            "1 to the experts, " + std::to_string(gate.count()), choices, here);
    expert_choices<T> r{{x.count(), gate.count(), here}, {x.count(), choices, here}, {x.count(), choices, here}};
    linear<T>(x, gate, r.logits.view(), here);
    choose_experts<T>(r.logits.view(), r.chosen.view(), r.weights.view(), here);
    return r;
}

template <class X = void>
detail::refused choose_experts(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
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
    expert_choices<T> r{
        {x.count(), gate.count(), here}, {x.count(), chosen.width(), here}, {x.count(), chosen.width(), here}};
    detail::require_shape("replay_experts", "chosen", chosen, x.count(), chosen.width(), here);
    for (index_t row = 0; row < chosen.count(); ++row)
        std::copy_n(chosen.row(row), chosen.width(), r.chosen.view().row(row));
    linear<T>(x, gate, r.logits.view(), here);
    weigh_experts<T>(r.logits.view(), chosen, r.weights.view(), here);
    return r;
}
template <class X = void>
detail::refused replay_experts(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: replay_experts<T>(gate, x, chosen) wants rows of T, and of index_t the "
                                    "experts that each row has chosen; take rows with view() or data()");
    return {};
}

} // namespace cpx
