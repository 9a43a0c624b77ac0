// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/causal_conv1d.hpp>

#include <cpx/ops/sections.hpp>

#include <doctest/doctest.h>

#include <ops/on_ranks.hpp>
#include <ops/reference.hpp>
#include <support/rejects.hpp>

namespace {

using namespace on_ranks;
using cpx::index;
using reference::conv, reference::random_conv, reference::run;
using support::lengths;

/// Convolutions whose halos span several ranks, with sequences of every awkward length.
template <class T>
std::vector<conv<T>> problems() {
    std::vector<conv<T>> list;
    std::vector<std::vector<index>> const packings{{5, 1, 0, 12, 3}, {37, 8, 21}, {1},         {},
                                                   {0, 0},           {2, 1, 1},   {16, 16, 16}};
    for (index const taps : {1, 2, 3, 4, 8})
        for (auto const& packing : packings) {
            bool const odd = list.size() % 2;
            list.push_back(random_conv<T>(lengths(packing), 3 + taps % 3, taps, odd || taps == 3,
                                          odd ? cpx::activation::silu : cpx::activation::none, list.size()));
        }
    return list;
}

/// Calls `f(name, sharding)` with layouts of their own types: static ones, a length rule and a layout of this test.
template <class F>
void for_each_typed_sharding(cpx::thd const& batch, F&& f) {
    f("static zigzag", cpx::shard(batch, cpx::zigzag<3>{}));
    f("static sequential over batch", cpx::shard<cpx::scope::batch>(batch, cpx::sequential<5>{}));
    f("miles' rule",
      cpx::shard(batch, cpx::by_length{cpx::zigzag<4>{}, cpx::sequential<4>{}, [](index n) { return n % 8 == 0; }}));
    struct backwards { // a layout is three functions
        int ranks() const { return 4; }
        int chunks() const { return 7; }
        int owner(int chunk) const { return (7 - chunk) / 2; }
    };
    f("a layout of one's own", cpx::shard(batch, backwards{}, cpx::aligned<3>{}));
}

struct scenario {
    char const* source;
    int ranks;
    index taps;
    std::vector<index> lengths;
};

std::vector<scenario> const peers = {
    {"fla test_cp_conv.py CP2_SequenceCut", 2, 4, {300, 400, 324}},
    {"fla test_cp_conv.py CP2_BoundaryAligned", 2, 4, {512, 512}},
    {"fla test_cp_conv.py CP4_Complex", 4, 4, {700, 324}},
    {"fla test_cp_conv.py CP4_SingleSequence", 4, 4, {1024}},
    {"fla test_cp_conv.py CP2_ManyShortSequences", 2, 4, {100, 150, 200, 250, 124, 100, 100}},
    {"fla test_cp_conv.py CP2_ShortTail_Len1", 2, 4, {513, 511}},
    {"fla test_cp_conv.py CP2_ShortTail_Len2", 2, 4, {514, 510}},
    {"fla test_cp_conv.py CP4_EveryRankShortTail", 4, 4, {257, 255, 257, 255}},
    {"fla test_cp_conv.py CP2_MultipleShortTails", 2, 4, {200, 313, 511}},
    {"fla test_cp_conv.py CP2_GlobalLen1Sequence", 2, 4, {512, 1, 511}},
    {"fla test_cp_conv.py CP4_MultipleShortTails", 4, 4, {257, 253, 257, 257}},
    {"fla test_cp_conv.py CP4_WorstCaseManyLen1", 4, 4, {257, 1, 253, 257, 1, 253, 2}},
    {"attention-gym 416, packed", 2, 4, {64, 256, 64}},
    {"attention-gym 416, a halo over several ranks", 2, 8, {1, 9}},
    {"attention-gym 416, a halo over several ranks", 5, 8, {1, 9}},
    {"miles 957, odd parts", 2, 4, {10, 8}},
    {"miles 957, lengths that W does not divide", 2, 4, {7, 9}},
    {"miles 957, lengths that 2W does not divide", 4, 4, {12, 20}},
    {"miles slice_with_cp, ranks of nothing but padding", 4, 4, {3}},
    {"miles slice_with_cp, ranks of nothing but padding", 8, 4, {1, 0}},
    {"twinkle test_twinkle_qwen3_5_text_model.py, packed", 2, 4, {3, 5}},
};

} // namespace

