// SPDX-License-Identifier: Apache-2.0
// Fields of structs of arguments, which say in one sentence what does not fit.
#pragma once

#include <cpx/core/refused.hpp>
#include <cpx/core/rows.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

namespace cpx {

namespace detail {

/// Whether F is a field of a struct that could deduce nothing, of which all has been said.
template <class F>
inline constexpr bool of_refused = false;
template <template <class> class View, class T>
inline constexpr bool of_refused<View<T>> = std::same_as<std::remove_const_t<T>, refused>;
template <class T>
inline constexpr bool of_refused<std::span<T>> = std::same_as<std::remove_const_t<T>, refused>;
template <template <class, class> class Saved, class T, class M>
inline constexpr bool of_refused<Saved<T, M>*> = std::same_as<T, refused>;

/// Says why X is no field: once, in however many fields it is given.
template <class X, bool View, bool Address>
void refuse_field() {
    static_assert(never<X> || !View,
                  "cpx: a field is given other elements, to write what is const, or no view; view a vector as "
                  "rows(list, width), a tensor as its data() or elements()");
    static_assert(never<X> || !Address,
                  "cpx: a field wants the address of an object of the tensors' elements and memory: &saved");
    static_assert(never<X> || View || Address,
                  "cpx: a field wants one of the names of its type, such as sum_order::by_row");
}

/// Returns `x` as a field of type F, or says why it is none.
template <class F, class X>
constexpr F fit(X&& x) {
    constexpr bool fits = std::is_convertible_v<X, F>;
    if constexpr (fits && !of_refused<F>) return std::forward<X>(x);
    if constexpr (!fits && !of_refused<F>) refuse_field<X, std::is_class_v<F>, std::is_pointer_v<F>>();
    throw;
}

/// The last field of a struct of arguments.
struct no_more {
    no_more() = default;
    template <class X>
    no_more(X const&) {
        static_assert(never<X>, "cpx: a struct is given more fields than it has");
    }
};

} // namespace detail

/// An F in a struct of arguments, as `sharded_field` is a `sharded`: rows, a list, an address or a choice.
///
/// F itself leaves what does not fit to overload resolution.
template <class F>
struct field : F {
    field() = default;
    template <class X>
    constexpr field(X&& x) : F(detail::fit<F>(std::forward<X>(x))) {}
    // In braces: what F is made of. Not inherited: nvcc cannot compare inherited default arguments.
    template <class X>
        requires std::constructible_from<F, X, std::size_t> && (!std::constructible_from<F, X, index_t, caller>)
    constexpr field(X&& data, std::size_t size) : F(std::forward<X>(data), size) {}
    template <class X>
        requires std::constructible_from<F, X, index_t, caller>
    constexpr field(X&& list, index_t width, caller here = caller::here()) : F(std::forward<X>(list), width, here) {}
    template <class X>
        requires std::constructible_from<F, X, index_t, index_t, caller>
    constexpr field(X&& data, index_t count, index_t width, caller here = caller::here())
        : F(std::forward<X>(data), count, width, here) {}
    template <class X>
        requires std::constructible_from<F, X, index_t, index_t, index_t, caller>
    constexpr field(X&& data, index_t count, index_t width, index_t stride, caller here = caller::here())
        : F(std::forward<X>(data), count, width, stride, here) {}
    template <class X, class Y, class... More>
        requires(!std::constructible_from<F, X, Y, More..., caller> &&
                 !(sizeof...(More) == 0 && std::constructible_from<F, X, Y>))
    field(X&&, Y&&, More&&...) : F(detail::fit<F>(detail::any())) {}
};

template <class F>
    requires(!std::is_class_v<F>)
struct field<F> {
    constexpr field() = default;
    template <class X>
    constexpr field(X&& x) : value_(detail::fit<F>(std::forward<X>(x))) {}

    constexpr operator F() const { return value_; }
    constexpr F operator->() const
        requires std::is_pointer_v<F>
    {
        return value_;
    }

private:
    F value_{};
};

} // namespace cpx
