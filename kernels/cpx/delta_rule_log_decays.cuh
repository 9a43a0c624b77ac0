// SPDX-License-Identifier: Apache-2.0
// Log decays, given or made of parameters where they are read, and what gradients of theirs make of these.
#pragma once

#include <cpx/delta_rule_plan.cuh>
#include <cpx/ops/local/delta_gates.hpp>
#include <cpx/pack.cuh>

#include <cstdint>

namespace cpx::kernels {

/// The log decays of tokens and value heads: g or, if there is an a_log, -exp(a_log) softplus(a + dt_bias).
template <class T>
struct delta_log_decays {
    delta_rows<float const> g;  ///< (tokens, value heads)
    delta_rows<T const> a = {}; ///< the same
    float const *a_log = nullptr, *dt_bias = nullptr;

    /// What is read of a token, and the log decay that it makes.
    __device__ __forceinline__ float read(std::int64_t row, int head) const {
        return a_log ? widen(a.at(row)[head]) : g.at(row)[head];
    }
    __device__ __forceinline__ float made_of(float x, int head) const {
        return a_log ? delta_rule_gate(x, a_log[head], dt_bias[head]) : x;
    }
    __device__ __forceinline__ float at(std::int64_t row, int head) const { return made_of(read(row, head), head); }
};

/// Of the gradients of log decays, dg, (tokens, value heads) side by side, makes those of a, and a chunk's shares of
/// those of a_log and dt_bias: terms, (chunks, 2, value heads). A grid of (chunks at most, value heads / 32, rounded
/// up) blocks.
template <class T>
__global__ void __launch_bounds__(256)
    delta_rule_parameter_terms(delta_plan const plan, delta_log_decays<T> const of, float const* dg,
                               delta_rows<T> const da, int heads, float* terms) {
    constexpr int warps = 8;
    __shared__ float shares[2][warps][32];
    int const chunk = static_cast<int>(blockIdx.x);
    if (chunk >= plan.totals[0]) return;
    int const lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    int const head = static_cast<int>(blockIdx.y) * 32 + lane;
    delta_sequence const sequence = plan.sequences[delta_sequence_of(plan, chunk)];
    int const end = sequence.chunk_end(chunk - sequence.first_chunk);
    float of_a_log = 0, of_dt_bias = 0;
    if (head < heads)
        for (int row = sequence.chunk_begin(chunk - sequence.first_chunk) + warp; row < end; row += warps) {
            auto const by = delta_rule_gate_backward(widen(of.a.at(row)[head]), of.a_log[head], of.dt_bias[head],
                                                     dg[std::int64_t{row} * heads + head]);
            da.at(row)[head] = static_cast<T>(by.a);
            of_a_log += by.a_log, of_dt_bias += by.dt_bias;
        }
    shares[0][warp][lane] = of_a_log, shares[1][warp][lane] = of_dt_bias;
    __syncthreads();
    if (warp >= 2 || head >= heads) return;
    float sum = 0;
    for (float const(&share)[32] : shares[warp]) sum += share[lane];
    terms[(std::int64_t{chunk} * 2 + warp) * heads + head] = sum;
}

/// Adds the chunks' shares, in an order that their number alone decides. A grid of (value heads / 32, rounded up, 2)
/// blocks of 1024 threads, of a_log and of dt_bias.
static __global__ void __launch_bounds__(1024)
    delta_rule_parameter_sums(int const* chunks, float const* terms, int heads, float* da_log, float* ddt_bias) {
    constexpr int warps = 32;
    __shared__ float shares[warps][32];
    int const lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    int const head = static_cast<int>(blockIdx.x) * 32 + lane, which = static_cast<int>(blockIdx.y);
    float sum = 0;
    if (head < heads)
        for (int chunk = warp; chunk < *chunks; chunk += warps)
            sum += terms[(std::int64_t{chunk} * 2 + which) * heads + head];
    shares[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || head >= heads) return;
    sum = 0;
    for (float const(&share)[32] : shares) sum += share[lane];
    (which == 0 ? da_log : ddt_bias)[head] = sum;
}

} // namespace cpx::kernels
