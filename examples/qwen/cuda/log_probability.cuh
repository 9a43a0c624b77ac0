// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of labels under softmax: a warp a row.
#pragma once

#include "launch.cuh"

namespace qwen::gpu {

namespace kernels {

static __global__ void log_probabilities(rows<float const> logits, index_t const* labels, rows<float> out) {
    index_t const row = item_of_warp();
    if (row >= logits.count()) return;
    index_t const label = labels[row];
    float highest = -INFINITY;
    for (index_t j = threadIdx.x; j < logits.width(); j += warp) highest = fmaxf(highest, logits(row, j));
    highest = max_over_warp(highest);
    double total = 0;
    for (index_t j = threadIdx.x; j < logits.width(); j += warp) total += expf(logits(row, j) - highest);
    total = sum_over_warp(total);
    if (threadIdx.x > 0) return;
    out(row, 0) = label < 0 ? 0 : static_cast<float>(static_cast<double>(logits(row, label) - highest) - log(total));
}

} // namespace kernels

/// out = log softmax(logits)[label], and 0 where the label is `cpx::ignored`. out: (rows, 1).
inline void log_probabilities(rows<float const> logits, index_t const* labels, rows<float> out, cudaStream_t stream) {
    launch_warps("log_probabilities", kernels::log_probabilities, logits.count(), stream, logits, labels, out);
}

} // namespace qwen::gpu
