// SPDX-License-Identifier: Apache-2.0
// Products of matrices in float32: by cuBLAS, or by a plain kernel.
#pragma once

#include "products.cuh"

#include <cpx/cuda/elements.hpp>

#include <cublas_v2.h>

namespace qwen::gpu {

/// Products on one stream: no TF32.
class product {
public:
    product(cudaStream_t stream, bool fixed) : memory_(stream), fixed_(fixed) {
        check(cublasCreate(&handle_), "cublasCreate");
        check(cublasSetMathMode(handle_, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode");
        check(cublasSetStream(handle_, stream), "cublasSetStream");
    }
    product(product const&) = delete;
    product& operator=(product const&) = delete;
    ~product() { static_cast<void>(cublasDestroy(handle_)); }

    /// c = before c + a b^T over `inner`; `before` is 0 or 1.
    void operator()(factor a, factor b, index_t inner, float before, rows<float> c) const {
        if (c.count() * c.width() == 0) return;
        if (fixed_) return for_each_element(memory_, c.count(), c.width(), fixed_product{a, b, inner, before, c});
        if (inner == 0) return;
        float const one = 1;
        // cuBLAS counts along columns: what is row-major here is transposed there, c^T = b a^T.
        check(cublasSgemm_64(handle_, b.turned ? CUBLAS_OP_N : CUBLAS_OP_T, a.turned ? CUBLAS_OP_T : CUBLAS_OP_N,
                             c.width(), c.count(), inner, &one, b.data.data(), b.data.stride(), a.data.data(),
                             a.data.stride(), &before, c.data(), c.stride()),
              "cublasSgemm");
    }

private:
    static void check(cublasStatus_t status, char const* call) {
        cpx::require(status == CUBLAS_STATUS_SUCCESS, "cublas", call, "success", cublasGetStatusString(status));
    }

    cpx::cuda::memory memory_;
    bool fixed_;
    cublasHandle_t handle_ = nullptr;
};

} // namespace qwen::gpu
