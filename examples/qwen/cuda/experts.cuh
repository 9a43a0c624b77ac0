// SPDX-License-Identifier: Apache-2.0
// Projections by the experts that rows have chosen, and their gradients.
#pragma once

#include "launch.cuh"

#include <cpx/core/row_buffer.hpp>
#include <cpx/cuda/memory.hpp>

namespace qwen::gpu {

namespace kernels {

/// A block for each row, a warp for each output in turn.
static __global__ void expert_linear(rows<index_t const> chosen, rows<float const> x, rows<float const> weight,
                                     rows<float> y) {
    index_t const row = blockIdx.x, expert = chosen(row, 0), out = y.width();
    for (index_t j = threadIdx.y; j < out; j += warps) {
        float const product = dot(weight.row(expert * out + j), x.row(row), weight.width());
        if (threadIdx.x == 0) y(row, j) = product;
    }
}

} // namespace kernels

/// A row for each choice of each token; its columns begin `each` after those of the choice before.
template <class T>
struct row_of_choice {
    rows<T const> x;
    index_t choices, each;
    rows<T> to;
    __device__ void operator()(index_t row, index_t j) const {
        to(row, j) = x(row / choices, row % choices * each + j);
    }
};

/// A row for each choice of each token, in their order: `cpx::expert_rows` on a device, where a rank has all experts.
class expert_rows {
public:
    expert_rows(rows<index_t const> chosen, index_t experts, cpx::cuda::memory const& memory)
        : chosen_(chosen), experts_(experts), memory_(memory) {}

    index_t experts() const { return experts_; }
    cpx::range own() const { return {0, experts_}; }
    index_t count() const { return tokens() * choices(); }
    index_t tokens() const { return chosen_.count(); }
    index_t choices() const { return chosen_.width(); }
    /// Returns (count(), 1).
    rows<index_t const> chosen() const { return {chosen_.data(), count(), 1}; }
    template <class T>
    cpx::row_buffer<T, cpx::cuda::memory> to_experts(rows<T const> x, index_t width) const {
        cpx::row_buffer<T, cpx::cuda::memory> to(memory_, count(), width);
        index_t const each_width = x.width() == width ? 0 : width;
        each(count(), width, row_of_choice<T>{x, choices(), each_width, to.view()}, memory_.stream());
        return to;
    }
    template <class T>
    void to_tokens(rows<T const> x, rows<T> y) const {
        rows<T const> const wide(x.data(), tokens(), y.width());
        each(tokens(), y.width(), row_of_choice<T>{wide, 1, 0, y}, memory_.stream());
    }

private:
    rows<index_t const> chosen_;
    index_t experts_;
    cpx::cuda::memory memory_;
};

/// y = W_e x for every row, e the expert chosen. chosen: (rows, 1); x: (rows, in); weight: (experts * out, in).
inline void expert_linear(rows<index_t const> chosen, rows<float const> x, rows<float const> weight, rows<float> y,
                          cudaStream_t stream) {
    launch("expert_linear", kernels::expert_linear, chosen.count(), dim3(warp, warps), 0, stream, chosen, x, weight, y);
}

/// For every element of dx, (rows, in): the sum over the outputs of its row's expert.
struct expert_backward_input {
    rows<index_t const> chosen;
    rows<float const> dy, weight;
    rows<float> dx;
    __device__ void operator()(index_t row, index_t j) const {
        index_t const out = dy.width();
        float sum = 0;
        for (index_t k = 0; k < out; ++k) sum += dy(row, k) * weight(chosen(row, 0) * out + k, j);
        dx(row, j) = sum;
    }
};

/// For every expert's outputs `first` to `first + n`, as rows, and every input: adds over the rows that chose it, in
/// their order. chosen: (tokens, choices), dy: (tokens, choices * n), x: (tokens, choices * in).
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
                if (chosen(row, s) == expert) sum += dy(row, s * n + k) * x(row, s * in + j);
    }
};

} // namespace qwen::gpu
