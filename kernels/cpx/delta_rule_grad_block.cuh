// SPDX-License-Identifier: Apache-2.0
// What the gated delta rule's gradients of queries, keys and gates (sm_90a) are made of.
//
//     U = K S,  Y = V - e.U,  R = Y dS'^T,  dX = 2^(G of the last - G).R,  A' = A diag(b),  B = lower(Q K^T)
//     E = s lower(dO Y^T . decay),   H = E.(B A),   dB = lower(E A'^T),   N = K dX^T + B^T E
//     Z = -diag(b) strictly lower(A^T N A'^T)
//     dQ = s e.(dO S^T) + dB K,      dK = A' dX - e.(dY S^T) + dB^T Q + (Z + Z^T) K
//     db_j = column sums of A.N, and row sums of Z.(K K^T) / b;   t_j: column sums of A.(K dX^T)
//     dg_t = sum_{i>=t} [q_i . (s e.dO S^T)_i - k_i . (e.dY S^T)_i] + sum_{j<t} b_j t_j + sum_{i>=t>j} b_j H_ij
//            + e_n <S, dS'>
//
// Nothing is divided by b, and every term of dg has its token's decay: sums of decayed products, never a difference.
//
// Where nothing is erased, A = I, b = 1, Y = V, and there are no U, Z and dY:
//
//     dV = P^T dO + w.(K dS'^T),   dQ = s e.(dO S^T) + E K,   dK = w.(V dS'^T) + E^T Q,   t = rows of K.(w.(V dS'^T))
#pragma once

#include <cpx/delta_rule_main.cuh>

namespace cpx::kernels {

/// What `delta_rule_grad` reads besides its tensor maps, and writes.
template <class T>
struct delta_gradients {
    delta_plan plan;
    delta_prepared prepared;
    char const *states, *dstates; ///< of the walks: before chunks, and gradients after them
    delta_head_rows<T> dq, dk;    ///< of key heads
    delta_rows<float> dg, dbeta;  ///< (tokens, value heads)
    int key_heads, group;
    float scale;
    delta_head_rows<T> dv{};         ///< of value heads, where nothing is erased; else a walk has made them
    bool first_chunks_first = false; ///< of a sequence; else the last ones, as the walk back ends last
    delta_share share{};             ///< of all tasks
};

namespace delta {

/// A chunk, a key head and the chunk's rows; no rows: there are no more tasks.
struct grad_task {
    int chunk, head, begin, n;
};

struct grad_memory {
    char keys[2][2 * panel_bytes], queries[2 * panel_bytes]; ///< keys of the task, and of the next one
    char values[2 * panel_bytes];                            ///< and then Y: a warp writes where it alone has read
    char dout[2 * panel_bytes], dy[2 * panel_bytes];
    char state[state_bytes], dstate[state_bytes];
    char inverse[2][panel_bytes]; ///< A
    char scores[panel_bytes];     ///< B^T
    char e[panel_bytes];          ///< diag(b) E^T, then diag(b) N^T A, then Z + Z^T
    char dscores[panel_bytes];    ///< dB^T
    char dx[2 * panel_bytes];
    delta_gates gates[2];
    float reading[2][delta_chunk];          ///< sums along rows, of dg: of queries, keys
    float t[delta_chunk], own[delta_chunk]; ///< and of A.N's columns
    float products[delta_chunk];            ///< and of (A^T N A'^T).(K K^T)
    float across[4][delta_chunk];           ///< of dg, of 16 rows each
    float inner[2];                         ///< <S, dS'>, of a half each
    grad_task tasks[2];                     ///< with the keys
    barrier keys_full[2], keys_empty[2], queries_full, queries_empty;
    barrier values_full, values_empty; ///< V, dO, dY
    barrier state_full, state_empty, dstate_full, dstate_empty;
    barrier prepared_full[2], prepared_empty[2];
    barrier y_full, dx_full, dscores_full, z_full;
    barrier dx_empty, z_empty;
    barrier sums_full, sums_empty, landed;
    barrier dq_full, dk_full, dv_full, dv_empty; ///< gradients to be stored: in place of queries and keys, or of what
    barrier stored;                              ///< is not wanted where nothing is erased
};

/// Of 2 Count sums, which lanes 2 Count apart have, each of the two adds up half.
template <int Count>
__device__ __forceinline__ void halve_sums(float (&x)[16]) {
    bool const upper = threadIdx.x % 32 & 2 * Count;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        float const other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + Count], 2 * Count);
        x[i] = (upper ? x[i + Count] : x[i]) + other;
    }
}
/// Adds sums of columns over a warp's rows. x[2b + k] is a lane's of column 8b + lane % 4 * 2 + k; lane l keeps those
/// of columns 2l and 2l + 1.
__device__ __forceinline__ float2 add_columns(float (&x)[16]) {
    halve_sums<8>(x);
    halve_sums<4>(x);
    halve_sums<2>(x);
    return {x[0], x[1]};
}

