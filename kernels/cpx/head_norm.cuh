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

/// A warp for each row, whose heads its groups of lanes take in turn. Blocks of (32, 8) threads.
template <class T>
__global__ void __launch_bounds__(256) normalise_rows(norm_input<T> n, rows<T> y, norm_lanes by) {
    constexpr int count = 16 / sizeof(T);
    index_t const row = static_cast<index_t>(blockIdx.x) * 8 + threadIdx.y, dim = n.dim();
    if (row >= n.x.count()) return;
    int const lane = static_cast<int>(threadIdx.x), across = by.lanes * count;
    for (index_t first = lane / by.lanes * dim; first - lane / by.lanes * dim < n.x.width();
         first += 32 / by.lanes * dim) {
        bool const there = first < n.x.width(); // else for the others' sums
        index_t const column = (there ? first : 0) + lane % by.lanes * count;
        array<float, count> x, z, gain;
        float squares = 0;
        for (int step = 0; step < by.steps; ++step) {
            load<T, count>(n.x.row(row) + column + step * across, by.whole, x);
#pragma unroll
            for (int i = 0; i < count; ++i) squares += x[i] * x[i];
        }
        squares = norm::sum_over(squares, 1, by.lanes);
        float const factor = 1 / sqrtf(squares / static_cast<float>(dim) + n.eps);
        if (!there) continue;
        for (int step = 0; step < by.steps; ++step) {
            index_t const at = column + step * across;
            load<T, count>(n.x.row(row) + at, by.whole, x);
            load<T, count>(n.weight.data() + (at - first), by.whole, gain);
            if (n.z.data()) load<T, count>(n.z.row(row) + at, by.whole, z);
#pragma unroll
            for (int i = 0; i < count; ++i) {
                x[i] *= factor * (n.offset + gain[i]);
                if (n.z.data()) x[i] *= z[i] / (1 + expf(-z[i]));
            }
            store<T, count>(x, by.whole, y.row(row) + at);
        }
    }
}

/// As above; a lane adds up its elements' terms over its heads, unless heads take several steps: then every head adds.
template <class T>
__global__ void __launch_bounds__(256) normalise_rows_backward(norm_input<T> n, rows<T const> dy, rows<T> dx,
                                                               rows<T> dz, rows<float> terms, norm_lanes by) {
    constexpr int count = 16 / sizeof(T);
    index_t const row = static_cast<index_t>(blockIdx.x) * 8 + threadIdx.y, dim = n.dim();
    if (row >= n.x.count()) return;
    int const lane = static_cast<int>(threadIdx.x), across = by.lanes * count;
    array<float, count> of_weight = {};
    for (index_t first = lane / by.lanes * dim; first - lane / by.lanes * dim < n.x.width();
         first += 32 / by.lanes * dim) {
        bool const there = first < n.x.width();
        index_t const column = (there ? first : 0) + lane % by.lanes * count;
        array<float, count> x, z, gain, d;
        float squares = 0, inner = 0;
        auto const load_all = [&](int step) {
            index_t const at = column + step * across;
            load<T, count>(n.x.row(row) + at, by.whole, x);
            load<T, count>(n.weight.data() + lane % by.lanes * count + step * across, by.whole, gain);
            load<T, count>(dy.row(row) + at, by.whole, d);
            if (n.z.data()) load<T, count>(n.z.row(row) + at, by.whole, z);
        };
        for (int step = 0; step < by.steps; ++step) {
            load_all(step);
#pragma unroll
            for (int i = 0; i < count; ++i) {
                float const opened = n.z.data() ? z[i] / (1 + expf(-z[i])) : 1.0f;
                squares += x[i] * x[i];
                inner += d[i] * opened * (n.offset + gain[i]) * x[i];
            }
        }
        squares = norm::sum_over(squares, 1, by.lanes);
        float const factor = 1 / sqrtf(squares / static_cast<float>(dim) + n.eps);
        inner = norm::sum_over(inner, 1, by.lanes) * factor / static_cast<float>(dim);
        if (!there) continue;
        for (int step = 0; step < by.steps; ++step) {
            if (by.steps > 1) load_all(step);
            index_t const at = column + step * across;
            array<float, count> of_x, of_z;
#pragma unroll
            for (int i = 0; i < count; ++i) {
                float const s = n.z.data() ? 1 / (1 + expf(-z[i])) : 1.0f, opened = n.z.data() ? z[i] * s : 1.0f;
                float const g = n.offset + gain[i], normed = x[i] * factor, term = d[i] * opened * normed;
                if (by.steps == 1)
                    of_weight[i] += term;
                else
                    terms(row, lane * count + step * across + i) += term;
                if (n.z.data()) of_z[i] = d[i] * normed * g * (s * (1 + z[i] * (1 - s)));
                of_x[i] = factor * (d[i] * opened * g - inner * normed);
            }
            if (n.z.data()) store<T, count>(of_z, by.whole, dz.row(row) + at);
            store<T, count>(of_x, by.whole, dx.row(row) + at);
        }
    }
    if (by.steps > 1) return;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        float const sum = norm::sum_over(of_weight[i], by.lanes, 32);
        if (lane < by.lanes) terms(row, lane * count + i) += sum;
    }
}

/// The same of heads of other sizes, element by element. Blocks of (32, 8) threads.
template <class T>
__global__ void __launch_bounds__(256) normalise_any_rows(norm_input<T> n, rows<T> y) {
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
    normalise_any_rows_backward(norm_input<T> n, rows<T const> dy, rows<T> dx, rows<T> dz, rows<float> terms) {
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
