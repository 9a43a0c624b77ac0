// SPDX-License-Identifier: Apache-2.0
// The auxiliary loss that keeps the experts of a mixture equally busy.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/ops/local/router.hpp>
#include <cpx/plan/segments.hpp>
#include <cpx/transport/gather.hpp>

#include <cstdint>
#include <type_traits>

namespace cpx {

/// Of which tokens a share is taken: of every sequence, and losses averaged, or of the whole batch.
enum class balance_over { sequence, batch };

/// How the tokens of a batch, wherever they are sharded, load its experts.
template <class T>
struct balance_loss {
    T loss = 0;
    row_buffer<double> choices; ///< (sequences or 1, experts), how many there are of each expert: whole numbers
    row_buffer<double> factor;  ///< (sequences or 1, experts), d loss / d probability of every token
    int rank = 0;               ///< whose loss this is
};

namespace detail {

/// Calls `f(row, sequence)` for a rank's rows but those behind the valid length of their sequence.
template <any_sharding S, class F>
void for_each_valid_row(S const& sharding, int rank, F&& f) {
    for (segment const& s : segments(sharding, rank))
        for (index_t i = 0; i < s.count && s.token + i < sharding.batch().valid(s.sequence); ++i)
            f(s.row + i, s.sequence);
}

} // namespace detail

/// Computes `E sum_e f_e p_e`: f_e is the share of expert e in the choices, p_e its mean probability, over the tokens
/// of a sequence or of the batch. Padding, behind the valid lengths of the batch, does not count. 1 if all experts are
/// equally busy, E if one has all.
///
/// of: of this rank's rows of `sharding`. Collective: every rank sends every other 2 E numbers a sequence; none where
/// every rank has every row. Choices are counted exactly, so that gradients have the same bits on all shardings; the
/// loss is equal within rounding. Of a batch whose micro-batches lie in several steps, add up `choices` instead.
/// Source: Fedus et al., "Switch Transformers", 2021, arXiv 2101.03961, equation 4. Hugging Face transformers'
/// `load_balancing_loss_func` is this times the choices a token.
///
/// Throws `cpx::error` if there is not a row of choices for every row of the sharding, and what `exchange` throws.
template <class T, any_sharding S, transport Comm>
balance_loss<T> expert_balance(expert_choices<T> const& of, S const& sharding, balance_over over, Comm& comm,
                               caller here = caller::here()) {
    char const* const where = "expert_balance";
    int const rank = detail::rank_in(where, sharding, comm, here);
    require(over == balance_over::sequence || over == balance_over::batch, where, "over", "sequence or batch",
            static_cast<int>(over), here);
    index_t const experts = of.logits.width(), count = of.chosen.width();
    detail::require_shape(where, "logits", of.logits.view(), sharding.rows(rank), experts, here);
    detail::require_shape(where, "chosen", of.chosen.view(), sharding.rows(rank), count, here);
    thd const& batch = sharding.batch();
    bool const one = over == balance_over::batch;
    index_t const units = one ? 1 : batch.sequences();
    auto numbers = detail::zeros<double>(where, {2 * units, experts}, here); // choices of all, then probabilities
    rows<double> const choices(numbers.data(), units, experts),
        probabilities(numbers.data() + units * experts, units, experts);
    std::vector<T> p(static_cast<std::size_t>(experts));
    detail::for_each_valid_row(sharding, rank, [&](index_t row, index_t sequence) {
        index_t const unit = one ? 0 : sequence;
        detail::softmax(of.logits.view().row(row), experts, p.data());
        for (index_t e = 0; e < experts; ++e)
            probabilities(unit, e) += static_cast<double>(p[static_cast<std::size_t>(e)]);
        for (index_t s = 0; s < count; ++s) {
            index_t const expert = of.chosen.view()(row, s);
            detail::require_expert(where, expert, experts, here);
            ++choices(unit, expert);
        }
    });
    if (!S::every_row) {
        identity id = detail::identify(where, sharding, sharding);
        id[identity::source_width] = static_cast<std::uint64_t>(experts);
        id[identity::target_width] = static_cast<std::uint64_t>(count);
        id[identity::parameter] = static_cast<std::uint64_t>(over);
        auto all = detail::zeros<double>(where, {comm.ranks(), std::ssize(numbers)}, here);
        detail::gather(comm, id, numbers.data(), all.data(), numbers.size() * sizeof(double), here);
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            numbers[i] = 0;
            for (std::size_t at = i; at < all.size(); at += numbers.size()) numbers[i] += all[at];
        }
    }