/// Asks for tensors of a chunk, 64 columns a panel; rows beyond the chunk's n are zeroed.
template <class F>
__device__ __forceinline__ void load_tokens(barrier& full, barrier& landed, int& landings, int n, int bytes, F&& load) {
    bool const whole = n == delta_chunk;
    if (threadIdx.x % 32 == 0) {
        barrier& b = whole ? full : landed;
        b.arrive_and_expect_tx(static_cast<std::uint32_t>(bytes));
        load(b);
    }
    __syncwarp();
    if (!whole) wait(landed, landings++ % 2);
}

/// Of rows of x and y, operands of 16 rows a warp, the products x_i . y_i: by tensor cores, as a diagonal, of which a
/// lane of a row's four has the sum; the others have what says nothing.
template <class T>
struct row_products {
    float upper[4] = {}, lower[4] = {}; ///< of rows 0 to 7, and 8 to 15

    /// Adds 16 columns: four words of each operand.
    __device__ __forceinline__ void add(std::uint32_t const* x, std::uint32_t const* y) {
        multiply(upper, x, y[0], y[2]);
        multiply(lower, x, y[1], y[3]);
    }
    template <std::size_t N>
    __device__ __forceinline__ void add_all(std::uint32_t const (&x)[N], std::uint32_t const (&y)[N]) {
#pragma unroll
        for (int k = 0; k < N; k += 4) add(x + k, y + k);
    }
    __device__ __forceinline__ float first() const { return second() ? upper[1] : upper[0]; }
    __device__ __forceinline__ float last() const { return second() ? lower[3] : lower[2]; } ///< 8 rows on
    static __device__ __forceinline__ bool second() { return threadIdx.x / 4 % 2; }
    static __device__ __forceinline__ void multiply(float (&sum)[4], std::uint32_t const* x, std::uint32_t y0,
                                                    std::uint32_t y1) {
        core_products<T>::warp::fma(sum[0], sum[1], sum[2], sum[3], x[0], x[1], x[2], x[3], y0, y1, sum[0], sum[1],
                                    sum[2], sum[3]);
    }
};

/// Adds f (S x_i) to the rows of sum for the 64 tokens x_i of a chunk, and returns what f (S x_i) . other_i adds up to,
/// by lanes as `row_products` has it: from S x_i rounded.
template <class T>
__device__ __forceinline__ void add_states(float (&sum)[64], float (&along)[2], char const* x, char const* state,
                                           char const* other, float const (&f)[2]) {
    row_products<T> products;
    int const place = place_straight(0, thread_again());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float product[32];
        keep(product);
        cute::warpgroup_arrive();
        multiply_values<T>(product, x, state + half * 8 * 128);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        keep(product);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            std::uint32_t words[4], rounded[4];
            load_left(other + half * panel_bytes + (place ^ 32 * k), words);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int const at = 8 * k + 2 * i;
                rounded[i] = round_two<T>(product[at], product[at + 1]);
                sum[32 * half + at] = fmaf(f[i % 2], product[at], sum[32 * half + at]);
                sum[32 * half + at + 1] = fmaf(f[i % 2], product[at + 1], sum[32 * half + at + 1]);
            }
            products.add(rounded, words);
        }
    }
    along[0] = f[0] * products.first();
    along[1] = f[1] * products.last();
}

/// Rounds 64 rows of 128 to two panels, by a warpgroup, for the warp that stores them, which `full` tells.
template <class T>
__device__ __forceinline__ void put_gradient(float const (&sum)[64], char* panels, barrier& full) {
    unsigned const thread = thread_again();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        std::uint32_t words[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) words[i] = round_two<T>(sum[32 * half + 2 * i], sum[32 * half + 2 * i + 1]);
        store_operand(words, panels + half * panel_bytes, thread);
    }
    cutlass::arch::fence_view_async_shared();
    arrive_warp(full);
}

