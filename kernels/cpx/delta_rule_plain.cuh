// SPDX-License-Identifier: Apache-2.0
// The gated delta rule and a decay a head token by token, of every size, float sums: along a sequence, and back.
#pragma once

#include <cpx/delta_rule_log_decays.cuh>

#include <cstdint>

namespace cpx::kernels {

/// What the kernels of the plain path read. States are (sequences, value heads, Dk, Dv).
template <class T>
struct delta_tokens {
    delta_rows<T const> q, k, v; ///< (tokens, heads * Dk or Dv)
    delta_log_decays<T> g;
    delta_rows<float const> beta;
    delta_plan plan;
    int key_heads, group; ///< value heads a key head
    int key_dim, value_dim;
    float scale;
    bool erases; ///< else a decay a head alone: beta is 1, and is not read

    __device__ __forceinline__ float beta_of(std::int64_t row, int head) const {
        return erases ? beta.at(row)[head] : 1.0f;
    }
};

/// What a walk along sequences writes besides outputs, for the gradients; null if it is not wanted.
struct delta_trace {
    float* states; ///< (chunks, value heads, Dv, Dk): before the chunks or, of a walk back, gradients after them
    float* rows;   ///< (tokens, value heads * Dv): what tokens write into the state or, of a walk back, its gradient
};

namespace delta {

inline constexpr int plain_columns = 4; ///< of a state, that a warp has
inline constexpr int plain_warps = 4;

/// Adds over a warp; every lane has the sum.
template <std::size_t N>
__device__ __forceinline__ void add_over_warp(float (&x)[N]) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2)
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] += __shfl_xor_sync(~0u, x[i], apart);
}

/// A warp's columns of a state: lane l has rows l, l + 32, ...
template <int R>
struct plain_state {
    static constexpr int C = plain_columns;
    array<float, C, R> s;
    int lane, column, key_dim, value_dim;

    __device__ __forceinline__ plain_state(int first_column, int dk, int dv)
        : lane(static_cast<int>(threadIdx.x % 32)), column(first_column), key_dim(dk), value_dim(dv) {}
    /// Calls `f(c, r, value channel, key channel)` for the elements that exist.
    template <class F>
    __device__ __forceinline__ void each(F&& f) {
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int r = 0; r < R; ++r)
                if (column + c < value_dim && lane + 32 * r < key_dim) f(c, r, column + c, lane + 32 * r);
    }
    __device__ __forceinline__ void read(float const* from) { // (Dk, Dv)
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int r = 0; r < R; ++r) s[c][r] = 0.0f;
        if (from) each([&](int c, int r, int v, int k) { s[c][r] = from[std::int64_t{k} * value_dim + v]; });
    }
    __device__ __forceinline__ void write(float* to) {
        each([&](int c, int r, int v, int k) { to[std::int64_t{k} * value_dim + v] = s[c][r]; });
    }
    __device__ __forceinline__ void write_transposed(float* to) {
        each([&](int c, int r, int v, int k) { to[std::int64_t{v} * key_dim + k] = s[c][r]; });
    }
    template <class T>
    __device__ __forceinline__ void load_row(T const* row, array<float, R>& x) {
#pragma unroll
        for (int r = 0; r < R; ++r) x[r] = lane + 32 * r < key_dim ? widen(row[lane + 32 * r]) : 0.0f;
    }
    /// Returns an element for each of the warp's columns, in all lanes.
    template <class T>
    __device__ __forceinline__ void load_columns(T const* row, float (&x)[C]) {
#pragma unroll
        for (int c = 0; c < C; ++c) x[c] = column + c < value_dim ? widen(row[column + c]) : 0.0f;
    }
    template <class T>
    __device__ __forceinline__ void store_columns(float const (&x)[C], T* row) {
#pragma unroll
        for (int c = 0; c < C; ++c)
            if (lane == c && column + c < value_dim) row[column + c] = static_cast<T>(x[c]);
    }
};

} // namespace delta

