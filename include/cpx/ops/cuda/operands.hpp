// SPDX-License-Identifier: Apache-2.0
// What operators of tensors on devices ask of the memory of all that they are given.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/memory.hpp>

namespace cpx::detail {

/// Throws unless operands of known shapes are memory of the current device, and their rows do not overlap each other.
inline void require_there(cuda::memory const&, char const* where, std::span<operand const> list, caller here) {
    for (operand const& o : list) {
        if (o.empty()) continue;
        if (o.count > 1 && o.stride < o.width)
            throw error(where, std::string("stride of ") + o.name + ", bytes",
                        "at least the width, " + std::to_string(o.width), std::to_string(o.stride), here);
        cuda::detail::require_memory(where, o.name, reinterpret_cast<void const*>(o.first), here);
    }
}

} // namespace cpx::detail
