// SPDX-License-Identifier: Apache-2.0
// A number of Python on its way to elements of some type.
#pragma once

#include <cpx/core/error.hpp>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>

namespace binding {

/// An integer, exactly, or a real number.
struct fill_value {
    bool whole = true;
    std::int64_t integer = 0;
    double real = 0;

    std::string text() const {
        if (whole) return std::to_string(integer);
        char digits[32];
        std::snprintf(digits, sizeof digits, "%.17g", real);
        return digits;
    }
};

/// Returns the element that a number is; real ones are rounded. Throws `cpx::error` if no integer of T is that number,
/// or if it is finite and beyond the real ones of T.
template <class T>
T element_of(char const* where, fill_value const& fill) {
    bool holds;
    std::string wanted;
    T element;
    if constexpr (std::integral<T>) {
        using limits = std::numeric_limits<T>;
        constexpr double beyond = 2 * (static_cast<double>(limits::max() / 2) + 1); // a power of two, so exact
        holds = fill.whole ? fill.integer >= limits::min() && fill.integer <= limits::max()
                           : fill.real == std::floor(fill.real) && fill.real >= -beyond && fill.real < beyond;
        wanted = "an integer of " + std::to_string(8 * sizeof(T)) + " bits";
        element = !holds ? T() : fill.whole ? static_cast<T>(fill.integer) : static_cast<T>(fill.real);
    } else {
        double const real = fill.whole ? static_cast<double>(fill.integer) : fill.real;
        element = static_cast<T>(real);
        holds = std::same_as<T, double> || !std::isfinite(real) || std::isfinite(static_cast<float>(element));
        wanted = "a number that a float of " + std::to_string(8 * sizeof(T)) + " bits holds";
    }
    cpx::require(holds, where, "fill", wanted.c_str(), fill.text(), cpx::caller::here());
    return element;
}

} // namespace binding
