// SPDX-License-Identifier: Apache-2.0
// The value of one stored number: half precision by hand, and whether another type can hold it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

namespace cpx::detail {

/// Returns the value of a bfloat16: the upper half of a float.
inline float from_bfloat(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

/// Returns the value of an IEEE 754 binary16: 1 sign bit, 5 bits of exponent, 10 of fraction.
inline float from_half(std::uint16_t bits) {
    int const exponent = bits >> 10 & 31, fraction = bits & 1023;
    float magnitude = std::ldexp(static_cast<float>(exponent ? fraction + 1024 : fraction), std::max(exponent, 1) - 25);
    if (exponent == 31)
        magnitude = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    return std::copysign(magnitude, bits & 0x8000 ? -1.0f : 1.0f);
}

/// Returns whether `T` has room for `value`: an integer or bool exactly, a floating-point number when rounded.
///
/// Infinities and NaN fit every floating-point type; no floating-point number is taken for an integer.
template <class T, class Value>
bool holds(Value value) {
    if constexpr (std::same_as<Value, bool>) {
        return true;
    } else if constexpr (std::floating_point<Value>) {
        static_assert(std::floating_point<T>);
        return sizeof(T) >= sizeof(Value) || !std::isfinite(value) || std::abs(value) <= std::numeric_limits<T>::max();
    } else if constexpr (std::integral<T>) {
        return std::in_range<T>(value);
    } else {
        // An integer is exact if its magnitude, without trailing zeros, is no wider than the fraction.
        using magnitude = std::make_unsigned_t<Value>;
        auto const bits = static_cast<magnitude>(value);
        auto const size = static_cast<magnitude>(std::cmp_less(value, 0) ? 0 - bits : bits);
        return static_cast<int>(std::bit_width(size)) - std::countr_zero(size) <= std::numeric_limits<T>::digits;
    }
}

} // namespace cpx::detail
