// SPDX-License-Identifier: Apache-2.0
// Labels and loss of next-token training on any sharding.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/ops/local/log_probability.hpp>
#include <cpx/ops/shift_rows.hpp>

#include <limits>
#include <span>
#include <type_traits>

namespace cpx {

namespace detail {

template <any_sharding S, class Comm>
void shift_labels(halo_plan<S> const& plan, sharded<index_t const, S> const& tokens, sharded<index_t, S> const& labels,
                  Comm& comm, caller here) {
    char const* const where = "next_token_labels";
    require_place(where, "tokens", tokens, plan.sharding, plan.rank, "the plan's", here);
    require_place(where, "labels", labels, plan.sharding, plan.rank, "the plan's", here);
    require(plan.where == side::after, where, "side of the plan", "side::after, of the tokens to come", "side::before",
            here);
    require(plan.reach >= 1, where, "rows after a segment in the plan", "at least 1", plan.reach, here);
    index_t const count = plan.sharding.rows(plan.rank);
    require_shape(where, "tokens", tokens.data(), count, 1, here);
    require_shape(where, "labels", labels.data(), count, 1, here);
    require_apart(where, {{"labels", labels.data()}}, {{"tokens", tokens.data()}}, here);
    shift<index_t, S>(where, plan, tokens, labels, ignored, comm, here);
}

} // namespace detail

/// Writes to every row the token that follows its own in its sequence, wherever that lives, and `ignored` to the last
/// valid token of a sequence and to padding. By a plan of k rows: the token k ahead, for a prediction of several tokens
/// (arXiv 2412.19437, section 2.2); its embeddings come by `shift_rows`.
///
/// `plan` is `halo(sharding, rank, 1, side::after)`, or of k rows instead of 1; tokens, labels: (rows, 1) of the plan's
/// sharding, not overlapping.
/// Tokens are not checked: `ignored` among them becomes the label of the row before it.
/// Collective: one exchange of the halo, at most one token a segment, or k; none where every rank holds every row.
///
/// Throws `cpx::error` on shapes and shardings that do not fit and on overlapping memory, and what `exchange` throws.
template <any_sharding S, sharded_like X, sharded_like Y, transport Comm>
void next_token_labels(halo_plan<S> const& plan, X const& tokens, Y&& labels, Comm& comm,
                       caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<S, X, Y>;
    constexpr bool writes = detail::writes<Y, X> && std::same_as<element_of<Y>, index_t>;
    static_assert(fits, "cpx: next_token_labels of tensors that are not sharded as the plan; make the plan with "
                        "halo(tokens.sharding(), ...) and labels of the same sharding");
    static_assert(!fits || writes,
                  "cpx: next_token_labels wants tokens and labels of index_t, and labels that are not const and "
                  "have a name");
    if constexpr (fits && writes) detail::shift_labels<S>(plan, tokens.view(), labels.view(), comm, here);
}
template <class Plan = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused next_token_labels(Plan const& = {}, Y1 const& = {}, Y2 const& = {}, detail::any = {},
                                  detail::any = {}) {
    static_assert(detail::never<Plan, Y1, Y2>,
                  "cpx: next_token_labels wants a halo_plan, tensors of tokens and labels, and a cpx::transport; "
                  "make the plan with halo(tokens.sharding(), rank, 1, side::after)");
    return {};
}

/// The weighted mean of -log p over the tokens of the whole batch, and the sum of their weights: without weights, the
/// number of labels. The same bits on every rank.
struct token_loss {
    double mean = 0;
    double weight = 0;
};

namespace detail {

/// Returns what a row counts: 0 without a label, else its weight, or 1 if there are no weights.
template <class T>
double weight_of(index_t label, std::span<T const> weights, index_t row) {
    if (label < 0) return 0;
    return weights.empty() ? 1 : static_cast<double>(weights[static_cast<std::size_t>(row)]);
}

/// Throws `cpx::error` unless labels are (count, 1) and weights, if there are any, are `count` numbers not negative.
template <class T>
void require_weights(char const* where, rows<index_t const> labels, std::span<T const> weights, index_t count,
                     caller here) {
    require_shape(where, "labels", labels, count, 1, here);
    if (!weights.empty())
        require(std::ssize(weights) == count, where, "number of weights", count, weights.size(), here);
    for (std::size_t row = 0; row < weights.size(); ++row)
        if (!(weights[row] >= 0 && weights[row] <= std::numeric_limits<T>::max())) // false for NaN
            throw error(where, "weight of row " + std::to_string(row), "finite and not negative", show(weights[row]),
                        here);
}

template <class T, any_sharding S, class Comm>
token_loss sum_loss(sharded<T const, S> const& logp, sharded<index_t const, S> const& labels, Comm& comm,
                    std::span<T const> weights, caller here) {
    char const* const where = "mean_token_loss";
    S const& sharding = logp.sharding();
    require(sharding.ranks() == comm.ranks(), where, "ranks of the transport", sharding.ranks(), comm.ranks(), here);
    require_place(where, "labels", labels, logp, "that of logp", here);
    tensor<double, S> terms(sharding, logp.rank(), 2, here);
    rows<double> const own = terms.data();
    require_shape(where, "logp", logp.data(), own.count(), 1, here);
    require_weights(where, labels.data(), weights, own.count(), here);
    for (index_t row = 0; row < own.count(); ++row) {
        double const weight = weight_of(labels.data()(row, 0), weights, row);
        if (weight == 0) continue; // 0 times -inf would be NaN
        own(row, 0) = -weight * static_cast<double>(logp.data()(row, 0));
        own(row, 1) = weights.empty() ? weight : -weight; // so that all ranks see who has weights
    }

    token_loss loss;
    auto const add = [&](rows<double const> all) {
        bool weighted = false, plain = false;
        for (index_t row = 0; row < all.count(); ++row) {
            loss.mean += all(row, 0);
            loss.weight += std::abs(all(row, 1));
            weighted |= all(row, 1)<0, plain |= all(row, 1)> 0;
        }
        require(!weighted || !plain, where, "weights", "on every rank or on none", "on some ranks", here);
        if (loss.weight > 0) loss.mean /= loss.weight;
    };
    if constexpr (S::every_row) {
        add(own);
    } else {
        replicated<> const whole(comm.ranks(), sharding.batch());
        auto all = make_tensor<double>(whole, comm.rank(), 2, here);
        exchange_rows(relayout(sharding, whole, comm.rank(), here), own, all.data(), comm, here, where);
        add(all.data());
    }
    return loss;
}

} // namespace detail

/// Returns `-sum w_i logp_i / sum w_i` over all rows of the batch that have a label; both are 0 if no row counts.
///
/// logp, labels: (rows, 1) of any sharding, as `log_probabilities` and `next_token_labels` write them; weights: one a
/// row of this rank, not negative, on every rank or on none; empty: all 1, the mean over labels. What logp holds in a
/// row without label or of weight 0 does not matter.
/// Bitwise the same on every sharding and any number of ranks: every rank receives every row and adds them in row
/// order, in double.
/// Collective: one all-gather of 16 bytes a row, so O(tokens) memory and additions on every rank. Sums of each rank's
/// own rows would move 16 bytes a rank, but their bits would depend on the sharding. No communication where
/// every rank holds every row.
///
/// Throws `cpx::error` on shapes, shardings or weights that do not fit, and what `exchange` throws.
template <sharded_like X, sharded_like Y, transport Comm>
token_loss mean_token_loss(X const& logp, Y const& labels, Comm& comm, std::span<element_of<X> const> weights = {},
                           caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<sharding_of<X>, Y>, numbers = std::same_as<element_of<Y>, index_t>;
    static_assert(fits, "cpx: mean_token_loss of logp and labels on two shardings; relayout one as the other");
    static_assert(!fits || numbers, "cpx: mean_token_loss wants labels of index_t");
    if constexpr (!fits || !numbers)
        return {};
    else
        return detail::sum_loss<element_of<X>, sharding_of<X>>(logp.view(), labels.view(), comm, weights, here);
}
template <class X = detail::any>
token_loss mean_token_loss(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: mean_token_loss(logp, labels, comm) wants tensors of one sharding, and a cpx::transport, then "
                  "perhaps a span of weights; view other memory as sharded(rows(list, 1), sharding, rank)");
    return {};
}

