// SPDX-License-Identifier: Apache-2.0
// The gated delta rule's first kernel (sm_90a): of every chunk and value head what does not depend on the state.
#pragma once

#include <cpx/delta_rule_log_decays.cuh>
#include <cpx/delta_rule_tiles.cuh>

#include <cuda_fp16.h>

namespace cpx::kernels {

/// The gates of a chunk's tokens; those beyond the chunk's end have beta 0 and the sum of its last.
struct delta_gates {
    float sum[delta_chunk];  ///< G: of log2 of the decays, up to and with the token
    float beta[delta_chunk]; ///< b
};

/// What `delta_rule_prep` writes, of (chunks, value heads): A = (I + strictly lower(diag(b) K K^T))^-1 of a chunk,
/// `delta::triangle_bytes` of 16-bit numbers, and its gates.
struct delta_prepared {
    char* inverse;
    delta_gates* gates;
};

namespace delta {

/// g and beta of a head each warp; it comes first where there is nothing else.
struct prep_gates {
    float g[4][delta_chunk], beta[4][delta_chunk];
};
struct prep_memory : prep_gates {
    char keys[2][2 * panel_bytes]; ///< of two heads; and then an inverse of each warp
    uint4 products[2][10][32];     ///< K K^T, in __half: of block `lower_block(i, j)` a lane's four words
    barrier full;
};

__device__ __forceinline__ std::uint32_t two_halves(float low, float high) { return round_two<__half>(low, high); }

/// Loads 16 x 16 elements at `from`, each lane from its own place, as the left operand of a product of warps.
__device__ __forceinline__ void load_left(void const* from, std::uint32_t (&a)[4]) {
    cute::SM75_U32x4_LDSM_N::copy(*static_cast<cute::uint128_t const*>(from), a[0], a[1], a[2], a[3]);
}
/// sum += a b, 16 x 16 by 16 x 8 of __half.
__device__ __forceinline__ void add_product(float (&sum)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1) {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3], b0, b1, sum[0],
                                            sum[1], sum[2], sum[3]);
}
/// sum += a b, 16 x 8 by 8 x 8.
__device__ __forceinline__ void add_product(float (&sum)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
    cute::SM80_16x8x8_F32F16F16F32_TN::fma(sum[0], sum[1], sum[2], sum[3], a0, a1, b, sum[0], sum[1], sum[2], sum[3]);
}

/// Where block (i, j) of 16 x 16 is in a list of those on the diagonal and below.
constexpr int lower_block(int i, int j) { return i * (i + 1) / 2 + j; }

/// Computes K K^T of N tiles of keys by a warpgroup: rows 16 w on by warp w, of which it keeps the blocks of 16 x 16 on
/// the diagonal and below. Of a block's words, number 2h + d is of columns 8h on and rows 8d on.
template <class T, std::size_t N>
__device__ __forceinline__ void multiply_keys_by_keys(char const (&keys)[N][2 * panel_bytes],
                                                      uint4 (&products)[N][10][32]) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sums[N][32];
#pragma unroll
    for (int t = 0; t < N; ++t) {
        keep(sums[t]);
        cute::warpgroup_arrive();
        multiply_panels<T, Major::K, Major::K, 8>(sums[t], keys[t], keys[t], false);
        cute::warpgroup_commit_batch();
    }
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int t = 0; t < N; ++t) {
        keep(sums[t]);
        float const(&sum)[32] = sums[t];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (j <= warp)
                products[t][lower_block(warp, j)][lane] =
                    make_uint4(two_halves(sum[8 * j], sum[8 * j + 1]), two_halves(sum[8 * j + 2], sum[8 * j + 3]),
                               two_halves(sum[8 * j + 4], sum[8 * j + 5]), two_halves(sum[8 * j + 6], sum[8 * j + 7]));
    }
}

/// Inverts a 8 x 8 block on the diagonal of I + L, one row a lane; `row`: -L's, in __half. Returns the inverse's row.
__device__ __forceinline__ void invert_row(uint4 const& row, float (&x)[8]) {
    __half2 const* const halves = reinterpret_cast<__half2 const*>(&row);
    int const own = threadIdx.x % 8;
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] = c == own ? 1.0f : 0.0f;
#pragma unroll
    for (int k = 0; k < 7; ++k) {
        float const factor = own > k ? (k % 2 ? __high2float(halves[k / 2]) : __low2float(halves[k / 2])) : 0.0f;
#pragma unroll
        for (int c = 0; c <= k; ++c) x[c] = fmaf(factor, __shfl_sync(~0u, x[c], k, 8), x[c]);
    }
}

