// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norms of rows, whole or head by head, and their backward: a warp a row.
#pragma once

#include "launch.cuh"

#include <cpx/ops/local/activation.hpp>

namespace qwen::gpu {

/// x, z, y: (rows, heads * dim); without z the plain norm, whose gain is centre + weight; with z the gated one.
struct norm_tensors {
    rows<float const> x, z;
    float const* weight = nullptr;
    index_t dim = 1;
    float eps = 0, centre = 0;
};

namespace kernels {

__device__ inline float norm_factor(norm_tensors const& t, float const* head) {
    return 1 / sqrtf(dot(head, head, t.dim) / static_cast<float>(t.dim) + t.eps);
}

static __global__ void rms_norm(norm_tensors t, rows<float> y) {
    index_t const row = item_of_warp();
    if (row >= t.x.count()) return;
    for (index_t first = 0; first < t.x.width(); first += t.dim) {
        float const factor = norm_factor(t, t.x.row(row) + first);
        for (index_t j = threadIdx.x; j < t.dim; j += warp) {
            float const normed = t.x(row, first + j) * factor;
            y(row, first + j) =
                t.z.data() ? normed * t.weight[j] * cpx::silu(t.z(row, first + j)) : normed * (t.centre + t.weight[j]);
        }
    }
}

/// Lane l has columns l, l + 32, ... of every head, so that each adds up the terms of its own.
static __global__ void rms_norm_backward(norm_tensors t, rows<float const> dy, rows<float> dx, rows<float> dz,
                                         rows<float> terms) {
    index_t const row = item_of_warp();
    if (row >= t.x.count()) return;
    for (index_t j = threadIdx.x; j < t.dim; j += warp) terms(row, j) = 0;
    for (index_t first = 0; first < t.x.width(); first += t.dim) {
        float const factor = norm_factor(t, t.x.row(row) + first);
        auto const pulled = [&](index_t j) { // the gradient of a normed element
            float const d = dy(row, first + j);
            return t.z.data() ? d * cpx::silu(t.z(row, first + j)) * t.weight[j] : d * (t.centre + t.weight[j]);
        };
        float inner = 0;
        for (index_t j = threadIdx.x; j < t.dim; j += warp) inner += pulled(j) * t.x(row, first + j) * factor;
        inner = sum_over_warp(inner) / static_cast<float>(t.dim);
        for (index_t j = threadIdx.x; j < t.dim; j += warp) {
            float const d = dy(row, first + j), normed = t.x(row, first + j) * factor, pull = pulled(j);
            float const opened = t.z.data() ? d * cpx::silu(t.z(row, first + j)) : d;
            terms(row, j) += opened * normed;
            if (t.z.data()) dz(row, first + j) = cpx::silu_backward(t.z(row, first + j), d * normed * t.weight[j]);
            dx(row, first + j) = factor * (pull - inner * normed);
        }
    }
}

} // namespace kernels

/// y may be x or z.
inline void rms_norm(norm_tensors const& t, rows<float> y, cudaStream_t stream) {
    launch_warps("rms_norm", kernels::rms_norm, t.x.count(), stream, t, y);
}

/// dx may be dy; terms: (rows, dim), those of the weight.
inline void rms_norm_backward(norm_tensors const& t, rows<float const> dy, rows<float> dx, rows<float> dz,
                              rows<float> terms, cudaStream_t stream) {
    launch_warps("rms_norm_backward", kernels::rms_norm_backward, t.x.count(), stream, t, dy, dx, dz, terms);
}

} // namespace qwen::gpu
