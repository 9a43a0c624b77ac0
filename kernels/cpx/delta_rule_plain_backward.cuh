// SPDX-License-Identifier: Apache-2.0
// The gradients of queries, keys and gates of the gated delta rule and of a decay a head, of every size, chunk by
// chunk, float sums.
#pragma once

#include <cpx/delta_rule_plain.cuh>

namespace cpx::kernels {

/// What `delta_rule_plain_gradients` reads and writes besides the tokens.
template <class T>
struct delta_plain_gradients {
    delta_trace forward, back; ///< of the walks along the sequences, and back
    delta_rows<T const> dout;
    delta_rows<T> dq, dk;
    delta_rows<float> dg, dbeta;
    float *dq_sum, *dk_sum; ///< (tokens, key heads * Dk), over the value heads of a key head
};

namespace delta {

/// A chunk's matrices of tokens by tokens and rows of tokens. The distance of rows keeps columns in other banks.
struct plain_memory {
    static constexpr int stride = delta_chunk + 1;
    using matrix = float[delta_chunk][stride];
    matrix products, scores, decay, of_scores, of_a;
    float until_now[delta_chunk], kept[delta_chunk], beta[delta_chunk], reading[delta_chunk], onward[delta_chunk],
        unread[delta_chunk], value[delta_chunk];
    float whole[8];
};

/// Sums of a warp's 8 rows of a chunk, tokens from `first` on, of which lane l has the channels l, l + 32, ...: they
/// become the gradients of queries or keys.
template <class T, int R>
struct plain_gradient_rows {
    array<float, 8, R> sum;
    int lane, first, count, dim; ///< tokens of the chunk, channels of a key

    __device__ __forceinline__ plain_gradient_rows(int tokens, int channels)
        : lane(static_cast<int>(threadIdx.x) % 32), first(static_cast<int>(threadIdx.x) / 32 * 8), count(tokens),
          dim(channels) {
        // To the compiler a number that it does not know: else it computes the addresses of all rows once for all heads
        // and has no registers left for the sums.
        asm volatile("" : "+r"(first));
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int r = 0; r < R; ++r) sum[i][r] = 0;
    }
    /// sum_i += x(i, j) row(j) over j < n, for tokens i that there are. Not unrolled: the elements of several j at once
    /// would be more than there are registers for.
    template <class X, class Row>
    __device__ __forceinline__ void add(int n, X&& x, Row&& row) {
#pragma unroll 1
        for (int j = 0; j < n; ++j) {
            float other[R];
#pragma unroll
            for (int r = 0; r < R; ++r) other[r] = lane + 32 * r < dim ? widen(row(j)[lane + 32 * r]) : 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float const factor = first + i < count ? x(first + i, j) : 0.0f;
#pragma unroll
                for (int r = 0; r < R; ++r) sum[i][r] = fmaf(factor, other[r], sum[i][r]);
            }
        }
    }
    __device__ __forceinline__ void multiply(float const* of_tokens) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int r = 0; r < R; ++r) sum[i][r] *= first + i < count ? of_tokens[first + i] : 0.0f;
    }
    /// Writes for each token the product of its sums and its row.
    template <class Row>
    __device__ __forceinline__ void write_along(Row&& row, float* of_tokens) const {
        float result[8] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int r = 0; r < R; ++r)
                if (first + i < count && lane + 32 * r < dim)
                    result[i] = fmaf(widen(row(first + i)[lane + 32 * r]), sum[i][r], result[i]);
        add_over_warp(result);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (lane == 0 && first + i < count) of_tokens[first + i] = result[i];
    }
    /// Adds the sums to `before(i)`, which has `begun` or is not read, and writes them there, or to `to(i)` at the end.
    template <class Before, class To>
    __device__ __forceinline__ void put(Before&& before, To&& to, bool begun, bool ended) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (first + i >= count) continue;
            float* const totals = before(first + i);
            T* const rounded = to(first + i);
#pragma unroll
            for (int r = 0; r < R; ++r)
                if (int const d = lane + 32 * r; d < dim) {
                    float const now = begun ? totals[d] + sum[i][r] : sum[i][r];
                    if (ended)
                        rounded[d] = static_cast<T>(now);
                    else
                        totals[d] = now;
                }
        }
    }
};

/// Beta of a chunk and value head, and decays between its tokens.
template <class T>
__device__ __forceinline__ void read_gates(plain_memory& m, delta_tokens<T> const& in, int begin, int n, int head) {
    int const thread = static_cast<int>(threadIdx.x);
    if (thread < n) {
        m.beta[thread] = in.beta_of(begin + thread, head);
        float product = 1;
        for (int i = 0; i < n; ++i) {
            if (i > thread) product *= expf(in.g.at(begin + i, head));
            m.decay[i][thread] = i < thread ? 0.0f : product;
        }
        m.kept[thread] = product; // decay[n - 1][thread]
    }
    if (thread == 0) {
        float product = 1;
        for (int i = 0; i < n; ++i) m.until_now[i] = product *= expf(in.g.at(begin + i, head));
    }
}

