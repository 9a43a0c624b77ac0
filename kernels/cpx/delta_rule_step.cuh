// SPDX-License-Identifier: Apache-2.0
// The step of the gated delta rule's state over one chunk (sm_90a): whoever computes a state has the same bits.
//
//     Y = V - diag(e) K S,    S <- e_n S + X^T Y,    X = diag(w) A^T K
//
// (I + strictly lower(diag(b) K K^T . decay))^-1 is A . decay: the gate is a similarity. Row j of A^T K is k_j taken
// through the later factors (I - b k k^T) of its chunk, so that it never grows.
//
// Kernels that are told that nothing is erased compute a decay a head by the same steps, with A = I, b = 1 and Y = V:
//
//     S <- e_n S + K^T (w.V)
#pragma once

#include <cpx/delta_rule_prep.cuh>

namespace cpx::kernels::delta {

/// Half of a state, transposed: 64 value channels by 128 key channels, which a warpgroup has in its registers. Word
/// 4j + 2d + i is that of value channel 16 warp + lane / 4 + 8 d and key channel 8 j + lane % 4 * 2 + i.
using half_state = float[64];

/// The gates of a chunk, and what kernels make of them.
struct chunk_gates : delta_gates {
    float onward[delta_chunk];   ///< w = b 2^(G of the last - G)
    float decay[delta_chunk];    ///< e = 2^G
    float until[3][delta_chunk]; ///< b 2^(G of token 16, 32, 48 - G), of the tokens before that one
};

/// Makes of G and b what else is wanted, by a warp, two tokens a lane.
template <bool WantsUntil>
__device__ __forceinline__ void complete_gates(chunk_gates& gates) {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    float2 const sum = reinterpret_cast<float2 const*>(gates.sum)[lane];
    float2 const b = reinterpret_cast<float2 const*>(gates.beta)[lane];
    auto const set = [&](float* place, float x, float y) { reinterpret_cast<float2*>(place)[lane] = {x, y}; };
    float const last = __shfl_sync(~0u, sum.y, 31);
    set(gates.decay, power_of_two(sum.x), power_of_two(sum.y));
    set(gates.onward, b.x * power_of_two(last - sum.x), b.y * power_of_two(last - sum.y));
    if constexpr (WantsUntil)
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            float const at = __shfl_sync(~0u, sum.x, 8 * (i + 1));
            bool const before = lane < 8 * (i + 1);
            set(gates.until[i], before ? b.x * power_of_two(at - sum.x) : 0.0f,
                before ? b.y * power_of_two(at - sum.y) : 0.0f);
        }
}

/// Computes X of a chunk by a warpgroup or, by one panel, of the 64 key channels of `keys`.
template <class T, int Panels = 2>
__device__ __forceinline__ void compute_x(char const* inverse, char const* keys, chunk_gates const& gates, char* x) {
    int const row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    float sum[Panels][32]; // one panel is rounded while the other one is under way
#pragma unroll
    for (int p = 0; p < Panels; ++p) {
        keep(sum[p]);
        cute::warpgroup_arrive();
        multiply_squares<T, Major::MN, Major::MN, true>(sum[p], inverse, keys + p * panel_bytes);
        cute::warpgroup_commit_batch();
    }
    float const w[2] = {gates.onward[row], gates.onward[row + 8]};
#pragma unroll
    for (int p = 0; p < Panels; ++p) {
        if (p + 1 < Panels)
            cute::warpgroup_wait<1>();
        else
            cute::warpgroup_wait<0>();
        keep(sum[p]);
        std::uint32_t words[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) words[i] = round_two<T>(w[i % 2] * sum[p][2 * i], w[i % 2] * sum[p][2 * i + 1]);
        store_operand(words, x + p * panel_bytes);
    }
}

/// The decays from the chunk's beginning to the tokens of a thread's accumulators.
using token_decays = float2[8];

__device__ __forceinline__ float2 decays_of(chunk_gates const& gates, int j) {
    return *reinterpret_cast<float2 const*>(gates.decay + 8 * j + threadIdx.x % 4 * 2);
}
__device__ __forceinline__ void load_decays(chunk_gates const& gates, token_decays& e) {
#pragma unroll
    for (int j = 0; j < 8; ++j) e[j] = decays_of(gates, j);
}

