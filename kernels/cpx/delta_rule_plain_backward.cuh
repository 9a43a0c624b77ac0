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

/// Adds over 8 rows `x` (8 of them, `stride` apart) times a matrix of `count` rows of `width`: sum[i] += x_i[j] m_j.
template <int R, class X>
__device__ __forceinline__ void add_rows(array<float, 8, R>& sum, X&& x, float const* m, int count, int width) {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    for (int j = 0; j < count; ++j) {
        float row[R];
#pragma unroll
        for (int r = 0; r < R; ++r) row[r] = lane + 32 * r < width ? m[std::int64_t{j} * width + lane + 32 * r] : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float const factor = x(i, j);
#pragma unroll
            for (int r = 0; r < R; ++r) sum[i][r] = fmaf(factor, row[r], sum[i][r]);
        }
    }
}

/// Beta of a chunk and value head, and decays between its tokens.
template <class T>
__device__ __forceinline__ void read_gates(plain_memory& m, delta_tokens<T> const& in, int begin, int n, int head) {
    int const thread = static_cast<int>(threadIdx.x);
    if (thread < n) {
        m.beta[thread] = in.beta_of(begin + thread, head);
        float product = 1;
        for (int i = 0; i < n; ++i) {
            if (i > thread) product *= expf(in.g.at(begin + i)[head]);
            m.decay[i][thread] = i < thread ? 0.0f : product;
        }
        m.kept[thread] = product; // decay[n - 1][thread]
    }
    if (thread == 0) {
        float product = 1;
        for (int i = 0; i < n; ++i) m.until_now[i] = product *= expf(in.g.at(begin + i)[head]);
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

} // namespace delta

/// A block computes the gradients of a chunk and a key head, summed over its value heads in their order. A grid of
/// (chunks at most, key heads) blocks of 256 threads, with `sizeof(delta::plain_memory)` bytes of shared memory.
///
/// Every term of dg has the decay of its token as a factor: a sum of decayed products, never a difference.
template <class T, int R>
__global__ void __launch_bounds__(256)
    delta_rule_plain_gradients(delta_tokens<T> const in, delta_plain_gradients<T> const to) {
    using namespace delta;
    extern __shared__ float raw_memory[];
    auto& m = *reinterpret_cast<plain_memory*>(raw_memory);
    int const chunk = static_cast<int>(blockIdx.x), key_head = static_cast<int>(blockIdx.y);
    if (chunk >= in.plan.totals[0]) return;
    delta_sequence const sequence = in.plan.sequences[delta_sequence_of(in.plan, chunk)];
    int const begin = sequence.chunk_begin(chunk - sequence.first_chunk);
    int const n = sequence.chunk_end(chunk - sequence.first_chunk) - begin;
    int const thread = static_cast<int>(threadIdx.x), lane = thread % 32, first = thread / 32 * 8;
    int const heads = in.key_heads * in.group, dk = in.key_dim, dv = in.value_dim;
    bool const erases = in.erases;
    auto const q = [&](int i) { return in.q.at(begin + i) + std::int64_t{key_head} * dk; };
    auto const k = [&](int i) { return in.k.at(begin + i) + std::int64_t{key_head} * dk; };
    auto const sum_row = [&](float* sums, int i) {
        return sums + ((std::int64_t{begin} + i) * in.key_heads + key_head) * dk;
    };
    for (int at = thread; at < n * n; at += 256) {
        int const i = at / n, j = at % n;
        float products = 0, scores = 0;
        for (int d = 0; d < dk; ++d) {
            float const other = widen(k(j)[d]);
            products = fmaf(widen(k(i)[d]), other, products);
            if (j <= i) scores = fmaf(widen(q(i)[d]), other, scores);
        }
        m.products[i][j] = products;
        m.scores[i][j] = scores;
    }
    for (int h = 0; h < in.group; ++h) {
        int const head = key_head * in.group + h;
        auto const traced = [&](float const* rows, int i) {
            return rows + (std::int64_t{begin} + i) * heads * dv + std::int64_t{head} * dv;
        };
        auto const fresh = [&](int i) { return traced(to.forward.rows, i); };
        auto const right = [&](int i) { return traced(to.back.rows, i); };
        auto const dout = [&](int i) { return to.dout.at(begin + i) + std::int64_t{head} * dv; };
        float const* const state = to.forward.states + (std::int64_t{chunk} * heads + head) * dk * dv;
        float const* const dstate = to.back.states + (std::int64_t{chunk} * heads + head) * dk * dv;
        __syncthreads(); // the last head's are not read any more
        read_gates(m, in, begin, n, head);
        for (int at = thread; at < n * n; at += 256) {
            int const i = at / n, j = at % n;
            float of_scores = 0, of_a = 0;
            if (j <= i)
                for (int d = 0; d < dv; ++d) {
                    of_scores = fmaf(in.scale * widen(dout(i)[d]), fresh(j)[d], of_scores);
                    if (erases) of_a = fmaf(right(i)[d], fresh(j)[d], of_a);
                }
            m.of_scores[i][j] = of_scores;
            m.of_a[i][j] = of_a;
        }
        float whole = 0;
        for (int at = thread; at < dk * dv; at += 256) whole = fmaf(state[at], dstate[at], whole);
        float whole_of_warp[1] = {whole};
        add_over_warp(whole_of_warp);
        if (lane == 0) m.whole[thread / 32] = whole_of_warp[0];
        __syncthreads();

        // Gradients of the products of queries with keys, and of keys with keys but for beta.
        for (int at = thread; at < n * n; at += 256) {
            int const i = at / n, j = at % n;
            m.of_scores[i][j] *= m.decay[i][j];
            m.of_a[i][j] = j < i ? -m.of_a[i][j] * m.decay[i][j] : 0.0f;
        }
        __syncthreads();

        float sum[8][R];
        auto const clear = [&] {
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int r = 0; r < R; ++r) sum[i][r] = 0;
        };
        // Writes for each of the warp's rows the product of the sums and a row.
        auto const along = [&](auto&& row, float* to_shared) {
            float result[8] = {};
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int r = 0; r < R; ++r)
                    if (first + i < n && lane + 32 * r < dk)
                        result[i] = fmaf(widen(row(first + i)[lane + 32 * r]), sum[i][r], result[i]);
            add_over_warp(result);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (lane == 0 && first + i < n) to_shared[first + i] = result[i];
        };
        auto const times = [&](float const* factor) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int r = 0; r < R; ++r) sum[i][r] *= first + i < n ? factor[first + i] : 0.0f;
        };
        auto const add_tokens = [&](auto&& factor, auto&& row) { // sum_i += factor(i, j) row_j
            for (int j = 0; j < n; ++j) {
                float x[R];
#pragma unroll
                for (int r = 0; r < R; ++r) x[r] = lane + 32 * r < dk ? widen(row(j)[lane + 32 * r]) : 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float const f = first + i < n ? factor(first + i, j) : 0.0f;
#pragma unroll
                    for (int r = 0; r < R; ++r) sum[i][r] = fmaf(f, x[r], sum[i][r]);
                }
            }
        };
        auto const finish = [&](float* sums, delta_rows<T> const& rows, bool begun, bool ended) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int r = 0; r < R; ++r)
                    if (int const d = lane + 32 * r; first + i < n && d < dk) {
                        float& total = sum_row(sums, first + i)[d];
                        float const now = begun ? total + sum[i][r] : sum[i][r];
                        if (!ended)
                            total = now;
                        else
                            rows.at(begin + first + i)[std::int64_t{key_head} * dk + d] = static_cast<T>(now);
                    }
        };
        clear();
        add_rows<R>(
            sum, [&](int i, int j) { return first + i < n ? in.scale * widen(dout(first + i)[j]) : 0.0f; }, state, dv,
            dk);
        times(m.until_now);
        along(q, m.reading);
        add_tokens([&](int i, int j) { return j <= i ? m.of_scores[i][j] : 0.0f; }, k);
        finish(to.dq_sum, to.dq, h > 0, h + 1 == in.group);

        clear(); // what the keys erase
        if (erases)
            add_rows<R>(
                sum, [&](int i, int j) { return first + i < n ? -right(first + i)[j] : 0.0f; }, state, dv, dk);
        times(m.until_now);
        along(k, m.unread);
        times(m.beta);
        finish(to.dk_sum, to.dk, h > 0, false);

        clear();
        add_rows<R>(
            sum, [&](int i, int j) { return first + i < n ? fresh(first + i)[j] : 0.0f; }, dstate, dv, dk);
        times(m.kept);
        along(k, m.onward);
        if (erases)
            add_tokens([&](int i, int j) { return m.beta[i] * m.of_a[i][j] + m.beta[j] * m.of_a[j][i]; },
                       k); // one of them is 0
        add_tokens([&](int i, int j) { return j >= i ? m.of_scores[j][i] : 0.0f; }, q);
        finish(to.dk_sum, to.dk, true, h + 1 == in.group);
        if (erases && thread < n) {
            float value = 0;
            for (int d = 0; d < dv; ++d)
                value = fmaf(right(thread)[d], widen(in.v.at(begin + thread)[std::int64_t{head} * dv + d]), value);
            m.value[thread] = value;
        }
        __syncthreads();

        if (thread < n) { // sums along a row: what its decays multiply, from the first token on
            float const of_beta = add_along_row(m, thread);
            if (erases) to.dbeta.at(begin + thread)[head] = of_beta;
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
}

} // namespace cpx::kernels
