// SPDX-License-Identifier: Apache-2.0
// Convolutions that other projects test: y, dx, dweight and dbias against one rank and against plain formulas in
// double.
#include <cpx/ops/causal_conv1d.hpp>

#include <peers/cases.hpp>

#include <ops/backward.hpp>

namespace {

using cpx::index_t;
using on_ranks::same_bits;
using peers::list, peers::ratio;
using reference::conv;

struct convolution {
    char const *id, *source;
    int ranks;
    list lengths;
    index_t taps = 4;
    double scale = 100;      ///< of x
    double tolerance = 1e-3; ///< the peer's, by its measure
    cpx::activation act = cpx::activation::silu;
};

constexpr index_t channels = 128;

/// flash-linear-attention has T = 1024, 128 channels, 4 taps, a bias, swish and x times 100, in float32.
std::vector<convolution> const cases = {
    {"F1", "fla tests/context_parallel/test_cp_conv.py CP2_SequenceCut", 2, {300, 400, 324}},
    {"F2", "fla test_cp_conv.py CP2_BoundaryAligned, nothing moves", 2, {512, 512}},
    {"F3", "fla test_cp_conv.py CP4_Complex", 4, {700, 324}},
    {"F4", "fla test_cp_conv.py CP4_SingleSequence", 4, {1024}},
    {"F5", "fla test_cp_conv.py CP2_ManyShortSequences", 2, {100, 150, 200, 250, 124, 100, 100}},
    {"F6a", "fla test_cp_conv.py CP2_ShortTail_Len1", 2, {513, 511}},
    {"F6b", "fla test_cp_conv.py CP2_ShortTail_Len2", 2, {514, 510}},
    {"F7", "fla test_cp_conv.py CP4_EveryRankShortTail", 4, {257, 255, 257, 255}},
    {"F8a", "fla test_cp_conv.py CP2_MultipleShortTails", 2, {200, 313, 511}},
    {"F8b", "fla test_cp_conv.py CP2_GlobalLen1Sequence", 2, {512, 1, 511}},
    {"F9", "fla test_cp_conv.py CP4_MultipleShortTails", 4, {257, 253, 257, 257}},
    {"F10", "fla test_cp_conv.py CP4_WorstCaseManyLen1", 4, {257, 1, 253, 257, 1, 253, 2}},
    {"Z1a", "attention-gym PR 416, --sequence-lengths 64,256,64", 2, {64, 256, 64}, 4, 1},
    {"Z1b", "attention-gym PR 416, --sequence-lengths 1,9 --short-conv-kernel-size 8", 2, {1, 9}, 8, 1},
    {"Z1c", "attention-gym PR 416, the same on ranks of two tokens", 5, {1, 9}, 8, 1},
    {"Z1d", "attention-gym PR 416, the same on more ranks than tokens", 12, {1, 9}, 8, 1},
    {"K1a", "twinkle tests, tiny Qwen3.5, packed 3 and 5 on two ranks", 2, {3, 5}, 4, 1},
};

/// A token shift is a convolution of two taps without activation: x_{t-1} - x_t.
std::vector<convolution> const token_shifts = {
    {"G12a", "fla tests/context_parallel, token shift, CP2_SequenceCut", 2, {300, 400, 324}},
    {"G12b", "fla token shift, CP2_BoundaryAligned", 2, {512, 512}},
    {"G12c", "fla token shift, CP4_Complex", 4, {700, 324}},
    {"G12d", "fla token shift, CP4_SingleSequence", 4, {1024}},
    {"G12e", "fla token shift, CP2_ManyShortSequences", 2, {100, 150, 200, 250, 124, 100, 100}},
    {"G12f", "fla token shift, CP2_ShortTail_Len1", 2, {513, 511}},
    {"G12g", "fla token shift, CP2_ShortTail_Len2", 2, {514, 510}},
};

/// dz = dy act'(z), dx_t = sum_j w_j dz_{t+K-1-j}, dw_j = sum_t dz_t x_{t-K+1+j}, db = sum_t dz_t, in its sequence.
conv<double> gradient(conv<double> const& p, std::vector<double> const& dy) {
    using std::size_t;
    auto linear = p;
    linear.act = cpx::activation::none;
    auto dz = reference::run(linear);
    for (size_t i = 0; i < dz.size(); ++i) {
        double const sigmoid = 1 / (1 + std::exp(-dz[i]));
        dz[i] = p.act == cpx::activation::silu ? dy[i] * sigmoid * (1 + dz[i] * (1 - sigmoid)) : dy[i];
    }
    conv<double> d = p;
    for (auto* values : {&d.x, &d.weight, &d.bias}) std::ranges::fill(*values, 0.0);
    for (index_t row = 0; row < p.batch.tokens(); ++row)
        for (index_t c = 0; c < p.channels; ++c) {
            double const g = dz[static_cast<size_t>(row * p.channels + c)];
            d.bias[static_cast<size_t>(c)] += g;
            for (index_t j = 0; j < p.taps; ++j)
                if (index_t const from = row - p.taps + 1 + j; from >= p.batch.offset(p.batch.sequence(row))) {
                    auto const x = static_cast<size_t>(from * p.channels + c), w = static_cast<size_t>(c * p.taps + j);
                    d.x[x] += g * p.weight[w];
                    d.weight[w] += g * p.x[x];
                }
        }
    return d;
}

void check(convolution const& c, conv<float> const& p) {
    support::splitmix numbers(5);
    auto const dy = on_ranks::uniform<float>(numbers, p.batch.tokens() * p.channels);
    auto const formula = run(p.as<double>());
    auto const formula_gradient = gradient(p.as<double>(), on_ranks::cast<double>(dy));
    auto const alone = on_ranks::one_rank(p.batch);
    auto const one = run(p, alone);
    auto const one_gradient = gradient(p, dy, alone, cpx::sum_order::by_row);
    // What cpx reaches: K roundings and an activation in y and dx, sums over 1024 tokens in dweight and dbias.
    double const reached = 1e-6;
    CHECK(reached < c.tolerance);
    peers::shardings(p.batch, c.ranks, 64, [&](std::string const& name, auto const& sharding) {
        CAPTURE(name);
        auto const y = run(p, sharding);
        CHECK(same_bits(y, one));
        CHECK(ratio(y, formula) <= reached);
        for (auto const order : {cpx::sum_order::by_rank, cpx::sum_order::by_row}) {
            auto const d = gradient(p, dy, sharding, order);
            CHECK(same_bits(d.x, one_gradient.x));
            CHECK(ratio(d.x, formula_gradient.x) <= reached);
            CHECK(ratio(d.weight, formula_gradient.weight) <= reached);
            CHECK(ratio(d.bias, formula_gradient.bias) <= reached);
            if (order == cpx::sum_order::by_row) {
                CHECK(same_bits(d.weight, one_gradient.weight));
                CHECK(same_bits(d.bias, one_gradient.bias));
            }
        }
    });
}

} // namespace

