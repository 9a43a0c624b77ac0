// SPDX-License-Identifier: Apache-2.0
// Gated delta net layers that other projects test, or that their relayouts got wrong: results and all gradients
// against one rank and each sequence alone, in place and by heads.
#include <cpx/ops/gated_delta_net_backward.hpp>

#include <cpx/core/packing.hpp>

#include <peers/cases.hpp>

#include <ops/backward.hpp>

namespace {

using cpx::index_t;
using on_ranks::same_bits, on_ranks::slice;
using peers::list, peers::ratio;
using reference::gradient, reference::gradient_by_heads, reference::layer, reference::run, reference::run_by_heads;

/// Layers, with chunks of 16 tokens.
using sizes = cpx::gated_delta_net_config; // hidden, {key heads, value heads, key and value dim}, taps, chunk
sizes const small{12, {2, 4, 4, 6}, 4, 16, 1e-6};
sizes const miles_module{32, {2, 4, 8, 8}, 4, 16, 1e-6};      // there: hidden 256, heads of 64
sizes const megatron{128, {4, 8, 32, 32}, 2, 16, 1e-6};       // as there
sizes const megatron_tp2{128, {2, 4, 32, 32}, 2, 16, 1e-6};   // what one of two TP ranks has of it
sizes const megatron_large{64, {4, 8, 8, 8}, 4, 16, 1e-6};    // there: hidden 2048, 16 and 32 heads of 128
sizes const twinkle_tiny{64, {2, 4, 16, 16}, 4, 16, 1e-6};    // as there
sizes const attention_gym_1{16, {1, 1, 16, 16}, 8, 16, 1e-6}; // there: hidden 64
sizes const attention_gym_2{32, {2, 2, 16, 16}, 4, 16, 1e-6}; // there: hidden 256

/// What cpx reaches in float32: some hundred roundings follow each other in a result, and sums over all tokens in the
/// gradients of weights.
constexpr double usual = 5e-6;

struct net {
    char const *id, *source;
    int ranks;
    sizes config;
    list lengths;
    double tolerance = 5e-3; ///< the peer's, in bfloat16
    double reached = usual;  ///< cpx's, in float32
};

/// Tokens are those of the peers, or divided as the source says. M8b: the norm takes back what beta does to the only
/// token of a sequence, so that the gradient of in_proj_b is the rest of a cancellation.
std::vector<net> const cases = {
    {"M1a", "miles PR 957, context over the whole pack", 2, small, {128, 128}},
    {"M1b", "miles PR 957, context over the whole pack", 4, small, {64, 192, 256}},
    {"M2a", "miles PR 957, the peer is 1 - rank", 1, small, {12, 7, 30}},
    {"M2b", "miles PR 957, the peer is 1 - rank", 2, small, {12, 7, 30}},
    {"M2c", "miles PR 957, the peer is 1 - rank", 3, small, {12, 7, 30}},
    {"M2d", "miles PR 957, the peer is 1 - rank", 4, small, {12, 7, 30}},
    {"M2e", "miles PR 957, the peer is 1 - rank", 5, small, {12, 7, 30}},
    {"M2f", "miles PR 957, the peer is 1 - rank", 8, small, {12, 7, 30}},
    {"M3", "miles PR 957, odd local length", 2, small, {10, 8}},
    {"M4", "miles PR 957, lengths that W does not divide", 2, small, {7, 9}},
    {"M5a", "miles PR 885, lengths that 2W does not divide", 2, small, {6, 10}},
    {"M5b", "miles PR 885, lengths that 2W does not divide", 4, small, {12, 20}},
    {"M8a", "miles slice_with_cp, ranks of padding only", 4, small, {3}},
    {"M8b", "miles slice_with_cp, ranks of padding only", 8, small, {1}, 5e-3, 2e-4},
    {"M8c", "miles slice_with_cp, a sequence of length 0 in cu_seqlens", 4, small, {5, 0, 0, 3, 0}},
    {"M9", "miles, 4W sequences of length 2W", 3, small, {6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6}},
    {"M13", "miles, torch.chunk of 6 tokens gives 3 chunks", 2, small, {6}},
    {"M14", "Megatron PR 3282, miles PR 957: rows by sequence in an operator over the batch", 2, small, {8, 12}},
    {"M-b2", "miles GDN module, T = 128 W divided by 4, two ranks", 2, miles_module, {64}, 1e-2},
    {"M-b4", "miles GDN module, T = 128 W divided by 4, four ranks", 4, miles_module, {128}, 1e-2},
    {"N1a", "Megatron tests/unit_tests/ssm/test_gated_delta_net.py, TP 1 CP 2, one row of 256", 2, megatron, {256}},
    {"N1b", "Megatron test_gated_delta_net.py, TP 1 CP 2, packed, 4 rows of 256 / 4", 2, megatron, {64, 64, 64, 64}},
    {"N1c", "Megatron test_gated_delta_net.py, TP 2 CP 2, half the heads", 2, megatron_tp2, {64, 64, 64, 64}},
    {"N2a", "Megatron test_gated_delta_net.py, THD against SBHD", 1, megatron_large, {32, 32, 32, 32}, 3e-4},
    {"N2b", "Megatron test_gated_delta_net.py, THD against SBHD", 2, megatron_large, {32, 32, 32, 32}, 3e-4},
    {"N4a", "Megatron test_gated_delta_net.py rejects cu_seqlens 0 505 1008", 2, small, {505, 503}},
    {"X1a", "fla rejects 10 tokens on 3 ranks, `divisible`", 3, small, {10}},
    {"X1b", "fla rejects 14 tokens on 4 ranks, `divisible`", 4, small, {14}},
    {"X1c", "fla rejects 2 tokens on 3 ranks, `at least`", 3, small, {2}},
    {"X2a", "fla build_cp_context of cu_seqlens 0 5 12", 3, small, {5, 7}},
    {"K1b", "twinkle tests, tiny Qwen3.5, packed 3 and 5, cut at 4 in a sequence", 2, twinkle_tiny, {3, 5}},
    {"K1c", "twinkle tests, tiny Qwen3.5, 2 rows of 8 left-padded", 2, twinkle_tiny, {5, 8}},
    {"Z1e", "attention-gym PR 416, --sequence-lengths 64,256,64 --heads 2", 2, attention_gym_2, {64, 256, 64}},
    {"Z1f", "attention-gym PR 416, --sequence-lengths 1,9 --short-conv-kernel-size 8", 2, attention_gym_1, {1, 9}},
};

template <class A, class B>
void check_near(layer<A> got, layer<B> expected, double reached = usual) {
    auto const a = inputs(got);
    auto const b = inputs(expected);
    for (std::size_t i = 0; i < a.size(); ++i) {
        CAPTURE(a[i].first);
        CHECK(ratio(*a[i].second, *b[i].second) <= reached);
    }
}

void check_same(layer<float> got, layer<float> expected) {
    auto const a = inputs(got), b = inputs(expected);
    for (std::size_t i = 0; i < a.size(); ++i) {
        CAPTURE(a[i].first);
        CHECK(same_bits(*a[i].second, *b[i].second));
    }
}

/// Checks that every sequence has the result and dx that it has alone, and weights the sums of what they get alone.
void check_sequences(layer<float> const& p, std::vector<float> const& dy, std::vector<float> const& y,
                     layer<float> const& d) {
    index_t const hidden = p.config.hidden;
    auto sums = d.as<double>();
    for (auto& w : sums.weights) std::ranges::fill(w, 0.0);
    for (index_t s = 0; s < p.batch.sequences(); ++s) {
        index_t const first = p.batch.offset(s), last = p.batch.offset(s + 1);
        auto own = p;
        own.batch = support::lengths({last - first});
        own.x = slice(p.x, hidden, first, last);
        auto const alone = on_ranks::one_rank(own.batch);
        CHECK(same_bits(slice(y, hidden, first, last), run<cpx::serial>(own, alone)));
        auto const own_d = gradient<cpx::serial>(own, slice(dy, hidden, first, last), alone, cpx::sum_order::by_row);
        CHECK(same_bits(slice(d.x, hidden, first, last), own_d.x));
        for (std::size_t w = 0; w < sums.weights.size(); ++w)
            for (std::size_t i = 0; i < sums.weights[w].size(); ++i)
                sums.weights[w][i] += static_cast<double>(own_d.weights[w][i]);
    }
    check_near(d, sums);
}

void check(net const& c) {
    auto const p = reference::random_layer<float>(support::lengths(c.lengths), c.config, true, 3);
    support::splitmix numbers(4);
    auto const dy = on_ranks::uniform<float>(numbers, p.batch.tokens() * c.config.hidden);
    auto const alone = on_ranks::one_rank(p.batch);
    auto const formula = run(p.as<double>());
    auto const precise =
        gradient<cpx::serial>(p.as<double>(), on_ranks::cast<double>(dy), alone, cpx::sum_order::by_rank);
    auto const one = run<cpx::serial>(p, alone);
    auto const one_gradient = gradient<cpx::serial>(p, dy, alone, cpx::sum_order::by_row);
    CHECK(c.reached < c.tolerance);
    CHECK(ratio(one, formula) <= c.reached);
    check_near(one_gradient, precise, c.reached);
    check_sequences(p, dy, one, one_gradient);
    auto const by_row = cpx::sum_order::by_row;
    peers::shardings(p.batch, c.ranks, 16, [&](std::string const& name, auto const& sharding) {
        CAPTURE(name);
        auto const compare = [&](std::vector<float> const& y, layer<float> const& d, bool exact) {
            CHECK(ratio(y, formula) <= c.reached);
            check_near(d, precise, c.reached);
            if (!exact) return;
            CHECK(same_bits(y, one));
            check_same(d, one_gradient);
        };
        compare(run<cpx::scan>(p, sharding), gradient<cpx::scan>(p, dy, sharding, cpx::sum_order::by_rank), false);
        compare(run<cpx::serial>(p, sharding), gradient<cpx::serial>(p, dy, sharding, by_row),
                cpx::is_exact<cpx::serial>(sharding, 16));
        compare(run_by_heads(p, sharding), gradient_by_heads(p, dy, sharding, by_row), true);
    });
}

/// Sequences that are padded at their ends.
struct padded_net {
    char const *id, *source;
    int ranks;
    sizes config;
    list valid, padded; ///< offsets
    double tolerance;
};

std::vector<padded_net> const padded_cases = {
    {"N3a",
     "Megatron test_gated_delta_net.py, cu_seqlens_padded",
     1,
     megatron_large,
     {0, 30, 60, 90, 120},
     {0, 32, 64, 96, 128},
     3e-4},
    {"N3b",
     "Megatron test_gated_delta_net.py, cu_seqlens_padded",
     2,
     megatron_large,
     {0, 30, 60, 90, 120},
     {0, 32, 64, 96, 128},
     3e-4},
    {"M8d", "miles slice_with_cp pads 3 tokens on 4 ranks: one is all padding", 4, small, {0, 3}, {0, 8}, 1e-2},
    {"M7a", "miles pads lengths, then every rank's rows", 2, small, {0, 5, 12, 12}, {0, 8, 16, 24}, 1e-2},
};

/// Returns the valid rows of a padded tensor.
std::vector<float> valid_rows(cpx::packing const& rows, std::vector<float> const& padded, index_t width) {
    std::vector<float> packed(static_cast<std::size_t>(rows.batch().tokens() * width));
    cpx::pack(rows, cpx::rows<float const>(padded, width), cpx::rows<float>(packed, width));
    return packed;
}

void check(padded_net const& c) {
    auto const batch = cpx::thd_from_cu_seqlens(c.valid, c.padded);
    auto const rows = cpx::unpadded(batch);
    auto const p = reference::random_layer<float>(batch, c.config, true, 6);
    auto without = p;
    without.batch = rows.batch();
    index_t const hidden = c.config.hidden;
    without.x = valid_rows(rows, p.x, hidden);
    support::splitmix numbers(8);
    auto const dy = on_ranks::uniform<float>(numbers, rows.batch().tokens() * hidden);
    std::vector<float> padded_dy(p.x.size()); // what is padding counts for no loss
    cpx::unpack(rows, cpx::rows<float const>(dy, hidden), cpx::rows<float>(padded_dy, hidden));
    auto const alone = on_ranks::one_rank(rows.batch());
    auto const y = run<cpx::serial>(without, alone);
    auto const d = gradient<cpx::serial>(without, dy, alone, cpx::sum_order::by_row);
    CHECK(usual < c.tolerance);
    peers::shardings(batch, c.ranks, 16, [&](std::string const& name, auto const& sharding) {
        CAPTURE(name);
        auto const compare = [&](std::vector<float> const& all, layer<float> gradient, bool exact) {
            auto const got = valid_rows(rows, all, hidden);
            CHECK(ratio(got, y) <= usual);
            if (exact) CHECK(same_bits(got, y)); // padding comes after the tokens that it might change
            gradient.x = valid_rows(rows, gradient.x, hidden);
            check_near(gradient, d);
        };
        auto const by_row = cpx::sum_order::by_row;
        compare(run<cpx::scan>(p, sharding), gradient<cpx::scan>(p, padded_dy, sharding, by_row), false);
        compare(run<cpx::serial>(p, sharding), gradient<cpx::serial>(p, padded_dy, sharding, by_row),
                cpx::is_exact<cpx::serial>(sharding, 16));
        compare(run_by_heads(p, sharding), gradient_by_heads(p, padded_dy, sharding, by_row), true);
    });
}

} // namespace

