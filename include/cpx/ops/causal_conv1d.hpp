// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution over sequences on any sharding.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/ops/local/causal_conv.hpp>
#include <cpx/ops/weight_sums.hpp>
#include <cpx/plan/halo.hpp>
#include <cpx/transport/exchange.hpp>

#include <span>

namespace cpx {

namespace detail {

/// Copies the rows beside segment `i`, after those that precede them all, into `buffer` and returns them, in token
/// order.
template <class T, any_sharding S>
rows<T const> rows_beside(halo_plan<S> const& plan, std::size_t i, rows<T const> own, rows<T const> halo,
                          std::vector<T>& buffer, std::span<T const> preceding = {}) {
    buffer.assign(preceding.begin(), preceding.end());
    index_t count = own.width() > 0 ? std::ssize(preceding) / own.width() : 0;
    for (std::size_t k = plan.begin[i]; k < plan.begin[i + 1]; ++k) {
        halo_run const& beside = plan.runs[k];
        rows<T const> const from = (beside.halo ? halo : own).sub(beside.first, beside.count);
        for (index_t row = 0; row < beside.count; ++row)
            buffer.insert(buffer.end(), from.row(row), from.row(row) + own.width());
        count += beside.count;
    }
    return {buffer.data(), count, own.width()};
}

/// Returns what must be alike on all ranks of a convolution.
template <class T>
identity::arguments convolution_arguments(activation act, std::span<T const> bias) {
    return {identity::word(act == activation::silu ? "silu" : "none"), identity::word(bias.empty() ? "none" : "given")};
}

/// Throws `cpx::error` unless `weight` is (channels, K) for a halo of K - 1 rows on that side of a segment.
template <class T, any_sharding S>
void require_taps(char const* where, halo_plan<S> const& plan, side wanted, rows<T const> weight, index_t channels,
                  caller here) {
    char const* const names[] = {"before", "after"};
    auto const name = [&](side s) { return names[s == side::after]; };
    require(plan.where == wanted, where, "rows that the plan brings",
            std::string("those ") + name(wanted) + " a segment", std::string("those ") + name(plan.where), here);
    if (weight.count() == channels && weight.width() == plan.reach + 1) return;
    auto const shape = [](index_t n, index_t k) { return '(' + std::to_string(n) + ", " + std::to_string(k) + ')'; };
    throw error(where, "shape of weight",
                shape(channels, plan.reach + 1) + ", the plan bringing " + std::to_string(plan.reach) + " rows",
                shape(weight.count(), weight.width()), here);
}

} // namespace detail

/// The K newest rows of every sequence, before the convolution: what a convolution that goes on from here must know.
///
/// Each is (sequences, K * channels), the newest row last, or empty for none. `initial` stands for tokens before the
/// batch, zeros for none; it is read on every rank that holds one of the first K - 1 tokens of a sequence. `final` is
/// written on the rank where a sequence ends (rank 0 if it has no tokens) and elsewhere left alone. They may be the
/// same.
template <class T>
struct causal_conv1d_states {
    field<rows<T const>> initial = {};
    field<rows<T>> final = {};
    detail::no_more end = {};
};

namespace detail {

/// Whether there are convolutions of tensors in memory M between the ranks of `Comm`.
template <any_memory M, class Comm>
inline constexpr bool convolves_by = std::same_as<M, host_memory> && transport<Comm>;

/// What a convolution is given, on one rank.
template <class T, any_sharding S, any_memory M = host_memory>
struct convolution {
    halo_plan<S> const& plan;
    sharded<T const, S, M> x;
    rows<T const> weight;
    std::span<T const> bias;
    activation act;
    sharded<T, S, M> y;
    causal_conv1d_states<T> states = {};
    char const* where = "causal_conv1d";
};

/// Throws unless states fit, and what is written is apart from the rest.
template <class T, any_sharding S, any_memory M>
void check_states(convolution<T, S, M> const& of, caller here) {
    auto const& [plan, x, weight, bias, act, y, states, where] = of;
    index_t const sequences = plan.sharding.batch().sequences(), window = (plan.reach + 1) * x.data().width();
    rows<T const> const all_states[] = {states.initial, states.final};
    for (rows<T const> const& given : all_states)
        if (given.data()) require_shape(where, "states", given, sequences, window, here);
    operand const initial("initial", states.initial), final("final", states.final);
    require_apart(where, {{"y", y.data()}, final}, {{"x", x.data()}, {"weight", weight}, {"bias", bias}}, here);
    require_apart(where, {{"y", y.data()}}, {initial}, here);
    require_apart(where, {final}, {initial}, here, in_place::yes);
}

/// Throws unless all fits. On devices: `ops/cuda/causal_conv1d.hpp`, as all that follows.
template <class T, any_sharding S, class Comm>
void check_convolution(convolution<T, S> const& of, Comm const&, caller here) {
    auto const& [plan, x, weight, bias, act, y, states, where] = of;
    require_place(where, "x", x, plan.sharding, plan.rank, "the plan's", here);
    require_place(where, "y", y, plan.sharding, plan.rank, "the plan's", here);
    index_t const channels = x.data().width();
    require_activation(where, act, here);
    require_taps(where, plan, side::before, weight, channels, here);
    require(bias.empty() || std::ssize(bias) == channels, where, "size of bias", channels, bias.size(), here);
    require_shape(where, "x", x.data(), plan.source_rows, channels, here);
    require_shape(where, "y", y.data(), plan.source_rows, channels, here);
    check_states(of, here);
}

/// Runs a convolution of which all fits.
template <class T, any_sharding S, class Comm>
void convolve(convolution<T, S> const& of, Comm& comm, caller here) {
    halo_plan<S> const& plan = of.plan;
    sharded<T const, S> const& x = of.x;
    sharded<T, S> const& y = of.y;
    causal_conv1d_states<T> const& states = of.states;
    char const* const where = of.where;
    index_t const channels = x.data().width(), taps = plan.reach + 1, window = taps * channels;
    thd const& batch = plan.sharding.batch();
    auto halo_rows = zeros<T>(where, {plan.target_rows, channels}, here);
    rows<T> const halo(halo_rows.data(), plan.target_rows, channels);
    exchange_rows(plan, x.data(), halo, comm, here, {where, convolution_arguments(of.act, of.bias)});
    conv_weights<T> const by{by_tap(of.weight), of.bias.empty() ? nullptr : of.bias.data(), of.act};
    std::vector<T> history, newest;
    auto const finish = [&](index_t sequence, rows<T const> before, rows<T const> own) {
        if (!states.final.data()) return;
        newest.assign(static_cast<std::size_t>(window), T{});
        if (states.initial.data()) std::copy_n(states.initial.row(sequence), window, newest.data());
        rows<T const> const all[] = {before, own};
        for (rows<T const> const& some : all) // the last K rows of all these
            for (index_t row = std::max<index_t>(0, some.count() - taps); row < some.count(); ++row)
                newest.insert(newest.end(), some.row(row), some.row(row) + channels);
        std::copy_n(newest.end() - window, window, states.final.row(sequence));
    };
    for (std::size_t i = 0; i < plan.segments.size(); ++i) {
        segment const& s = plan.segments[i];
        std::span<T const> preceding; // of the initial rows those within reach
        if (states.initial.data() && s.token < plan.reach)
            preceding = {states.initial.row(s.sequence) + (s.token + 1) * channels,
                         static_cast<std::size_t>((plan.reach - s.token) * channels)};
        auto const before = rows_beside<T, S>(plan, i, x.data(), halo, history, preceding);
        auto const own = rows<T const>(x.data()).sub(s.row, s.count);
        by.forward(before, own, y.data().sub(s.row, s.count));
        index_t const skip = std::ssize(preceding) / std::max<index_t>(1, channels);
        if (s.token + s.count == batch.length(s.sequence))
            finish(s.sequence, before.sub(skip, before.count() - skip), own);
    }
    for (index_t s = 0; s < batch.sequences(); ++s)
        if (batch.length(s) == 0 && (S::every_row || plan.rank == 0)) finish(s, {}, {});
}

} // namespace detail

/// Computes `y_t = activation(bias + sum_j weight_j x_{t-K+1+j})` for every channel, with zeros before a sequence
/// begins.
///
/// `plan` is `halo(sharding, rank, K - 1)`. x and y: (rows, channels) of the plan's sharding; weight: (channels, K),
/// rows or a list, and bias: (channels) or empty, for the channels that this rank holds (see `local_rows`). `states`,
/// for decoding: what came before the batch, and what the next one will have to know.
/// Collective: one exchange of the halo. Any K and segments of any length, a halo may span several ranks.
/// Bitwise the same on every sharding.
/// Of tensors on devices: include <cpx/ops/cuda/causal_conv1d.hpp>. Weight, bias and states are there, too.
///
/// Throws `cpx::error` on shapes that do not fit and on overlapping memory, if ranks have other activations or only
/// some a bias, and what `exchange` throws.
template <any_sharding S, sharded_anywhere X, sharded_like<memory_of<X>> Y, class Comm>
    requires detail::convolves_by<memory_of<X>, Comm>
void causal_conv1d(halo_plan<S> const& plan, X const& x, rows_or_list<element_of<Y> const> weight,
                   std::span<element_of<Y> const> bias, activation act, Y&& y, Comm& comm,
                   causal_conv1d_states<element_of<Y>> const& states = {}, caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<S, X, Y>, writes = detail::writes<Y, X>;
    constexpr bool real = !std::integral<element_of<Y>>;
    static_assert(fits, "cpx: causal_conv1d of tensors that are not sharded as the plan; make the plan with "
                        "halo(x.sharding(), ...) and y of the same sharding");
    static_assert(!fits || writes,
                  "cpx: causal_conv1d wants x of y's elements, and a y that is not const and has a name");
    static_assert(!fits || !writes || real, "cpx: causal_conv1d of whole numbers; use float or double");
    if constexpr (fits && writes && real) {
        detail::convolution<element_of<Y>, S, memory_of<X>> const given{
            plan, x.view(), weight.of_width(plan.reach + 1), bias, act, y.view(), states};
        check_convolution(given, comm, here);
        convolve(given, comm, here);
    }
}

template <class Plan = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused causal_conv1d(Plan const& = {}, Y1 const& = {}, detail::any = {}, detail::any = {}, detail::any = {},
                              Y2 const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<Plan, Y1, Y2>,
                  "cpx: causal_conv1d wants a halo_plan, a tensor x, weight and bias of its elements, an "
                  "activation, a tensor y, and a cpx::transport of their memory; make the plan with "
                  "halo(x.sharding(), ...)");
    return {};
}

