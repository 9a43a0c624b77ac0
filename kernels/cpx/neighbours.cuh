// SPDX-License-Identifier: Apache-2.0
// Neighbouring elements that are read and written at once, and how many bytes these are.
#pragma once

#include <cpx/array.cuh>
#include <cpx/core/config.hpp>

#include <cstdint>
#include <type_traits>

namespace cpx::kernels {

/// `N` neighbouring elements, read and written at once; N * sizeof(T) is 1, 2, 4, 8 or 16.
template <class T, int N>
struct alignas(sizeof(T) * N) neighbours {
    array<T, N> element;
};

/// `Bytes` neighbouring bytes, in words of 32 bits if there are as many.
template <int Bytes>
using bytes_at_once = neighbours<
    std::conditional_t<Bytes == 1, std::uint8_t, std::conditional_t<Bytes == 2, std::uint16_t, std::uint32_t>>,
    (Bytes + 3) / 4>;

/// Calls `f` with `bytes`, a power of two from `Least` to 16, as a compile-time number.
CPX_CALLS_BACK
template <int Least, int Bytes = 16, class F>
CPX_HOST_DEVICE constexpr void with_bytes(int bytes, F&& f) {
    if constexpr (Bytes > Least)
        if (bytes < Bytes) return with_bytes<Least, Bytes / 2>(bytes, f);
    f(std::integral_constant<int, Bytes>());
}

} // namespace cpx::kernels
