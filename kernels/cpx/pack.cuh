// SPDX-License-Identifier: Apache-2.0
// Some neighbouring elements loaded or stored at once, as floats in registers.
#pragma once

#include <cpx/neighbours.cuh>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace cpx::kernels {

/// `V` neighbouring elements as they are in memory: two a word if T has 16 bits.
template <class T, int V>
using pack = bytes_at_once<static_cast<int>(sizeof(T)) * V>;

/// Loads what no one writes during the launch.
template <class T, int V>
__device__ __forceinline__ pack<T, V> load(T const* from) {
    if constexpr (V > 1) {
        uint4 const bits = __ldg(reinterpret_cast<uint4 const*>(from));
        return {{bits.x, bits.y, bits.z, bits.w}};
    } else if constexpr (sizeof(T) == 4) {
        return {{__ldg(reinterpret_cast<std::uint32_t const*>(from))}};
    } else {
        return {{__ldg(reinterpret_cast<std::uint16_t const*>(from))}};
    }
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T, int V>
__device__ __forceinline__ void widen(pack<T, V> const& from, array<float, V>& to) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
        std::uint32_t const word = from.element[sizeof(T) == 4 ? v : v / 2];
        if constexpr (sizeof(T) == 4)
            to[v] = __uint_as_float(word);
        else if constexpr (std::is_same_v<T, __half>)
            to[v] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> (v % 2 * 16))));
        else // the upper half of a float
            to[v] = __uint_as_float(v % 2 ? word & 0xffff0000u : word << 16);
    }
}

/// Rounds to T; two of 16 bits by one instruction, which takes less than one of each.
template <class T, int V>
__device__ __forceinline__ pack<T, V> narrow(array<float, V> const& from) {
    static_assert(V > 1);
    pack<T, V> to;
#pragma unroll
    for (int word = 0; word < 4; ++word)
        if constexpr (sizeof(T) == 4) {
            to.element[word] = __float_as_uint(from[word]);
        } else if constexpr (std::is_same_v<T, __half>) {
            __half2 const two = __floats2half2_rn(from[2 * word], from[2 * word + 1]);
            memcpy(&to.element[word], &two, 4);
        } else {
            __nv_bfloat162 const two = __floats2bfloat162_rn(from[2 * word], from[2 * word + 1]);
            memcpy(&to.element[word], &two, 4);
        }
    return to;
}

template <class T, int V>
__device__ __forceinline__ void store(array<float, V> const& from, T* to) {
    if constexpr (V == 1)
        *to = static_cast<T>(from[0]);
    else
        *reinterpret_cast<pack<T, V>*>(to) = narrow<T, V>(from);
}

/// Loads neighbours that the launch may write; at once if they are `whole`: they begin at a multiple of 16 bytes.
template <class T, int V>
__device__ __forceinline__ pack<T, V> load(T const* from, bool whole) {
    if (whole) return *reinterpret_cast<pack<T, V> const*>(from);
    pack<T, V> to = {};
#pragma unroll
    for (int v = 0; v < V; ++v) {
        std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t> bits;
        memcpy(&bits, from + v, sizeof(T));
        to.element[sizeof(T) == 4 ? v : v / 2] |= std::uint32_t{bits} << (sizeof(T) == 4 ? 0 : v % 2 * 16);
    }
    return to;
}
template <class T, int V>
__device__ __forceinline__ void load(T const* from, bool whole, array<float, V>& to) {
    widen<T, V>(load<T, V>(from, whole), to);
}
/// Stores neighbours, at once if they are `whole`.
template <class T, int V>
__device__ __forceinline__ void store(array<float, V> const& from, bool whole, T* to) {
    if (whole) return store<T, V>(from, to);
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = static_cast<T>(from[v]);
}

/// Relative error: 3e-7; for a T of 16 bits, some 1e-7 (1 + |z|) by two approximate instructions. These may take what
/// is below 2^-126 for zero, which does not matter: 1 is added to the exponential.
template <class T>
__device__ __forceinline__ float sigmoid(float z) {
    if constexpr (sizeof(T) == 4) {
        return __fdividef(1.0f, 1.0f + expf(-z));
    } else {
        float e, s;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(z * -1.4426950408889634f));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
        return s;
    }
}

template <class T, bool Silu>
__device__ __forceinline__ float activate(float z) {
    return Silu ? z * sigmoid<T>(z) : z;
}

/// Returns the gradient of z, given that of `activate(z)`: with the same bits wherever it is computed.
template <class T, bool Silu>
__device__ __forceinline__ float activate_backward(float z, float dy) {
    if constexpr (!Silu) return dy;
    float const s = sigmoid<T>(z);
    return __fmul_rn(dy, __fmul_rn(s, fmaf(z, 1.0f - s, 1.0f)));
}

} // namespace cpx::kernels
