// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norms of rows, head by head, and their backward: a warp a row, computed in float.
#pragma once

#include <cpx/core/rows.hpp>

#include <cpx/normalised_heads.cuh>

#include <cmath>

namespace cpx::kernels {

/// x, z, y: (rows, heads * dim), weight: (1, dim); the gain is offset + weight, and with z silu(z) times that. X: T, or
/// another type of 16 bits, such as that of a delta rule's output, whose gradient is multiplied by `gradient_scale`.
template <class T, class X = T>
struct norm_input {
    static_assert(sizeof(X) == sizeof(T), "cpx: a norm of elements that have not as many bytes as those of its result");
    rows<X const> x;
    rows<T const> z, weight;
    float eps, offset, gradient_scale = 1;

    __host__ __device__ index_t dim() const { return weight.width(); }
    /// Returns the factor of the head whose first column this is, on every lane.
    __device__ float factor(index_t row, index_t first) const {
        X const* const head = x.row(row) + first;
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

/// Loads the gains of neighbours from the head's element j on.
template <class T, int V, class X>
__device__ __forceinline__ void load_gain(norm_input<T, X> const& n, int j, bool whole, array<float, V>& to) {
    load<T, V>(n.weight.data() + j, whole, to);
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] += n.offset;
}

/// Returns 1 / sqrt(mean + eps), for a T of 16 bits to 2 units in the last place of a float.
template <class T>
__device__ __forceinline__ float norm_factor(float squares, int dim, float eps) {
    float const mean = squares * (1 / static_cast<float>(dim));
    return sizeof(T) == 4 ? 1 / sqrtf(mean + eps) : rsqrtf(mean + eps);
}

/// A warp for each row, whose heads its groups of lanes take in turn. Blocks of (32, 8) threads. Gated: z is there.
template <class T, bool Gated, class X = T>
__global__ void __launch_bounds__(256, 4) normalise_rows(norm_input<T, X> n, rows<T> y, norm_lanes by) {
    constexpr int count = 16 / sizeof(T);
    using values = array<float, count>;
    index_t const row = static_cast<index_t>(blockIdx.x) * 8 + threadIdx.y;
    if (row >= n.x.count()) return;
    int const lane = static_cast<int>(threadIdx.x), dim = static_cast<int>(n.dim()),
              width = static_cast<int>(n.x.width());
    values x, z, gain;
    auto const add_squares = [&](float squares) {
#pragma unroll
        for (int i = 0; i < count; ++i) squares += x[i] * x[i];
        return squares;
    };
    auto const write = [&](float factor, int column) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            x[i] *= factor * gain[i];
            if constexpr (Gated) x[i] *= activate<T, true>(z[i]);
        }
        store<T, count>(x, by.whole, y.row(row) + column);
    };
    if (by.steps == 1) {
        load_gain<T, count>(n, lane % by.lanes * count, by.whole, gain);
        auto const of_x = reinterpret_cast<T const*>(n.x.row(row)); // taken for X where it is widened
        array<T const*, 2> const from = {of_x, Gated ? n.z.row(row) : of_x};
        for_each_head<T, 2>(from, width, dim, by, [&](int column, lane_packs<T, 2> const& packs) {
            widen<X, count>(packs.of[0], x);
            if constexpr (Gated) widen<T, count>(packs.of[1], z);
            float const factor = norm_factor<T>(norm::sum_over(add_squares(0), 1, by.lanes), dim, n.eps);
            if (column >= 0) write(factor, column);
        });
        return;
    }
    for (int first = 0; first < width; first += dim) {
        float squares = 0;
        for (int j = lane * count; j < dim; j += 32 * count) {
            load<X, count>(n.x.row(row) + first + j, by.whole, x);
            squares = add_squares(squares);
        }
        float const factor = norm_factor<T>(norm::sum_over(squares, 1, 32), dim, n.eps);
        for (int j = lane * count; j < dim; j += 32 * count) {
            load<X, count>(n.x.row(row) + first + j, by.whole, x);
            load_gain<T, count>(n, j, by.whole, gain);
            if constexpr (Gated) load<T, count>(n.z.row(row) + first + j, by.whole, z);
            write(factor, first + j);
        }
    }
}

