// SPDX-License-Identifier: Apache-2.0
// How long a rank waits for the others.
#pragma once

#include <cpx/core/error.hpp>

#include <algorithm>
#include <chrono>

namespace cpx::detail {

/// Returns `deadline`, or a year if it is longer. Throws `cpx::error` if it is not positive.
inline std::chrono::milliseconds checked_deadline(char const* where, std::chrono::milliseconds deadline, caller here) {
    require(deadline.count() > 0, where, "deadline, ms", "more than 0", deadline.count(), here);
    return std::min<std::chrono::milliseconds>(deadline, std::chrono::hours(24 * 365));
}

} // namespace cpx::detail
