// SPDX-License-Identifier: Apache-2.0
// The names of activations, for operators of the host and of GPUs.
#pragma once

#include <cpx/core/error.hpp>

namespace cpx {

/// Which function follows a linear operator.
enum class activation { none, silu };

namespace detail {

inline void require_activation(char const* where, activation act, caller here) {
    require(act == activation::none || act == activation::silu, where, "activation", "none or silu",
            static_cast<int>(act), here);
}

} // namespace detail

} // namespace cpx
