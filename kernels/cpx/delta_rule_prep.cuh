// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's first kernel (sm_90a): of every chunk and value head what does not depend on the state.
#pragma once

#include <cpx/delta_rule_plan.cuh>
#include <cpx/delta_rule_tiles.cuh>

#include <cute/arch/mma_sm80.hpp>

#include <cuda_fp16.h>

namespace cpx::kernels {

/// The gates of a chunk's tokens; those beyond the chunk's end have beta 0 and the sum of its last.
struct delta_gates {
    float sum[delta_chunk];      ///< G: of log2 of the decays, up to and with the token
    float beta[delta_chunk];     ///< b
    float decay[delta_chunk];    ///< e = 2^G
    float onward[delta_chunk];   ///< w = b 2^(G of the last - G)
    float until[3][delta_chunk]; ///< b 2^(G of token 16, 32, 48 - G), of the tokens before that one
};

/// What `delta_rule_prep` writes, of (chunks, value heads): A = (I + strictly lower(diag(b) K K^T))^-1 of a chunk, a
/// panel of bfloat16, and its gates.
struct delta_prepared {
    char* inverse;
    delta_gates* gates;
};

namespace delta {

/// A triangular matrix of 64 x 64 __half; the distance of its rows lets eight of them be read at once.
struct triangle {
    static constexpr int stride = 72;
    __half value[64 * stride];
    __device__ __forceinline__ __half* at(int row, int column) { return value + row * stride + column; }
    __device__ __forceinline__ void set_two(int row, int column, float a, float b) {
        *reinterpret_cast<__half2*>(at(row, column)) = __floats2half2_rn(a, b);
    }
};

struct prep_memory {
    char keys[2 * panel_bytes];
    triangle lower, inverse;
    float beta[4][delta_chunk];
    barrier full;
};

__device__ __forceinline__ std::uint32_t two_halves(float low, float high) {
    __half2 const two = __floats2half2_rn(low, high);
    return reinterpret_cast<std::uint32_t const&>(two);
}

/// Loads 16 x 16 elements at `from`, each lane from its own place, as the left operand of a product of warps.
__device__ __forceinline__ void load_left(void const* from, std::uint32_t (&a)[4]) {
    cute::SM75_U32x4_LDSM_N::copy(*static_cast<cute::uint128_t const*>(from), a[0], a[1], a[2], a[3]);
}
__device__ __forceinline__ void load_left(triangle& m, int row, int column, std::uint32_t (&a)[4]) {
    int const lane = threadIdx.x % 32;
    load_left(m.at(row + lane % 16, column + lane / 16 * 8), a);
}
/// Loads 16 x 16 as right operands of two products of eight columns.
__device__ __forceinline__ void load_right(triangle& m, int row, int column, std::uint32_t (&b)[4]) {
    int const lane = threadIdx.x % 32;
    cute::SM75_U16x8_LDSM_T::copy(
        *reinterpret_cast<cute::uint128_t const*>(m.at(row + lane % 16, column + lane / 16 * 8)), b[0], b[1], b[2],
        b[3]);
}
/// sum += a b, 16 x 16 by 16 x 8 of __half.
__device__ __forceinline__ void add_product(float (&sum)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1) {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3], b0, b1, sum[0],
                                            sum[1], sum[2], sum[3]);
}
/// Rounds 16 x 16 sums to a left operand.
__device__ __forceinline__ void to_left(float const (&first)[4], float const (&second)[4], std::uint32_t (&a)[4]) {
    a[0] = two_halves(first[0], first[1]);
    a[1] = two_halves(first[2], first[3]);
    a[2] = two_halves(second[0], second[1]);
    a[3] = two_halves(second[2], second[3]);
}
__device__ __forceinline__ void store_negative(triangle& m, int row, int column, float const (&sum)[4]) {
    int const lane = threadIdx.x % 32;
    m.set_two(row + lane / 4, column + lane % 4 * 2, -sum[0], -sum[1]);
    m.set_two(row + lane / 4 + 8, column + lane % 4 * 2, -sum[2], -sum[3]);
}

/// Inverts the eight 8 x 8 blocks on the diagonal of I + lower, one row a thread, by 64 threads.
__device__ __forceinline__ void invert_blocks(triangle& lower, triangle& inverse, int row) {
    int const block = row / 8 * 8, own = row % 8;
    uint4 const bits = *reinterpret_cast<uint4 const*>(lower.at(row, block));
    __half2 const* const halves = reinterpret_cast<__half2 const*>(&bits);
    float x[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] = c == own ? 1.0f : 0.0f;
#pragma unroll
    for (int k = 0; k < 7; ++k) {
        float const factor = own > k ? (k % 2 ? __high2float(halves[k / 2]) : __low2float(halves[k / 2])) : 0.0f;
#pragma unroll
        for (int c = 0; c <= k; ++c) x[c] = fmaf(-factor, __shfl_sync(~0u, x[c], k, 8), x[c]);
    }
    *reinterpret_cast<uint4*>(inverse.at(row, block)) =
        make_uint4(two_halves(x[0], x[1]), two_halves(x[2], x[3]), two_halves(x[4], x[5]), two_halves(x[6], x[7]));
}

