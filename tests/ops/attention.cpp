// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/attention.hpp>

#include <doctest/doctest.h>

#include <ops/attention.hpp>
#include <support/rejects.hpp>

#include <cmath>
#include <limits>

namespace {

using namespace on_ranks;
using cpx::index_t;
using reference::random_attention, reference::run, reference::run_by_heads, reference::run_gathered;
using support::lengths;

std::vector<cpx::attention_heads> const heads = {{1, 1, 8}, {4, 2, 5}, {6, 1, 3}, {3, 3, 16}};
std::vector<std::vector<index_t>> const packings = {{37, 0, 16, 1, 50}, {5, 3, 2}, {1}, {}, {0, 0, 7}, {64, 65}};

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("attention is the same formula on every sharding, and the same bits", T, float, double) {
        for (std::size_t turn = 0; turn < 2 * packings.size(); ++turn) {
            auto const p =
                random_attention<T>(lengths(packings[turn / 2]), heads[(turn + turn / 4) % heads.size()], turn);
            CAPTURE(support::text(p.batch));
            auto const one = run_gathered(p, one_rank(p.batch));
            // scores of up to 9 sqrt(dim) * 3 have that many roundings, which exp turns into relative errors
            CHECK(relative_error(one, run(p)) <= 200 * std::numeric_limits<T>::epsilon());
            for (int const ranks : rank_counts) {
                CAPTURE(ranks);
                CHECK(same_bits(run_by_heads(p, ranks), one));
                for_each_sharding(p.batch, ranks, {1, 16}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    CHECK(same_bits(run_gathered(p, sharding), one));
                });
            }
            auto const zigzag = cpx::shard(p.batch, cpx::zigzag<4>{}, cpx::aligned<16>{}); // of its own type
            CHECK(same_bits(run_gathered(p, zigzag), one));
            // queries by heads may read keys that stand everywhere
            cpx::head_sharded<> const split(3, p.batch, {p.queries()});
            CHECK(same_bits(run(p, split, cpx::replicated<>(3, p.batch)), one));
        }
    }

    TEST_CASE("a token changes no bit of another sequence and of no token before it, not even by NaN") {
        auto const p = random_attention<float>(lengths({9, 1, 14, 0, 3}), {4, 2, 4}, 2);
        by_tokens const sharding = cpx::shard<cpx::scope::batch>(p.batch, cpx::zigzag<>(3));
        auto const before = run_gathered(p, sharding);
        REQUIRE(same_bits(run_by_heads(p, 3), before));
        for (float const change : {0.5f, std::numeric_limits<float>::quiet_NaN()})
            for (index_t const row : {0, 5, 8, 9, 10, 23, 24}) {
                CAPTURE(row);
                auto other = p;
                for (index_t d = 0; d < p.width(); ++d)
                    other.q[static_cast<std::size_t>(row * p.width() + d)] += change;
                for (auto* x : {&other.k, &other.v})
                    for (index_t d = 0; d < 8; ++d) (*x)[static_cast<std::size_t>(row * 8 + d)] += change;
                index_t const end = p.batch.offset(p.batch.sequence(row) + 1);
                for (auto const& after : {run_gathered(other, sharding), run_by_heads(other, 3)}) {
                    CHECK(same_rows(after, before, p.width(), 0, row));
                    CHECK(same_rows(after, before, p.width(), end, p.batch.tokens()));
                    for (index_t changed = row; changed < end; ++changed)
                        CHECK_FALSE(same_rows(after, before, p.width(), changed, changed + 1));
                }
            }
    }

    TEST_CASE_TEMPLATE("a sequence has the bits that it has alone, whatever it is packed with", T, float, double) {
        for (auto const& order : std::vector<std::vector<index_t>>{{33, 1, 50, 16}, {50, 0, 16, 33, 1}}) {
            auto const p = random_attention<T>(lengths(order), {4, 2, 8}, 8);
            auto const all = run_gathered(p, by_tokens(cpx::shard<cpx::scope::batch>(p.batch, cpx::zigzag<3>{})));
            for (index_t s = 0; s < p.batch.sequences(); ++s) {
                index_t const first = p.batch.offset(s), last = p.batch.offset(s + 1);
                reference::attention<T> const own{lengths({last - first}),
                                                  p.heads,
                                                  p.scale,
                                                  slice(p.q, p.width(), first, last),
                                                  slice(p.k, 16, first, last),
                                                  slice(p.v, 16, first, last)};
                CHECK(same_bits(slice(all, p.width(), first, last), run_gathered(own, one_rank(own.batch))));
            }
        }
    }

    TEST_CASE("attention writes what its backward needs to rows or to a list of that size") {
        by_tokens const sharding = cpx::shard(lengths({3, 2}), cpx::zigzag<>(1));
        auto const q = cpx::make_tensor<float>(sharding, 0, 2);
        auto const k = cpx::make_tensor<float>(cpx::replicated<>(1, sharding.batch()), 0, 2);
        auto o = q;
        cpx::attention_heads const heads{2, 2, 1};
        std::vector<float> list(5 * 2), wide(5 * 3);
        cpx::attention(q, k, k, heads, 1, o, list);
        cpx::attention(q, k, k, heads, 1, o, cpx::rows(wide, 3).columns(1, 2));
        for (index_t const i : {0, 2, 9}) { // scores are 0, so it is the logarithm of the number of keys
            auto const row = static_cast<std::size_t>(i / 2), at = static_cast<std::size_t>(i);
            CHECK(list[at] == doctest::Approx(std::log(std::array{1., 2., 3., 1., 2.}[row])));
            CHECK(list[at] == wide[row * 3 + at % 2 + 1]);
        }
        list.pop_back();
        support::rejects({"attention.cpp", "attention: shape of lse: expected (5, 2), got (9, 1)"},
                         [&] { cpx::attention(q, k, k, heads, 1, o, list); });
    }

    TEST_CASE("attention rejects what does not fit") {
        auto const batch = lengths({6, 5}), other_batch = lengths({5, 6});
        using Q = by_tokens;
        Q const zigzag = cpx::shard(batch, cpx::zigzag<>(2)), other = cpx::shard(other_batch, cpx::zigzag<>(2));
        using K = cpx::replicated<>;
        std::vector<float> values(11 * 8), written(11 * 8);
        index_t const held = zigzag.rows(1);
        cpx::attention_heads const grouped{4, 2, 2};
        cpx::sharded<float, Q> const q({values.data(), held, 8}, zigzag, 1), o({written.data(), held, 8}, zigzag, 1);
        cpx::sharded<float, K> const k({values.data(), 11, 4, 8}, K(2, batch), 1);
        auto const call = [&](auto const& queries, auto const& keys, auto const& v, auto const& result,
                              cpx::attention_heads h) {
            return [=] { cpx::attention(queries, keys, v, h, 1., result); };
        };
        CHECK(support::message(call(q, k, k, o, grouped)) == "");
        auto const rejects = [](std::string const& passage, auto const& f) {
            support::rejects({"attention.cpp", "attention: " + passage}, f);
        };
        for (double const scale : {HUGE_VAL, std::numeric_limits<double>::quiet_NaN()})
            rejects("scale: expected a number", [&] { cpx::attention(q, k, k, grouped, scale, o); });
        rejects("query heads: expected a multiple of the key heads 3, got 4", call(q, k, k, o, {4, 3, 2}));
        rejects("key heads: expected at least 1, got 0", call(q, k, k, o, {4, 0, 2}));
        rejects("query heads: expected at least 1, got 0", call(q, k, k, o, {0, 2, 2}));
        index_t const big = index_t{1} << 32;
        rejects("query heads: expected 0 to 2147483647, got 4294967296", call(q, k, k, o, {big, 1, 2}));
        rejects("query heads x dim: expected less than 2^62", call(q, k, k, o, {4, 2, index_t{1} << 61}));
        cpx::sharded<float, K> const foreign(k.data(), K(2, other_batch), 1);
        rejects("batch of keys and values: expected the queries', offset ", call(q, foreign, foreign, o, grouped));
        rejects("sharding of v: expected that of k", call(q, k, foreign, o, grouped));
        cpx::sharded<float, K> const on_zero(k.data(), k.sharding(), 0);
        rejects("rank of k: expected 1 of 2, got 0 of 2", call(q, on_zero, on_zero, o, grouped));
        rejects("rank of v: expected that of k, 1, got 0", call(q, k, on_zero, o, grouped));
        cpx::sharded<float, K> const of_three(k.data(), K(3, batch), 1);
        rejects("rank of k: expected 1 of 2, got 1 of 3", call(q, of_three, of_three, o, grouped));
        rejects("rank of v: expected that of k, 1, got 0", call(q, k, on_zero, o, grouped));
        cpx::sharded<float, Q> const elsewhere(o.data(), other, 1);
        rejects("sharding of o: expected that of q", call(q, k, k, elsewhere, grouped));
        auto const shape = [](index_t count, index_t width) {
            return '(' + std::to_string(count) + ", " + std::to_string(width) + ')';
        };
        rejects("memory of q: expected some, got null",
                call(cpx::sharded<float, Q>({nullptr, held, 8}, q.sharding(), 1), k, k, o, grouped));
        rejects("shape of q: expected " + shape(held, 8) + ", got " + shape(held, 7),
                call(q.columns(0, 7), k, k, o, grouped));
        cpx::sharded<float, Q> const low(o.data().sub(0, held - 1), q.sharding(), 1);
        rejects("shape of o: expected " + shape(held, 8) + ", got " + shape(held - 1, 8), call(q, k, k, low, grouped));
        rejects("shape of k: expected (11, 4), got (11, 2)", call(q, k.columns(0, 2), k, o, grouped));
        cpx::sharded<float, K> const short_keys(k.data().sub(0, 10), k.sharding(), 1);
        rejects("shape of v: expected (11, 4), got (10, 4)", call(q, k, short_keys, o, grouped));

        rejects("overlap of o and q: expected none, got some", call(q, k, k, q, grouped));
        cpx::sharded<float, K> const written_keys({written.data(), 11, 4, 8}, k.sharding(), 1);
        rejects("overlap of o and v: expected none, got some", call(q, k, written_keys, o, grouped));
        support::rejects({"attention.cpp", "overlap of o and lse"},
                         [&] { cpx::attention(q, k, k, grouped, 1, o, o.data().columns(4, 4)); });

        using H = cpx::head_sharded<>; // keys by heads, queries whole: head 0 is not on rank 1
        cpx::sharded<float, H> const some({values.data(), 11, 2, 8}, H(2, batch, {{2, 2}}), 1);
        rejects("key heads on this rank: expected those that its query heads read", call(q, some, some, o, grouped));
    }
}