/// As above; a lane adds up its elements' terms over its heads, unless heads take several steps: then every head adds.
template <class T, bool Gated, class X = T>
__global__ void __launch_bounds__(256, 3) normalise_rows_backward(norm_input<T, X> n, rows<T const> dy, rows<X> dx,
                                                                  rows<T> dz, rows<float> terms, norm_lanes by) {
    constexpr int count = 16 / sizeof(T);
    using values = array<float, count>;
    index_t const row = static_cast<index_t>(blockIdx.x) * 8 + threadIdx.y;
    if (row >= n.x.count()) return;
    int const lane = static_cast<int>(threadIdx.x), dim = static_cast<int>(n.dim()),
              width = static_cast<int>(n.x.width());
    values x, d, z, gain, of_weight = {};
    float squares = 0, inner = 0;
    auto const open = [&] { // d becomes the gradient of what the gate opens, z that of z but for its head's factor
#pragma unroll
        for (int i = 0; i < count && Gated; ++i) {
            float const s = sigmoid<T>(z[i]), given = d[i];
            d[i] *= z[i] * s;
            z[i] = given * x[i] * gain[i] * (s * (1 + z[i] * (1 - s)));
        }
    };
    auto const add_sums = [&] {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            squares += x[i] * x[i];
            inner += d[i] * gain[i] * x[i];
        }
    };
    auto const finish_sums = [&] {
        squares = norm::sum_over(squares, 1, by.lanes);
        inner = norm::sum_over(inner, 1, by.lanes);
        float const factor = norm_factor<T>(squares, dim, n.eps);
        float const along = inner * factor * (1 / static_cast<float>(dim)); // a quotient would take registers
        squares = inner = 0;
        return head_sums{factor, along};
    };
    auto const write = [&](head_sums sums, int column) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            float const normed = x[i] * sums.factor;
            of_weight[i] += d[i] * normed;
            x[i] = sums.factor * (d[i] * gain[i] - sums.along * normed);
            if constexpr (!std::is_same_v<X, T>) x[i] *= n.gradient_scale;
            if constexpr (Gated) z[i] *= sums.factor;
        }
        if constexpr (Gated) store<T, count>(z, by.whole, dz.row(row) + column);
        store<X, count>(x, by.whole, dx.row(row) + column);
    };
    if (by.steps == 1) {
        load_gain<T, count>(n, lane % by.lanes * count, by.whole, gain);
        auto const of_x = reinterpret_cast<T const*>(n.x.row(row));
        array<T const*, 3> const from = {of_x, dy.row(row), Gated ? n.z.row(row) : of_x};
        for_each_head<T, 3>(from, width, dim, by, [&](int column, lane_packs<T, 3> const& packs) {
            widen<X, count>(packs.of[0], x);
            widen<T, count>(packs.of[1], d);
            if constexpr (Gated) widen<T, count>(packs.of[2], z);
            open();
            add_sums();
            auto const sums = finish_sums();
            if (column >= 0) write(sums, column);
        });
#pragma unroll
        for (int i = 0; i < count; ++i) {
            float const sum = norm::sum_over(of_weight[i], by.lanes, 32);
            if (lane < by.lanes) terms(row, lane * count + i) += sum;
        }
        return;
    }
    auto const load_all = [&](int first, int j) {
        load<X, count>(n.x.row(row) + first + j, by.whole, x);
        load_gain<T, count>(n, j, by.whole, gain);
        load<T, count>(dy.row(row) + first + j, by.whole, d);
        if constexpr (Gated) load<T, count>(n.z.row(row) + first + j, by.whole, z);
    };
    for (int first = 0; first < width; first += dim) {
        for (int j = lane * count; j < dim; j += 32 * count) {
            load_all(first, j);
            open();
            add_sums();
        }
        auto const sums = finish_sums();
        for (int j = lane * count; j < dim; j += 32 * count) {
            load_all(first, j);
            open();
            write(sums, first + j);
#pragma unroll
            for (int i = 0; i < count; ++i) terms(row, j + i) += of_weight[i], of_weight[i] = 0;
        }
    }
}

/// The same of heads of other sizes, element by element. Blocks of (32, 8) threads.
template <class T, class X = T>
__global__ void __launch_bounds__(256) normalise_any_rows(norm_input<T, X> n, rows<T> y) {
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
template <class T, class X = T>
__global__ void __launch_bounds__(256)
    normalise_any_rows_backward(norm_input<T, X> n, rows<T const> dy, rows<X> dx, rows<T> dz, rows<float> terms) {
    index_t const row = static_cast<index_t>(blockIdx.x) * 8 + threadIdx.y;
    if (row >= n.x.count()) return;
    for (index_t first = 0; first < n.x.width(); first += n.dim()) {
        float const factor = n.factor(row, first);
        auto const pulled = [&](index_t j) { // the gradient of a normed element
            return widen(dy(row, first + j)) * n.opened(row, first + j) * n.gain(j);
        };
        X const* const head = n.x.row(row) + first;
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
            dx(row, first + j) = static_cast<X>(factor * (pull - inner * normed) * n.gradient_scale);
        }
    }
}

} // namespace cpx::kernels
