// SPDX-License-Identifier: Apache-2.0
// What CUDA C++ has beside C++, as far as kernels here use it, for the machine of gpu.hpp. Before any kernel.
#pragma once

#include "gpu.hpp"

#include <cmath>

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ static thread_local // one block at a time
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (gpu::now().thread())
#define blockIdx (gpu::now().block)
#define gridDim (gpu::now().grid)
#define blockDim (gpu::now().size)
#define __syncthreads() gpu::now().meet()
#define __syncthreads_or(mine) gpu::now().meet(mine)
#define __syncthreads_and(mine) (!gpu::now().meet(!(mine)))
#define __shfl_sync(mask, mine, lane) gpu::from_lane(mine, lane)
#define __shfl_xor_sync(mask, mine, apart) gpu::from_lane(mine, gpu::now().lane() ^ (apart))
#define __shfl_up_sync(mask, mine, apart)                                                                              \
    gpu::from_lane(mine, max(gpu::now().lane() - (apart), gpu::now().lane() % (apart)))

inline unsigned __ballot_sync(unsigned, bool mine) { return gpu::lanes_that_say(mine); }
inline void __syncwarp() {
    gpu::now().meet_in_warp([](void* const*) {}, nullptr);
}

template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
    return a < b ? b : a;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline void __trap() { gpu::now().trap(); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T>
T __ldg(T const* from) {
    return *from;
}
inline void atomicOr(unsigned long long* to, unsigned long long bits) { *to |= bits; }
/// As ex2.approx.ftz.f32 and rcp.approx.ftz.f32, rounded better.
inline float flushed(float x) { return std::abs(x) < 0x1p-126f ? 0.0f : x; }
inline float ex2_flushed(float x) { return flushed(std::exp2(x)); }
inline float rcp_flushed(float x) { return flushed(1 / x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
