// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norms of rows, head by head, and their backward: a warp a row, computed in float.
#pragma once

#include <cpx/core/rows.hpp>

#include <cpx/normalised_heads.cuh>

#include <cmath>

namespace cpx::kernels {

/// x, z, y: (rows, heads * dim), weight: (1, dim); the gain is offset + weight, and with z silu(z) times that.
template <class T>
struct norm_input {
    rows<T const> x, z, weight;
    float eps, offset;

    __host__ __device__ index_t dim() const { return weight.width(); }
    /// Returns the factor of the head whose first column this is, on every lane.
    __device__ float factor(index_t row, index_t first) const {
        T const* const head = x.row(row) + first;
        float const squares =
            sum_over_head(static_cast<int>(dim()), [&](int j) { return widen(head[j]) * widen(head[j]); });
        return 1 / sqrtf(squares / static_cast<float>(dim()) + eps);
    }
    __device__ float gain(index_t j) const { return offset + widen(weight(0, j)); }
    /// Returns silu(z), or 1 without z.
    __device__ float opened(index_t row, index_t column) const {
        if (!z.data()) return 1;
        float const gate = widen(z(row, column));
        return gate / (1 + expf(-gate));
    }
};

/// Blocks of (32, 8) threads.
template <class T>
__global__ void __launch_bounds__(256) normalise_rows(norm_input<T> n, rows<T> y) {
    index_t const row = static_cast<index_t>(blockIdx.x) * 8 + threadIdx.y;
    if (row >= n.x.count()) return;
    for (index_t first = 0; first < n.x.width(); first += n.dim()) {
        float const factor = n.factor(row, first);
        for (index_t j = threadIdx.x; j < n.dim(); j += 32)
            y(row, first + j) =
                static_cast<T>(widen(n.x(row, first + j)) * factor * n.gain(j) * n.opened(row, first + j));
    }
}

/// Lane l has columns l, l + 32, ... of every head, so that each adds up the terms of its own.
template <class T>
__global__ void __launch_bounds__(256)
    normalise_rows_backward(norm_input<T> n, rows<T const> dy, rows<T> dx, rows<T> dz, rows<float> terms) {
    index_t const row = static_cast<index_t>(blockIdx.x) * 8 + threadIdx.y;
    if (row >= n.x.count()) return;
    for (index_t first = 0; first < n.x.width(); first += n.dim()) {
        float const factor = n.factor(row, first);
        auto const pulled = [&](index_t j) { // the gradient of a normed element
            return widen(dy(row, first + j)) * n.opened(row, first + j) * n.gain(j);
        };
        T const* const head = n.x.row(row) + first;
        float const inner =
            sum_over_head(static_cast<int>(n.dim()), [&](int j) { return pulled(j) * widen(head[j]) * factor; }) /
            static_cast<float>(n.dim());
        for (index_t j = threadIdx.x; j < n.dim(); j += 32) {
            float const d = widen(dy(row, first + j)), normed = widen(head[j]) * factor, pull = pulled(j);
            terms(row, j) += d * n.opened(row, first + j) * normed;
            if (n.z.data()) {
                float const z = widen(n.z(row, first + j)), s = 1 / (1 + expf(-z));
                dz(row, first + j) = static_cast<T>(d * normed * n.gain(j) * (s * (1 + z * (1 - s))));
            }
            dx(row, first + j) = static_cast<T>(factor * (pull - inner * normed));
        }
    }
}

} // namespace cpx::kernels
