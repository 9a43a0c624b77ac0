// SPDX-License-Identifier: Apache-2.0
// Attention's kernels of tensor cores against float64: forward and backward, on every rank with the bits of one, in
// every order in which warps may run.
#include "words.hpp"

#include <cpx/attention_cores_backward.cuh>
#include <cpx/cpx.hpp>
#include <cpx/plan/places.hpp>

#include <doctest/doctest.h>

#include "matrix.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace {

using cpx::index_t;
namespace kernels = cpx::kernels;

kernels::attended_places view_of(cpx::place_lists const& lists) {
    return {lists.first.data(),
            lists.first_tile.data(),
            lists.place.data(),
            lists.row.data(),
            lists.token.data(),
            static_cast<int>(lists.first.size()) - 1,
            static_cast<int>(lists.place.size())};
}

struct shape {
    int dim, heads, key_heads, ranks;
    std::vector<index_t> lengths;
};

/// Inputs as a rank's kernels take them, and what is exact.
template <class T, int D>
struct problem {
    shape of;
    cpx::thd batch = cpx::thd::from_lengths(of.lengths);
    index_t tokens = batch.offsets().back();
    int group = of.heads / of.key_heads;
    float scale = 1 / std::sqrt(static_cast<float>(of.dim));
    matrix<T> q{tokens, of.heads* of.dim}, k{tokens, of.key_heads* of.dim}, v = k, dout = q;
    matrix<float> lse{tokens, of.heads}, delta = lse;
    std::vector<double> o, dq, dk, dv;

    problem(shape const& as, unsigned seed) : of(as) {
        std::mt19937 random(seed);
        std::normal_distribution<float> number;
        for (auto* x : {&q, &k, &v, &dout})
            for (index_t i = 0; i < tokens * x->width(); ++i) x->data()[i] = static_cast<T>(number(random));
        o.resize(static_cast<std::size_t>(tokens * q.width()));
        dq = o;
        dk.resize(static_cast<std::size_t>(tokens * k.width()));
        dv = dk;
        for (index_t s = 0; s < batch.sequences(); ++s)
            for (index_t i = batch.offset(s); i < batch.offset(s + 1); ++i)
                for (int h = 0; h < of.heads; ++h) attend_exactly(batch.offset(s), i, h);
    }
    void attend_exactly(index_t begin, index_t i, int h) {
        auto const at = [&](auto& x, index_t row, int head) { return x.data() + row * x.width() + head * of.dim; };
        auto const dot = [&](T const* a, T const* b) {
            double sum = 0;
            for (int c = 0; c < of.dim; ++c) sum += double{kernels::widen(a[c])} * kernels::widen(b[c]);
            return sum;
        };
        auto const exact = [&](std::vector<double>& x, index_t row, int heads, int head) {
            return x.data() + (row * heads + head) * of.dim;
        };
        int const kh = h / group;
        std::vector<double> weight;
        double highest = -std::numeric_limits<double>::infinity(), total = 0, pull = 0;
        for (index_t j = begin; j <= i; ++j) {
            weight.push_back(dot(at(q, i, h), at(k, j, kh)) * scale);
            highest = std::max(highest, weight.back());
        }
        for (double& w : weight) total += w = std::exp(w - highest);
        for (index_t j = begin; j <= i; ++j) {
            double& w = weight[static_cast<std::size_t>(j - begin)];
            w /= total;
            pull += w * dot(at(dout, i, h), at(v, j, kh));
            for (int c = 0; c < of.dim; ++c) {
                exact(o, i, of.heads, h)[c] += w * kernels::widen(at(v, j, kh)[c]);
                exact(dv, j, of.key_heads, kh)[c] += w * kernels::widen(at(dout, i, h)[c]);
            }
        }
        for (index_t j = begin; j <= i; ++j) {
            double const w = weight[static_cast<std::size_t>(j - begin)],
                         of_score = w * (dot(at(dout, i, h), at(v, j, kh)) - pull) * scale;
            for (int c = 0; c < of.dim; ++c) {
                exact(dq, i, of.heads, h)[c] += of_score * kernels::widen(at(k, j, kh)[c]);
                exact(dk, j, of.key_heads, kh)[c] += of_score * kernels::widen(at(q, i, h)[c]);
            }
        }
        lse.data()[i * of.heads + h] = static_cast<float>(highest + std::log(total));
        delta.data()[i * of.heads + h] = static_cast<float>(pull);
    }

