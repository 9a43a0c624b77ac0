// SPDX-License-Identifier: Apache-2.0
// The clock, and loads and stores that other devices and the host see.
#pragma once

#include <cpx/cuda/nvcc.hpp>

#include <cstdint>

namespace cpx::kernels::detail {

__device__ __forceinline__ std::uint64_t nanoseconds() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
__device__ __forceinline__ void store_release(std::uint64_t* to, std::uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(std::uint64_t* to, std::uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ std::uint64_t load_relaxed(std::uint64_t const* from) {
    std::uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from));
    return value;
}
__device__ __forceinline__ std::uint32_t load_relaxed(std::uint32_t const* from) {
    std::uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}
__device__ __forceinline__ std::uint64_t load_acquire(std::uint64_t const* from) {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

} // namespace cpx::kernels::detail
