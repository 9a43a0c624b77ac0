// SPDX-License-Identifier: Apache-2.0
// Gated delta rule over sequences on any sharding.
#pragma once

#include <cpx/ops/local/delta_rule_backward.hpp>
#include <cpx/ops/recurrence.hpp>

#include <array>
#include <concepts>

namespace cpx {

using delta_rule_heads = recurrence_heads;

template <class T, any_memory M = host_memory>
using delta_rule_saved = recurrence_saved<T, M>;

/// The tensors of a gated delta rule on one rank, as in `recurrence_tensors`.
///
/// q, k: (rows, key heads * key_dim), v, o: (rows, value heads * value_dim), g: log decay, beta: (rows, value heads).
/// States: (sequences, value heads * key_dim * value_dim). Gates and states are what memory M has for sums.
template <class T, any_sharding S, any_memory M = host_memory>
struct delta_rule_tensors {
    using sum = typename M::template sum<T>;
    sharded_field<T const, S, M> q, k, v;
    sharded_field<sum const, S, M> g, beta;
    sharded_field<T, S, M> o;
    field<rows<sum const>> initial = {};
    field<rows<sum>> final = {};
    field<delta_rule_saved<T, M>*> saved = nullptr;
    detail::no_more end = {};
};
template <class X = void>
delta_rule_tensors(...) -> delta_rule_tensors<detail::refused, sharding<sequential<1>>>;
template <class X, class Y = detail::any, class Z = detail::any, class F = detail::first_fields<X, Y, Z>>
delta_rule_tensors(X&&, Y const& = {}, Z const& = {}, detail::any = {}, detail::any = {}, detail::any = {},
                   detail::any = {}, detail::any = {}, detail::any = {}, ...)
    -> delta_rule_tensors<typename F::element, typename F::sharding, typename F::memory>;

namespace detail {

/// Throws unless the heads fit each other and there are sizes of their states.
inline void require_delta_heads(char const* where, delta_rule_heads const& heads, caller here) {
    heads.check(where, here);
    require_groups(where, "value heads", heads.value_heads, "key heads", heads.key_heads, here);
    for (index_t const dim : {heads.key_dim, heads.value_dim})
        product(where, "value heads x key_dim x dim", {heads.value_heads, heads.key_dim, dim}, here);
}

/// The gated delta rule as a model of `recurrence`.
struct gated_delta {
    delta_rule_heads const& heads;
    delta_rule_options const& options;
    char const* name = "gated_delta_rule";

    state_shape states() const { return {heads.value_heads, heads.key_dim, heads.value_dim}; }
    std::array<recurrence_input, 5> inputs() const {
        return {{{"q", heads.key_heads, heads.key_dim},
                 {"k", heads.key_heads, heads.key_dim},
                 {"v", heads.value_heads, heads.value_dim},
                 {"g", heads.value_heads, 1},
                 {"beta", heads.value_heads, 1}}};
    }
    recurrence_settings settings() const {
        return {options.chunk, query_scale<double>(options.scale, heads.key_dim), options.qk_l2norm};
    }
    void check(char const* where, caller here) const {
        require_delta_heads(where, heads, here);
        require(options.chunk >= 1, where, "chunk", "at least 1", options.chunk, here);
    }