/// Turns row i of the gradients of scores into sums along it, of what its decays multiply, from the first token on, and
/// returns the gradient of its beta.
__device__ __forceinline__ float add_along_row(plain_memory& m, int i) {
    float of_beta = m.value[i] + m.unread[i], decayed = m.reading[i] + m.beta[i] * m.unread[i];
    for (int j = 0; j < i; ++j) {
        float const of_keys = m.of_a[i][j] * m.products[i][j];
        of_beta += of_keys;
        float const term = m.of_scores[i][j] * m.scores[i][j] + m.beta[i] * of_keys;
        m.of_scores[i][j] = decayed; // for the token j, from row i
        decayed += term;
    }
    m.of_scores[i][i] = decayed;
    return of_beta;
}

/// What a block of `delta_rule_plain_gradients` works on: a chunk of a key head, and one of its value heads.
template <class T>
struct plain_gradient_chunk {
    delta_tokens<T> const& in;
    delta_plain_gradients<T> const& to;
    plain_memory& m;
    int begin, n, key_head; ///< first row, tokens
    int head = 0;           ///< value head

    __device__ __forceinline__ std::int64_t key_channel() const { return std::int64_t{key_head} * in.key_dim; }
    __device__ __forceinline__ std::int64_t value_channel() const { return std::int64_t{head} * in.value_dim; }
    __device__ __forceinline__ T const* q(int i) const { return in.q.at(begin + i) + key_channel(); }
    __device__ __forceinline__ T const* k(int i) const { return in.k.at(begin + i) + key_channel(); }
    __device__ __forceinline__ T const* dout(int i) const { return to.dout.at(begin + i) + value_channel(); }
    __device__ __forceinline__ float const* fresh(int i) const { return traced(to.forward.rows, i); }
    __device__ __forceinline__ float const* right(int i) const { return traced(to.back.rows, i); }
    __device__ __forceinline__ float const* traced(float const* rows, int i) const {
        return rows + (std::int64_t{begin} + i) * in.key_heads * in.group * in.value_dim + value_channel();
    }
    __device__ __forceinline__ float* sum_row(float* sums, int i) const {
        return sums + ((std::int64_t{begin} + i) * in.key_heads + key_head) * in.key_dim;
    }

