// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/attention_backward.hpp>

#include <doctest/doctest.h>

#include <ops/backward.hpp>
#include <support/rejects.hpp>

namespace {

using namespace on_ranks;
using cpx::index_t;
using reference::attention, reference::gathered, reference::inputs, reference::random_attention;
using reference::gradient_by_heads, reference::gradient_gathered;
using support::lengths;

std::vector<cpx::attention_heads> const heads = {{1, 1, 8}, {4, 2, 5}, {6, 1, 3}, {3, 3, 16}};
std::vector<std::vector<index_t>> const packings = {{37, 0, 16, 1, 50}, {5, 3, 2}, {1}, {}, {0, 0, 7}, {64, 65}};

template <class T>
std::vector<T> random_upstream(attention<T> const& p) {
    support::splitmix numbers(33);
    return uniform<T>(numbers, std::ssize(p.q));
}

/// With the weights w of a query: dv_j += w_j do, ds_j = w_j (do . v_j - do . o), dq += scale ds_j k_j,
/// dk_j += scale ds_j q.
attention<double> plain_gradient(attention<double> const& p, std::vector<double> const& dout) {
    index_t const dim = p.heads.dim, key_width = p.heads.key_heads * dim;
    attention<double> d = p;
    for (auto const& [name, values] : inputs(d)) std::ranges::fill(*values, 0.);
    for (index_t row = 0; row < p.batch.tokens(); ++row)
        for (index_t h = 0; h < p.heads.query_heads; ++h) {
            index_t const first = p.batch.offset(p.batch.sequence(row)), q = row * p.width() + h * dim;
            index_t const head = h / (p.heads.query_heads / p.heads.key_heads) * dim;
            auto const products = [&](std::vector<double> const& a, std::vector<double> const& b) {
                std::vector<double> list;
                for (index_t j = first; j <= row; ++j) {
                    list.push_back(0);
                    for (index_t c = 0; c < dim; ++c)
                        list.back() +=
                            a[static_cast<std::size_t>(q + c)] * b[static_cast<std::size_t>(j * key_width + head + c)];
                }
                return list;
            };
            auto weights = products(p.q, p.k), pulls = products(dout, p.v);
            double const highest = *std::ranges::max_element(weights);
            double sum = 0, mean = 0;
            for (double& w : weights) sum += w = std::exp(p.scale * (w - highest));
            for (std::size_t j = 0; j < weights.size(); ++j) mean += (weights[j] /= sum) * pulls[j];
            for (std::size_t j = 0; j < weights.size(); ++j) {
                double const score = p.scale * weights[j] * (pulls[j] - mean);
                for (index_t c = 0; c < dim; ++c) {
                    auto const at = static_cast<std::size_t>(q + c);
                    auto const key = static_cast<std::size_t>((first + static_cast<index_t>(j)) * key_width + head + c);
                    d.v[key] += weights[j] * dout[at];
                    d.q[at] += score * p.k[key];
                    d.k[key] += score * p.q[at];
                }
            }
        }
    return d;
}

/// Calls `check(name, values of a, values of b)` for q, k and v.
template <class A, class B, class F>
void each(attention<A> a, attention<B> b, F&& check) {
    auto const of_a = inputs(a);
    auto const of_b = inputs(b);
    for (std::size_t i = 0; i < of_a.size(); ++i) {
        CAPTURE(of_a[i].first);
        check(of_a[i].first, *of_a[i].second, *of_b[i].second);
    }
}

template <class T>
void check_bits(attention<T> const& got, attention<T> const& expected) {
    each(got, expected, [](auto const&, auto const& a, auto const& b) { CHECK(same_bits(a, b)); });
}

template <class A, class B>
void check_near(attention<A> const& got, attention<B> const& expected, double tolerance) {
    each(got, expected, [&](auto const&, auto const& a, auto const& b) { CHECK(relative_error(a, b) <= tolerance); });
}

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("gradients of attention are the same formula on every sharding, with queries gathered the bits",
                       T, float, double) {
        for (std::size_t turn = 0; turn < packings.size() + 2; ++turn) {
            auto const p =
                random_attention<T>(lengths(packings[turn % packings.size()]), heads[(turn + 1) % heads.size()], turn);
            CAPTURE(support::text(p.batch));
            auto const dout = random_upstream(p);
            auto const one = gradient_gathered(p, dout, one_rank(p.batch), gathered::queries);
            attention<double> const exact{p.batch,           p.heads,           p.scale,
                                          cast<double>(p.q), cast<double>(p.k), cast<double>(p.v)};
            // scores of up to 9 sqrt(dim) * 3 have that many roundings, which exp turns into relative errors
            double const tolerance = 500 * std::numeric_limits<T>::epsilon();
            check_near(one, plain_gradient(exact, cast<double>(dout)), tolerance);
            for (int const ranks : rank_counts) {
                CAPTURE(ranks);
                check_bits(gradient_by_heads(p, dout, ranks), one);
                for_each_sharding(p.batch, ranks, {1}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    check_bits(gradient_gathered(p, dout, sharding, gathered::queries), one);
                    auto const other = gradient_gathered(p, dout, sharding, gathered::keys);
                    CHECK(same_bits(other.q, one.q));
                    check_near(other, one, tolerance);
                });
            }
            auto const zigzag = cpx::shard(p.batch, cpx::zigzag<4>{}, cpx::aligned<16>{}); // of its own type
            check_bits(gradient_gathered(p, dout, zigzag, gathered::queries), one);
        }
    }

    TEST_CASE("a token of one sequence changes no bit of the gradients of another, not even by NaN") {
        auto const p = random_attention<double>(lengths({9, 1, 14, 0, 3}), {4, 2, 4}, 2);
        by_tokens const sharding = cpx::shard<cpx::scope::batch>(p.batch, cpx::zigzag<>(3));
        auto const dout = random_upstream(p);
        auto const run = [&](attention<double> const& of, std::vector<double> const& upstream) {
            return std::array{gradient_gathered(of, upstream, sharding, gathered::queries),
                              gradient_gathered(of, upstream, sharding, gathered::keys),
                              gradient_by_heads(of, upstream, 3)};
        };
        auto const before = run(p, dout);
        for (double const change : {0.5, std::numeric_limits<double>::quiet_NaN()})
            for (index_t const row : {0, 5, 8, 9, 10, 23, 24}) {
                CAPTURE(row);
                auto other = p;
                auto upstream = dout;
                for (auto* x : {&other.q, &other.k, &other.v, &upstream})
                    (*x)[static_cast<std::size_t>(row * std::ssize(*x) / p.batch.tokens())] += change;
                index_t const s = p.batch.sequence(row), first = p.batch.offset(s), last = p.batch.offset(s + 1);
                auto const after = run(other, upstream);
                for (std::size_t way = 0; way < after.size(); ++way)
                    each(after[way], before[way], [&](std::string const& name, auto const& a, auto const& b) {
                        index_t const width = std::ssize(a) / p.batch.tokens();
                        CHECK(same_rows(a, b, width, 0, first));
                        CHECK(same_rows(a, b, width, last, p.batch.tokens()));
                        // a query that sees itself only has the weight 1, whatever its score
                        if (row > first || name == "v") CHECK_FALSE(same_rows(a, b, width, row, row + 1));
                    });
            }
    }

    TEST_CASE("the backward of attention rejects what does not fit, before anything is written") {
        auto const batch = lengths({6, 5}), other_batch = lengths({5, 6});
        using Q = by_tokens;
        using K = cpx::replicated<>;
        using queries = cpx::attention_queries<float, Q>;
        Q const here = cpx::shard(batch, cpx::zigzag<>(1)), elsewhere = cpx::shard(other_batch, cpx::zigzag<>(1));
        std::vector<float> values(11 * 8), written(11 * 8);
        cpx::attention_heads const grouped{4, 2, 2};
        auto const at = [](Q const& sharding, std::vector<float>& of, index_t count, index_t width, int rank = 0) {
            return cpx::sharded<float, Q>({of.data(), count, width, 8}, sharding, rank);
        };
        auto const wide = at(here, values, 11, 8), narrow = at(here, values, 11, 4), d = at(here, written, 11, 8);
        queries const good{wide, wide, narrow, narrow};
        cpx::sharded<float, K> const k({values.data(), 11, 4, 8}, K(1, batch), 0),
            dk({written.data(), 11, 4, 8}, k.sharding(), 0), dv({written.data() + 4, 11, 4, 8}, k.sharding(), 0);
        cpx::sharded<float, K> const foreign(k.data(), K(1, other_batch), 0),
            foreign_dk(dk.data(), foreign.sharding(), 0);
        auto const low = [](cpx::sharded<float, K> const& x) {
            return cpx::sharded<float, K>(x.data().sub(0, 10), x.sharding(), 0);
        };
        auto const of_queries = [&](queries const& from, auto const& keys, auto const& v, cpx::attention_heads h,
                                    auto const& dq) {
            return [=] { cpx::attention_backward_queries(from, keys, v, h, 1., dq); };
        };
        auto const of_keys = [&](queries const& from, auto const& keys, auto const& v, cpx::attention_heads h,
                                 auto const& to_k, auto const& to_v) {
            return [=] {
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    cpx::attention_backward_keys(from, keys, v, h, 1., to_k, to_v, comm);
                });
            };
        };
        auto const untouched = [&] { CHECK(std::ranges::all_of(written, [](float x) { return x == 0; })); };
        auto const both = [&](std::string const& passage, queries const& from, auto const& keys, auto const& v,
                              cpx::attention_heads h) {
            support::rejects({"attention_backward.cpp", "attention_backward_queries: " + passage},
                             of_queries(from, keys, v, h, d));
            cpx::sharded<float, K> const to(dk.data(), keys.sharding(), 0), to_v(dv.data(), keys.sharding(), 0);
            support::rejects({"attention_backward.cpp", "attention_backward_keys: " + passage},
                             of_keys(from, keys, v, h, to, to_v));
            untouched();
        };
        both("query heads: expected a multiple of the key heads 3, got 4", good, k, k, {4, 3, 2});
        both("key heads: expected at least 1, got 0", good, k, k, {4, 0, 2});
        auto const foreign_wide = at(elsewhere, values, 11, 8), foreign_narrow = at(elsewhere, values, 11, 4);
        both("sharding of dout: expected that of q", {wide, foreign_wide, narrow, narrow}, k, k, grouped);
        both("sharding of lse: expected that of q", {wide, wide, foreign_narrow, narrow}, k, k, grouped);
        both("sharding of delta: expected that of q", {wide, wide, narrow, foreign_narrow}, k, k, grouped);
        both("shape of q: expected (11, 8), got (10, 8)", {at(here, values, 10, 8), wide, narrow, narrow}, k, k,
             grouped);
        both("shape of dout: expected (11, 8), got (11, 7)", {wide, at(here, values, 11, 7), narrow, narrow}, k, k,
             grouped);
        both("shape of lse: expected (11, 4), got (11, 3)", {wide, wide, at(here, values, 11, 3), narrow}, k, k,
             grouped);
        both("shape of delta: expected (11, 4), got (9, 4)", {wide, wide, narrow, at(here, values, 9, 4)}, k, k,
             grouped);
        both("batch of keys and values: expected the queries', offset ", good, foreign, foreign, grouped);

        std::string const queries_ = "attention_backward_queries: ", keys_ = "attention_backward_keys: ";
        support::rejects({queries_ + "sharding of v: expected that of k"}, of_queries(good, k, foreign, grouped, d));
        support::rejects({queries_ + "sharding of dq: expected that of q"},
                         of_queries(good, k, k, grouped, at(elsewhere, written, 11, 8)));
        support::rejects({queries_ + "shape of dq: expected (11, 8), got (11, 7)"},
                         of_queries(good, k, k, grouped, d.columns(0, 7)));
        support::rejects({queries_ + "shape of k: expected (11, 4), got (11, 2)"},
                         of_queries(good, k.columns(0, 2), k, grouped, d));
        support::rejects({queries_ + "shape of v: expected (11, 4), got (10, 4)"},
                         of_queries(good, k, low(k), grouped, d));
        support::rejects({keys_ + "sharding of v: expected that of k"}, of_keys(good, k, foreign, grouped, dk, dk));
        support::rejects({keys_ + "sharding of dk: expected that of k"}, of_keys(good, k, k, grouped, foreign_dk, dk));
        support::rejects({keys_ + "sharding of dv: expected that of k"}, of_keys(good, k, k, grouped, dk, foreign_dk));
        std::string const low_shape = ": expected (11, 4), got (10, 4)";
        support::rejects({keys_ + "shape of dk" + low_shape}, of_keys(good, k, k, grouped, low(dk), dk));
        support::rejects({keys_ + "shape of dv" + low_shape}, of_keys(good, k, k, grouped, dk, low(dk)));
        support::rejects({keys_ + "shape of k" + low_shape}, of_keys(good, low(k), k, grouped, dk, dk));
        support::rejects({keys_ + "shape of v" + low_shape}, of_keys(good, k, low(k), grouped, dk, dk));
        cpx::sharded<float, K> const in_d(d.data().columns(0, 4), k.sharding(), 0);
        queries const written_queries{d, wide, narrow, narrow};
        support::rejects({"attention_backward.cpp", queries_ + "overlap of dq and k: expected none, got some"},
                         of_queries(good, in_d, k, grouped, d));
        support::rejects({queries_ + "overlap of dq and q"}, of_queries(written_queries, k, k, grouped, d));
        support::rejects({"attention_backward.cpp", keys_ + "overlap of dk and dv: expected none, got some"},
                         of_keys(good, k, k, grouped, dk, dk));
        support::rejects({keys_ + "overlap of dk and k"}, of_keys(good, in_d, k, grouped, dk, dv));
        support::rejects({keys_ + "overlap of dk and q"}, of_keys(written_queries, k, k, grouped, dk, dv));
        untouched();

        using H = cpx::head_sharded<>; // keys by heads, queries whole
        std::vector<float> more(2 * 11 * 8);
        cpx::threads::run(2, [&](cpx::threads& comm) {
            Q const whole = cpx::shard(batch, cpx::zigzag<>(2));
            index_t const count = whole.rows(comm.rank());
            int const rank = comm.rank();
            queries const some{at(whole, more, count, 8, rank), at(whole, more, count, 8, rank),
                               at(whole, more, count, 4, rank), at(whole, more, count, 4, rank)};
            cpx::sharded<float, H> const split({more.data(), 11, 2, 8}, H(2, batch, {{2, 2}}), rank);
            support::rejects({queries_ + "key heads on this rank: expected those that its query heads read"}, [&] {
                cpx::attention_backward_queries(some, split, split, grouped, 1., at(whole, more, count, 8, rank));
            });
            support::rejects({keys_ + "query heads on this rank: expected those of the keys' sharding"}, [&] {
                cpx::attention_backward_keys(some, split, split, grouped, 1., split, split, comm);
            });
        });

        auto const delta = [&](auto const& o, auto const& dout, auto const& to) {
            return [=] { cpx::attention_delta(o, dout, 2, to); };
        };
        std::string const where = "attention_delta: ";
        support::rejects({where + "sharding of dout: expected that of o"}, delta(wide, foreign_wide, narrow));
        support::rejects({where + "sharding of delta: expected that of o"}, delta(wide, wide, foreign_narrow));
        support::rejects({where + "shape of o: expected (11, 8), got (11, 7)"},
                         delta(at(here, values, 11, 7), wide, narrow));
        support::rejects({where + "shape of dout: expected (11, 8), got (11, 7)"},
                         delta(wide, at(here, values, 11, 7), narrow));
        support::rejects({where + "shape of delta: expected (11, 4), got (10, 4)"},
                         delta(wide, wide, at(here, values, 10, 4)));
        support::rejects({"attention_backward.cpp", where + "overlap of delta and o: expected none, got some"},
                         delta(wide, wide, narrow));
        CHECK(support::message(delta(wide, wide, at(here, written, 11, 4))) == "");
        CHECK(support::message(of_queries(good, k, k, grouped, d)) == "");
        CHECK(support::message(of_keys(good, k, k, grouped, dk, dv)) == "");
    }
}
