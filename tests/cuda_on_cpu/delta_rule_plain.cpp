// SPDX-License-Identifier: Apache-2.0
// The plain path of the gated delta rule and of a decay a head, forward and backward, against float64's on the host, of
// heads that fill lanes and that do not, whatever the order in which warps run.
#include "words.hpp"

#include <cpx/cpx.hpp>
#include <cpx/delta_rule_plain_backward.cuh>
#include <cpx/ops.hpp>

#include <doctest/doctest.h>

#include "matrix.hpp"

#include <random>
#include <vector>

namespace {

using cpx::index_t;
namespace kernels = cpx::kernels;
using numbers = std::vector<double>;

struct sizes {
    int key_heads, group, key_dim, value_dim;
    bool erases;

    int heads() const { return key_heads * group; }
};

/// A matrix of random numbers, and the same in float64.
template <class T>
struct both {
    matrix<T> own;
    numbers wide;

    both(std::mt19937& random, index_t rows, index_t width, float scale) : own(rows, width) {
        std::normal_distribution<float> number;
        for (index_t i = 0; i < rows * width; ++i) set(i, scale * number(random));
    }
    void set(index_t i, float x) {
        own.data()[i] = static_cast<T>(x);
        wide.resize(static_cast<std::size_t>(own.count() * own.width()));
        wide[static_cast<std::size_t>(i)] = kernels::widen(own.data()[i]);
    }
    kernels::delta_rows<T const> at() { return {own.data(), own.width()}; }
};

/// Packed tokens of several sequences, some of their heads' channels.
template <class T>
struct problem {
    sizes of;
    std::vector<index_t> lengths;
    index_t tokens, sequences;
    both<T> q, k, v, dout;
    both<float> g, beta, state, dlast;

    problem(std::vector<index_t> const& list, sizes const& s, std::mt19937 random)
        : of(s), lengths(list), tokens(std::accumulate(list.begin(), list.end(), index_t{0})),
          sequences(std::ssize(list)), q(random, tokens, s.key_heads * s.key_dim, 0.3f),
          k(random, tokens, s.key_heads * s.key_dim, 1 / std::sqrt(static_cast<float>(s.key_dim))),
          v(random, tokens, s.heads() * s.value_dim, 1), dout(random, tokens, s.heads() * s.value_dim, 1),
          g(random, tokens, s.heads(), 1), beta(random, tokens, s.heads(), 1),
          state(random, sequences, s.heads() * s.key_dim * s.value_dim, 0.3f),
          dlast(random, sequences, s.heads() * s.key_dim * s.value_dim, 0.3f) {
        for (index_t i = 0; i < tokens * s.heads(); ++i) {
            g.set(i, i % 37 == 5 ? -INFINITY : -0.1f * std::abs(g.own.data()[i]));
            beta.set(i, 1 / (1 + std::exp(-beta.own.data()[i])));
        }
    }
    double scale() const { return 1 / std::sqrt(static_cast<double>(of.key_dim)); }
};

/// What kernels give. Of every sequence and head last and dstate are (Dk, Dv).
template <class T>
struct results {
    matrix<T> o, dq, dk, dv;
    matrix<float> last, dg, dbeta, dstate;

    explicit results(problem<T>& p)
        : o(p.tokens, p.v.own.width()), dq(p.tokens, p.q.own.width()), dk(dq), dv(o),
          last(p.sequences, p.state.own.width()), dg(p.tokens, p.of.heads()), dbeta(dg), dstate(last) {
        std::vector<kernels::delta_sequence> sequences;
        int row = 0, chunks = 0;
        for (index_t const n : p.lengths) {
            int const end = row + static_cast<int>(n), of_sequence = static_cast<int>(n + 63) / 64;
            sequences.push_back({row, end, row, of_sequence, chunks, 1, 0});
            row = end, chunks += of_sequence;
        }
        int totals[4] = {chunks};
        kernels::delta_plan plan{};
        plan.sequences = sequences.data();
        plan.totals = totals;
        plan.count = static_cast<int>(sequences.size());
        kernels::delta_tokens<T> const in{p.q.at(),
                                          p.k.at(),
                                          p.v.at(),
                                          {p.g.at()},
                                          p.beta.at(),
                                          plan,
                                          p.of.key_heads,
                                          p.of.group,
                                          p.of.key_dim,
                                          p.of.value_dim,
                                          static_cast<float>(p.scale()),
                                          p.of.erases};
        matrix<float> states(chunks, last.width()), dstates(states), fresh(p.tokens, o.width()), right(fresh),
            dq_sum(p.tokens, dq.width()), dk_sum(dq_sum);
        auto const at = [](auto& x) {
            return kernels::delta_rows<std::remove_pointer_t<decltype(x.data())>>{x.data(), x.width()};
        };
        kernels::delta_trace const forward{states.data(), fresh.data()}, back{dstates.data(), right.data()};
        auto const run = [&]<int R>(std::integral_constant<int, R>) {
            gpu::dim3_of_host const grid{static_cast<unsigned>((p.of.value_dim + 15) / 16),
                                         static_cast<unsigned>(p.of.heads()), static_cast<unsigned>(p.sequences)};
            gpu::now().launch(grid, {128, 1}, [&] {
                kernels::delta_rule_plain<T, R>(in, p.state.own.data(), last.data(), at(o), forward);
            });
            gpu::now().launch(grid, {128, 1}, [&] {
                kernels::delta_rule_plain_back<T, R>(in, p.dout.at(), p.dlast.own.data(), dstate.data(), at(dv), back);
            });
            kernels::delta_plain_gradients<T> const to{forward, back,      p.dout.at(),   at(dq),       at(dk),
                                                       at(dg),  at(dbeta), dq_sum.data(), dk_sum.data()};
            // one block more than there are chunks, as in launches whose chunks the host does not know
            gpu::now().launch({static_cast<unsigned>(chunks + 1), static_cast<unsigned>(p.of.key_heads)}, {256, 1},
                              [&] { kernels::delta_rule_plain_gradients<T, R>(in, to); });
        };
        if (p.of.key_dim <= 128)
            run(std::integral_constant<int, 4>());
        else
            run(std::integral_constant<int, 8>());
    }
};

/// The host's, in float64, of the same numbers.
struct exact_results {
    numbers o, dq, dk, dv, last, dg, dbeta, dstate;