/// What the backward of a causal convolution computes. Each but dx may be left empty.
///
/// dx: (rows, channels), written. dweight: (channels, K), dbias: (channels), this rank's share, added to what they
/// hold: the gradient is the sum over all ranks. `order`: see there.
template <class T, any_sharding S, any_memory M = host_memory>
struct causal_conv1d_gradients {
    sharded_field<T, S, M> dx;
    field<rows_or_list<typename M::template sum<T>>> dweight = {};
    field<std::span<typename M::template sum<T>>> dbias = {};
    field<sum_order> order = sum_order::by_rank;
    detail::no_more end = {};
};

template <class X = void>
causal_conv1d_gradients(...) -> causal_conv1d_gradients<detail::refused, sharding<sequential<1>>>;
template <class X>
causal_conv1d_gradients(X&&, detail::any = {}, detail::any = {}, detail::any = {}, ...)
    -> causal_conv1d_gradients<typename detail::first_field<X>::element, typename detail::first_field<X>::sharding,
                               typename detail::first_field<X>::memory>;

namespace detail {

/// What the backward of a convolution is given, on one rank.
template <class T, any_sharding S, any_memory M = host_memory>
struct convolution_backward {
    using sum = typename M::template sum<T>;
    halo_plan<S> const &before, &after;
    sharded<T const, S, M> x;
    rows<T const> weight;
    std::span<T const> bias;
    activation act;
    sharded<T const, S, M> dy;
    sharded<T, S, M> dx;
    rows<sum> dweight;
    std::span<sum> dbias;
    sum_order order;
    char const* where = "causal_conv1d_backward";
};

template <class T, any_sharding S, class Comm>
void check_convolution_backward(convolution_backward<T, S> const& of, Comm const&, caller here) {
    auto const& [before, after, x, weight, bias, act, dy, dx, dweight, dbias, order, where] = of;
    for (auto const* plan : {&before, &after})
        require_place(where, "x", x, plan->sharding, plan->rank, "that of the plans", here);
    require_place(where, "dy", dy, x, "that of x", here);
    require_place(where, "dx", dx, x, "that of x", here);
    index_t const channels = x.data().width();
    require_activation(where, act, here);
    require_taps(where, before, side::before, weight, channels, here);
    require_taps(where, after, side::after, weight, channels, here);
    require(bias.empty() || std::ssize(bias) == channels, where, "size of bias", channels, bias.size(), here);
    require_shape(where, "x", x.data(), before.source_rows, channels, here);
    require_shape(where, "dy", dy.data(), before.source_rows, channels, here);
    require_shape(where, "dx", dx.data(), before.source_rows, channels, here);
    if (dweight.data()) require_shape(where, "dweight", dweight, channels, before.reach + 1, here);
    require(dbias.empty() || std::ssize(dbias) == channels, where, "size of dbias", channels, dbias.size(), here);
    require_apart(where, {{"dx", dx.data()}, {"dweight", dweight}, {"dbias", dbias}},
                  {{"x", x.data()}, {"dy", dy.data()}, {"weight", weight}, {"bias", bias}}, here);
}

/// Runs a backward of which all fits.
template <class T, any_sharding S, class Comm>
void convolve_backward(convolution_backward<T, S> const& to, Comm& comm, caller here) {
    halo_plan<S> const &before = to.before, &after = to.after;
    sharded<T const, S> const &x = to.x, &dy = to.dy;
    char const* const where = to.where;
    index_t const channels = x.data().width(), taps = before.reach + 1;
    rows<T> const given = to.dweight;
    auto const buffer = [&](index_t count) { return zeros<T>(where, {count, channels}, here); };
    auto unwanted = buffer(given.data() || to.dbias.empty() ? 0 : taps);
    rows<T> const dweight = given.data() ? given : rows<T>(unwanted, taps);
    auto x_values = buffer(before.target_rows), dz_values = buffer(before.source_rows), beside = buffer(0);
    auto future_values = buffer(after.target_rows);
    rows<T> const x_halo(x_values.data(), before.target_rows, channels);
    rows<T> const dz(dz_values.data(), before.source_rows, channels);
    rows<T> const dz_halo(future_values.data(), after.target_rows, channels);
    weight_sums const sums(x.sharding(), to.order, comm, here, where);
    conv_weights<T> const by{by_tap(to.weight), to.bias.empty() ? nullptr : to.bias.data(), to.act};
    run_for const of(where, convolution_arguments(to.act, to.bias));
    exchange_rows(before, x.data(), x_halo, comm, here, of);
    for (std::size_t i = 0; i < before.segments.size(); ++i) {
        segment const& s = before.segments[i];
        auto const history = rows_beside<T, S>(before, i, x.data(), x_halo, beside);
        auto const own = rows<T const>(x.data()).sub(s.row, s.count);
        by.backward_sums(history, own, dy.data().sub(s.row, s.count), dz.sub(s.row, s.count));
        if (dweight.data() && !sums.moves() && sums.speaks())
            add_weight_terms<T>(history, own, dz.sub(s.row, s.count), dweight,
                                to.dbias.empty() ? nullptr : to.dbias.data());
    }
    if (dweight.data() && sums.moves()) { // whole sequences, some channels
        auto const all_x = sums.share(x, channels, here);
        auto const all_dz = sums.share(sharded(dz, x.sharding(), x.rank()), channels, here);
        range const own = all_x.share;
        thd const& batch = x.sharding().batch();
        for (index_t s = 0; !own.empty() && s < batch.sequences(); ++s)
            add_weight_terms<T>({}, all_x.data.sub(batch.offset(s), batch.length(s)),
                                all_dz.data.sub(batch.offset(s), batch.length(s)), dweight.sub(own.first, own.size()),
                                to.dbias.empty() ? nullptr : to.dbias.data() + own.first);
    }
    exchange_rows(after, dz, dz_halo, comm, here, of);
    for (std::size_t i = 0; i < after.segments.size(); ++i) {
        segment const& s = after.segments[i];
        by.backward_input(dz.sub(s.row, s.count), rows_beside<T, S>(after, i, dz, dz_halo, beside),
                          to.dx.data().sub(s.row, s.count));
    }
}

} // namespace detail

