// SPDX-License-Identifier: Apache-2.0
// Some neighbouring elements loaded or stored at once, as floats in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace cpx::kernels {

/// `V` neighbouring elements.
template <class T, int V>
struct alignas(V * sizeof(T)) pack {
    T at[V];
};

/// Loads what no one writes during the launch.
template <class T, int V>
__device__ __forceinline__ pack<T, V> load(T const* from) {
    pack<T, V> result;
    if constexpr (sizeof(result) == 16) {
        uint4 const bits = __ldg(reinterpret_cast<uint4 const*>(from));
        memcpy(&result, &bits, 16);
    } else if constexpr (sizeof(result) == 8) {
        uint2 const bits = __ldg(reinterpret_cast<uint2 const*>(from));
        memcpy(&result, &bits, 8);
    } else {
        static_assert(V == 1);
        result.at[0] = __ldg(from);
    }
    return result;
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T, int V>
__device__ __forceinline__ void widen(pack<T, V> const& from, float (&to)[V]) {
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = widen(from.at[v]);
}

template <class T, int V>
__device__ __forceinline__ void store(float const (&from)[V], T* to) {
    if constexpr (sizeof(T) == 2 && V > 1) { // two are rounded by one instruction
        std::uint32_t bits[V / 2];
#pragma unroll
        for (int v = 0; v < V; v += 2)
            if constexpr (std::is_same_v<T, __half>) {
                __half2 const two = __floats2half2_rn(from[v], from[v + 1]);
                memcpy(&bits[v / 2], &two, 4);
            } else {
                __nv_bfloat162 const two = __floats2bfloat162_rn(from[v], from[v + 1]);
                memcpy(&bits[v / 2], &two, 4);
            }
        if constexpr (V == 8)
            *reinterpret_cast<uint4*>(to) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        else
            *reinterpret_cast<uint2*>(to) = make_uint2(bits[0], bits[1]);
    } else if constexpr (V == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
    } else {
        static_assert(V == 1);
        *to = static_cast<T>(from[0]);
    }
}

/// Relative error: 3e-7; for a T of 16 bits, some 1e-7 (1 + |z|) with a faster exponential.
template <class T>
__device__ __forceinline__ float sigmoid(float z) {
    return __fdividef(1.0f, 1.0f + (sizeof(T) == 2 ? __expf(-z) : expf(-z)));
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
