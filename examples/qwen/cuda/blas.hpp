// SPDX-License-Identifier: Apache-2.0
// Products of matrices, sums in float32: by cuBLAS, or by a plain kernel.
#pragma once

#include "products.cuh"

#include <cpx/cuda/elements.hpp>

#include <cublas_v2.h>
#include <cuda_bf16.h>

namespace qwen::gpu {

/// Products of matrices of T on one stream: no TF32, no sums of parts in 16 bits.
template <class T>
class product {
public:
    product(cudaStream_t stream, bool fixed) : memory_(stream), fixed_(fixed) {
        check(cublasCreate(&handle_), "cublasCreate");
        check(cublasSetMathMode(handle_, std::is_same_v<T, float> ? CUBLAS_PEDANTIC_MATH
                                                                  : CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
              "cublasSetMathMode");
        check(cublasSetStream(handle_, stream), "cublasSetStream");
    }
    product(product const&) = delete;
    product& operator=(product const&) = delete;
    ~product() { static_cast<void>(cublasDestroy(handle_)); }

    /// c = before c + a b^T over `inner`; `before` is 0 or 1. Out: T, or float.
    template <class Out>
    void operator()(factor<T> a, factor<T> b, index_t inner, float before, rows<Out> c) const {
        if (c.count() * c.width() == 0) return;
        if (fixed_) return for_each_element(memory_, c.count(), c.width(), fixed_product{a, b, inner, before, c});
        if (inner == 0) return;
        float const one = 1;
        // cuBLAS counts along columns: what is row-major here is transposed there, c^T = b a^T.
        check(cublasGemmEx_64(handle_, b.turned ? CUBLAS_OP_N : CUBLAS_OP_T, a.turned ? CUBLAS_OP_T : CUBLAS_OP_N,
                              c.width(), c.count(), inner, &one, b.data.data(), type_of<T>, b.data.stride(),
                              a.data.data(), type_of<T>, a.data.stride(), &before, c.data(), type_of<Out>, c.stride(),
                              CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
              "cublasGemmEx");
    }

private:
    template <class X>
    static constexpr cudaDataType_t type_of = std::is_same_v<X, float> ? CUDA_R_32F : CUDA_R_16BF;

    static void check(cublasStatus_t status, char const* call) {
        cpx::require(status == CUBLAS_STATUS_SUCCESS, "cublas", call, "success", cublasGetStatusString(status));
    }

    cpx::cuda::memory memory_;
    bool fixed_;
    cublasHandle_t handle_ = nullptr;
};

} // namespace qwen::gpu
