// SPDX-License-Identifier: Apache-2.0
// A size that is known at compile time or only at run time, under one name.
#pragma once

#include <cpx/core/config.hpp>
#include <cpx/core/refused.hpp>

namespace cpx {

/// Stands for "known at run time only" where a size is a template argument.
inline constexpr int dynamic = -1;

/// A positive int: a type when `N` is given, one stored number when it is `dynamic`, 0 until it is told.
///
/// Meant as a private or public base class, so that a static size takes no room (`zigzag<4>` is an empty type).
template <int N>
struct extent {
    static_assert(N > 0,
                  "cpx: a static size must be at least 1; leave it out (or say cpx::dynamic) for a run-time size");
    constexpr extent() = default;
    template <class I>
    CPX_HOST_DEVICE constexpr explicit extent(I) {
        static_assert(detail::never<I>, "cpx: a size that the type tells takes no other; leave the number out, or "
                                        "leave it to run time: zigzag<>(4), aligned<cpx::dynamic>(32)");
    }
    CPX_HOST_DEVICE constexpr int get() const { return N; }
    friend constexpr bool operator==(extent, extent) = default;
};

template <>
struct extent<dynamic> {
    constexpr extent() = default;
    CPX_HOST_DEVICE constexpr explicit extent(int n) : value(n) {}
    CPX_HOST_DEVICE constexpr int get() const { return value; }
    friend constexpr bool operator==(extent, extent) = default;

    int value = 0; ///< not told: what is made of it says so
};

} // namespace cpx