    template <class T>
    explicit exact_results(problem<T> const& p)
        : o(p.v.wide), dq(p.q.wide.size()), dk(dq), dv(p.v.wide), last(p.state.wide), dg(p.g.wide), dbeta(p.g.wide),
          dstate(p.dlast.wide) {
        index_t const heads = p.of.heads(), dim = p.of.key_dim, value_dim = p.of.value_dim;
        index_t first = 0;
        for (index_t s = 0; s < p.sequences; first += p.lengths[static_cast<std::size_t>(s++)])
            for (index_t h = 0; h < heads; ++h) {
                auto const part = [&](auto& x, index_t count, index_t head, index_t width) {
                    return cpx::rows(x.data() + first * count * width, p.lengths[static_cast<std::size_t>(s)],
                                     count * width)
                        .columns(head * width, width);
                };
                auto const of_state = [&](auto& x) {
                    return cpx::rows(x.data() + (s * heads + h) * dim * value_dim, dim, value_dim);
                };
                index_t const key_head = h / p.of.group, key_heads = p.of.key_heads;
                auto const q = part(p.q.wide, key_heads, key_head, dim), k = part(p.k.wide, key_heads, key_head, dim),
                           v = part(p.v.wide, heads, h, value_dim), dout = part(p.dout.wide, heads, h, value_dim),
                           g = part(p.g.wide, heads, h, 1), beta = part(p.beta.wide, heads, h, 1);
                auto const to_q = part(dq, key_heads, key_head, dim), to_k = part(dk, key_heads, key_head, dim),
                           to_v = part(dv, heads, h, value_dim), to_g = part(dg, heads, h, 1);
                auto const start = of_state(p.state.wide);
                if (p.of.erases) {
                    cpx::delta_rule_options const options{.chunk = 16, .qk_l2norm = false, .scale = p.scale()};
                    cpx::delta_rule_forward<double>(q, k, v, g, beta, 0, options, of_state(last),
                                                    part(o, heads, h, value_dim));
                    cpx::delta_rule_backward<double>(q, k, v, g, beta, 0, options, start, dout, of_state(dstate),
                                                     {to_q, to_k, to_v, to_g, part(dbeta, heads, h, 1)});
                } else {
                    cpx::head_decay_attention const alone{{1, 1, dim, value_dim}, {.chunk = 16, .scale = p.scale()}};
                    std::array<cpx::rows<double const>, 4> const x{q, k, v, g};
                    alone.forward<double>(x, 0, of_state(last), part(o, heads, h, value_dim));
                    numbers of_q(static_cast<std::size_t>(q.count() * dim)), of_k(of_q); // of this value head
                    alone.backward<double>(x, 0, start, dout, of_state(dstate),
                                           {cpx::rows(of_q, dim), cpx::rows(of_k, dim), to_v, to_g});
                    for (index_t i = 0; i < q.count() * dim; ++i) {
                        to_q(i / dim, i % dim) += of_q[static_cast<std::size_t>(i)];
                        to_k(i / dim, i % dim) += of_k[static_cast<std::size_t>(i)];
                    }
                }
            }
    }
};

template <class T>
void check(std::vector<index_t> const& lengths, sizes const& s) {
    CAPTURE(s.key_dim);
    CAPTURE(s.erases);
    problem<T> p(lengths, s, std::mt19937(7));
    exact_results const exact(p);
    gpu::now().warps_run = gpu::order::ascending;
    results<T> got(p);
    double const sums = 1e-5, rounded = sizeof(T) == 4 ? sums : 0x1p-8;
    CHECK(distance(got.o, exact.o) < rounded);
    CHECK(distance(got.last, exact.last) < sums);
    CHECK(distance(got.dq, exact.dq) < rounded);
    CHECK(distance(got.dk, exact.dk) < rounded);
    CHECK(distance(got.dv, exact.dv) < rounded);
    CHECK(distance(got.dg, exact.dg) < sums);
    if (s.erases) CHECK(distance(got.dbeta, exact.dbeta) < sums);
    CHECK(distance(got.dstate, exact.dstate) < sums);
    if (!s.erases) return;
    gpu::now().warps_run = gpu::order::random;
    results<T> again(p);
    CHECK(got.dq.has_the_bits_of(again.dq));
    CHECK(got.dk.has_the_bits_of(again.dk));
    CHECK(got.dg.has_the_bits_of(again.dg));
    gpu::now().warps_run = gpu::order::ascending;
}

} // namespace

TEST_SUITE("cuda_on_cpu") {
    TEST_CASE("the plain path of the delta rule and of a decay a head is float64's, with its gradients") {
        for (bool const erases : {true, false}) {
            check<float>({65, 0, 3}, {1, 2, 20, 5, erases});
            check<__nv_bfloat16>({9}, {1, 2, 40, 17, erases});
            check<float>({10, 1}, {2, 1, 200, 4, erases});
        }
    }
}
