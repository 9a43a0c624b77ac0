// SPDX-License-Identifier: Apache-2.0
// The gated delta rule of whole sequences, token by token: a block for each sequence and value head.
#pragma once

#include "launch.cuh"

namespace qwen3_5::gpu {

/// The tensors of a gated delta rule for the heads that a rank holds, all tokens in sequence order.
///
/// q, k: (tokens, key heads * key_dim), v, o: (tokens, value heads * value_dim), g (log decay), beta: (tokens, value
/// heads); `offsets`: cu_seqlens. Value head h reads key head `(first_value + h) / group - first_key`.
struct delta_rule_tensors {
    rows<float const> q, k, v, g, beta;
    rows<float> o;
    index_t const* offsets = nullptr;
    index_t sequences = 0, key_dim = 1, value_dim = 1, first_value = 0, first_key = 0, group = 1;
    float scale = 1; ///< of q
};

namespace kernels {

/// Loads x, divided by sqrt(sum x^2 + 1e-6), times `scale`. Every thread adds the squares in the same order.
__device__ inline void load_normalised(float const* from, index_t n, float scale, float* to) {
    for (index_t d = threadIdx.x; d < n; d += blockDim.x) to[d] = from[d];
    __syncthreads();
    float squares = 0;
    for (index_t d = 0; d < n; ++d) squares += to[d] * to[d];
    float const factor = scale / sqrtf(squares + 1e-6f);
    __syncthreads(); // all have read what is now written
    for (index_t d = threadIdx.x; d < n; d += blockDim.x) to[d] *= factor;
    __syncthreads();
}

/// Thread v holds column v of the state; `memory`: the state (key_dim, value_dim), then q and k of one token.
static __global__ void gated_delta_rule(delta_rule_tensors t) {
    extern __shared__ float memory[];
    index_t const heads = t.g.width(), sequence = blockIdx.x / heads, h = blockIdx.x % heads;
    index_t const key = ((t.first_value + h) / t.group - t.first_key) * t.key_dim, v = threadIdx.x;
    float* const state = memory + v;
    float* const q = memory + t.key_dim * t.value_dim;
    float* const k = q + t.key_dim;
    for (index_t d = 0; d < t.key_dim; ++d) state[d * t.value_dim] = 0;
    for (index_t row = t.offsets[sequence]; row < t.offsets[sequence + 1]; ++row) {
        load_normalised(t.q.row(row) + key, t.key_dim, t.scale, q);
        load_normalised(t.k.row(row) + key, t.key_dim, 1, k);
        float const decay = expf(t.g(row, h));
        float stored = 0; // k^T (decay S)
        for (index_t d = 0; d < t.key_dim; ++d) stored += k[d] * (state[d * t.value_dim] *= decay);
        float const fresh = t.beta(row, h) * (t.v(row, h * t.value_dim + v) - stored);
        float out = 0;
        for (index_t d = 0; d < t.key_dim; ++d) out += q[d] * (state[d * t.value_dim] += k[d] * fresh);
        t.o(row, h * t.value_dim + v) = out;
        __syncthreads(); // before the next token's q and k
    }
}

} // namespace kernels

/// Computes, from zero states,
///
///     S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t
///
/// with q and k divided by their lengths. Throws `cpx::error` if the device has no room for a head's state.
inline void gated_delta_rule(delta_rule_tensors const& t, cudaStream_t stream) {
    char const* const name = "gated_delta_rule";
    index_t const bytes = (t.key_dim * t.value_dim + 2 * t.key_dim) * static_cast<index_t>(sizeof(float));
    int most = 0;
    cpx::cuda::check(
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, cpx::cuda::current_device()),
        "cudaDeviceGetAttribute");
    cpx::require(bytes <= most, name, "bytes of a head's state", "at most " + std::to_string(most), bytes);
    cpx::require(t.value_dim <= 1024, name, "value_dim", "at most 1024", t.value_dim);
    cpx::cuda::check(cudaFuncSetAttribute(kernels::gated_delta_rule, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(bytes)),
                     "cudaFuncSetAttribute");
    launch(name, kernels::gated_delta_rule, t.sequences * t.g.width(), dim3(static_cast<unsigned>(t.value_dim)), bytes,
           stream, t);
}

} // namespace qwen3_5::gpu
