// SPDX-License-Identifier: Apache-2.0
// Contexts, relayouts and cases that other libraries test, document or get wrong, run through cpx's plans.
#include <cpx/plan/carry.hpp>

#include <cpx/cpx.hpp>

#include <doctest/doctest.h>

#include <law.hpp>

namespace {

using namespace support;
using cpx::index_t;
using cpx::scope;
using list = std::vector<index_t>;

/// What flash-linear-attention's build_cp_context gives a rank: offsets of its rows, the ranks before and after that
/// share its first and its last sequence, and the tokens before it in its first sequence.
struct context {
    int rank;
    list offsets;
    index_t ranks_before, ranks_after, tokens_before;
};

struct context_case {
    list offsets;
    int ranks;
    std::vector<context> contexts;
};

std::vector<context_case> const contexts = {
    {{0, 8, 20}, 2, {{0, {0, 8, 10}, 0, 1, 0}, {1, {0, 10}, 1, 0, 2}}},
    {{0, 5, 12}, 3, {{0, {0, 4}, 0, 1, 0}, {1, {0, 1, 4}, 1, 1, 4}, {2, {0, 4}, 1, 0, 3}}},
    {{0, 700, 1024},
     4,
     {{0, {0, 256}, 0, 2, 0}, {1, {0, 256}, 1, 1, 256}, {2, {0, 188, 256}, 2, 1, 512}, {3, {0, 256}, 1, 0, 68}}},
    {{0, 257, 258, 511, 768, 769, 1022, 1024},
     4,
     {{0, {0, 256}, 0, 1, 0},
      {1, {0, 1, 2, 255, 256}, 1, 1, 256},
      {2, {0, 256}, 1, 0, 1},
      {3, {0, 1, 254, 256}, 0, 0, 0}}},
    {{0, 16, 40}, 4, {{0, {0, 10}, 0, 1, 0}, {1, {0, 6, 10}, 1, 2, 10}, {2, {0, 10}, 1, 1, 4}, {3, {0, 10}, 2, 0, 14}}},
    // Totals that fla rejects, because ranks do not divide them or outnumber the tokens.
    {{0, 10}, 3, {{0, {0, 3}, 0, 2, 0}, {1, {0, 3}, 1, 1, 3}, {2, {0, 4}, 2, 0, 6}}},
    {{0, 2}, 3, {{0, {0}, 0, 0, 0}, {1, {0, 1}, 0, 1, 0}, {2, {0, 1}, 1, 0, 1}}}};

/// Lengths with which peers' relayouts, gathers or neighbour exchanges went wrong.
struct wrong_elsewhere {
    char const* what;
    int ranks;
    list lengths;
};

std::vector<wrong_elsewhere> const wrong = {
    {"a context over the whole pack instead of its sequences", 2, {128, 128}},
    {"a context over the whole pack instead of its sequences", 4, {64, 192, 256}},
    {"a peer that is always 1 - rank", 3, {12, 7, 30}},
    {"a peer that is always 1 - rank", 5, {12, 7, 30}},
    {"odd local lengths lose a token", 2, {10, 8}},
    {"lengths that W does not divide", 2, {7, 9}},
    {"lengths that 2W does not divide", 2, {6, 10}},
    {"lengths that 2W does not divide", 4, {12, 20}},
    {"a rank without tokens", 4, {3}},
    {"a rank without tokens", 8, {1}},
    {"a sequence without tokens", 2, {8, 0, 4}},
    {"torch.chunk gives 3 chunks of 6 tokens", 2, {6}},
    {"rows per sequence fed to an operator over the batch", 2, {8, 12}},
    {"Transformer Engine's round trip", 4, {8, 16, 16}},
    {"Transformer Engine's round trip", 4, {8, 8, 8, 16}},
    {"Megatron's fused THD all-to-all", 4, {32, 32, 32, 32}},
    {"Megatron's fused THD all-to-all", 2, {16, 32, 32}},
    {"Megatron rejects 1008 tokens cut at 505", 2, {505, 503}},
    {"a convolution whose halo spans ranks", 2, {1, 9}},
};

TEST_SUITE("plan") {
    TEST_CASE("contexts are flash-linear-attention's, also for totals that it rejects") {
        for (context_case const& c : contexts) {
            cpx::thd const batch(c.offsets);
            auto const sharding = cpx::shard<scope::batch>(batch, cpx::sequential<>{c.ranks});
            std::vector<index_t> chain(static_cast<std::size_t>(batch.sequences())); // segments of each sequence
            for (int r = 0; r < c.ranks; ++r)
                for (cpx::segment const& s : cpx::segments(sharding, r)) ++chain[static_cast<std::size_t>(s.sequence)];
            for (context const& want : c.contexts) {
                CAPTURE(text(batch));
                CAPTURE(want.rank);
                auto const plan = cpx::carry<cpx::scan>(sharding, want.rank);
                CHECK(cpx::offsets(plan.segments) == want.offsets);
                if (plan.segments.empty()) continue;
                index_t const last =
                    static_cast<index_t>(chain[static_cast<std::size_t>(plan.segments.back().sequence)]) - 1;
                CHECK(plan.links.front().level == want.ranks_before);
                CHECK(last - plan.links.back().level == want.ranks_after);
                CHECK(plan.segments.front().token == want.tokens_before);
                index_t const rows = cpx::halo(sharding, want.rank, 3).target_rows; // a convolution of 4
                CHECK(rows == std::min<index_t>(3, want.tokens_before));
            }
        }
    }

    TEST_CASE("all laws hold for the lengths that went wrong elsewhere") {
        for (wrong_elsewhere const& c : wrong) {
            cpx::thd const batch = lengths(c.lengths);
            std::vector<law::subject> subjects = {
                law::replicated(batch, c.ranks),
                law::heads(batch, c.ranks, {{8, 1}, {8, 1}, {4, 2}, {16, 1}, {32, 1}, {4, 1}}),
                law::heads(batch, c.ranks, {{2, 1}, {4, 1}})};
            for (spec const& s : all_specs(c.ranks, {0, 64})) subjects.push_back(law::tokens(batch, s));
            std::string const problem = law::all_pairs(subjects);
            CHECK_MESSAGE(problem.empty(), std::string(c.what) << ": " << problem);
        }
    }

    // miles' test of its relayout: sequences of 3 and 5 rows a chunk and a tail pad of 3 (or 4) rows on every rank. Its
    // gradient is that of a sum, all ones, which a wrong inverse passes; here every place has its own gradient.
    TEST_CASE("miles' relayout, its way back and its gradient are exact, with odd and even tail pads") {
        for (int const w : {2, 4})
            for (index_t const pad : {3, 4}) {
                cpx::thd const batch = lengths({3 * 2 * w, 5 * 2 * w, pad * w});
                auto const rule = [w](index_t n) { return n % (2 * w) == 0; };
                auto const zigzag = cpx::shard(batch, cpx::by_length{cpx::zigzag<>{w}, cpx::sequential<>{w}, rule});
                auto const packed = cpx::shard<scope::batch>(batch, cpx::sequential<>{w});
                std::vector<cpx::plan> there, back;
                law::matrix rows, packed_rows;
                for (int r = 0; r < w; ++r) {
                    there.push_back(cpx::relayout(zigzag, packed, r));
                    back.push_back(cpx::relayout(packed, zigzag, r));
                    for (auto* m : {&rows, &packed_rows}) m->emplace_back();
                    auto const collect = [](list& into) {
                        return [&into](cpx::range piece) {
                            for (index_t row = piece.first; row < piece.last; ++row) into.push_back(row);
                        };
                    };
                    zigzag.for_each_piece(r, collect(rows.back()));
                    packed.for_each_piece(r, collect(packed_rows.back()));
                    CHECK(rows.back().size() == static_cast<std::size_t>(3 * 2 + 5 * 2 + pad));
                    CHECK(back.back() == there.back().transposed());
                }
                CHECK(disagreement(there).empty());
                CHECK(execute(there, rows, 1, index_t{-1}) == packed_rows);
                CHECK(execute(back, packed_rows, 1, index_t{-1}) == rows);
                CHECK(execute(transposed(there), packed_rows, 1, index_t{-1}) == rows);
            }
    }

    TEST_CASE("a relayout of hidden states takes two messages a rank where miles gathers from all") {
        auto const batch = cpx::thd::uniform(1, 65536);
        auto const a = cpx::shard(batch, cpx::zigzag<8>{});
        auto const b = cpx::shard(batch, cpx::sequential<8>{});
        for (int r = 0; r < 8; ++r) {
            auto const p = cpx::relayout(a, b, r);
            CHECK(p.messages() <= 2);
            CHECK(p.sent_elements(2048) * 2 <= index_t{32} << 20); // bf16: 32 MiB, against 224 MiB received there
        }
    }

    TEST_CASE("many tiny sequences make one message a peer") {
        for (int const w : {2, 3, 4, 8}) {
            auto const batch = cpx::thd::uniform(4 * w, 2 * w);
            for (int r = 0; r < w; ++r) {
                auto const p =
                    cpx::relayout(cpx::shard(batch, cpx::zigzag<>{w}), cpx::shard(batch, cpx::sequential<>{w}), r);
                CHECK(p.messages() <= 2);
                CHECK(p.source_rows == 8 * w);
            }
        }
    }
}

} // namespace