/// Loads 16 x 16 of -L, L = strictly lower(diag(b) K K^T), which is a right operand of L^T. So no product is negated
/// when it is rounded.
__device__ __forceinline__ void load_lower(uint4 const (*products)[32], float const* beta, int i, int j,
                                           std::uint32_t (&l)[4]) {
    int const lane = threadIdx.x % 32;
    uint4 const words = products[lower_block(i, j)][lane];
    float const b[2] = {-beta[16 * i + lane / 4], -beta[16 * i + lane / 4 + 8]};
    auto const scaled = [&](std::uint32_t word, float by) {
        float2 const two = __half22float2(reinterpret_cast<__half2 const&>(word));
        return two_halves(by * two.x, by * two.y);
    };
    l[0] = scaled(words.x, b[0]), l[1] = scaled(words.y, b[1]);
    l[2] = scaled(words.z, b[0]), l[3] = scaled(words.w, b[1]);
}

/// Inverts the 8 x 8 blocks on the diagonal of I + L, and writes them to `blocks` and the triangle: a lane has a row of
/// two. `below`: of -L what is below these blocks in the 16 x 16 on the diagonal.
template <class T>
__device__ __forceinline__ void invert_blocks(uint4 const (*products)[32], float const* beta, __half (*blocks)[8],
                                              char* triangle, std::uint32_t (&below)[4]) {
    int const lane = threadIdx.x % 32;
    std::uint32_t const before =
        (lane % 4 * 2 < lane / 4 ? 0xffffu : 0u) | (lane % 4 * 2 + 1 < lane / 4 ? ~0xffffu : 0u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        std::uint32_t l[4];
        load_lower(products, beta, i, i, l);
        below[i] = l[1];
#pragma unroll
        for (int down = 0; down < 2; ++down)
            reinterpret_cast<std::uint32_t*>(blocks)[(2 * i + down) * 32 + lane] = l[3 * down] & before;
    }
    __syncwarp();
    float x[2][8];
#pragma unroll
    for (int t = 0; t < 2; ++t) invert_row(*reinterpret_cast<uint4 const*>(blocks[32 * t + lane]), x[t]);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        int const row = 32 * t + lane;
        auto const pack = [&](auto two) {
            return make_uint4(two(x[t][0], x[t][1]), two(x[t][2], x[t][3]), two(x[t][4], x[t][5]),
                              two(x[t][6], x[t][7]));
        };
        *reinterpret_cast<uint4*>(blocks[row]) = pack(two_halves);
        *reinterpret_cast<uint4*>(triangle + in_triangle(row, row / 8)) = pack(round_two<T>);
    }
    __syncwarp();
}

/// Writes A = (I + L)^-1, L = strictly lower(diag(b) K K^T), by a warp, to a triangle that has zeros above the
/// 8 x 8 blocks on the diagonal. Operands are __half, sums float, and whatever is multiplied lies in registers: what is
/// called transposed below is A^T, of which a product's sums are the next one's left operand.
template <class T>
__device__ __forceinline__ void write_inverse(uint4 const (*products)[32], float const* beta, __half (*blocks)[8],
                                              char* triangle) {
    int const lane = threadIdx.x % 32;
    std::uint32_t below[4]; // of -L, of a block on the diagonal the 8 x 8 below it
    invert_blocks<T>(products, beta, blocks, triangle, below);
    std::uint32_t diagonal[8], transposed[10][4], corner[4], stored[4];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        std::uint32_t upper[4];
        load_left(blocks[32 * t + lane], reinterpret_cast<std::uint32_t(&)[4]>(diagonal[4 * t]));
        cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(blocks[32 * t + lane]), upper[0],
                                      upper[1], upper[2], upper[3]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            transposed[lower_block(2 * t + i, 2 * t + i)][0] = upper[2 * i];
            transposed[lower_block(2 * t + i, 2 * t + i)][1] = 0;
            transposed[lower_block(2 * t + i, 2 * t + i)][3] = upper[2 * i + 1];
        }
    }
    // 16 x 16: what lies below one and left of the other is -(inverse of the other) L (inverse of the one).
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        std::uint32_t(&inverse)[4] = transposed[lower_block(i, i)];
        float first[4] = {}, second[4] = {};
        add_product(first, inverse[0], 0, below[i]);
        add_product(second, two_halves(first[0], first[1]), 0, diagonal[2 * i + 1]);
        inverse[2] = two_halves(second[0], second[1]);
        stored[i] = round_two<T>(second[0], second[1]);
        cute::SM75_U32x1_MOVM_T::copy(inverse[2], corner[i]);
    }
    auto const store = [&](std::uint32_t const(&words)[4], int row, int column) {
        cute::SM90_U16x8_STSM_T::copy(
            words[0], words[1], words[2], words[3],
            *reinterpret_cast<cute::uint128_t*>(triangle + in_triangle(8 * row + lane % 8, column)));
    };
    store(stored, lane / 8 * 2 + 1, lane / 8 * 2);

    // Rows of blocks below: A_ij = -(inverse of I + L_ii) sum_k L_ik A_kj.
