// SPDX-License-Identifier: Apache-2.0
// By what gradients of fewer bits are multiplied, to stay within the range of their type.
#pragma once

#include <cpx/core/error.hpp>

namespace cpx::detail {

/// Throws `cpx::error` unless gradients can be so many times what they stand for, in float: 1 where their elements are
/// not `others` than those around them.
inline void require_gradient_scale(char const* where, bool others, double scale, caller here) {
    require(others ? scale >= 0x1p-126 && scale <= 0x1p126 : scale == 1, where, "gradient_scale",
            others ? "2^-126 to 2^126" : "1, for gradients have the elements of all else", scale, here);
}

} // namespace cpx::detail
