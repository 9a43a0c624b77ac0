// SPDX-License-Identifier: Apache-2.0
// The gates of the gated delta rule, of what projections and parameters make them of.
#pragma once

#include <cpx/ops/local/activation.hpp>

#include <cmath>

namespace cpx {

/// Returns the log decay `g = -exp(a_log) softplus(a + dt_bias)` of one token and head; never positive.
template <class T>
CPX_HOST_DEVICE T delta_rule_gate(T a, T a_log, T dt_bias) {
    return -std::exp(a_log) * softplus(a + dt_bias);
}

/// The gradients of the arguments of `delta_rule_gate`, the parameters' terms of one token and head.
template <class T>
struct delta_rule_gate_gradients {
    T a, a_log, dt_bias;
};

/// Returns the gradients of `delta_rule_gate(a, a_log, dt_bias)`, given that of its value.
template <class T>
CPX_HOST_DEVICE delta_rule_gate_gradients<T> delta_rule_gate_backward(T a, T a_log, T dt_bias, T dg) {
    T const of_a = softplus_backward(a + dt_bias, -std::exp(a_log) * dg);
    return {of_a, dg * delta_rule_gate(a, a_log, dt_bias), of_a};
}

namespace rowwise {

/// The gates of a row and head: g, and beta, the sigmoid of b. b, a: (rows, heads); A_log, dt_bias: (heads, 1).
template <class T>
struct delta_gates {
    rows<T const> b, a;
    rows<wide<T> const> A_log, dt_bias;
    rows<wide<T>> g, beta;
    CPX_HOST_DEVICE void operator()(index_t row, index_t h) const {
        g(row, h) = delta_rule_gate(widen(a(row, h)), A_log(h, 0), dt_bias(h, 0));
        beta(row, h) = sigmoid(widen(b(row, h)));
    }
};
/// Their gradients. terms: (rows, 2 * heads), those of A_log, then those of dt_bias. dg and dbeta may be `scale` times
/// what they stand for.
template <class T>
struct delta_gates_backward {
    rows<T const> b, a;
    rows<wide<T> const> A_log, dt_bias, dg, dbeta;
    rows<T> db, da;
    rows<wide<T>> terms;
    wide<T> scale = 1;
    CPX_HOST_DEVICE void operator()(index_t row, index_t h) const {
        auto const of = delta_rule_gate_backward(widen(a(row, h)), A_log(h, 0), dt_bias(h, 0), dg(row, h) / scale);
        db(row, h) = static_cast<T>(sigmoid_backward(widen(b(row, h)), dbeta(row, h) / scale));
        da(row, h) = static_cast<T>(of.a);
        terms(row, h) = of.a_log;
        terms(row, dg.width() + h) = of.dt_bias;
    }
};

} // namespace rowwise

} // namespace cpx