    balance_loss<T> result{0, {units, experts, here}, {units, experts, here}, rank};
    auto const tokens = [&](index_t unit) {
        index_t sum = 0;
        for (index_t s = one ? 0 : unit; s < (one ? batch.sequences() : unit + 1); ++s) sum += batch.valid(s);
        return static_cast<double>(sum);
    };
    double counted = 0, loss = 0;
    for (index_t unit = 0; unit < units; ++unit) counted += tokens(unit) > 0;
    for (index_t unit = 0; unit < units; ++unit)
        for (index_t e = 0; e < experts && tokens(unit) > 0; ++e) {
            double const share = choices(unit, e) / (tokens(unit) * static_cast<double>(count));
            result.choices.view()(unit, e) = choices(unit, e);
            result.factor.view()(unit, e) = static_cast<double>(experts) * share / (tokens(unit) * counted);
            loss += result.factor.view()(unit, e) * probabilities(unit, e);
        }
    result.loss = static_cast<T>(loss);
    return result;
}

template <class X = detail::any>
detail::refused expert_balance(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: expert_balance(of, sharding, over, comm) wants expert_choices of this rank's rows, their "
                  "sharding, a balance_over and a cpx::transport");
    return {};
}

/// Adds the gradient of a `balance_loss` to that of this rank's logits, which `moe_backward` takes: (rows, experts).
///
/// of, sharding: those of the loss, on its rank; dloss: the gradient of what it is a term of, such as its coefficient.
/// Choices have no gradient, probabilities do. Throws `cpx::error` if shapes do not fit.
template <class T, any_sharding S>
void balance_loss_backward(balance_loss<T> const& of_batch, expert_choices<T> const& of, S const& sharding,
                           std::type_identity_t<T> dloss, std::type_identity_t<rows<T>> dlogits,
                           caller here = caller::here()) {
    char const* const where = "balance_loss_backward";
    int const rank = of_batch.rank;
    index_t const experts = of_batch.factor.width(), units = of_batch.factor.count();
    detail::require_shape(where, "logits", of.logits.view(), detail::rows_of_rank(where, sharding, rank, here), experts,
                          here);
    detail::require_shape(where, "dlogits", dlogits, of.logits.count(), experts, here);
    require(units == 1 || units == sharding.batch().sequences(), where, "sequences of the loss",
            sharding.batch().sequences(), units, here);
    detail::require_apart(where, {{"dlogits", dlogits}}, {{"logits", of.logits.view()}}, here);
    std::vector<T> p(static_cast<std::size_t>(experts));
    detail::for_each_valid_row(sharding, rank, [&](index_t row, index_t sequence) {
        double const* const factor = of_batch.factor.view().row(units == 1 ? 0 : sequence);
        detail::softmax(of.logits.view().row(row), experts, p.data());
        double mean = 0;
        for (index_t e = 0; e < experts; ++e) mean += factor[e] * static_cast<double>(p[static_cast<std::size_t>(e)]);
        for (index_t e = 0; e < experts; ++e)
            dlogits(row, e) += dloss * p[static_cast<std::size_t>(e)] * static_cast<T>(factor[e] - mean);
    });
}

template <class X = detail::any, class Y = detail::any>
detail::refused balance_loss_backward(X const& = {}, Y const& = {}, detail::any = {}, detail::any = {},
                                      detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X, Y>,
                  "cpx: balance_loss_backward(loss, of, sharding, dloss, dlogits) wants the expert_choices and "
                  "the sharding of the loss, and rows of its elements for dlogits");
    return {};
}

} // namespace cpx
