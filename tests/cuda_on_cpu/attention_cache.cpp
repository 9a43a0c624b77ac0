// SPDX-License-Identifier: Apache-2.0
// Attention over kept keys and values against float64: of few and many query heads a key head, of a rank that has some
// of them, in every order in which warps may run.
#include "words.hpp"

#include <cpx/attention_cache.cuh>
#include <cpx/cpx.hpp>

#include <doctest/doctest.h>

#include "matrix.hpp"

#include <cmath>
#include <random>
#include <vector>

namespace {

using cpx::index_t;
namespace kernels = cpx::kernels;

/// Heads of a rank, of `all_heads` that share `key_heads`; keys that each query sees.
struct shape {
    int dim, first_head, heads, all_heads, key_heads;
    std::vector<index_t> seen;
};

template <class T>
void fill(matrix<T>& x, std::mt19937& random) {
    std::normal_distribution<float> number;
    for (index_t i = 0; i < x.count() * x.width(); ++i) x.data()[i] = static_cast<T>(number(random));
}

template <class T, int E, int G>
void check(shape const& of, unsigned seed) {
    CAPTURE(of.dim);
    CAPTURE(G);
    std::mt19937 random(seed);
    auto const queries = static_cast<index_t>(of.seen.size());
    std::vector<index_t> split{0}, row, first, count;
    index_t keys = 0;
    for (index_t const seen : of.seen) {
        split.push_back(split.back() + (seen + kernels::attention::stretch - 1) / kernels::attention::stretch);
        row.push_back(queries - 1 - std::ssize(row)); // in another order
        first.push_back(keys);
        count.push_back(seen);
        keys += seen + 3; // what nobody sees is NaN
    }
    matrix<T> q(queries, of.heads * of.dim), k(keys, of.key_heads * of.dim), v = k;
    fill(q, random);
    for (auto* const x : {&k, &v}) {
        fill(*x, random);
        for (std::size_t i = 0; i < of.seen.size(); ++i)
            for (index_t r = first[i] + count[i]; r < first[i] + count[i] + 3; ++r)
                for (index_t c = 0; c < k.width(); ++c) x->data()[r * k.width() + c] = static_cast<T>(std::nanf(""));
    }
    int const group = of.all_heads / of.key_heads, chunks = (group + G - 1) / G,
              read = (of.first_head + of.heads - 1) / group - of.first_head / group + 1;
    float const scale = 1 / std::sqrt(static_cast<float>(of.dim));
    kernels::cached_tensors<T> const t{q,
                                       k,
                                       v,
                                       split.data(),
                                       row.data(),
                                       first.data(),
                                       count.data(),
                                       static_cast<int>(queries),
                                       of.first_head,
                                       0,
                                       of.heads,
                                       group,
                                       of.dim,
                                       scale};
    matrix<float> parts(split.back() * of.heads, of.dim + 2), o(queries, of.heads * of.dim), lse(queries, of.heads);
    auto const size = [](index_t n) { return static_cast<unsigned>(n); };
    gpu::now().launch({size(split.back()), size(read * chunks)}, {kernels::attention::threads, 1},
                      [&] { kernels::attend_over_stretch<T, E, G>(t, parts.data()); });
    gpu::now().launch({size(queries), size(of.heads)}, {kernels::attention::threads, 1}, [&] {
        kernels::join_stretches<float>(o.rows(), lse.rows(), split.data(), row.data(), parts.data(), of.dim);
    });

    std::vector<double> exact(static_cast<std::size_t>(queries * of.heads * of.dim));
    for (std::size_t i = 0; i < of.seen.size(); ++i)
        for (int h = 0; h < of.heads; ++h) {
            index_t const at = row[i] * q.width() + h * of.dim, key = (of.first_head + h) / group * of.dim;
            std::vector<double> scores;
            for (index_t j = 0; j < count[i]; ++j) {
                double score = 0;
                for (int c = 0; c < of.dim; ++c)
                    score += double{kernels::widen(q.data()[at + c])} *
                             kernels::widen(k.data()[(first[i] + j) * k.width() + key + c]);
                scores.push_back(score * scale);
            }
            double total = 0;
            for (double const score : scores) total += std::exp(score);
            for (index_t j = 0; j < count[i]; ++j)
                for (int c = 0; c < of.dim; ++c)
                    exact[static_cast<std::size_t>(at + c)] +=
                        std::exp(scores[static_cast<std::size_t>(j)]) / total *
                        kernels::widen(v.data()[(first[i] + j) * k.width() + key + c]);
            float const sum = lse.data()[row[i] * of.heads + h];
            if (count[i] > 0)
                CHECK(sum == doctest::Approx(std::log(total)).epsilon(1e-5));
            else
                CHECK(sum == -INFINITY);
        }
    CHECK(distance(o, exact) < 1e-6);
}

} // namespace

TEST_SUITE("cuda_on_cpu") {
    TEST_CASE("attention over a cache is float64's, whatever a query sees") {
        unsigned seed = 0;
        for (auto const warps : {gpu::order::ascending, gpu::order::descending, gpu::order::random}) {
            gpu::now().warps_run = warps;
            check<float, 4, 1>({5, 0, 2, 2, 2, {1, 0, 255, 300}}, ++seed);
            check<__nv_bfloat16, 4, 4>({128, 3, 4, 9, 3, {513, 2, 0}}, ++seed);
            check<__half, 8, 8>({256, 0, 16, 16, 2, {35, 257}}, ++seed);
            check<__nv_bfloat16, 8, 8>({136, 2, 9, 11, 1, {31, 260}}, ++seed);
            check<float, 4, 8>({64, 0, 6, 6, 1, {600}}, ++seed);
        }
    }
}
