// SPDX-License-Identifier: Apache-2.0
// What segments of the gated delta rule or of a decay a head do to a state, token by token, of every size, float sums.
#pragma once

#include <cpx/delta_rule_plain.cuh>

namespace cpx::kernels {

namespace delta {

/// Blocks that share the columns of a matrix.
__host__ __device__ constexpr int plain_blocks(int columns) {
    return (columns + plain_columns * plain_warps - 1) / (plain_columns * plain_warps);
}

} // namespace delta

/// Writes E and M of segments, S -> M S + E: what they make of zeros, and, without values, of the identity.
///
/// A grid of (blocks of Dv and of Dk columns, value heads, segments) blocks of 128 threads. R: at least Dk / 32.
/// `maps`: (segments, value heads, Dk, Dk), `ends`: (segments, value heads, Dk, Dv). Of a decay a head M is a number,
/// and no block has Dk columns.
template <class T, int R>
__global__ void __launch_bounds__(128) delta_rule_plain_fold(delta_tokens<T> const in, float* maps, float* ends) {
    using namespace delta;
    constexpr int C = plain_columns;
    int const head = static_cast<int>(blockIdx.y), heads = in.key_heads * in.group;
    int const of_ends = plain_blocks(in.value_dim), block = static_cast<int>(blockIdx.x);
    bool const of_map = block >= of_ends;
    int const column = ((of_map ? block - of_ends : block) * plain_warps + static_cast<int>(threadIdx.x) / 32) * C;
    int const width = of_map ? in.key_dim : in.value_dim;
    if (column >= width) return;
    delta_sequence const sequence = in.plan.sequences[blockIdx.z];
    std::int64_t const key_channel = std::int64_t{head / in.group} * in.key_dim;
    std::int64_t const value_channel = std::int64_t{head} * in.value_dim;
    plain_state<R> state(column, in.key_dim, width);
    bool const erases = in.erases;
    float whole = 1;
    state.read(nullptr);
    if (of_map) state.each([&](int c, int r, int v, int k) { state.s[c][r] = v == k ? 1.0f : 0.0f; });
    for (int row = sequence.begin; row < sequence.end; ++row) {
        float k[R], v[C] = {};
        state.load_row(in.k.at(row) + key_channel, k);
        if (!of_map) state.load_columns(in.v.at(row) + value_channel, v);
        float const decay = expf(in.g.at(row, head)), beta = in.beta_of(row, head);
        float stored[C] = {};
        whole *= decay;
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int r = 0; r < R; ++r) {
                state.s[c][r] *= decay;
                stored[c] = fmaf(k[r], state.s[c][r], stored[c]);
            }
        if (erases)
            add_over_warp(stored);
        else
            for (float& x : stored) x = 0;
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int r = 0; r < R; ++r) state.s[c][r] = fmaf(k[r], beta * (v[c] - stored[c]), state.s[c][r]);
    }
    std::int64_t const place = std::int64_t{blockIdx.z} * heads + head;
    if (!erases && column == 0 && state.lane == 0) maps[place] = whole;
    state.write((of_map ? maps : ends) + place * in.key_dim * width);
}

/// Writes what the outputs of segments alone make the gradient of the states before them; (segments, value heads, Dk,
/// Dv). A grid of (blocks of Dv columns, value heads, segments) blocks of 128 threads.
template <class T, int R>
__global__ void __launch_bounds__(128)
    delta_rule_plain_fold_back(delta_tokens<T> const in, delta_rows<T const> dout, float* dstates) {
    using namespace delta;
    constexpr int C = plain_columns;
    int const head = static_cast<int>(blockIdx.y), heads = in.key_heads * in.group;
    int const column = (static_cast<int>(blockIdx.x) * plain_warps + static_cast<int>(threadIdx.x) / 32) * C;
    if (column >= in.value_dim) return;
    delta_sequence const sequence = in.plan.sequences[blockIdx.z];
    std::int64_t const key_channel = std::int64_t{head / in.group} * in.key_dim;
    std::int64_t const value_channel = std::int64_t{head} * in.value_dim;
    plain_state<R> state(column, in.key_dim, in.value_dim);
    bool const erases = in.erases;
    state.read(nullptr);
    for (int row = sequence.end - 1; row >= sequence.begin; --row) {
        float q[R], k[R], d[C], right[C] = {};
        state.load_row(in.q.at(row) + key_channel, q);
        state.load_row(in.k.at(row) + key_channel, k);
        state.load_columns(dout.at(row) + value_channel, d);
        float const decay = expf(in.g.at(row, head)), beta = in.beta_of(row, head);
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int r = 0; r < R; ++r) {
                state.s[c][r] = fmaf(in.scale * q[r], d[c], state.s[c][r]);
                right[c] = fmaf(k[r], state.s[c][r], right[c]);
            }
        add_over_warp(right);
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int r = 0; r < R; ++r)
                state.s[c][r] = decay * (erases ? fmaf(-k[r], beta * right[c], state.s[c][r]) : state.s[c][r]);
    }
    state.write(dstates + (std::int64_t{blockIdx.z} * heads + head) * in.key_dim * in.value_dim);
}

} // namespace cpx::kernels
