// SPDX-License-Identifier: Apache-2.0
// Projections by the experts that rows have chosen, and their gradients.
#pragma once

#include "launch.cuh"

namespace qwen::gpu {

namespace kernels {

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

} // namespace kernels

/// y_s = W_e x_s for every choice s of every row, where e is the expert chosen.
///
/// x: (rows, in), the same for all choices, or (rows, choices * in); weight: (experts * out, in); y: (rows, choices *
/// out).
inline void expert_linear(rows<index_t const> chosen, rows<float const> x, rows<float const> weight, rows<float> y,
                          cudaStream_t stream) {
    launch("expert_linear", kernels::expert_linear, chosen.count() * chosen.width(), dim3(warp, warps), 0, stream,
           chosen, x, weight, y);
}

/// For every element of dx, (rows, choices * in): the sum over the outputs of its choice's expert.
struct expert_backward_input {
    rows<index_t const> chosen;
    rows<float const> dy, weight;
    rows<float> dx;
    __device__ void operator()(index_t row, index_t j) const {
        index_t const in = weight.width(), s = j / in, out = dy.width() / chosen.width();
        float sum = 0;
        for (index_t k = 0; k < out; ++k) sum += dy(row, s * out + k) * weight(chosen(row, s) * out + k, j % in);
        dx(row, j) = sum;
    }
};

/// For every expert's outputs `first` to `first + n`, as rows, and every input: adds over the rows that chose it, in
/// their order. dy: (rows, choices * n).
struct expert_backward_weight {
    rows<index_t const> chosen;
    rows<float const> dy, x;
    rows<float> dweight;
    index_t out, first, n;
    __device__ void operator()(index_t output, index_t j) const {
        index_t const expert = output / n, k = output % n, in = dweight.width();
        float& sum = dweight(expert * out + first + k, j);
        for (index_t row = 0; row < chosen.count(); ++row)
            for (index_t s = 0; s < chosen.width(); ++s)
                if (chosen(row, s) == expert) sum += dy(row, s * n + k) * x(row, (x.width() == in ? 0 : s * in) + j);
    }
};

} // namespace qwen::gpu
