// SPDX-License-Identifier: Apache-2.0
// Attention over kept keys and values against float64: of few and many query heads a key head, of a rank that has some
// of them, in every order in which warps may run.
#include "words.hpp"

#include <cpx/attention_cache_cores.cuh>
#include <cpx/cpx.hpp>

#include <doctest/doctest.h>

#include "matrix.hpp"

#include <cmath>
#include <concepts>
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

/// G: query heads at a time; E: columns of a lane, or of a head on tensor cores.
template <class T, int E, int G, bool Cores = false>
void check(shape const& of, unsigned seed) {
    CAPTURE(of.dim);
    CAPTURE(G);
    CAPTURE(Cores);
    std::mt19937 random(seed);
    auto const queries = static_cast<index_t>(of.seen.size());
    std::vector<kernels::seen_rows> list;
    index_t keys = 0, stretches = 0;
    for (index_t const seen : of.seen) {
        list.push_back({stretches, queries - 1 - std::ssize(list), keys, seen}); // rows in another order
        index_t const stretch = kernels::attention::stretch_of(seen);
        stretches += (seen + stretch - 1) / stretch;
        keys += seen + 3; // what nobody sees is NaN
    }
    list.push_back({stretches, 0, 0, 0});
    matrix<T> q(queries, of.heads * of.dim), k(keys, of.key_heads * of.dim), v = k;
    fill(q, random);
    for (auto* const x : {&k, &v}) {
        fill(*x, random);
        for (std::size_t i = 0; i < of.seen.size(); ++i)
            for (index_t r = list[i].first + list[i].count; r < list[i].first + list[i].count + 3; ++r)
                for (index_t c = 0; c < k.width(); ++c) x->data()[r * k.width() + c] = static_cast<T>(std::nanf(""));
    }
    int const group = of.all_heads / of.key_heads, chunks = (group + G - 1) / G;
    float const scale = 1 / std::sqrt(static_cast<float>(of.dim));
    kernels::cached_tensors<T> t{q,
                                 k,
                                 v,
                                 {nullptr, static_cast<int>(queries), {}},
                                 of.heads,
                                 group,
                                 of.first_head / group,
                                 of.first_head % group,
                                 of.dim,
                                 scale};
    if (seed % 2)
        t.queries.elsewhere = list.data();
    else
        std::ranges::copy(list, t.queries.here);
    matrix<float> values(stretches * of.heads, kernels::partial_width(of.dim)), o(queries, of.heads * of.dim),
        lse(queries, of.heads);
    std::vector<float2> weights(static_cast<std::size_t>(stretches * of.heads));
    kernels::stretch_partials const partials{values.data(), weights.data()};
    auto const size = [](index_t n) { return static_cast<unsigned>(n); };
    namespace attention = kernels::attention;
    gpu::now().launch({size(stretches * t.keys() * chunks), 1},
                      {Cores ? attention::cache_threads : attention::threads, 1}, [&] {
                          if constexpr (Cores)
                              kernels::attend_over_stretch_on_cores<T, E>(t, partials);
                          else
                              kernels::attend_over_stretch<T, E, G>(t, partials);
                      });
    gpu::now().launch({size(queries), size(of.heads)}, {attention::threads, 1},
                      [&] { kernels::join_stretches<float>(o.rows(), lse.rows(), t.queries, partials, of.dim); });

    std::vector<double> exact(static_cast<std::size_t>(queries * of.heads * of.dim));
    for (std::size_t i = 0; i < of.seen.size(); ++i)
        for (int h = 0; h < of.heads; ++h) {
            auto const& [stretch, row, first, count] = list[i];
            index_t const at = row * q.width() + h * of.dim, key = (of.first_head + h) / group * of.dim;
            std::vector<double> scores;
            for (index_t j = 0; j < count; ++j) {
                double score = 0;
                for (int c = 0; c < of.dim; ++c)
                    score += double{kernels::widen(q.data()[at + c])} *
                             kernels::widen(k.data()[(first + j) * k.width() + key + c]);
                scores.push_back(score * scale);
            }
            double total = 0;
            for (double const score : scores) total += std::exp(score);
            for (index_t j = 0; j < count; ++j)
                for (int c = 0; c < of.dim; ++c)
                    exact[static_cast<std::size_t>(at + c)] +=
                        std::exp(scores[static_cast<std::size_t>(j)]) / total *
                        kernels::widen(v.data()[(first + j) * k.width() + key + c]);
            float const sum = lse.data()[row * of.heads + h];
            if (count > 0)
                CHECK(sum == doctest::Approx(std::log(total)).epsilon(1e-5));
            else
                CHECK(sum == -INFINITY);
        }
    CHECK(distance(o, exact) < (Cores && std::same_as<T, __nv_bfloat16> ? 3e-6 : 1e-6)); // weights of 16 bits or 22
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
            for (auto const arrive : {gpu::copies::at_once, gpu::copies::at_the_wait}) {
                gpu::now().arrive = arrive;
                check<__half, 64, 8, true>({40, 0, 2, 2, 2, {1, 0, 255, 300}}, ++seed);
                check<__nv_bfloat16, 128, 8, true>({128, 3, 4, 9, 3, {513, 2, 0}}, ++seed);
                check<__nv_bfloat16, 256, 8, true>({256, 0, 16, 16, 2, {35, 257}}, ++seed);
                check<__half, 256, 8, true>({136, 2, 9, 11, 1, {31, 260}}, ++seed);
            }
        }
        check<__nv_bfloat16, 64, 8, true>({8, 0, 1, 1, 1, {32769}}, ++seed); // stretches of 1024
        std::vector<index_t> many(1100);                                     // found by three looks at 32 of them
        for (std::size_t i = 0; i < many.size(); ++i) many[i] = static_cast<index_t>(i % 3);
        check<float, 4, 1>({4, 0, 1, 1, 1, many}, 2 * ++seed + 1);
    }
}