/// Joins inverses D^-1 and A^-1 of neighbouring blocks on the diagonal: what lies below A becomes -(D^-1 C) A^-1. Of
/// 8 x 8, a warp to a pair.
__device__ __forceinline__ void join_8(triangle& lower, triangle& inverse, int warp) {
    int const lane = threadIdx.x % 32, first = 16 * warp, row = lane / 4, two = lane % 4 * 2;
    auto const right = [&](triangle& m, int r, int c) {
        __half2 const pair = __halves2half2(*m.at(r + two, c + row), *m.at(r + two + 1, c + row));
        return reinterpret_cast<std::uint32_t const&>(pair);
    };
    float t[4] = {}, result[4] = {};
    cute::SM80_16x8x8_F32F16F16F32_TN::fma(
        t[0], t[1], t[2], t[3], *reinterpret_cast<std::uint32_t const*>(inverse.at(first + 8 + row, first + 8 + two)),
        0u, right(lower, first + 8, first), t[0], t[1], t[2], t[3]);
    cute::SM80_16x8x8_F32F16F16F32_TN::fma(result[0], result[1], result[2], result[3], two_halves(t[0], t[1]), 0u,
                                           right(inverse, first, first), result[0], result[1], result[2], result[3]);
    inverse.set_two(first + 8 + row, first + two, -result[0], -result[1]);
}
/// The same of 16 x 16, two warps to a pair.
__device__ __forceinline__ void join_16(triangle& lower, triangle& inverse, int warp) {
    int const first = 32 * (warp / 2), half = warp % 2;
    std::uint32_t a[4], b[4];
    float t[2][4] = {}, result[4] = {};
    load_left(inverse, first + 16, first + 16, a);
    load_right(lower, first + 16, first, b);
    add_product(t[0], a, b[0], b[1]);
    add_product(t[1], a, b[2], b[3]);
    to_left(t[0], t[1], a);
    load_right(inverse, first, first, b);
    add_product(result, a, half ? b[2] : b[0], half ? b[3] : b[1]);
    store_negative(inverse, first + 16, first + 8 * half, result);
}
/// The same of 32 x 32, four warps.
__device__ __forceinline__ void join_32(triangle& lower, triangle& inverse, int warp) {
    int const rows = 32 + 16 * (warp / 2), columns = 16 * (warp % 2);
    std::uint32_t a[4], b[4];
    float t[4][4] = {}, result[2][4] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        load_left(inverse, rows, 32 + 16 * k, a);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            load_right(lower, 32 + 16 * k, 16 * c, b);
            add_product(t[2 * c], a, b[0], b[1]);
            add_product(t[2 * c + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        to_left(t[2 * k], t[2 * k + 1], a);
        load_right(inverse, 16 * k, columns, b);
        add_product(result[0], a, b[0], b[1]);
        add_product(result[1], a, b[2], b[3]);
    }
    store_negative(inverse, rows, columns, result[0]);
    store_negative(inverse, rows, columns + 8, result[1]);
}

/// Computes the gates of n tokens by a warp, two tokens a lane.
__device__ __forceinline__ void compute_gates(float const* g, std::int64_t g_stride, float const* beta,
                                              std::int64_t beta_stride, int n, delta_gates& to, float* beta_shared) {
    int const lane = threadIdx.x % 32;
    float own[2], b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int const token = 2 * lane + i;
        float const log2_decay = token < n ? g[token * g_stride] * 1.4426950408889634f : 0.0f;
        own[i] = log2_decay < -126.0f ? -126.0f : log2_decay; // minus infinity, too; NaN stays
        b[i] = token < n ? beta[token * beta_stride] : 0.0f;
    }
    float sum = own[0] + own[1];
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        float const before = __shfl_up_sync(~0u, sum, apart);
        if (lane >= apart) sum += before;
    }
    float before = __shfl_up_sync(~0u, sum, 1);
    if (lane == 0) before = 0.0f;
    float const first = before + own[0], second = first + own[1], last = __shfl_sync(~0u, second, 31);
    auto const set = [&](float* place, float x, float y) { *reinterpret_cast<float2*>(place + 2 * lane) = {x, y}; };
    set(to.sum, first, second);
    set(to.beta, b[0], b[1]);
    set(to.decay, power_of_two(first), power_of_two(second));
    set(to.onward, b[0] * power_of_two(last - first), b[1] * power_of_two(last - second));
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        float const at = __shfl_sync(~0u, first, 8 * (i + 1));
        bool const before = lane < 8 * (i + 1);
        set(to.until[i], before ? b[0] * power_of_two(at - first) : 0.0f,
            before ? b[1] * power_of_two(at - second) : 0.0f);
    }
    set(beta_shared, b[0], b[1]);
}

} // namespace delta