TEST_SUITE("peers") {
    using cpx::index_t;

    TEST_CASE("convolutions of peers have their results and gradients, and the bits of one rank") {
        peers::each(cases, [](convolution const& c) {
            auto p = reference::random_conv<float>(support::lengths(c.lengths), channels, c.taps, true, c.act, 11);
            for (float& x : p.x) x *= static_cast<float>(c.scale);
            check(c, p);
        });
    }

    TEST_CASE("token shifts of peers have their results and gradients, and the bits of one rank") {
        peers::each(token_shifts, [](convolution const& c) {
            auto p = reference::random_conv<float>(support::lengths(c.lengths), channels, 2, true,
                                                   cpx::activation::none, 12);
            for (std::size_t i = 0; i < p.weight.size(); ++i) p.weight[i] = i % 2 ? -1.f : 1.f;
            std::ranges::fill(p.bias, 0.f);
            check(c, p);
            auto const shifted = run(p, cpx::shard<cpx::scope::batch>(p.batch, cpx::sequential<>(c.ranks)));
            for (index_t row = 0; row < p.batch.tokens(); ++row)
                for (index_t d = 0; d < channels; d += 17) {
                    auto const i = static_cast<std::size_t>(row * channels + d);
                    bool const first = row == p.batch.offset(p.batch.sequence(row));
                    CHECK(shifted[i] == (first ? 0.f : p.x[i - channels]) - p.x[i]);
                }
        });
    }
}
