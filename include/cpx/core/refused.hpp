// SPDX-License-Identifier: Apache-2.0
// How a call that fits no function is refused in one sentence.
#pragma once

#include <cpx/core/config.hpp>
#include <cpx/core/error.hpp>

#include <compare>
#include <concepts>
#include <initializer_list>
#include <type_traits>

// Beside what can be called stands an overload `template <class X = any> f(X const& = {}, any = {}, ...)` that any call
// fits, one without arguments, too, but no better than the function itself. It asserts `never<X>`: name, what is
// wanted, how to get it. A class has such a constructor, explicit, and such a deduction guide;
// a template of classes, for arguments of other kinds, a specialisation.
// clang++ takes names in braces, `{.theta = 1e6}`, for no `any`: where these are usual, a second overload has the
// options as an `O const&`, O by default their type and nothing else.
namespace cpx::detail {

/// A parameter that takes any argument, lists in braces too, where no other overload does.
struct any {
    any() = default;
    template <class... X>
    constexpr any(X const&...) {} // of several, too: g++ takes names in braces for these
    constexpr any(std::initializer_list<any>) {}
};

/// The first field of a struct whose others are given by name only: numbers in braces do not make one.
struct by_name {
    by_name() = default;
};

/// The result of a call that has been refused. What is done with it is no second mistake: loops over it, calls of it,
/// members of what the call would have returned, tensors, their rows, shardings and plans, elements and numbers of
/// these, and to pass it on as one of these.
struct refused {
    static refused const view, data, elements, row, columns, sub, count, width, stride, sharding, rank, ranks, memory,
        read, hold, rows, batch, runs, run, policy, size, empty, transposed, step, steps, level, plan, set, rows_of,
        make_tensor, sends, receives, sent_rows, source_rows, target_rows, segments, links, from,
        to; ///< never defined: what uses them does not compile
    template <class X>
        requires(!std::same_as<X, any>) // which takes it as it takes all else
    operator X() const;
    refused const* begin() const { return nullptr; }
    refused const* end() const { return nullptr; }
    template <class... X>
    refused operator()(X const&...) const {
        return {};
    }
    template <class X>
    refused const& operator[](X const&) const {
        return *this;
    }
    template <class X>
    refused const& operator=(X const&) const {
        return *this;
    }
};

/// What a sentence is said for that is said once, whatever X is given: `any`, or what has been refused.
template <class X>
using whatever = std::conditional_t<std::same_as<X, refused>, X, any>;

/// Arithmetic and comparisons, which a conversion to any number would leave ambiguous.
template <class... X>
concept some_refused = (std::same_as<X, refused> || ...);
template <class A, class B>
    requires some_refused<A, B>
refused operator+(A const&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<A, B>
refused operator-(A const&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<A, B>
refused operator*(A const&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<A, B>
refused operator/(A const&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<A, B>
refused operator%(A const&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<std::remove_cvref_t<A>, B>
refused operator+=(A&&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<std::remove_cvref_t<A>, B>
refused operator-=(A&&, B const&) {
    return {};
}
template <class A, class B>
    requires some_refused<A, B>
bool operator==(A const&, B const&) {
    return true;
}
template <class A, class B>
    requires some_refused<A, B>
std::strong_ordering operator<=>(A const&, B const&) {
    return std::strong_ordering::equal;
}

/// Whether a function of these parameters, and perhaps a `caller`, takes arguments X.
///
/// For functions of rows, which any argument would fit no worse than the function itself: rows of T become rows of
/// T const.
template <class F, class... X>
inline constexpr bool takes = false;
template <class... P, class... X>
inline constexpr bool takes<void(P...), X...> =
    std::is_invocable_v<void (*)(P...), X...> || std::is_invocable_v<void (*)(P..., caller), X...>;

/// Whether X has been refused, or is a struct of tensors that could deduce nothing: all has been said of it.
template <class X>
inline constexpr bool was_refused = std::same_as<X, refused>;
template <template <class, class...> class X, class... More>
inline constexpr bool was_refused<X<refused, More...>> = true;
template <template <class, class, auto> class X, class S, auto N>
inline constexpr bool was_refused<X<refused, S, N>> = true;

/// False, but only where the template that asserts it is used. Where one of X has been refused before, nothing more is
/// said. Of a function's own assertions, each stands behind those before it: one mistake is said at a time.
template <class... X>
inline constexpr bool never = (was_refused<std::remove_cvref_t<X>> || ...);

/// What a constructor that refuses its arguments is made of, to be what it says alone.
template <class Y>
Y lacking() {
    throw;
}

} // namespace cpx::detail
