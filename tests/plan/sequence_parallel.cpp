// SPDX-License-Identifier: Apache-2.0
// Shardings by pieces, and those over TP ranks for each rank of another: laws of every sharding.
#include <cpx/layout/sequence_parallel.hpp>

#include <doctest/doctest.h>

#include <law.hpp>
#include <support/rejects.hpp>

namespace {

using namespace support;
using cpx::index_t;
using list = std::vector<index_t>;

/// Cuts the rows of every rank of `s` into `tp` shares, row by row.
law::subject over_tp(cpx::thd const& batch, spec const& s, int tp) {
    law::subject const cp = law::tokens(batch, s);
    auto const& sharding = std::get<any_tokens>(cp.sharding);
    law::subject a{cp.name + " over " + std::to_string(tp),
                   any_tokens(cpx::sequence_parallel(sharding, tp)),
                   std::vector<int>(cp.owners.size()),
                   {},
                   s.ranks * tp,
                   {}};
    for (int r = 0; r < s.ranks; ++r) {
        list const& rows = cp.rows[static_cast<std::size_t>(r)];
        index_t const count = std::ssize(rows);
        for (int t = 0; t < tp; ++t) {
            auto const begin = rows.begin();
            a.rows.emplace_back(begin + count * t / tp, begin + count * (t + 1) / tp);
            for (index_t const row : a.rows.back()) a.owners[static_cast<std::size_t>(row)] = t + tp * r;
        }
    }
    return a;
}

/// Returns a sharding that gives runs of random lengths to random ranks.
law::subject random_pieces(cpx::thd const& batch, int ranks, splitmix& numbers) {
    law::subject a{"pieces", cpx::shard(batch, cpx::sequential<>(ranks)), {}, {},
                   ranks,    law::matrix(static_cast<std::size_t>(ranks))};
    std::vector<cpx::owned_piece> pieces;
    for (index_t row = 0; row < batch.tokens();) {
        index_t const last = std::min(batch.tokens(), row + numbers.between(0, 6));
        int const rank = static_cast<int>(numbers.between(0, ranks - 1));
        pieces.push_back({{row, last}, rank});
        for (; row < last; ++row) {
            a.owners.push_back(rank);
            a.rows[static_cast<std::size_t>(rank)].push_back(row);
        }
    }
    a.sharding = any_tokens(cpx::piecewise<>(ranks, batch, pieces));
    return a;
}

} // namespace

TEST_SUITE("plan") {
    TEST_CASE("all laws hold between shardings over CP x TP, by pieces, by tokens, by heads and replicated") {
        splitmix numbers(5);
        for (auto const& [cp, tp] : std::vector<std::pair<int, int>>{{1, 1}, {1, 3}, {2, 2}, {3, 1}, {2, 3}, {3, 2}})
            for (int turn = 0; turn < 4; ++turn) {
                list some;
                for (index_t n = numbers.between(0, 4); n > 0; --n) some.push_back(numbers.between(0, 30));
                cpx::thd const batch = lengths(some);
                auto const inner = all_specs(cp, {0, 2}, numbers.next() % 1000),
                           outer = all_specs(cp * tp, {0, 2}, numbers.next() % 1000);
                std::vector<law::subject> subjects = {law::replicated(batch, cp * tp),
                                                      law::heads(batch, cp * tp, {{4, 2}, {2, 1}}),
                                                      random_pieces(batch, cp * tp, numbers)};
                for (int k = 0; k < 3; ++k) {
                    subjects.push_back(over_tp(batch, inner[numbers.next() % inner.size()], tp));
                    subjects.push_back(law::tokens(batch, outer[numbers.next() % outer.size()]));
                }
                std::string const problem = law::all_pairs(subjects);
                CHECK_MESSAGE(problem.empty(), problem << ", lengths " << text(batch));
            }
    }

    // Megatron-Bridge cuts the mask of a dense row in TP 2 CP chunks: which of them a rank has.
    TEST_CASE("rows of CP x TP are Megatron-Bridge's") {
        auto const held = [](int cp, int tp) {
            auto const s =
                cpx::sequence_parallel(cpx::shard<cpx::scope::batch>(lengths({2 * cp * tp}), cpx::zigzag<>(cp)), tp);
            std::vector<list> rows;
            for (int r = 0; r < cp * tp; ++r) {
                rows.emplace_back();
                s.for_each_piece(r, [&](cpx::range piece) {
                    for (index_t row = piece.first; row < piece.last; ++row) rows.back().push_back(row);
                });
            }
            return rows;
        };
        CHECK(held(2, 2) == std::vector<list>{{0, 1}, {6, 7}, {2, 3}, {4, 5}});
        CHECK(held(2, 4) == std::vector<list>{{0, 1}, {2, 3}, {12, 13}, {14, 15}, {4, 5}, {6, 7}, {8, 9}, {10, 11}});
    }

    TEST_CASE("shardings by pieces are equal if they give every row to the same rank") {
        auto const make = [](std::vector<cpx::owned_piece> const& pieces) {
            return cpx::piecewise<>(2, lengths({4}), pieces);
        };
        auto const a = make({{{0, 2}, 0}, {{2, 4}, 1}});
        CHECK(a == make({{{0, 1}, 0}, {{1, 1}, 1}, {{1, 2}, 0}, {{2, 4}, 1}}));
        CHECK(a != make({{{0, 2}, 1}, {{2, 4}, 0}}));
        CHECK(a == cpx::piecewise<>::by_counts(lengths({4}), {2, 2}));
        CHECK(cpx::relayout(a, a, 0).fingerprint() !=
              cpx::relayout(make({{{0, 2}, 1}, {{2, 4}, 0}}), a, 0).fingerprint());
        CHECK(make({{{0, 4}, 1}}).rows(0) == 0);
    }

    TEST_CASE("pieces that are no partition, and ranks that are none, are rejected") {
        auto const make = [](std::vector<cpx::owned_piece> const& pieces) {
            return cpx::piecewise<>(2, lengths({4}), pieces);
        };
        rejects({"sequence_parallel.cpp", "piecewise: rows of piece 1: expected some from 2, got 3 to 4"}, [&] {
            make({{{0, 2}, 0}, {{3, 4}, 1}});
        });
        rejects({"piecewise: rows of piece 1: expected some from 2, got 1 to 4"}, [&] {
            make({{{0, 2}, 0}, {{1, 4}, 1}});
        });
        rejects({"piecewise: rank of piece 0: expected 0 to 1, got 2"}, [&] { make({{{0, 4}, 2}}); });
        rejects({"piecewise: end of the last piece: expected 4, got 2"}, [&] { make({{{0, 2}, 0}}); });
        rejects({"piecewise: ranks"}, [] { cpx::piecewise<>(0, cpx::thd(), {}); });
        auto const zigzag = cpx::shard(lengths({8}), cpx::zigzag<>(2));
        rejects({"sequence_parallel.cpp", "sequence_parallel: tp: expected 1 to 524288, got 0"},
                [&] { cpx::sequence_parallel(zigzag, 0); });
        rejects({"piecewise::rows: rank: expected 0 to 5, got 6"},
                [&] { static_cast<void>(cpx::sequence_parallel(zigzag, 3).rows(6)); });
    }
}