TEST_SUITE("peers") {
    using cpx::index_t;

    TEST_CASE("layers of peers have their results and gradients on every carry, exact ones the bits of one rank") {
        peers::each(cases, [](net const& c) { check(c); });
    }

    TEST_CASE("padding changes no bit of a valid row's result, and no gradient") {
        peers::each(padded_cases, [](padded_net const& c) { check(c); });
    }

    // The tokens of a padded batch of rows, as a tokenizer gives them, on ranks and each row alone.
    TEST_CASE("rows padded on the left are packed, run on ranks and put back") {
        peers::each(
            std::vector<net>{
                {"K1d", "twinkle tests, left-padded attention_mask of 2 rows of 8", 2, twinkle_tiny, {5, 8}}},
            [](net const& c) {
                list const mask{0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
                auto const rows = cpx::packing_from_mask(mask, 8, cpx::padding::left);
                CHECK(rows.batch() == support::lengths(c.lengths));
                auto p = reference::random_layer<float>(rows.batch(), c.config, true, 9);
                index_t const hidden = c.config.hidden;
                std::vector<float> padded(static_cast<std::size_t>(16 * hidden), on_ranks::poison<float>());
                cpx::unpack(rows, cpx::rows<float const>(p.x, hidden), cpx::rows<float>(padded, hidden));
                CHECK(same_bits(valid_rows(rows, padded, hidden), p.x));
                auto const zigzag = cpx::shard(rows.batch(), cpx::zigzag<>(c.ranks));
                auto const y = run_by_heads(p, zigzag);
                cpx::unpack(rows, cpx::rows<float const>(y, hidden), cpx::rows<float>(padded, hidden));
                for (index_t s = 0; s < 2; ++s) {
                    auto own = p;
                    own.batch = support::lengths({c.lengths[static_cast<std::size_t>(s)]});
                    own.x = slice(p.x, hidden, p.batch.offset(s), p.batch.offset(s + 1));
                    CHECK(same_bits(slice(padded, hidden, rows.start(s), 8 * (s + 1)),
                                    run<cpx::serial>(own, on_ranks::one_rank(own.batch))));
                }
                CHECK(std::ranges::all_of(slice(padded, hidden, 0, 3), [](float x) { return x == 0; }));
            });
    }
}
