// SPDX-License-Identifier: Apache-2.0
// Products of matrices, sums in float32: by cuBLASLt, or by a plain kernel.
#pragma once

#include "products.cuh"

#include <cpx/cuda/elements.hpp>

#include <cublasLt.h>
#include <cuda_bf16.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>

namespace qwen::gpu {

/// Products of matrices of T on one stream, asked for by one thread: no TF32, no sums of parts in 16 bits, in an order
/// that depends on sizes, strides and alignment alone. What cuBLASLt advises for these is kept.
template <class T>
class product {
public:
    product(cudaStream_t stream, bool fixed)
        : memory_(stream), fixed_(fixed), space_(memory_.template room<char>(fixed ? 0 : most_space)) {
        if (!fixed_) check(cublasLtCreate(&handle_), "cublasLtCreate");
    }
    product(product const&) = delete;
    product& operator=(product const&) = delete;
    ~product() {
        if (handle_) static_cast<void>(cublasLtDestroy(handle_));
    }

    /// c = before c + a b^T over `inner`; `before` is 0 or 1. Out: T, or float. Where c has 16 bits and something is
    /// added to it, cuBLASLt may round the product to these before.
    template <class Out>
    void operator()(factor<T> a, factor<T> b, index_t inner, float before, rows<Out> c) const {
        if (c.count() * c.width() == 0) return;
        if (fixed_ || inner == 0)
            return for_each_element(memory_, c.count(), c.width(), fixed_product{a, b, inner, before, c});
        // cuBLASLt counts along columns: what is row-major here is transposed there, c^T = b a^T.
        cublasLtMatmulDescOpaque_t of;
        check(cublasLtMatmulDescInit(&of, std::is_same_v<T, float> ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F,
                                     CUDA_R_32F),
              "cublasLtMatmulDescInit");
        turn(of, CUBLASLT_MATMUL_DESC_TRANSA, b.turned ? CUBLAS_OP_N : CUBLAS_OP_T);
        turn(of, CUBLASLT_MATMUL_DESC_TRANSB, a.turned ? CUBLAS_OP_T : CUBLAS_OP_N);
        auto left = layout_of(b.data), right = layout_of(a.data), result = layout_of(c);
        asked const what{a.turned,
                         b.turned,
                         std::is_same_v<Out, float>,
                         inner,
                         c.count(),
                         c.width(),
                         a.data.stride(),
                         b.data.stride(),
                         c.stride(),
                         aligned(a.data.data()),
                         aligned(b.data.data()),
                         aligned(c.data())};
        if (advised_.size() > 1000) advised_.clear(); // experts get other counts of rows each time
        auto known = advised_.find(what);
        if (known == advised_.end()) known = advised_.emplace(what, advise(of, left, right, result, what)).first;
        float const one = 1;
        check(cublasLtMatmul(handle_, &of, &one, b.data.data(), &left, a.data.data(), &right, &before, c.data(),
                             &result, c.data(), &result, &known->second, space_.data(), most_space, memory_.stream()),
              "cublasLtMatmul");
    }

private:
    /// What an algorithm is chosen by.
    struct asked {
        bool a_turned, b_turned, to_float;
        index_t inner, count, width, a_stride, b_stride, c_stride;
        std::uint32_t a_aligned, b_aligned, c_aligned;
        friend auto operator<=>(asked const&, asked const&) = default;
    };
    static constexpr std::size_t most_space = std::size_t{32} << 20; ///< what NVIDIA advises for Hopper
    template <class X>
    static constexpr cudaDataType_t type_of = std::is_same_v<X, float> ? CUDA_R_32F : CUDA_R_16BF;

    static void check(cublasStatus_t status, char const* call) {
        cpx::require(status == CUBLAS_STATUS_SUCCESS, "cublas", call, "success", cublasLtGetStatusString(status));
    }
    static void turn(cublasLtMatmulDescOpaque_t& of, cublasLtMatmulDescAttributes_t which, cublasOperation_t how) {
        check(cublasLtMatmulDescSetAttribute(&of, which, &how, sizeof how), "cublasLtMatmulDescSetAttribute");
    }
    template <class X>
    static cublasLtMatrixLayoutOpaque_t layout_of(rows<X> x) {
        cublasLtMatrixLayoutOpaque_t made;
        check(cublasLtMatrixLayoutInit(&made, type_of<std::remove_const_t<X>>, static_cast<std::uint64_t>(x.width()),
                                       static_cast<std::uint64_t>(x.count()), x.stride()),
              "cublasLtMatrixLayoutInit");
        return made;
    }
    /// Returns the greatest power of two, up to 256, that an address is a multiple of.
    static std::uint32_t aligned(void const* address) {
        auto const at = reinterpret_cast<std::uintptr_t>(address) | 256;
        return static_cast<std::uint32_t>(at & (~at + 1));
    }
    cublasLtMatmulAlgo_t advise(cublasLtMatmulDescOpaque_t& of, cublasLtMatrixLayoutOpaque_t& left,
                                cublasLtMatrixLayoutOpaque_t& right, cublasLtMatrixLayoutOpaque_t& result,
                                asked const& what) const {
        cublasLtMatmulPreferenceOpaque_t wanted;
        check(cublasLtMatmulPreferenceInit(&wanted), "cublasLtMatmulPreferenceInit");
        auto const want = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
            check(cublasLtMatmulPreferenceSetAttribute(&wanted, which, &value, sizeof value),
                  "cublasLtMatmulPreferenceSetAttribute");
        };
        want(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most_space);
        want(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
        want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, what.b_aligned);
        want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, what.a_aligned);
        want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, what.c_aligned);
        want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, what.c_aligned);
        cublasLtMatmulHeuristicResult_t advised;
        int count = 0;
        check(
            cublasLtMatmulAlgoGetHeuristic(handle_, &of, &left, &right, &result, &result, &wanted, 1, &advised, &count),
            "cublasLtMatmulAlgoGetHeuristic");
        cpx::require(count == 1, "cublas", "cublasLtMatmulAlgoGetHeuristic", "an algorithm", count);
        check(advised.state, "cublasLtMatmulAlgoGetHeuristic");
        return advised.algo;
    }

    cpx::cuda::memory memory_;
    bool fixed_;
    mutable cpx::cuda::block<char> space_;
    cublasLtHandle_t handle_ = nullptr;
    mutable std::map<asked, cublasLtMatmulAlgo_t> advised_;
};

} // namespace qwen::gpu