#pragma unroll
    for (int i = 1; i < 4; ++i) {
        std::uint32_t l[3][4];
#pragma unroll
        for (int k = 0; k < i; ++k) load_lower(products, beta, i, k, l[k]);
#pragma unroll
        for (int j = 0; j < i; ++j) {
            float sum[2][4] = {}, result[2][4] = {};
#pragma unroll
            for (int k = j; k < i; ++k)
#pragma unroll
                for (int down = 0; down < 2; ++down)
                    add_product(sum[down], transposed[lower_block(k, j)], l[k][down], l[k][2 + down]);
            std::uint32_t const left[4] = {two_halves(sum[0][0], sum[0][1]), two_halves(sum[0][2], sum[0][3]),
                                           two_halves(sum[1][0], sum[1][1]), two_halves(sum[1][2], sum[1][3])};
            add_product(result[0], left[0], left[1], diagonal[2 * i]);
            add_product(result[1], left, corner[i], diagonal[2 * i + 1]);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                float const low = result[w / 2][w % 2 * 2], high = result[w / 2][w % 2 * 2 + 1];
                transposed[lower_block(i, j)][w] = two_halves(low, high);
                stored[w] = round_two<T>(low, high);
            }
            store(stored, 2 * i + lane / 16, 2 * j + lane / 8 % 2);
        }
    }
}

/// Zeroes the 8 x 8 blocks above those on the diagonal that memory has, by a warp: one in each 16 x 16 on the diagonal.
__device__ __forceinline__ void clear_above(char* triangle) {
    int const lane = threadIdx.x % 32, square = lane / 8;
    *reinterpret_cast<uint4*>(triangle + in_triangle(16 * square + lane % 8, 2 * square + 1)) = make_uint4(0, 0, 0, 0);
    __syncwarp();
}

/// Computes the gates of a chunk by a warp, two tokens a lane, of its g and beta.
__device__ __forceinline__ void compute_gates(float const* g, float const* beta, delta_gates& to) {
    int const lane = threadIdx.x % 32;
    float2 const decays = *reinterpret_cast<float2 const*>(g + 2 * lane);
    float const of[2] = {decays.x, decays.y};
    float own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float const log2_decay = of[i] * 1.4426950408889634f;
        own[i] = log2_decay < -126.0f ? -126.0f : log2_decay; // minus infinity, too; NaN stays
    }
    float sum = own[0] + own[1];
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        float const before = __shfl_up_sync(~0u, sum, apart);
        if (lane >= apart) sum += before;
    }
    float before = __shfl_up_sync(~0u, sum, 1);
    if (lane == 0) before = 0.0f;
    float const first = before + own[0];
    reinterpret_cast<float2*>(to.sum)[lane] = {first, first + own[1]};
    reinterpret_cast<float2*>(to.beta)[lane] = reinterpret_cast<float2 const*>(beta)[lane];
}

} // namespace delta

/// Inputs of `delta_rule_prep`; keys: (tokens, key heads, key channels) of T, of norm at most 1, in panels.
template <class T>
struct delta_prep_input {
    delta_segments segments;
    delta_plan plan;
    delta_log_decays<T> g;
    delta_rows<float const> beta; ///< (tokens, value heads); none where nothing is erased
    int key_heads, group;         ///< value heads a key head
};

/// Returns how many blocks a chunk has: one for two key heads and two value heads of either.
CPX_HOST_DEVICE constexpr int delta_prep_blocks(int key_heads, int group) {
    return (key_heads + 1) / 2 * ((group + 1) / 2);
}

