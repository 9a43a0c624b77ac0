// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution over sequences on any sharding.
#pragma once

#include <cpx/ops/convolution.hpp>

#include <concepts>
#include <span>

namespace cpx {

namespace detail {

/// Throws `cpx::error` unless `weight` is (channels, K) for a halo of K - 1 rows on that side of a segment.
template <class T, any_sharding S>
void require_taps(char const* where, halo_plan<S> const& plan, side wanted, rows<T const> weight, index_t channels,
                  caller here) {
    char const* const names[] = {"before", "after"};
    auto const name = [&](side s) { return names[s == side::after]; };
    require(plan.where == wanted, where, "rows that the plan brings",
            std::string("those ") + name(wanted) + " a segment", std::string("those ") + name(plan.where), here);
    bool const fits = weight.count() == channels && weight.width() == plan.reach + 1;
    require(!fits || channels == 0 || weight.data(), where, "weight", "memory", "null", here);
    if (fits) return;
    auto const shape = [](index_t n, index_t k) { return '(' + std::to_string(n) + ", " + std::to_string(k) + ')'; };
    throw error(where, "shape of weight",
                shape(channels, plan.reach + 1) + ", the plan bringing " + std::to_string(plan.reach) + " rows",
                shape(weight.count(), weight.width()), here);
}

/// Whether there are convolutions of tensors in memory M between the ranks of `Comm`.
template <any_memory M, class Comm>
inline constexpr bool convolves_by = std::same_as<M, host_memory> && transport<Comm>;

/// Throws unless states fit, and what is written is apart from the rest.
template <class T, any_sharding S, any_memory M>
void check_states(convolution<T, S, M> const& of, caller here) {
    auto const& [plan, x, weight, bias, act, y, states, where, heads] = of;
    index_t const sequences = plan.sharding.batch().sequences(), window = (plan.reach + 1) * x.data().width();
    rows<T const> const all_states[] = {states.initial, states.final};
    for (rows<T const> const& given : all_states)
        if (given.data()) require_shape(where, "states", given, sequences, window, here);
    operand const initial("initial", states.initial), final("final", states.final);
    require_apart(where, {{"y", y.data()}, final}, {{"x", x.data()}, {"weight", weight}, {"bias", bias}}, here);
    require_apart(where, {{"y", y.data()}}, {initial}, here);
    require_apart(where, {final}, {initial}, here, in_place::yes);
}

/// Throws unless a tensor of a convolution has this shape, and is where the plan and the ranks have it.
template <class A, any_sharding S, any_memory M, class Comm>
void require_convolved(char const* where, char const* what, sharded<A, S, M> const& x, halo_plan<S> const& plan,
                       char const* whose, index_t channels, Comm const& comm, caller here) {
    require_place(where, what, x, plan.sharding, plan.rank, whose, here);
    require_in_memory(where, what, x, rank_memory(comm), "the communicator's", here);
    require_shape(where, what, x.data(), plan.source_rows, channels, here);
}

/// Throws unless all fits.
template <class T, any_sharding S, any_memory M, class Comm>
void check_convolution(convolution<T, S, M> const& of, Comm const& comm, caller here) {
    auto const& [plan, x, weight, bias, act, y, states, where, heads] = of;
    index_t const channels = x.data().width();
    require_convolved(where, "x", x, plan, "the plan's", channels, comm, here);
    require_convolved(where, "y", y, plan, "the plan's", channels, comm, here);
    require_activation(where, act, here);
    require_taps(where, plan, side::before, weight, channels, here);
    require(bias.empty() || std::ssize(bias) == channels, where, "size of bias", channels, bias.size(), here);
    check_states(of, here);
    operand const given[] = {
        {"x", x.data()},         {"y", y.data()}, {"weight", weight}, {"bias", bias}, {"states", states.initial},
        {"states", states.final}};
    require_there(x.memory(), where, given, here);
}

/// Runs a convolution of which all fits. On devices: `ops/cuda/causal_conv1d.hpp`.
template <class T, any_sharding S, class Comm>
void convolve(convolution<T, S> const& of, Comm& comm, caller here) {
    run_convolution(host_convolution<T, S, Comm>(of, comm, here), here);
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

namespace detail {

/// Takes `silu` and its like, of which several functions have the name, where an activation is wanted.
struct function_of_numbers {
    function_of_numbers(float (*)(float)) {}
};
template <class X>
refused no_activation() {
    static_assert(never<X>, "cpx: causal_conv1d and its backward want an activation, activation::silu or "
                            "activation::none, not the function silu of one number");
    return {};
}

} // namespace detail

template <class X>
detail::refused causal_conv1d(detail::any, X const&, detail::any, detail::any, detail::function_of_numbers, detail::any,
                              detail::any = {}, detail::any = {}, detail::any = {}) {
    return detail::no_activation<X>();
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
template <class X, class F = detail::first_fields<X>>
causal_conv1d_gradients(X&&, detail::any = {}, detail::any = {}, detail::any = {}, ...)
    -> causal_conv1d_gradients<typename F::element, typename F::sharding, typename F::memory>;

namespace detail {

template <class T, any_sharding S, any_memory M, class Comm>
void check_convolution_backward(convolution_backward<T, S, M> const& of, Comm const& comm, caller here) {
    auto const& [before, after, x, weight, bias, act, dy, dx, dweight, dbias, order, where, heads, of_channels, scale] =
        of;
    index_t const channels = x.data().width();
    for (halo_plan<S> const* plan : {&before, &after}) {
        require_convolved(where, "x", x, *plan, "that of the plans", channels, comm, here);
        require_taps(where, *plan, plan == &before ? side::before : side::after, weight, channels, here);
    }
    require_convolved(where, "dy", dy, before, "that of x", channels, comm, here);
    require_convolved(where, "dx", dx, before, "that of x", channels, comm, here);
    require_activation(where, act, here);
    require(bias.empty() || std::ssize(bias) == channels, where, "size of bias", channels, bias.size(), here);
    if (dweight.data()) require_shape(where, "dweight", dweight, channels, before.reach + 1, here);
    require(dbias.empty() || std::ssize(dbias) == channels, where, "size of dbias", channels, dbias.size(), here);
    operand const written[] = {{"dx", dx.data()}, {"dweight", dweight}, {"dbias", dbias}};
    operand const read[] = {{"x", x.data()}, {"dy", dy.data()}, {"weight", weight}, {"bias", bias}};
    require_apart(where, written, read, here);
    require_there(x.memory(), where, written, here);
    require_there(x.memory(), where, read, here);
}

/// Adds the terms of whole sequences, of which x and dy have some channels, in their order. On devices:
/// `ops/cuda/causal_conv1d.hpp`, as what follows.
template <class T, any_sharding S>
void add_in_order(convolution_backward<T, S> const& to, rows<T const> x, rows<T const> dy, caller) {
    conv_weights<T> const by{by_tap(to.weight), to.bias.empty() ? nullptr : to.bias.data(), to.act};
    sums_of_weights<T> sums(to.dweight, to.dbias, x.width(), to.weight.width());
    thd const& batch = to.x.sharding().batch();
    for (index_t s = 0; s < batch.sequences(); ++s) {
        auto const own = x.sub(batch.offset(s), batch.length(s));
        row_buffer<T> dz(own.count(), own.width());
        by.backward_sums({}, own, dy.sub(batch.offset(s), batch.length(s)), dz.view());
        sums.add({}, own, dz.view());
    }
}
template <class T, any_sharding S, class Comm, class F>
void convolve_backward_by_rank(convolution_backward<T, S> const& to, Comm& comm, caller here, F&& more) {
    run_convolution_backward(host_convolution_backward<T, S, Comm>(to, comm, here), here, more);
}

/// Runs a backward of which all fits. In the order of the batch some channels of whole sequences of x and dy go to
/// every rank. by: `comm`, or what has been prepared once for its ranks.
template <class T, any_sharding S, any_memory M, class Y, class Comm, class By>
void convolve_backward(convolution_backward<T, S, M, Y> const& to, Comm& comm, By& by, caller here) {
    weight_sums const sums(to.x.sharding(), to.order, comm, here, to.where);
    bool const in_order = to.order == sum_order::by_row && to.sums();
    auto const add = [&] {
        if (!in_order) return;
        index_t const channels = to.x.data().width();
        auto const all_x = sums.share(to.x, channels, here);
        auto const all_dy = sums.share(to.dy_of_channels ? *to.dy_of_channels : to.dy, channels, here);
        if (!all_x.share.empty()) add_in_order(to.channels(all_x.share), all_x.data, all_dy.data, here);
    };
    convolve_backward_by_rank(in_order || !sums.speaks() ? to.without_sums() : to, by, here, add);
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
        convolve_backward(given, comm, comm, here);
    }
}
template <class X>
detail::refused causal_conv1d_backward(detail::any, detail::any, X const&, detail::any, detail::any,
                                       detail::function_of_numbers, detail::any, detail::any, detail::any,
                                       detail::any = {}) {
    return detail::no_activation<X>();
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
