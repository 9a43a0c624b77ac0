// SPDX-License-Identifier: Apache-2.0
// A token each of many sequences: the gated delta rule or a decay a head from state to state, float sums.
#pragma once

#include <cpx/array.cuh>
#include <cpx/delta_rule_log_decays.cuh>

#include <cstdint>

namespace cpx::kernels {

/// What a step of decoding reads, a row a sequence.
template <class T>
struct delta_decode {
    delta_rows<T const> q, k, v; ///< (rows, heads * Dk or Dv)
    delta_log_decays<T> g;
    delta_rows<float const> beta;
    std::int64_t const* slots; ///< which state a row has, below 0: none, then nothing is written; null: its own
    std::int64_t states;       ///< that there are: a slot beyond them traps
    int key_heads, group;      ///< value heads a key head
    int key_dim, value_dim;
    float scale;
    bool erases; ///< else a decay a head alone: beta is 1, and is not read
};

namespace delta {

/// Warps of a block that decodes: one has every eighth key channel, from its number on.
inline constexpr int decode_warps = 8;

/// Loads a thread's V channels of a state, of those keys; zeros of what is not `held`.
template <int R, int V>
__device__ __forceinline__ void load_channels(float const* state, int keys, int stride, int warp, bool held,
                                              array<float, R, V>& s) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
        int const key = warp + decode_warps * r;
        bool const there = held && key < keys;
        float const* const from = state + std::int64_t{key} * stride;
        if constexpr (V == 4) {
            float4 const four = there ? __ldcs(reinterpret_cast<float4 const*>(from)) : float4{};
            s[r][0] = four.x, s[r][1] = four.y, s[r][2] = four.z, s[r][3] = four.w;
        } else {
            s[r][0] = there ? __ldcs(from) : 0.0f;
        }
    }
}

/// Stores them where they were, k fresh^T added.
template <int R, int V>
__device__ __forceinline__ void store_channels(float* state, int keys, int stride, int warp, float const* k,
                                               array<float, V> const& fresh, array<float, R, V>& s) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
        int const key = warp + decode_warps * r;
        if (key >= keys) break;
        float* const to = state + std::int64_t{key} * stride;
#pragma unroll
        for (int i = 0; i < V; ++i) s[r][i] = fmaf(k[key], fresh[i], s[r][i]);
        if constexpr (V == 4)
            __stcs(reinterpret_cast<float4*>(to), make_float4(s[r][0], s[r][1], s[r][2], s[r][3]));
        else
            __stcs(to, s[r][0]);
    }
}

/// Adds over the warps of a block, in their order, what lanes have of two sums; every warp gets the same bits.
template <int V>
__device__ __forceinline__ void add_over_warps(array<float, 2, decode_warps, 32 * V>& sums, int warp, int lane,
                                               array<float, V>& first, array<float, V>& second) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
        sums[0][warp][32 * i + lane] = first[i];
        sums[1][warp][32 * i + lane] = second[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < V; ++i) {
        first[i] = second[i] = 0;
#pragma unroll
        for (int w = 0; w < decode_warps; ++w) {
            first[i] += sums[0][w][32 * i + lane];
            second[i] += sums[1][w][32 * i + lane];
        }
    }
}

} // namespace delta

/// A block has 32 V value channels of a state, in registers between its reading and its writing: a warp every eighth
/// key channel. A grid of (rows, value heads, blocks of value channels) blocks of 256 threads. R: at least Dk / 8; V: 4
/// if states are at multiples of 16 bytes and Dv at those of 4. `states`: (states, value heads, Dk, Dv).
template <class T, int R, int V>
__global__ void __launch_bounds__(256) delta_rule_decode(delta_decode<T> const in, float* states, delta_rows<T> o) {
    constexpr int warps = delta::decode_warps;
    __shared__ float keys[warps * R], queries[warps * R];
    __shared__ array<float, 2, warps, 32 * V> sums;
    int const row = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), heads = in.key_heads * in.group;
    int const thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    int const column = (static_cast<int>(blockIdx.z) * 32 + lane) * V;
    std::int64_t const slot = in.slots ? in.slots[row] : row;
    if (slot >= in.states) __trap();
    if (slot < 0) return;
    float* const state = states + (slot * heads + head) * in.key_dim * in.value_dim + column;
    bool const held = column < in.value_dim;
    array<float, R, V> s;
    delta::load_channels<R, V>(state, in.key_dim, in.value_dim, warp, held, s);
    for (int i = thread; i < warps * R; i += 256) {
        std::int64_t const channel = std::int64_t{head / in.group} * in.key_dim + i;
        keys[i] = i < in.key_dim ? widen(in.k.at(row)[channel]) : 0.0f;
        queries[i] = i < in.key_dim ? widen(in.q.at(row)[channel]) : 0.0f;
    }
    float const decay = expf(in.g.at(row, head)), beta = in.erases ? in.beta.at(row)[head] : 1.0f;
    float value[V];
#pragma unroll
    for (int i = 0; i < V; ++i)
        value[i] = held ? widen(in.v.at(row)[std::int64_t{head} * in.value_dim + column + i]) : 0.0f;
    __syncthreads();
    array<float, V> stored = {}, read = {}; // K S, Q S
    float match = 0;                        // q k
#pragma unroll
    for (int r = 0; r < R; ++r) {
        float const k = keys[warp + warps * r], q = queries[warp + warps * r];
#pragma unroll
        for (int i = 0; i < V; ++i) {
            s[r][i] *= decay;
            stored[i] = fmaf(k, s[r][i], stored[i]);
            read[i] = fmaf(q, s[r][i], read[i]);
        }
    }
    for (int i = lane; i < warps * R; i += 32) match = fmaf(queries[i], keys[i], match);
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) match += __shfl_xor_sync(~0u, match, apart);
    delta::add_over_warps<V>(sums, warp, lane, stored, read);
    array<float, V> fresh;
#pragma unroll
    for (int i = 0; i < V; ++i) fresh[i] = in.erases ? beta * (value[i] - stored[i]) : value[i];
    if (!held) return;
    if (warp == 0)
#pragma unroll
        for (int i = 0; i < V; ++i)
            o.at(row)[std::int64_t{head} * in.value_dim + column + i] =
                static_cast<T>(in.scale * fmaf(match, fresh[i], read[i]));
    delta::store_channels<R, V>(state, in.key_dim, in.value_dim, warp, keys, fresh, s);
}

} // namespace cpx::kernels