namespace delta {

/// Copies to shared memory g and beta of two value heads of each of two key heads, by 128 threads: four threads read
/// what lies side by side, or twice two. Where nothing is erased beta is 1; of tokens and heads that there are not, 0.
template <bool Erases, class T>
__device__ __forceinline__ void load_gates(delta_prep_input<T> const& in, int first_head, int first_number, int begin,
                                           int n, prep_gates& to) {
    int const slot = static_cast<int>(threadIdx.x) % 4, token = static_cast<int>(threadIdx.x) / 4;
    int const key_head = first_head + slot / 2, number = first_number + slot % 2, head = key_head * in.group + number;
    bool const head_there = key_head < in.key_heads && number < in.group;
    float g[2], b[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int const at = token + 32 * half;
        bool const there = head_there && at < n;
        g[half] = there ? in.g.read(begin + at, head) : 0.0f;
        b[half] = there ? (Erases ? in.beta.at(begin + at)[head] : 1.0f) : 0.0f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) // what is read is on its way for both
        if (head_there && token + 32 * half < n) g[half] = in.g.made_of(g[half], head);
#pragma unroll
    for (int half = 0; half < 2; ++half)
        to.g[slot][token + 32 * half] = g[half], to.beta[slot][token + 32 * half] = b[half];
}

} // namespace delta

/// A warpgroup multiplies keys of a chunk by themselves for two key heads; a warp each computes the inverses of two
/// value heads of either, or gates alone where nothing is erased. A grid of (chunks at most) * `delta_prep_blocks`
/// blocks of 128 threads.
template <class T, bool Erases>
static __global__ void __launch_bounds__(128, 5)
    delta_rule_prep(__grid_constant__ CUtensorMap const keys, delta_prep_input<T> const in, delta_prepared const to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace delta;
    auto& memory = shared_memory<prep_memory>();
    int const lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    if (Erases && threadIdx.x == 0) {
        memory.full.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncwarp(); // for racecheck, which does not know that it is one thread that uses it first
    // Of few sequences the plan is not waited for, but by one block: who waits for this kernel waits for the plan, too.
    bool const planned = in.plan.count > delta_segments::few;
    if (planned || blockIdx.x == 0) wait_for_previous_kernel();
    int const blocks = delta_prep_blocks(in.key_heads, in.group), pairs = (in.group + 1) / 2;
    int const chunk = static_cast<int>(blockIdx.x) / blocks, block = static_cast<int>(blockIdx.x) % blocks;
    int const first_head = block / pairs * 2, first_number = block % pairs * 2;
    if (planned && chunk >= in.plan.totals[0]) return;
    delta_sequence const sequence =
        planned ? in.plan.sequences[delta_sequence_of(in.plan, chunk)] : delta_sequence_at(in.segments, in.plan, chunk);
    if (sequence.chunks == 0) return;
    int const begin = sequence.chunk_begin(chunk - sequence.first_chunk);
    int const n = sequence.chunk_end(chunk - sequence.first_chunk) - begin;
    if (Erases && threadIdx.x == 0) { // of a head that there is not zeros come
        memory.full.arrive_and_expect_tx(4 * panel_bytes);
        load_panels<2>(keys, memory.full, memory.keys[0], first_head, begin);
        load_panels<2>(keys, memory.full, memory.keys[1], first_head + 1, begin);
    }
    load_gates<Erases>(in, first_head, first_number, begin, n, memory);
    __syncthreads();
    int const tile = warp / 2, key_head = first_head + tile, number = first_number + warp % 2;
    bool const there = key_head < in.key_heads && number < in.group;
    std::int64_t const place = (std::int64_t{chunk} * in.key_heads + key_head) * in.group + number;
    if (there) compute_gates(memory.g[warp], memory.beta[warp], to.gates[place]); // while keys come
    if constexpr (!Erases) return;
    wait(memory.full, 0);
    if (n < delta_chunk) {
        clear_rows(memory.keys[tile] + warp % 2 * panel_bytes, n);
        cutlass::arch::fence_view_async_shared();
        __syncthreads();
    }
    multiply_keys_by_keys<T>(memory.keys, memory.products);
    __syncthreads();
    if (!there) return;
    char* const triangle = memory.keys[tile] + warp % 2 * panel_bytes;
    // 8 x 8 blocks on the diagonal: where the last strip has the zeros that memory leaves out
    static_assert(delta_chunk * 8 * sizeof(__half) <= strip_bytes * 3 / 4);
    auto* const squares = reinterpret_cast<__half(*)[8]>(triangle + 3 * strip_bytes);
    clear_above(triangle);
    write_inverse<T>(memory.products[tile], memory.beta[warp], squares, triangle);
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane == 0) {
        char* const inverse = to.inverse + place * triangle_bytes;
        for_each_strip(
            [&](int from, int at, int bytes) { cute::SM90_BULK_COPY_S2G::copy(triangle + from, inverse + at, bytes); });
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();
    }
#endif
}

} // namespace cpx::kernels