/// Inputs of `delta_rule_prep`; keys: (tokens, key heads * 128) bfloat16, of norm at most 1, in panels.
struct delta_prep_input {
    delta_plan plan;
    delta_rows<float const> g, beta; ///< (tokens, value heads)
    int key_heads, group;            ///< value heads a key head
};

/// A block computes a chunk's inverses for a key head. A grid of (chunks at most) * key heads blocks of 128 threads.
static __global__ void __launch_bounds__(128, 5)
    delta_rule_prep(__grid_constant__ CUtensorMap const keys, delta_prep_input const in, delta_prepared const to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace delta;
    extern __shared__ __align__(1024) char raw[];
    auto& memory = *reinterpret_cast<prep_memory*>(raw);
    int const thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    if (thread == 0) {
        memory.full.init(1);
        cutlass::arch::fence_barrier_init();
    }
    for (int i = thread; i < 64 * triangle::stride / 8; i += 128)
        reinterpret_cast<uint4*>(memory.inverse.value)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads(); // the barrier has been made
    wait_for_previous_kernel();
    int const chunk = static_cast<int>(blockIdx.x) / in.key_heads,
              key_head = static_cast<int>(blockIdx.x) % in.key_heads;
    if (chunk >= in.plan.totals[0]) return;
    delta_sequence const sequence = in.plan.sequences[delta_sequence_of(in.plan, chunk)];
    int const begin = sequence.chunk_begin(chunk - sequence.first_chunk);
    int const n = sequence.chunk_end(chunk - sequence.first_chunk) - begin;
    if (thread == 0) {
        memory.full.arrive_and_expect_tx(2 * panel_bytes);
        load_panels<2>(keys, memory.full, memory.keys, 128 * key_head, begin);
    }
    int const value_heads = in.key_heads * in.group;
    auto const gates = [&](int h) { // of four heads, a warp to each
        if (int const head = key_head * in.group + h + warp; h + warp < in.group)
            compute_gates(in.g.at(begin) + head, in.g.stride, in.beta.at(begin) + head, in.beta.stride, n,
                          to.gates[std::int64_t{chunk} * value_heads + head], memory.beta[warp]);
    };
    gates(0);
    __syncthreads();
    wait(memory.full, 0);

    // K K^T, a warp to 16 rows, as far as the diagonal.
    float products[4][2][4] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        char const* const panel = memory.keys + k / 4 * panel_bytes;
        std::uint32_t a[4], b[4];
        load_left(panel + swizzled(16 * warp + lane % 16, k % 4 * 2 + lane / 16), a);
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (c <= warp) {
                load_left(panel + swizzled(16 * c + lane % 8 + lane / 16 * 8, k % 4 * 2 + lane / 8 % 2), b);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float(&sum)[4] = products[c][half];
                    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3],
                                                              b[2 * half], b[2 * half + 1], sum[0], sum[1], sum[2],
                                                              sum[3]);
                }
            }
    }

    for (int h = 0; h < in.group; ++h) {
        if (h > 0) __syncthreads(); // the head before has been read
        if (h > 0 && h % 4 == 0) {
            gates(h);
            __syncthreads();
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (c <= warp) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int down = 0; down < 2; ++down) {
                        int const i = 16 * warp + lane / 4 + 8 * down, j = 16 * c + 8 * half + lane % 4 * 2;
                        float const b = memory.beta[h % 4][i];
                        float const x = products[c][half][2 * down], y = products[c][half][2 * down + 1];
                        memory.lower.set_two(i, j, j < i && i < n ? b * x : 0.0f, j + 1 < i && i < n ? b * y : 0.0f);
                    }
            }
        __syncthreads();
        if (warp < 2) invert_blocks(memory.lower, memory.inverse, thread);
        __syncthreads();
        join_8(memory.lower, memory.inverse, warp);
        __syncthreads();
        join_16(memory.lower, memory.inverse, warp);
        __syncthreads();
        join_32(memory.lower, memory.inverse, warp);
        __syncthreads();
        char* const panel = to.inverse + (std::int64_t{chunk} * value_heads + key_head * in.group + h) * panel_bytes;
#pragma unroll
        for (int i = thread; i < 512; i += 128) {
            uint4 const halves = *reinterpret_cast<uint4 const*>(memory.inverse.at(i / 8, i % 8 * 8));
            std::uint32_t word[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                float2 const two = __half22float2(reinterpret_cast<__half2 const*>(&halves)[w]);
                word[w] = two_bf16(two.x, two.y);
            }
            *reinterpret_cast<uint4*>(panel + swizzled(i / 8, i % 8)) = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
#endif
}

} // namespace cpx::kernels
