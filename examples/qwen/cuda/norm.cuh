// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norms of rows, whole or head by head: a warp a head.
#pragma once

#include "launch.cuh"

namespace qwen::gpu {

namespace kernels {

/// One head of one row; without z the zero-centred norm, with z the gated one.
static __global__ void rms_norm(rows<float const> x, rows<float const> z, float const* weight, index_t dim, float eps,
                                rows<float> y) {
    index_t const heads = x.width() / dim, item = item_of_warp();
    if (item >= x.count() * heads) return;
    index_t const row = item / heads, first = item % heads * dim;
    float const* const head = x.row(row) + first;
    float const factor = 1 / sqrtf(dot(head, head, dim) / static_cast<float>(dim) + eps);
    for (index_t j = threadIdx.x; j < dim; j += warp) {
        float const normed = head[j] * factor;
        y(row, first + j) = z.data() ? normed * weight[j] * silu(z(row, first + j)) : normed * (1 + weight[j]);
    }
}

} // namespace kernels

/// y = x / sqrt(mean x^2 + eps) (1 + weight), the mean over heads of `dim` columns; y may be x.
inline void rms_norm(rows<float const> x, float const* weight, index_t dim, float eps, rows<float> y,
                     cudaStream_t stream) {
    launch_warps("rms_norm", kernels::rms_norm, x.count() * (x.width() / dim), stream, x, {}, weight, dim, eps, y);
}

/// y = x / sqrt(mean x^2 + eps) weight silu(z); y may be x or z.
inline void gated_rms_norm(rows<float const> x, rows<float const> z, float const* weight, index_t dim, float eps,
                           rows<float> y, cudaStream_t stream) {
    launch_warps("gated_rms_norm", kernels::rms_norm, x.count() * (x.width() / dim), stream, x, z, weight, dim, eps, y);
}

} // namespace qwen::gpu
