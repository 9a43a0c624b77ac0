// SPDX-License-Identifier: Apache-2.0
// The gates of a gated delta net, in any memory.
#pragma once

#include <cpx/core/elements.hpp>
#include <cpx/ops/local/delta_gates.hpp>
#include <cpx/ops/local/shape.hpp>

#include <span>

namespace binding {

/// What gates are made of. b, a: (rows, heads); A_log, dt_bias: (heads, 1).
template <class T>
struct gate_inputs {
    cpx::rows<T const> b, a, A_log, dt_bias;
};

/// Throws `cpx::error` if shapes do not fit.
template <class T>
gate_inputs<T> gates_of(char const* where, cpx::rows<T const> b, cpx::rows<T const> a, std::span<T const> A_log,
                        std::span<T const> dt_bias) {
    auto const here = cpx::caller::here();
    auto const column = [](std::span<T const> list) { return cpx::rows<T const>(list.data(), std::ssize(list), 1); };
    gate_inputs<T> const of{b, a, column(A_log), column(dt_bias)};
    cpx::detail::require_shape(where, "b", b, a.count(), a.width(), here);
    cpx::detail::require_shape(where, "A_log", of.A_log, a.width(), 1, here);
    cpx::detail::require_shape(where, "dt_bias", of.dt_bias, a.width(), 1, here);
    return of;
}

/// Computes g and beta: (rows, heads), one number from one of each. Memory: the host's, or a device's.
template <class T, class M>
void open_gates(char const* where, gate_inputs<T> const& of, cpx::rows<T> g, cpx::rows<T> beta, M const& memory) {
    auto const here = cpx::caller::here();
    cpx::detail::require_shape(where, "g", g, of.a.count(), of.a.width(), here);
    cpx::detail::require_shape(where, "beta", beta, of.a.count(), of.a.width(), here);
    for_each_element(memory, of.a.count(), of.a.width(),
                     cpx::rowwise::delta_gates<T>{of.b, of.a, of.A_log, of.dt_bias, g, beta}, here);
}

/// Computes the gradients of b and a, and of each row's share of those of A_log and dt_bias. terms: (rows, 2 heads).
template <class T, class M>
void open_gates_backward(char const* where, gate_inputs<T> const& of, cpx::rows<T const> dg, cpx::rows<T const> dbeta,
                         cpx::rows<T> db, cpx::rows<T> da, cpx::rows<T> terms, M const& memory) {
    auto const here = cpx::caller::here();
    cpx::index_t const rows = of.a.count(), heads = of.a.width();
    cpx::detail::require_shape(where, "dg", dg, rows, heads, here);
    cpx::detail::require_shape(where, "dbeta", dbeta, rows, heads, here);
    cpx::detail::require_shape(where, "db", db, rows, heads, here);
    cpx::detail::require_shape(where, "da", da, rows, heads, here);
    cpx::detail::require_shape(where, "terms", terms, rows, 2 * heads, here);
    for_each_element(memory, rows, heads,
                     cpx::rowwise::delta_gates_backward<T>{of.b, of.a, of.A_log, of.dt_bias, dg, dbeta, db, da, terms},
                     here);
}

} // namespace binding