    template <class T>
    void forward(std::array<rows<T const>, 5> const& x, index_t first, rows<T> state, rows<T> o) const {
        segment_of(x, first).forward(state, o);
    }
    template <class T>
    void fold(std::array<rows<T const>, 5> const& x, index_t first, rows<T> end, rows<T> map) const {
        segment_of(x, first).fold(end, map);
    }
    template <class T>
    void backward(std::array<rows<T const>, 5> const& x, index_t first, rows<T const> state, rows<T const> dout,
                  rows<T> dstate, std::array<rows<T>, 5> const& dx) const {
        for (std::size_t i = 0; i < 2; ++i) fill(dx[i], T(0)); // they are added to
        delta_backward<T>(segment_of(x, first), state, dout, dstate, {dx[0], dx[1], dx[2], dx[3], dx[4]});
    }
    template <class T>
    void backward_fold(std::array<rows<T const>, 5> const& x, index_t first, rows<T const> dout, rows<T> dstate) const {
        delta_backward_fold<T>(segment_of(x, first), dout, dstate);
    }

private:
    template <class T>
    delta_segment<T> segment_of(std::array<rows<T const>, 5> const& x, index_t first) const {
        return {x[0], x[1], x[2], x[3], x[4], first, options};
    }
};

template <class T, any_sharding S>
recurrence_tensors<T, S, 5> listed(delta_rule_tensors<T, S> const& t) {
    return {{t.q, t.k, t.v, t.g, t.beta}, t.o, t.initial, t.final, t.saved};
}

/// Whether there are gated delta rules of elements T in memory M, whose states `By` carries.
template <any_memory M, class By>
inline constexpr bool carries_rule = std::same_as<M, host_memory> && transport<By>;
template <any_memory M, class T>
inline constexpr bool rules_on = !std::integral<T>;
/// Whether such rules can be between rows of T: of the same elements, on devices of others, too.
template <any_memory M, class R, class T>
inline constexpr bool rule_between = std::same_as<R, T>;

/// Throws unless a memory has the heads of a gated delta rule, and these operands; the host's has.
template <class Plan>
void check_rule_in(host_memory const&, char const*, gated_delta const&, Plan const&, bool, std::span<operand const>,
                   caller) {}

/// Throws unless a gated delta rule and its tensors fit the plan, and runs one of which all fits. On devices:
/// `ops/cuda/gated_delta_rule.hpp`.
template <carry_kind How, any_sharding S, class T, class Comm>
void check_delta_rule(carry_plan<How, S> const& plan, gated_delta const& r, delta_rule_tensors<T, S> const& t,
                      Comm const&, caller here) {
    check_recurrence(plan, r, listed(t), here);
}
template <carry_kind How, any_sharding S, class T, class Comm>
void run_delta_rule(carry_plan<How, S> const& plan, gated_delta const& r, delta_rule_tensors<T, S> const& t, Comm& comm,
                    caller here) {
    recur_on_host(plan, r, listed(t), comm, here);
}

} // namespace detail

/// Computes the gated delta rule in place on any sharding,
///
///     S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t,    a_t = exp(g_t).
///
/// `plan` is `carry<serial>(sharding, rank)` or `carry<scan>(sharding, rank)`, see there and `is_exact`.
/// Collective. Communication: `serial`, one state (value heads * key_dim * value_dim) a cut, one after the other;
/// `scan`, to a segment of level l floor(log2 l) + 1 states and one map (value heads * key_dim^2) fewer.
/// Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, arXiv 2412.06464, eq. 10.
/// Of tensors on devices: include <cpx/ops/cuda/gated_delta_rule.hpp>, which says what `by` may be there.
///
/// Throws `cpx::error` on shapes or shardings that do not fit and on overlapping memory, and what `exchange`
/// throws.
template <carry_kind How, any_sharding S, class T, any_sharding X, any_memory M, class By>
    requires detail::carries_rule<M, By>
void gated_delta_rule(carry_plan<How, S> const& plan, delta_rule_tensors<T, X, M> const& t,
                      delta_rule_heads const& heads, delta_rule_options const& options, By& by,
                      caller here = caller::here()) {
    constexpr bool fits = std::same_as<X, S>, element = detail::rules_on<M, T>;
    static_assert(fits || detail::never<T>,
                  "cpx: gated_delta_rule of tensors that are not sharded as the plan; make the plan with "
                  "carry(q.sharding(), ...)");
    static_assert(!fits || element, "cpx: gated_delta_rule of elements that it does not have; use float or double, on "
                                    "devices float, __nv_bfloat16 or __half");
    if constexpr (fits && element) {
        detail::gated_delta const r{heads, options};
        check_delta_rule(plan, r, t, by, here);
        run_delta_rule(plan, r, t, by, here);
    }
}
template <class Plan = detail::any, class Y = detail::any>
detail::refused gated_delta_rule(Plan const& = {}, Y const& = {}, detail::any = {}, detail::any = {}, detail::any = {},
                                 detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                                 detail::any = {}) {
    static_assert(detail::never<Plan, Y>,
                  "cpx: gated_delta_rule wants a carry_plan, delta_rule_tensors, heads, options and a "
                  "cpx::transport; make the plan with carry<scan>(q.sharding(), ...)");
    return {};
}
template <class Plan, class Y, class H = delta_rule_heads, class O = delta_rule_options>
    requires std::same_as<H, delta_rule_heads> && std::same_as<O, delta_rule_options>
detail::refused gated_delta_rule(Plan const& plan, Y const& t, H const&, O const& = {}, detail::any = {},
                                 detail::any = {}) {
    return gated_delta_rule(plan, t);
}

} // namespace cpx
