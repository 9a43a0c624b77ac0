// SPDX-License-Identifier: Apache-2.0
// Backward of the gated delta rule over sequences on any sharding.
#pragma once

#include <cpx/ops/gated_delta_rule.hpp>

#include <concepts>

namespace cpx {

/// What goes into and comes out of the backward of a gated delta rule, as in `recurrence_gradients`.
template <class T, any_sharding S, any_memory M = host_memory>
struct delta_rule_gradient_tensors {
    using sum = typename M::template sum<T>;
    sharded_field<T const, S, M> dout;
    sharded_field<T, S, M> dq, dk, dv;
    sharded_field<sum, S, M> dg, dbeta;
    field<rows<sum const>> dfinal = {};
    field<rows<sum>> dinitial = {};
    detail::no_more end = {};
};
template <class X = void>
delta_rule_gradient_tensors(...) -> delta_rule_gradient_tensors<detail::refused, sharding<sequential<1>>>;
template <class X, class Y = detail::any, class Z = detail::any, class F = detail::first_fields<X, Y, Z>>
delta_rule_gradient_tensors(X&&, Y const& = {}, Z const& = {}, detail::any = {}, detail::any = {}, detail::any = {},
                            detail::any = {}, detail::any = {}, ...)
    -> delta_rule_gradient_tensors<typename F::element, typename F::sharding, typename F::memory>;

namespace detail {

template <class T, any_sharding S>
recurrence_gradients<T, S, 5> listed(delta_rule_gradient_tensors<T, S> const& to) {
    return {to.dout, {to.dq, to.dk, to.dv, to.dg, to.dbeta}, to.dfinal, to.dinitial};
}

/// The same of the backward.
template <carry_kind How, any_sharding S, class T, class Comm>
void check_delta_rule_backward(carry_plan<How, S> const& plan, gated_delta const& r, delta_rule_tensors<T, S> const& t,
                               delta_rule_gradient_tensors<T, S> const& to, Comm const&, caller here) {
    check_recurrence_backward(plan, r, listed(t), listed(to), here);
}
template <carry_kind How, any_sharding S, class T, class Comm>
void run_delta_rule_backward(carry_plan<How, S> const& plan, gated_delta const& r, delta_rule_tensors<T, S> const& t,
                             delta_rule_gradient_tensors<T, S> const& to, Comm& comm, caller here) {
    recur_backward_on_host(plan, r, listed(t), listed(to), comm, here);
}

} // namespace detail

/// Computes the gradients of `gated_delta_rule`.
///
/// `plan`, `t`, `heads` and `options` as in the forward, which has filled `t.saved`; t.o is not read.
/// Cost, exchanges and exactness as of `recur_backward`.
/// Collective. Throws `cpx::error` on shapes or shardings that do not fit and on overlapping memory, and what
/// `exchange` throws.
template <carry_kind How, any_sharding S, class T, any_sharding X, any_memory M, class D = T, any_sharding G = S,
          class By>
    requires detail::carries_rule<M, By>
void gated_delta_rule_backward(carry_plan<How, S> const& plan, delta_rule_tensors<T, X, M> const& t,
                               delta_rule_gradient_tensors<D, G, M> const& to, delta_rule_heads const& heads,
                               delta_rule_options const& options, By& by, caller here = caller::here()) {
    constexpr bool fits = std::same_as<X, S> && std::same_as<G, S>, same = std::same_as<D, T>;
    constexpr bool made = !detail::never<T> && !detail::never<D>, element = detail::rules_on<M, T>;
    static_assert(fits || !made,
                  "cpx: gated_delta_rule_backward of tensors or gradients that are not sharded as the plan; make "
                  "the plan with carry(q.sharding(), ...) and the gradients of the same sharding");
    static_assert(!fits || same || !made, "cpx: gated_delta_rule_backward wants gradients of the tensors' elements");
    static_assert(!fits || !same || element,
                  "cpx: gated_delta_rule_backward of elements that it does not have; use float or double, on "
                  "devices float, __nv_bfloat16 or __half");
    if constexpr (fits && same && element) {
        detail::gated_delta const r{heads, options};
        check_delta_rule_backward(plan, r, t, to, by, here);
        run_delta_rule_backward(plan, r, t, to, by, here);
    }
}
template <class Plan = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused gated_delta_rule_backward(Plan const& = {}, Y1 const& = {}, Y2 const& = {}, detail::any = {},
                                          detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<Plan, Y1, Y2>,
                  "cpx: gated_delta_rule_backward wants a carry_plan, the forward's delta_rule_tensors, "
                  "delta_rule_gradient_tensors, heads, options and a cpx::transport; make the plan with "
                  "carry<scan>(q.sharding(), ...)");
    return {};
}
template <class Plan, class Y1, class Y2, class H = delta_rule_heads, class O = delta_rule_options>
    requires std::same_as<H, delta_rule_heads> && std::same_as<O, delta_rule_options>
detail::refused gated_delta_rule_backward(Plan const& plan, Y1 const& t, Y2 const& to, H const&, O const& = {},
                                          detail::any = {}, detail::any = {}) {
    return gated_delta_rule_backward(plan, t, to);
}

} // namespace cpx