/// The bits of a 64 x 64 operand's words that are below its diagonal.
struct below_diagonal {
    std::uint32_t squares[9]; ///< of 8 x 8, by how far right of a warp's first rows they are

    __device__ __forceinline__ below_diagonal(int warp, int lane) {
        int const below = lane / 4 - lane % 4 * 2;
        std::uint32_t const diagonal = below >= 2 ? ~0u : below == 1 ? 0xffffu : 0u;
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            squares[i] = i < 2 * warp + 1 ? ~0u : i == 2 * warp + 1 ? diagonal : 0u;
            asm volatile("" : "+r"(squares[i])); // or they would be made at every use
        }
    }
    __device__ __forceinline__ std::uint32_t operator[](int word) const { return squares[word / 2 - word % 2 + 1]; }
};

/// What a thread of `delta_rule_grad` knows, and what it does, by its role.
template <class T, bool Erases>
struct grad_block {
    delta_gradients<T> const& in;
    grad_memory* memory;
    int const heads = in.key_heads * in.group;
    unsigned const thread = thread_again();
    int const group = int(thread / 128), warp = int(thread / 32 % 4), lane = int(thread % 32);
    int const row = 16 * warp + lane / 4; ///< of a warpgroup's accumulators that the thread has, as row + 8
    int turn = 0, task_turn = 0;          ///< of heads and of tasks, that the block has done
    int of_group = 0;                     ///< of a task's heads, those done

    __device__ __forceinline__ grad_task& task() const { return memory->tasks[task_turn & 1]; }
    /// Calls, of the block's tasks, when their keys are there, `begin_task()`, `body(A, gates)` for each head,
    /// `end_task()`.
    template <class B, class F, class E>
    __device__ __forceinline__ void each(B&& begin_task, F&& body, E&& end_task) {
        for (;; ++task_turn) {
            reload_memory();
            wait(memory->keys_full[task_turn & 1], task_turn >> 1 & 1);
            if (task().n == 0) break;
            begin_task();
            of_group = 0;
            do {
                reload_memory();
                body(memory->inverse[turn & 1], memory->gates[turn & 1]);
                ++turn;
            } while (++of_group < in.group);
            reload_memory();
            end_task();
            arrive_warp(memory->keys_empty[task_turn & 1]);
        }
    }
    /// Or places in it would be kept in registers.
    __device__ __forceinline__ void reload_memory() { memory = &shared_memory<grad_memory>(); }
    static __device__ __forceinline__ void nothing() {}
    __device__ __forceinline__ bool is_last() const { return of_group + 1 == in.group; } ///< of a task's heads
    __device__ __forceinline__ char* keys() const { return memory->keys[task_turn & 1]; }
    /// Writes sums of rows, as `row_products` leaves them, when those of the turn before have been read.
    __device__ __forceinline__ void put_rows(float first, float last, float* to) const {
        wait(memory->sums_empty, turn & 1 ^ 1);
        if (lane / 8 == lane % 4) to[row] = first, to[row + 8] = last;
    }

    // A warp each, and two for the second:
    __device__ void take(int number);
    __device__ void load(CUtensorMap const& queries, CUtensorMap const& keys, CUtensorMap const& values,
                         CUtensorMap const& dout, CUtensorMap const& dvalues);
    __device__ void multiply_states();
    __device__ void store(CUtensorMap const& map, delta_head_rows<T> const& to, char const* panels, int head,
                          barrier& full, int parity);
    __device__ void write_gates(CUtensorMap const& dqueries, CUtensorMap const& dkeys, CUtensorMap const& dvalues);
    // A warpgroup each:
    __device__ void make_values();
    __device__ void write_rows();
    __device__ void multiply_tokens();
    // And where nothing is erased:
    template <bool OfKeys>
    __device__ void write_sums();
    __device__ void write_values();
    // What `multiply_tokens` and `write_values` do:
    template <class F>
    __device__ void weigh(delta_gates const& gates, below_diagonal const& below, F&& put) const;
    __device__ void put_across(std::uint32_t const (&h)[16]) const;
    __device__ void multiply_rows(std::uint32_t (&squares)[16], below_diagonal const& below);
    __device__ void multiply_outputs(delta_gates const& gates, char const* inverse, below_diagonal const& below,
                                     std::uint32_t (&words)[16], std::uint32_t (&h)[16]) const;
    __device__ void multiply_n(char const* inverse, std::uint32_t (&words)[16]) const;
};

} // namespace delta

} // namespace cpx::kernels