    kernels::attended_tensors<T> tensors(matrix<T>& queries, cpx::place_lists const& of_queries,
                                         cpx::place_lists const& of_keys) {
        return {queries, k, v, view_of(of_queries), view_of(of_keys), 0, 0, group, of.dim, scale};
    }
    /// Runs `kernel` for a block a tile and head.
    template <class F>
    void launch(cpx::place_lists const& of_tiles, int heads, F&& kernel) {
        gpu::now().launch({static_cast<unsigned>(of_tiles.tiles()), static_cast<unsigned>(heads)},
                          {kernels::attention::core_threads, 1}, kernel);
    }
    template <class S>
    void forward(S const& sharding, int rank, matrix<T>& queries, matrix<T>& out, matrix<float>& sums) {
        cpx::place_lists const here(sharding, rank, kernels::attention::core_rows), all = every_key();
        auto const t = tensors(queries, here, all);
        launch(here, of.heads, [&] { kernels::attend_on_cores<T, D>(t, out.rows(), sums.rows()); });
    }
    template <class S>
    void queries_back(S const& sharding, int rank, matrix<T>& queries, kernels::attended_gradients<T> const& from,
                      matrix<T>& to) {
        cpx::place_lists const here(sharding, rank, kernels::attention::core_rows), all = every_key();
        auto const t = tensors(queries, here, all);
        launch(here, of.heads, [&] { kernels::attend_backward_queries_on_cores<T, D>(t, from, to.rows()); });
    }
    template <class S, class Out>
    void keys_back(S const& sharding, int rank, matrix<T>& queries, kernels::attended_gradients<T> const& from,
                   matrix<Out>& to_k, matrix<Out>& to_v) {
        cpx::place_lists const here(sharding, rank, kernels::attention::core_rows),
            all(cpx::shard(batch, cpx::sequential<>(1)), 0, kernels::attention::core_keys(D));
        matrix<float> sums(2 * tokens, k.width());
        auto const t = tensors(queries, here, all);
        launch(all, of.key_heads, [&] {
            kernels::attend_backward_keys_on_cores<T, Out, D>(t, from, group, sums.data(), to_k.rows(), to_v.rows());
        });
    }
    cpx::place_lists every_key() const {
        return {cpx::shard(batch, cpx::sequential<>(1)), 0, kernels::attention::core_rows};
    }
};

template <class T, int D>
void check(shape const& of, unsigned seed) {
    CAPTURE(D);
    CAPTURE(of.dim);
    CAPTURE(seed);
    problem<T, D> p(of, seed);
    // weights and their gradients are rounded to T: half a unit of T each, and that of the result
    double const unit = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
    auto const alone = cpx::shard(p.batch, cpx::sequential<>(1));
    auto const shared = cpx::shard(p.batch, cpx::zigzag<>(of.ranks));
    kernels::attended_gradients<T> const from{p.dout, p.lse, p.delta};
    matrix<T> o(p.tokens, p.q.width()), dq = o, dk(p.tokens, p.k.width()), dv = dk;
    matrix<float> lse = p.lse;
    p.forward(alone, 0, p.q, o, lse);
    CHECK(distance(o, p.o) < 0.7 * unit);
    for (index_t i = 0; i < p.tokens * of.heads; ++i)
        CHECK(lse.data()[i] == doctest::Approx(p.lse.data()[i]).epsilon(2e-5));
    p.queries_back(alone, 0, p.q, from, dq);
    CHECK(distance(dq, p.dq) < unit);
    p.keys_back(alone, 0, p.q, from, dk, dv);
    CHECK(distance(dk, p.dk) < unit);
    CHECK(distance(dv, p.dv) < unit);

    std::vector<double> rest_k = p.dk, rest_v = p.dv; // what no rank has given
    for (int rank = 0; rank < of.ranks; ++rank) {
        CAPTURE(rank);
        auto q = p.q.of(shared, rank), dout = p.dout.of(shared, rank), expected = o.of(shared, rank),
             expected_dq = dq.of(shared, rank), own_o = q, own_dq = q;
        auto expected_lse = lse.of(shared, rank), own_lse = expected_lse, of_lse = p.lse.of(shared, rank),
             of_delta = p.delta.of(shared, rank);
        kernels::attended_gradients<T> const own{dout, of_lse, of_delta};
        p.forward(shared, rank, q, own_o, own_lse);
        CHECK(own_o.has_the_bits_of(expected));
        CHECK(own_lse.has_the_bits_of(expected_lse));
        p.queries_back(shared, rank, q, own, own_dq);
        CHECK(own_dq.has_the_bits_of(expected_dq));
        matrix<float> part_k(p.tokens, p.k.width()), part_v = part_k;
        p.keys_back(shared, rank, q, own, part_k, part_v);
        for (std::size_t i = 0; i < rest_k.size(); ++i) {
            rest_k[i] -= part_k.data()[i];
            rest_v[i] -= part_v.data()[i];
        }
    }
    auto const norm = [](std::vector<double> const& x) {
        double sum = 0;
        for (double const y : x) sum += y * y;
        return std::sqrt(sum);
    };
    CHECK(norm(rest_k) < unit * norm(p.dk));
    CHECK(norm(rest_v) < unit * norm(p.dv));
}

} // namespace