TEST_SUITE("ops") {
    using cpx::index;

    TEST_CASE_TEMPLATE("the convolution is the same formula on every sharding, and the same bits", T, float, double) {
        for (auto const& p : problems<T>()) {
            CAPTURE(support::text(p.batch));
            CAPTURE(p.taps);
            auto const alone = run(p, one_rank(p.batch));
            // K products and one activation, each within a rounding
            CHECK(relative_error(alone, run(p.template as<double>())) <=
                  2 * static_cast<double>(p.taps + 2) * std::numeric_limits<T>::epsilon());
            for (int const ranks : rank_counts)
                for_each_sharding(p.batch, ranks, {1, 5}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    CHECK(same_bits(run(p, sharding), alone));
                });
            for_each_typed_sharding(p.batch, [&](std::string const& name, auto const& sharding) {
                CAPTURE(name);
                CHECK(same_bits(run(p, sharding), alone));
            });
        }
    }

    TEST_CASE_TEMPLATE("the convolution by heads gives the bits of one rank, uneven or few as the heads may be", T,
                       float, double) {
        std::vector<cpx::section> const qkv{{2, 3}, {2, 3}, {6, 2}};
        for (auto const& packing : std::vector<std::vector<index>>{{5, 1, 0, 12}, {}, {1, 2}}) {
            auto const p = random_conv<T>(lengths(packing), width(qkv), 4, true, cpx::activation::silu, 7);
            auto const alone = run(p, one_rank(p.batch));
            for (int const ranks : rank_counts) {
                CAPTURE(ranks);
                CHECK(same_bits(run(p, cpx::head_sharded<>(ranks, p.batch, qkv), qkv), alone));
                CHECK(same_bits(run(p, cpx::head_sharded<>(ranks, p.batch, {{width(qkv), 1}})), alone));
            }
        }
    }

    TEST_CASE("the convolution passes the forward scenarios of peers") {
        for (scenario const& s : peers) {
            CAPTURE(s.source);
            auto const p = random_conv<float>(lengths(s.lengths), 128, s.taps, true, cpx::activation::silu, 11);
            auto const alone = run(p, one_rank(p.batch));
            CHECK(relative_error(alone, run(p.as<double>())) <= 1e-6);
            CHECK(same_bits(run(p, cpx::shard<cpx::scope::batch>(p.batch, cpx::sequential<>(s.ranks))), alone));
            CHECK(same_bits(run(p, cpx::shard(p.batch, cpx::zigzag<>(s.ranks))), alone));
        }
    }

    TEST_CASE("a token changes no bit of another sequence and of no token before it, not even by NaN") {
        for (index const taps : {2, 4, 8}) {
            auto const p = random_conv<float>(lengths({9, 1, 14, 0, 3}), 4, taps, true, cpx::activation::silu, 3);
            for (float const change : {0.5f, std::numeric_limits<float>::quiet_NaN()})
                for (int const ranks : {1, 3, 5})
                    for_each_sharding(p.batch, ranks, {1}, [&](std::string const& name, auto const& sharding) {
                        CAPTURE(name);
                        auto const before = run(p, sharding);
                        for (index const row : {0, 8, 9, 10, 17, 23, 24}) {
                            CAPTURE(row);
                            auto other = p;
                            for (index d = 0; d < 4; ++d) other.x[static_cast<std::size_t>(row * 4 + d)] += change;
                            auto const after = run(other, sharding);
                            index const end = std::min(p.batch.offset(p.batch.sequence(row) + 1), row + taps);
                            CHECK(same_rows(after, before, 4, 0, row));
                            CHECK(same_rows(after, before, 4, end, p.batch.tokens()));
                            for (index changed = row; changed < end; ++changed)
                                CHECK_FALSE(same_rows(after, before, 4, changed, changed + 1));
                        }
                    });
        }
    }

    TEST_CASE("the convolution rejects what does not fit, before anything moves") {
        auto const batch = lengths({6, 5}), other = lengths({5, 6});
        auto const sharding = cpx::shard(batch, cpx::zigzag<>(1));
        using S = cpx::sharding<cpx::zigzag<>>;
        std::vector<float> const weight(12), bias(3);
        std::vector<float> values(33);
        cpx::rows<float const> const w(weight, 4);
        cpx::sharded<float, S> const x({values, 3}, sharding),
            y = x, foreign({values, 3}, cpx::shard(other, cpx::zigzag<>(1)));
        cpx::sharded<float, S> const narrow = x.columns(0, 2), low(x.data().sub(0, 10), sharding);
        auto const plan = halo(sharding, 0, 3);
        auto const call = [](auto const& p, auto const& from, auto const& taps, std::span<float const> b,
                             auto const& to) {
            return [=] {
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    cpx::causal_conv1d(p, from, taps, b, cpx::activation::none, to, comm);
                });
            };
        };
        support::rejects({"causal_conv1d.cpp", "causal_conv1d: rows before a segment in the plan: expected 3, got 2"},
                         call(halo(sharding, 0, 2), x, w, {}, y));
        support::rejects({"causal_conv1d: sharding of x and y: expected the plan's"}, call(plan, foreign, w, {}, y));
        support::rejects({"causal_conv1d: sharding of x and y: expected the plan's"}, call(plan, x, w, {}, foreign));
        support::rejects({"size of bias: expected 3, got 2"}, call(plan, x, w, std::span(bias).first(2), y));
        support::rejects({"shape of weight: expected (3, 4), got (2, 4)"}, call(plan, x, w.sub(0, 2), {}, y));
        support::rejects({"shape of y: expected (11, 3), got (11, 2)"}, call(plan, x, w, {}, narrow));
        support::rejects({"shape of x: expected (11, 3), got (10, 3)"}, call(plan, low, w, {}, y));
        support::rejects({"shape of y: expected (11, 3), got (10, 3)"}, call(plan, x, w, {}, low));
        CHECK(support::message(call(plan, x, w, bias, y)) == "");
    }
}
