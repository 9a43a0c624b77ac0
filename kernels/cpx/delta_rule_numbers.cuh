// SPDX-License-Identifier: Apache-2.0
// Numbers of 16 bits, two a word, and what of tensor cores multiplies them (sm_90a), by CUTLASS's wrappers.
#pragma once

#include <cpx/cuda/nvcc.hpp>

#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace cpx::kernels::delta {

namespace gmma = cute::SM90::GMMA;
using cute::SM90::GMMA::Major;

/// What multiplies 16-bit numbers of T, two of which are a word, and adds them up in float: warpgroups' products with
/// both operands in shared memory, or the left one in registers.
template <class T>
struct core_products;
template <>
struct core_products<__nv_bfloat16> {
    template <Major A, Major B>
    using shared_64 = gmma::MMA_64x64x16_F32BF16BF16_SS<A, B>;
    template <Major A, Major B>
    using shared_128 = gmma::MMA_64x128x16_F32BF16BF16_SS<A, B>;
    template <Major B>
    using registers_64 = gmma::MMA_64x64x16_F32BF16BF16_RS<Major::K, B>;
    template <Major B>
    using registers_128 = gmma::MMA_64x128x16_F32BF16BF16_RS<Major::K, B>;
    using warp = cute::SM80_16x8x16_F32BF16BF16F32_TN; ///< a warp's, both in registers
    using two = __nv_bfloat162;
};
template <>
struct core_products<__half> {
    template <Major A, Major B>
    using shared_64 = gmma::MMA_64x64x16_F32F16F16_SS<A, B>;
    template <Major A, Major B>
    using shared_128 = gmma::MMA_64x128x16_F32F16F16_SS<A, B>;
    template <Major B>
    using registers_64 = gmma::MMA_64x64x16_F32F16F16_RS<Major::K, B>;
    template <Major B>
    using registers_128 = gmma::MMA_64x128x16_F32F16F16_RS<Major::K, B>;
    using warp = cute::SM80_16x8x16_F32F16F16F32_TN;
    using two = __half2;
};

template <class T, Major A, Major B>
using shared_64 = typename core_products<T>::template shared_64<A, B>;
template <class T, Major A, Major B, std::size_t N>
using shared_by = std::conditional_t<N == 32, shared_64<T, A, B>, typename core_products<T>::template shared_128<A, B>>;
template <class T, Major B, std::size_t N>
using registers_by = std::conditional_t<N == 32, typename core_products<T>::template registers_64<B>,
                                        typename core_products<T>::template registers_128<B>>;

/// Rounds to a word of T: what is beyond its range becomes infinite, as everywhere.
template <class T>
__device__ __forceinline__ std::uint32_t round_two(float low, float high) {
    typename core_products<T>::two two;
    if constexpr (std::is_same_v<T, __half>)
        two = __floats2half2_rn(low, high);
    else
        two = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<std::uint32_t const&>(two);
}
template <class T>
__device__ __forceinline__ std::uint32_t round_twice(float x) {
    return round_two<T>(x, x);
}
/// Multiplies two by two, rounded.
template <class T>
__device__ __forceinline__ std::uint32_t multiply_two(std::uint32_t a, std::uint32_t b) {
    using word = typename core_products<T>::two;
    word const two = __hmul2(reinterpret_cast<word const&>(a), reinterpret_cast<word const&>(b));
    return reinterpret_cast<std::uint32_t const&>(two);
}
template <class T>
__device__ __forceinline__ float low_of(std::uint32_t two) {
    if constexpr (std::is_same_v<T, __half>)
        return __low2float(reinterpret_cast<__half2 const&>(two));
    else
        return __uint_as_float(two << 16);
}
template <class T>
__device__ __forceinline__ float high_of(std::uint32_t two) {
    if constexpr (std::is_same_v<T, __half>)
        return __high2float(reinterpret_cast<__half2 const&>(two));
    else
        return __uint_as_float(two & 0xffff0000u);
}

/// Rounds accumulators of 64 rows: words 4k to 4k + 3 are the operand of step k of 16 columns.
template <class T, std::size_t N>
__device__ __forceinline__ void round_to_operand(float const (&sum)[N], std::uint32_t (&a)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) a[i] = round_two<T>(sum[2 * i], sum[2 * i + 1]);
}

} // namespace cpx::kernels::delta