/// Computes the gradients of `causal_conv1d` of sequences that began with it: without initial states.
///
/// `before` is the plan of the forward, `after` is `halo(sharding, rank, K - 1, side::after)`; x, weight, bias and
/// `act` as there; dy: (rows, channels), the gradient of y.
/// Collective: one exchange of the halo of x, one of that of dz = dy act'(z). dx is computed where x lives, from the dz
/// of the tokens after it, so that it is bitwise the same on every sharding; a gradient never reaches another sequence.
///
/// Throws as the forward does.
template <any_sharding S, any_sharding A, sharded_anywhere X, sharded_like<memory_of<X>> Dy, class T = element_of<X>,
          any_sharding G = S, class Comm>
    requires detail::convolves_by<memory_of<X>, Comm>
void causal_conv1d_backward(halo_plan<S> const& before, halo_plan<A> const& after, X const& x,
                            rows_or_list<element_of<X> const> weight, std::span<element_of<X> const> bias,
                            activation act, Dy const& dy, causal_conv1d_gradients<T, G, memory_of<X>> const& to,
                            Comm& comm, caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<S, X, Dy> && std::same_as<A, S> && std::same_as<G, S>;
    constexpr bool same = std::same_as<element_of<X>, T> && std::same_as<element_of<Dy>, T>;
    static_assert(fits || detail::never<T>,
                  "cpx: causal_conv1d_backward of tensors that are not sharded as the plans; make both plans "
                  "with halo(x.sharding(), ...) and dy and dx of the same sharding");
    static_assert(!fits || same || detail::never<T>,
                  "cpx: causal_conv1d_backward wants x and dy of the gradients' elements");
    if constexpr (fits && same) {
        index_t const taps = before.reach + 1;
        detail::convolution_backward<T, S, memory_of<X>> const given{
            before,   after,   x.view(), weight.of_width(taps), bias, act, dy.view(), to.dx, to.dweight.of_width(taps),
            to.dbias, to.order};
        check_convolution_backward(given, comm, here);
        convolve_backward(given, comm, here);
    }
}
template <class Plan = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused causal_conv1d_backward(Plan const& = {}, detail::any = {}, Y1 const& = {}, detail::any = {},
                                       detail::any = {}, detail::any = {}, Y2 const& = {}, detail::any = {},
                                       detail::any = {}, detail::any = {}) {
    static_assert(detail::never<Plan, Y1, Y2>,
                  "cpx: causal_conv1d_backward wants two halo_plans, a tensor x, weight and bias of its elements, "
                  "an activation, a tensor dy, gradients and a cpx::transport of their memory; make the plans "
                  "with halo(x.sharding(), ...)");
    return {};
}

} // namespace cpx
