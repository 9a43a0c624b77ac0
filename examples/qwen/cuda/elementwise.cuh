// SPDX-License-Identifier: Apache-2.0
// What happens element by element: a thread each.
#pragma once

#include "launch.cuh"

namespace qwen::gpu {

namespace kernels {

struct place {
    index_t row, column;
    bool there;
};
/// Returns the element of `all` that this thread is for.
template <class T>
__device__ place place_in(rows<T> const& all) {
    index_t const i = item_of_thread();
    if (i >= all.count() * all.width()) return {0, 0, false};
    return {i / all.width(), i % all.width(), true};
}

static __global__ void add(rows<float const> x, rows<float> h) {
    if (auto const [row, j, there] = place_in(h); there) h(row, j) += x(row, j);
}

static __global__ void silu_mul(rows<float const> gate, rows<float const> up, rows<float> y) {
    if (auto const [row, j, there] = place_in(y); there) y(row, j) = silu(gate(row, j)) * up(row, j);
}

static __global__ void take_queries(rows<float const> q_and_gate, index_t dim, rows<float> q) {
    if (auto const [row, j, there] = place_in(q); there) q(row, j) = q_and_gate(row, j / dim * 2 * dim + j % dim);
}

static __global__ void sigmoid_gate(rows<float const> q_and_gate, index_t dim, rows<float> o) {
    if (auto const [row, j, there] = place_in(o); there)
        o(row, j) *= sigmoid(q_and_gate(row, (j / dim * 2 + 1) * dim + j % dim));
}

static __global__ void delta_rule_gates(rows<float const> b, rows<float const> a, float const* A_log,
                                        float const* dt_bias, rows<float> g, rows<float> beta) {
    if (auto const [row, h, there] = place_in(g); there) {
        g(row, h) = -expf(A_log[h]) * softplus(a(row, h) + dt_bias[h]);
        beta(row, h) = sigmoid(b(row, h));
    }
}

} // namespace kernels

/// h += x.
inline void add(rows<float const> x, rows<float> h, cudaStream_t stream) {
    launch_threads("add", kernels::add, h.count() * h.width(), stream, x, h);
}

/// y = silu(gate) up; y may be one of the others.
inline void silu_mul(rows<float const> gate, rows<float const> up, rows<float> y, cudaStream_t stream) {
    launch_threads("silu_mul", kernels::silu_mul, y.count() * y.width(), stream, gate, up, y);
}

/// Copies the queries out of what q_proj gives: each head's query, then its gate.
inline void take_queries(rows<float const> q_and_gate, index_t dim, rows<float> q, cudaStream_t stream) {
    launch_threads("take_queries", kernels::take_queries, q.count() * q.width(), stream, q_and_gate, dim, q);
}

/// o *= sigmoid(gate), the gates as q_proj gives them.
inline void sigmoid_gate(rows<float const> q_and_gate, index_t dim, rows<float> o, cudaStream_t stream) {
    launch_threads("sigmoid_gate", kernels::sigmoid_gate, o.count() * o.width(), stream, q_and_gate, dim, o);
}

/// g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b); all (rows, heads).
inline void delta_rule_gates(rows<float const> b, rows<float const> a, float const* A_log, float const* dt_bias,
                             rows<float> g, rows<float> beta, cudaStream_t stream) {
    launch_threads("delta_rule_gates", kernels::delta_rule_gates, g.count() * g.width(), stream, b, a, A_log, dt_bias,
                   g, beta);
}

} // namespace qwen::gpu