TEST_SUITE("cuda_on_cpu") {
    TEST_CASE("attention on tensor cores is float64's, on every rank with the bits of one") {
        unsigned seed = 0;
        for (auto const warps : {gpu::order::ascending, gpu::order::descending, gpu::order::random}) {
            gpu::now().warps_run = warps;
            gpu::now().arrive = warps == gpu::order::descending ? gpu::copies::at_once : gpu::copies::at_the_wait;
            check<__nv_bfloat16, 64>({64, 4, 2, 2, {37, 0, 150, 1, 5}}, ++seed);
            check<__half, 64>({40, 2, 1, 3, {130, 65, 3}}, ++seed);
            if (warps != gpu::order::ascending) continue; // these take long
            check<__half, 128>({72, 3, 1, 2, {129, 0, 31}}, ++seed);
            check<__nv_bfloat16, 256>({256, 1, 1, 3, {150, 33}}, ++seed);
        }
    }
    TEST_CASE("a key that is no number reaches only who sees it") {
        problem<__nv_bfloat16, 64> p({64, 2, 1, 1, {20, 100, 40}}, 1);
        auto const alone = cpx::shard(p.batch, cpx::sequential<>(1));
        matrix<__nv_bfloat16> clean(p.tokens, p.q.width()), spoilt = clean;
        matrix<float> lse = p.lse;
        p.forward(alone, 0, p.q, clean, lse);
        index_t const at = 90; // of the second sequence
        for (index_t c = 0; c < p.k.width(); ++c) {
            p.k.data()[at * p.k.width() + c] = static_cast<__nv_bfloat16>(std::nanf(""));
            p.v.data()[at * p.k.width() + c] = static_cast<__nv_bfloat16>(c % 2 ? std::nanf("") : INFINITY);
        }
        p.forward(alone, 0, p.q, spoilt, lse);
        for (index_t i = 0; i < p.tokens * p.q.width(); ++i) {
            index_t const row = i / p.q.width();
            CAPTURE(row);
            float const x = kernels::widen(spoilt.data()[i]);
            if (row >= at && row < 120)
                REQUIRE(std::isnan(x));
            else
                REQUIRE(x == kernels::widen(clean.data()[i]));
        }
    }
    TEST_CASE("threads that wait for each other are found") {
        auto const stuck = [] {
            if (threadIdx.x < 32) __syncthreads();
        };
        CHECK_THROWS(gpu::now().launch({1, 1}, {64, 1}, stuck));
        auto const apart = [] { static_cast<void>(threadIdx.x == 5 ? __syncthreads_or(true) : 0); };
        CHECK_THROWS(gpu::now().launch({1, 1}, {32, 1}, apart));
    }
}
