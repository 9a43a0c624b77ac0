// SPDX-License-Identifier: Apache-2.0
// What a warp does together from sm_80 on: products of 16 rows on tensor cores, their operands from shared memory, and
// copies to it that nobody waits for (PTX ISA: mma, ldmatrix, cp.async).
#pragma once

#include <cpx/pack.cuh>

#include <cstdint>
#include <type_traits>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

namespace cpx::kernels {

/// Bits of two elements of 16 bits, the first one below.
template <class T>
__device__ __forceinline__ std::uint32_t two_elements(float first, float second) {
    return narrow<T, 8>({first, second, 0, 0, 0, 0, 0, 0}).element[0];
}

/// Returns where something is in shared memory, as the functions below want it.
__device__ __forceinline__ std::uint32_t shared_address(void const* place) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(place));
}

/// Copies 16 bytes to shared memory, or zeros if they are not `there`: done after `wait_for_copies` and a barrier.
__device__ __forceinline__ void copy_later(std::uint32_t to, void const* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(there ? 16 : 0)
                 : "memory");
}
/// Waits for all copies of this thread.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Ends a group of copies of this thread, those since the group before.
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits for the copies of this thread in all groups but the last N.
template <int N>
__device__ __forceinline__ void wait_for_copies_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/// Loads four matrices of 8 rows of 16 bytes: lane l says where row l % 8 of matrix l / 8 is, and gets of each the
/// elements 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
}
/// The same of the transposed matrices.
__device__ __forceinline__ void load_transposed(std::uint32_t (&to)[4], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
}

/// Returns of a matrix of 8 rows of 8 elements, of which every lane has as above, what this lane has of the transposed.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t two) {
    std::uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
    return result;
}

/// sum += a b, of 16 x 16 and 16 x 8 elements. Lane l has of the sum rows l / 4 and l / 4 + 8, columns 2 (l % 4) and
/// the next; of a those rows and columns, then those rows 8 columns further; of b rows 2 (l % 4) and the next, then 8
/// further, of column l / 4.
template <class T>
__device__ __forceinline__ void multiply(float (&sum)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Rounds to the 11 bits of half with the exponents of float.
__device__ __forceinline__ std::uint32_t to_tf32(float x) {
    std::uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}
/// sum += a b, of 16 x 8 and 8 x 8 numbers of tf32. Lane l has of a rows l / 4 and l / 4 + 8 of column l % 4, then of
/// column l % 4 + 4; of b rows l % 4 and l % 4 + 4 of column l / 4.
__device__ __forceinline__ void multiply_tf32(float (&sum)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                              std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

} // namespace cpx::kernels

#endif
