// SPDX-License-Identifier: Apache-2.0
// Finds, among places that ascend, the last that is not beyond another.
#pragma once

#include <cpx/core/config.hpp>

namespace cpx {

namespace detail {

/// Returns the largest i in [low, high) with `begins(i) <= at`, or `low`.
CPX_CALLS_BACK
template <class Int, class At, class Begins>
CPX_HOST_DEVICE constexpr Int last_between(At at, Int low, Int high, Begins const& begins) {
    while (low + 1 < high) {
        Int const middle = low + (high - low) / 2;
        bool const before = begins(middle) <= at; // chosen by it, not branched on: half of the branches would be missed
        low = before ? middle : low;
        high = before ? high : middle;
    }
    return low;
}

} // namespace detail

/// Returns the largest i in [0, count) with `begins(i) <= at`, for `begins` ascending from at most `at`.
CPX_CALLS_BACK
template <class Int, class At, class Begins>
CPX_HOST_DEVICE constexpr Int last_at_or_before(At at, Int count, Begins const& begins) {
    return detail::last_between(at, Int{0}, count, begins);
}

/// The same; `guess` is where to look first. Cost: O(log d) if the guess is d off.
CPX_CALLS_BACK
template <class Int, class At, class Begins>
CPX_HOST_DEVICE constexpr Int last_at_or_before(At at, Int count, Int guess, Begins const& begins) {
    Int low = guess, high = guess, step = 1;
    if (begins(guess) <= at) {
        for (; low + step < count && begins(low + step) <= at; step *= 2) low += step;
        high = low + step < count ? low + step : count;
    } else {
        for (; step < high && begins(high - step) > at; step *= 2) high -= step;
        low = step < high ? high - step : 0;
    }
    return detail::last_between(at, low, high, begins);
}

} // namespace cpx
