// SPDX-License-Identifier: Apache-2.0
// A mixture of experts: choice, projections by the experts chosen, and their weighted sum.
#pragma once

#include "launch.cuh"

namespace qwen::gpu {

namespace kernels {

/// One row of logits.
static __global__ void choose_experts(rows<float const> logits, rows<index_t> chosen, rows<float> weights) {
    index_t const row = item_of_thread(), experts = logits.width(), choices = chosen.width();
    if (row >= logits.count()) return;
    float highest = -INFINITY, total = 0, of_chosen = 0;
    for (index_t e = 0; e < experts; ++e) highest = fmaxf(highest, logits(row, e));
    for (index_t e = 0; e < experts; ++e) total += expf(logits(row, e) - highest);
    auto const is_chosen = [&](index_t e, index_t count) {
        for (index_t s = 0; s < count; ++s)
            if (chosen(row, s) == e) return true;
        return false;
    };
    for (index_t s = 0; s < choices; ++s) {
        index_t best = -1;
        float probability = 0;
        for (index_t e = 0; e < experts; ++e) {
            if (is_chosen(e, s)) continue;
            float const p = expf(logits(row, e) - highest) / total;
            if (best < 0 || p > probability) best = e, probability = p;
        }
        chosen(row, s) = best;
        weights(row, s) = probability;
        of_chosen += probability;
    }
    for (index_t s = 0; s < choices; ++s) weights(row, s) /= of_chosen;
}

/// A block for each row and choice, a warp for each output in turn.
static __global__ void expert_linear(rows<index_t const> chosen, rows<float const> x, rows<float const> weight,
                                     rows<float> y) {
    index_t const choices = chosen.width(), row = blockIdx.x / choices, s = blockIdx.x % choices;
    index_t const in = weight.width(), out = y.width() / choices;
    float const* const from = x.row(row) + (x.width() == in ? 0 : s * in);
    for (index_t j = threadIdx.y; j < out; j += warps) {
        float const product = dot(weight.row(chosen(row, s) * out + j), from, in);
        if (threadIdx.x == 0) y(row, s * out + j) = product;
    }
}

static __global__ void combine_experts(rows<float const> weights, rows<float const> output, rows<float const> gate,
                                       rows<float const> shared, rows<float> y) {
    index_t const i = item_of_thread();
    if (i >= y.count() * y.width()) return;
    index_t const row = i / y.width(), j = i % y.width();
    float sum = 0;
    for (index_t s = 0; s < weights.width(); ++s) sum += weights(row, s) * output(row, s * y.width() + j);
    y(row, j) = sum + sigmoid(gate(row, 0)) * shared(row, j);
}

} // namespace kernels

/// Chooses the largest probabilities of each row, the lower expert first among equals, and divides them by their sum.
///
/// logits: (rows, experts); chosen, weights: (rows, choices), by descending probability.
inline void choose_experts(rows<float const> logits, rows<index_t> chosen, rows<float> weights, cudaStream_t stream) {
    launch_threads("choose_experts", kernels::choose_experts, logits.count(), stream, logits, chosen, weights);
}

/// y_s = W_e x_s for every choice s of every row, where e is the expert chosen.
///
/// x: (rows, in), the same for all choices, or (rows, choices * in); weight: (experts * out, in); y: (rows, choices *
/// out).
inline void expert_linear(rows<index_t const> chosen, rows<float const> x, rows<float const> weight, rows<float> y,
                          cudaStream_t stream) {
    launch("expert_linear", kernels::expert_linear, chosen.count() * chosen.width(), dim3(warp, warps), 0, stream,
           chosen, x, weight, y);
}

/// y = sum_s weights_s output_s + sigmoid(gate) shared. output: (rows, choices * hidden), gate: (rows, 1).
inline void combine_experts(rows<float const> weights, rows<float const> output, rows<float const> gate,
                            rows<float const> shared, rows<float> y, cudaStream_t stream) {
    launch_threads("combine_experts", kernels::combine_experts, y.count() * y.width(), stream, weights, output, gate,
                   shared, y);
}

} // namespace qwen::gpu
