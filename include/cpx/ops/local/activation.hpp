// SPDX-License-Identifier: Apache-2.0
// Activations, element by element.
#pragma once

#include <cpx/core/activation.hpp>
#include <cpx/core/config.hpp>
#include <cpx/core/elements.hpp>
#include <cpx/ops/local/shape.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>

namespace cpx {

template <std::floating_point T>
CPX_HOST_DEVICE T sigmoid(T x) {
    return 1 / (1 + std::exp(-x));
}

/// Returns `x * sigmoid(x)`, for every finite x.
template <std::floating_point T>
CPX_HOST_DEVICE T silu(T x) {
    return x / (1 + std::exp(-x));
}

/// Returns `log(1 + exp(x))` without overflow. Exact also above 20, where torch returns x itself.
template <std::floating_point T>
CPX_HOST_DEVICE T softplus(T x) {
    return (x > 0 ? x : T(0)) + std::log1p(std::exp(-std::abs(x)));
}

/// Return the gradient of x, given that of the function's value.
template <std::floating_point T>
CPX_HOST_DEVICE T sigmoid_backward(T x, T dy) {
    return dy * sigmoid(x) * sigmoid(-x);
}
template <std::floating_point T>
CPX_HOST_DEVICE T silu_backward(T x, T dy) {
    T const s = sigmoid(x);
    return dy * (s * (1 + x * (1 - s)));
}
template <std::floating_point T>
CPX_HOST_DEVICE T softplus_backward(T x, T dy) {
    return dy * sigmoid(x);
}

namespace detail {

template <class X>
refused no_number() {
    static_assert(never<X>, "cpx: sigmoid, silu and softplus, and their backwards, are of one float or double; "
                            "silu_mul<T>(gate, up, y) is of rows");
    return {};
}

} // namespace detail

template <class X>
    requires(!std::floating_point<X>)
detail::refused sigmoid(X const&) {
    return detail::no_number<X>();
}
template <class X>
    requires(!std::floating_point<X>)
detail::refused silu(X const&) {
    return detail::no_number<X>();
}
template <class X>
    requires(!std::floating_point<X>)
detail::refused softplus(X const&) {
    return detail::no_number<X>();
}
template <class X, class Y>
    requires(!std::floating_point<X>)
detail::refused sigmoid_backward(X const&, Y const&) {
    return detail::no_number<X>();
}
template <class X, class Y>
    requires(!std::floating_point<X>)
detail::refused silu_backward(X const&, Y const&) {
    return detail::no_number<X>();
}
template <class X, class Y>
    requires(!std::floating_point<X>)
detail::refused softplus_backward(X const&, Y const&) {
    return detail::no_number<X>();
}

/// What operators compute of an element or a row, for `for_each_element` of any memory. Arguments are not checked.
/// Elements may have 16 bits on devices: what is computed is `wide`, and rounded once.
namespace rowwise {

/// y = silu(gate) up.
template <class T>
struct silu_mul {
    rows<T const> gate, up;
    rows<T> y;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        y(row, j) = static_cast<T>(silu(widen(gate(row, j))) * widen(up(row, j)));
    }
};
template <class T>
struct silu_mul_backward {
    rows<T const> gate, up, dy;
    rows<T> dgate, dup;
    CPX_HOST_DEVICE void operator()(index_t row, index_t j) const {
        // a result may be one of these
        wide<T> const g = widen(gate(row, j)), u = widen(up(row, j)), d = widen(dy(row, j));
        dgate(row, j) = static_cast<T>(silu_backward(g, d * u));
        dup(row, j) = static_cast<T>(d * silu(g));
    }
};

} // namespace rowwise

/// Computes `y = silu(gate) * up`. All are (rows, width); y may be one of the others.
///
/// Throws `cpx::error` if the shapes differ, or if memory overlaps in another way.
template <class T>
void silu_mul(rows<T const> gate, rows<T const> up, rows<T> y, caller here = caller::here()) {
    detail::require_shape("silu_mul", "up", up, gate.count(), gate.width(), here);
    detail::require_shape("silu_mul", "y", y, gate.count(), gate.width(), here);
    detail::require_apart("silu_mul", {{"y", y}}, {{"gate", gate}, {"up", up}}, here, detail::in_place::yes);
    for_each_element(host_memory(), y.count(), y.width(), rowwise::silu_mul<T>{gate, up, y});
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T>), X...>)
detail::refused silu_mul(X&&...) {
    static_assert(detail::never<X...>, "cpx: silu_mul<T>(gate, up, y) wants rows of T, not const where they are "
                                       "written; take rows with view() or data()");
    return {};
}

/// Computes `dgate` and `dup` of `silu_mul`. All are (rows, width); a result may be one of the inputs.
///
/// Throws `cpx::error` if the shapes differ, or if memory overlaps in another way.
template <class T>
void silu_mul_backward(rows<T const> gate, rows<T const> up, rows<T const> dy, rows<T> dgate, rows<T> dup,
                       caller here = caller::here()) {
    char const* const where = "silu_mul_backward";
    detail::require_shape(where, "up", up, gate.count(), gate.width(), here);
    detail::require_shape(where, "dy", dy, gate.count(), gate.width(), here);
    detail::require_shape(where, "dgate", dgate, gate.count(), gate.width(), here);
    detail::require_shape(where, "dup", dup, gate.count(), gate.width(), here);
    detail::require_apart(where, {{"dgate", dgate}, {"dup", dup}}, {{"gate", gate}, {"up", up}, {"dy", dy}}, here,
                          detail::in_place::yes);
    for_each_element(host_memory(), dy.count(), dy.width(), rowwise::silu_mul_backward<T>{gate, up, dy, dgate, dup});
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T const>, rows<T>, rows<T>), X...>)
detail::refused silu_mul_backward(X&&...) {
    static_assert(detail::never<X...>, "cpx: silu_mul_backward<T>(gate, up, dy, dgate, dup) wants rows of T, not "
                                       "const where they are written; take rows with view() or data()");
    return {};
}

} // namespace cpx