namespace detail {

template <class T, any_sharding S>
void spread_loss(token_loss const& loss, sharded<index_t const, S> const& labels, double upstream,
                 sharded<T, S> const& dlogp, std::span<T const> weights, caller here) {
    char const* const where = "mean_token_loss_backward";
    require_place(where, "dlogp", dlogp, labels, "that of labels", here);
    index_t const count = labels.data().count();
    require_shape(where, "dlogp", dlogp.data(), count, 1, here);
    require_weights(where, labels.data(), weights, count, here);
    require_apart(where, {{"dlogp", dlogp.data()}}, {{"labels", labels.data()}, {"weights", weights}}, here);
    for (index_t row = 0; row < count; ++row) {
        double const weight = weight_of(labels.data()(row, 0), weights, row);
        if (weight > 0 && !(loss.weight > 0))
            require(false, where, "weight of the loss", "that of the batch, more than 0", loss.weight, here);
        dlogp.data()(row, 0) = weight == 0 ? T(0) : static_cast<T>(-upstream * weight / loss.weight);
    }
}

} // namespace detail

/// Computes `dlogp_i = -upstream w_i / sum w_i`, the gradient of `mean_token_loss`, and 0 in rows that do not count.
///
/// `loss` is what the forward returned, labels and weights as there, `upstream` the gradient of the mean; dlogp:
/// (rows, 1), what `log_probabilities_backward` wants. No communication: a row of dlogp tells nothing of other rows but
/// the sum of all weights.
///
/// Throws `cpx::error` on shapes, shardings or weights that do not fit.
template <sharded_like X, sharded_like Y>
void mean_token_loss_backward(token_loss const& loss, X const& labels, double upstream, Y&& dlogp,
                              std::span<element_of<Y> const> weights = {}, caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<sharding_of<X>, Y>;
    constexpr bool writes = detail::writes<Y> && std::same_as<element_of<X>, index_t>;
    static_assert(fits, "cpx: mean_token_loss_backward of labels and dlogp on two shardings; make dlogp of the labels' "
                        "sharding");
    static_assert(!fits || writes,
                  "cpx: mean_token_loss_backward wants labels of index_t, and a dlogp that is not const and has "
                  "a name");
    if constexpr (fits && writes)
        detail::spread_loss<element_of<Y>, sharding_of<X>>(loss, labels.view(), upstream, dlogp.view(), weights, here);
}
template <class X = detail::any>
detail::refused mean_token_loss_backward(detail::any, X const&, detail::any = {}, detail::any = {}, detail::any = {},
                                         detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: mean_token_loss_backward(loss, labels, upstream, dlogp) wants what the forward returned, and "
                  "tensors; view other memory as sharded(rows(list, 1), sharding, rank)");
    return {};
}

} // namespace cpx