/// Walks along sequences; a block has 16 columns of a state. A grid of ((Dv + 15) / 16, value heads, sequences) blocks
/// of 128 threads. R: at least Dk / 32. `initial`, `last`: states, null for zeros or if not wanted; `o` may be null.
template <class T, int R>
__global__ void __launch_bounds__(128) delta_rule_plain(delta_tokens<T> const in, float const* initial, float* last,
                                                        delta_rows<T> o, delta_trace const trace) {
    using namespace delta;
    constexpr int C = plain_columns;
    int const head = static_cast<int>(blockIdx.y), heads = in.key_heads * in.group;
    int const column = (static_cast<int>(blockIdx.x) * plain_warps + static_cast<int>(threadIdx.x) / 32) * C;
    delta_sequence const sequence = in.plan.sequences[blockIdx.z];
    if (column >= in.value_dim) return;
    std::int64_t const place = (std::int64_t{blockIdx.z} * heads + head) * in.key_dim * in.value_dim;
    std::int64_t const key_channel = std::int64_t{head / in.group} * in.key_dim;
    std::int64_t const value_channel = std::int64_t{head} * in.value_dim;
    plain_state<R> state(column, in.key_dim, in.value_dim);
    bool const erases = in.erases;
    state.read(initial ? initial + place : nullptr);
    for (int row = sequence.begin; row < sequence.end; ++row) {
        if (trace.states && (row == sequence.begin || (row - sequence.origin) % delta_chunk == 0)) {
            std::int64_t const chunk = sequence.first_chunk + (row - sequence.origin) / delta_chunk;
            state.write_transposed(trace.states + (chunk * heads + head) * in.key_dim * in.value_dim);
        }
        float q[R], k[R], v[C];
        state.load_row(in.q.at(row) + key_channel, q);
        state.load_row(in.k.at(row) + key_channel, k);
        state.load_columns(in.v.at(row) + value_channel, v);
        float const decay = expf(in.g.at(row, head)), beta = in.beta_of(row, head);
        float sums[2 * C + 1] = {}; // K S, Q S, and q k
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
            for (int c = 0; c < C; ++c) {
                state.s[c][r] *= decay;
                sums[c] = fmaf(k[r], state.s[c][r], sums[c]);
                sums[C + c] = fmaf(q[r], state.s[c][r], sums[C + c]);
            }
            sums[2 * C] = fmaf(q[r], k[r], sums[2 * C]);
        }
        add_over_warp(sums);
        float fresh[C], out[C];
#pragma unroll
        for (int c = 0; c < C; ++c) {
            fresh[c] = erases ? beta * (v[c] - sums[c]) : v[c];
            out[c] = in.scale * fmaf(sums[2 * C], fresh[c], sums[C + c]);
#pragma unroll
            for (int r = 0; r < R; ++r) state.s[c][r] = fmaf(k[r], fresh[c], state.s[c][r]);
        }
        if (o.data) state.store_columns(out, o.at(row) + value_channel);
        if (trace.rows)
            state.store_columns(fresh, trace.rows + row * std::int64_t{heads} * in.value_dim + value_channel);
    }
    if (last) state.write(last + place);
}

/// Walks back along sequences with the gradient of the state; the grid is `delta_rule_plain`'s. `dlast`, `dinitial`:
/// gradients of the states after and before the sequences.
template <class T, int R>
__global__ void __launch_bounds__(128)
    delta_rule_plain_back(delta_tokens<T> const in, delta_rows<T const> dout, float const* dlast, float* dinitial,
                          delta_rows<T> dv, delta_trace const trace) {
    using namespace delta;
    constexpr int C = plain_columns;
    int const head = static_cast<int>(blockIdx.y), heads = in.key_heads * in.group;
    int const column = (static_cast<int>(blockIdx.x) * plain_warps + static_cast<int>(threadIdx.x) / 32) * C;
    delta_sequence const sequence = in.plan.sequences[blockIdx.z];
    if (column >= in.value_dim) return;
    std::int64_t const place = (std::int64_t{blockIdx.z} * heads + head) * in.key_dim * in.value_dim;
    std::int64_t const key_channel = std::int64_t{head / in.group} * in.key_dim;
    std::int64_t const value_channel = std::int64_t{head} * in.value_dim;
    plain_state<R> state(column, in.key_dim, in.value_dim);
    bool const erases = in.erases;
    state.read(dlast ? dlast + place : nullptr);
    for (int row = sequence.end - 1; row >= sequence.begin; --row) {
        if (row == sequence.end - 1 || (row + 1 - sequence.origin) % delta_chunk == 0) {
            std::int64_t const chunk = sequence.first_chunk + (row - sequence.origin) / delta_chunk;
            state.write_transposed(trace.states + (chunk * heads + head) * in.key_dim * in.value_dim);
        }
        float q[R], k[R], d[C];
        state.load_row(in.q.at(row) + key_channel, q);
        state.load_row(in.k.at(row) + key_channel, k);
        state.load_columns(dout.at(row) + value_channel, d);
        float const decay = expf(in.g.at(row, head)), beta = in.beta_of(row, head);
        float right[C] = {}, of_v[C];
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int r = 0; r < R; ++r) {
                state.s[c][r] = fmaf(in.scale * q[r], d[c], state.s[c][r]);
                right[c] = fmaf(k[r], state.s[c][r], right[c]);
            }
        add_over_warp(right);
#pragma unroll
        for (int c = 0; c < C; ++c) {
            of_v[c] = beta * right[c];
#pragma unroll
            for (int r = 0; r < R; ++r)
                state.s[c][r] = decay * (erases ? fmaf(-k[r], of_v[c], state.s[c][r]) : state.s[c][r]);
        }
        state.store_columns(of_v, dv.at(row) + value_channel);
        state.store_columns(right, trace.rows + row * std::int64_t{heads} * in.value_dim + value_channel);
    }
    if (dinitial) state.write(dinitial + place);
}

} // namespace cpx::kernels