/// Y^T from V^T and K S, as an operand.
template <class T>
__device__ __forceinline__ void subtract(std::uint32_t const (&v)[16], float const (&ks)[32], token_decays const& e,
                                         std::uint32_t (&y)[16]) {
#pragma unroll
    for (int j = 0; j < 16; ++j)
        y[j] = round_two<T>(fmaf(-e[j / 2].x, ks[2 * j], low_of<T>(v[j])),
                            fmaf(-e[j / 2].y, ks[2 * j + 1], high_of<T>(v[j])));
}

/// Of V^T, each token times a factor of its own, an operand.
template <class T>
__device__ __forceinline__ void scale_tokens(std::uint32_t const (&v)[16], float const* factor, float by,
                                             std::uint32_t (&y)[16]) {
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        float2 const f = *reinterpret_cast<float2 const*>(factor + 4 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            y[j + i] = round_two<T>(by * f.x * low_of<T>(v[j + i]), by * f.y * high_of<T>(v[j + i]));
    }
}

__device__ __forceinline__ void scale(half_state& s, float by) {
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] *= by;
}

/// Begins the products by which a state takes in V where nothing is erased or, Back, its gradient dO times `by`.
template <class T, bool Back>
__device__ __forceinline__ void write_tokens(chunk_gates const& gates, char const* keys, float by,
                                             std::uint32_t const (&v)[16], half_state& s) {
    std::uint32_t y[16];
    scale_tokens<T>(v, Back ? gates.decay : gates.onward, Back ? by : 1.0f, y);
    keep(s);
    cute::warpgroup_arrive();
    multiply_down<T>(s, y, keys, true);
    cute::warpgroup_commit_batch();
}

/// Calls `f(word, value channel, key channel)` for every word of a thread's half state.
template <class F>
__device__ __forceinline__ void for_each_word(F&& f) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int i = 0; i < 64; ++i) f(i, 16 * warp + lane / 4 + i / 2 % 2 * 8, 8 * (i / 4) + lane % 4 * 2 + i % 2);
}

/// Reads half `half` of a state of these channels, key channels first; zeros beyond them, and for null.
__device__ __forceinline__ void load_state(float const* from, delta_dims dims, int half, half_state& s) {
    for_each_word([&](int i, int value, int key) { s[i] = from ? dims.read(from, key, 64 * half + value) : 0.0f; });
}
__device__ __forceinline__ void store_state(half_state const& s, delta_dims dims, int half, float* to) {
    for_each_word([&](int i, int value, int key) {
        int const column = 64 * half + value;
        if (key < dims.key && column < dims.value) to[key * dims.value + column] = s[i];
    });
}

/// The same of a state that one kernel leaves to another, as it lies in registers.
__device__ __forceinline__ void load_words(float const* from, half_state& s) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float4 const four = __ldcg(reinterpret_cast<float4 const*>(from) + i * 128 + threadIdx.x % 128);
        s[4 * i] = four.x, s[4 * i + 1] = four.y, s[4 * i + 2] = four.z, s[4 * i + 3] = four.w;
    }
}
__device__ __forceinline__ void store_words(half_state const& s, float* to) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
        reinterpret_cast<float4*>(to)[i * 128 + threadIdx.x % 128] =
            make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
}

/// Writes half a state, as an operand, for other kernels' products: `along_cores`, `down_cores`; to shared memory.
__device__ __forceinline__ void put_trace(std::uint32_t const (&words)[32], char* to) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4; // a warp's word of this number is a core
    char* const first = to + (2 * warp + lane / 8 % 2) * cores_bytes + lane / 16 * 128 + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        cute::SM90_U32x4_STSM_N::copy(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3],
                                      *reinterpret_cast<cute::uint128_t*>(first + 256 * i));
}
/// The same to memory.
__device__ __forceinline__ void store_trace(std::uint32_t const (&words)[32], char* to) {
    char* const first = to + threadIdx.x / 32 % 4 * 2 * cores_bytes + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) // a warp's word of this number is a core
        *reinterpret_cast<std::uint32_t*>(first + i % 2 * cores_bytes + i / 2 * 128) = words[i];
}

} // namespace cpx::kernels::delta