    /// Products of keys with keys, and of queries with keys, which all value heads share.
    __device__ __forceinline__ void multiply_tokens() const {
        for (int at = static_cast<int>(threadIdx.x); at < n * n; at += 256) {
            int const i = at / n, j = at % n;
            float products = 0, scores = 0;
            for (int d = 0; d < in.key_dim; ++d) {
                float const other = widen(k(j)[d]);
                products = fmaf(widen(k(i)[d]), other, products);
                if (j <= i) scores = fmaf(widen(q(i)[d]), other, scores);
            }
            m.products[i][j] = products;
            m.scores[i][j] = scores;
        }
    }
    /// Gradients of the decayed products of queries with keys, and of keys with keys but for beta, and the terms of the
    /// product of the state with its gradient. `state`, `dstate`: before and after the chunk.
    __device__ __forceinline__ void multiply_values(float const* state, float const* dstate) const {
        int const thread = static_cast<int>(threadIdx.x);
        for (int at = thread; at < n * n; at += 256) {
            int const i = at / n, j = at % n;
            float of_scores = 0, of_a = 0;
            if (j <= i)
                for (int d = 0; d < in.value_dim; ++d) {
                    of_scores = fmaf(in.scale * widen(dout(i)[d]), fresh(j)[d], of_scores);
                    if (in.erases) of_a = fmaf(right(i)[d], fresh(j)[d], of_a);
                }
            m.of_scores[i][j] = of_scores;
            m.of_a[i][j] = of_a;
        }
        float whole[1] = {};
        for (int at = thread; at < in.key_dim * in.value_dim; at += 256)
            whole[0] = fmaf(state[at], dstate[at], whole[0]);
        add_over_warp(whole);
        if (thread % 32 == 0) m.whole[thread / 32] = whole[0];
        __syncthreads();
        for (int at = thread; at < n * n; at += 256) {
            int const i = at / n, j = at % n;
            m.of_scores[i][j] *= m.decay[i][j];
            m.of_a[i][j] = j < i ? -m.of_a[i][j] * m.decay[i][j] : 0.0f;
        }
        __syncthreads();
    }
    /// Gradients of queries and keys, and what those of gates are made of.
    template <int R>
    __device__ __forceinline__ void write_rows(float const* state, float const* dstate, bool begun, bool ended) const {
        auto const query = [&](int i) { return q(i); };
        auto const key = [&](int i) { return k(i); };
        auto const of_queries = [&](int i) { return to.dq.at(begin + i) + key_channel(); };
        auto const of_keys = [&](int i) { return to.dk.at(begin + i) + key_channel(); };
        auto const queries_before = [&](int i) { return sum_row(to.dq_sum, i); };
        auto const keys_before = [&](int i) { return sum_row(to.dk_sum, i); };
        auto const before = [&](int j) { return state + std::int64_t{j} * in.key_dim; };
        auto const after = [&](int j) { return dstate + std::int64_t{j} * in.key_dim; };
        {
            plain_gradient_rows<T, R> sums(n, in.key_dim);
            sums.add(
                in.value_dim, [&](int i, int j) { return in.scale * widen(dout(i)[j]); }, before);
            sums.multiply(m.until_now);
            sums.write_along(query, m.reading);
            sums.add(
                n, [&](int i, int j) { return j <= i ? m.of_scores[i][j] : 0.0f; }, key);
            sums.put(queries_before, of_queries, begun, ended);
        }
        {
            plain_gradient_rows<T, R> sums(n, in.key_dim); // what the keys erase
            if (in.erases)
                sums.add(
                    in.value_dim, [&](int i, int j) { return -right(i)[j]; }, before);
            sums.multiply(m.until_now);
            sums.write_along(key, m.unread);
            sums.multiply(m.beta);
            sums.put(keys_before, of_keys, begun, false);
        }
        plain_gradient_rows<T, R> sums(n, in.key_dim);
        sums.add(
            in.value_dim, [&](int i, int j) { return fresh(i)[j]; }, after);
        sums.multiply(m.kept);
        sums.write_along(key, m.onward);
        if (in.erases) // one of the two is 0
            sums.add(
                n, [&](int i, int j) { return m.beta[i] * m.of_a[i][j] + m.beta[j] * m.of_a[j][i]; }, key);
        sums.add(
            n, [&](int i, int j) { return j >= i ? m.of_scores[j][i] : 0.0f; }, query);
        sums.put(keys_before, of_keys, true, ended);
    }
    /// Gradients of beta and of gates.
    __device__ __forceinline__ void write_gates() const {
        int const thread = static_cast<int>(threadIdx.x);
        if (in.erases && thread < n) {
            float value = 0;
            for (int d = 0; d < in.value_dim; ++d)
                value = fmaf(right(thread)[d], widen(in.v.at(begin + thread)[value_channel() + d]), value);
            m.value[thread] = value;
        }
        __syncthreads();
        if (thread < n) {
            float const of_beta = add_along_row(m, thread);
            if (in.erases) to.dbeta.at(begin + thread)[head] = of_beta;
        }
        __syncthreads();
        if (thread < n) {
            float result = 0;
            for (int w = 0; w < 8; ++w) result += m.whole[w];
            result *= m.until_now[n - 1];
            for (int j = 0; j < thread; ++j) result += m.onward[j];
            for (int i = thread; i < n; ++i) result += m.of_scores[i][thread];
            to.dg.at(begin + thread)[head] = result;
        }
    }
};

} // namespace delta

/// A block computes the gradients of a chunk and a key head, summed over its value heads in their order. A grid of
/// (chunks at most, key heads) blocks of 256 threads, with `sizeof(delta::plain_memory)` bytes of shared memory.
///
/// Every term of dg has the decay of its token as a factor: a sum of decayed products, never a difference.
template <class T, int R>
__global__ void __launch_bounds__(256, 1) // else registers are few, so that blocks fit beside each other
    delta_rule_plain_gradients(__grid_constant__ delta_tokens<T> const in,
                               __grid_constant__ delta_plain_gradients<T> const to) {
    using namespace delta;
    extern __shared__ __align__(16) float raw_memory[];
    int const chunk = static_cast<int>(blockIdx.x);
    if (chunk >= in.plan.totals[0]) return;
    delta_sequence const sequence = in.plan.sequences[delta_sequence_of(in.plan, chunk)];
    int const begin = sequence.chunk_begin(chunk - sequence.first_chunk);
    plain_gradient_chunk<T> of{in,
                               to,
                               *reinterpret_cast<plain_memory*>(raw_memory),
                               begin,
                               sequence.chunk_end(chunk - sequence.first_chunk) - begin,
                               static_cast<int>(blockIdx.y)};
    of.multiply_tokens();
    for (int h = 0; h < in.group; ++h) {
        of.head = of.key_head * in.group + h;
        std::int64_t const place =
            (std::int64_t{chunk} * in.key_heads * in.group + of.head) * in.key_dim * in.value_dim;
        float const *const state = to.forward.states + place, *const dstate = to.back.states + place;
        __syncthreads(); // the last head's are not read any more
        read_gates(of.m, in, begin, of.n, of.head);
        of.multiply_values(state, dstate);
        of.template write_rows<R>(state, dstate, h > 0, h + 1 == in.group);
        of.write_gates();
    }
}

} // namespace cpx::kernels
