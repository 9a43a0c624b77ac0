// SPDX-License-Identifier: Apache-2.0
#include <cpx/plan/segments.hpp>

#include <cpx/core/packing.hpp>
#include <cpx/plan/global_rows.hpp>

#include <doctest/doctest.h>

#include <law.hpp>
#include <support/rejects.hpp>

namespace {

using namespace support;
using cpx::index_t;
using cpx::segment;

/// Cuts the rows of a rank wherever the next row is not the next token of the same sequence.
std::vector<segment> brute_segments(cpx::thd const& batch, std::vector<index_t> const& rows) {
    std::vector<segment> list;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        index_t const s = batch.sequence(rows[i]);
        if (i > 0 && rows[i] == rows[i - 1] + 1 && s == list.back().sequence)
            ++list.back().count;
        else
            list.push_back({s, rows[i] - batch.offset(s), static_cast<index_t>(i), 1});
    }
    return list;
}

/// Returns what is wrong with the global rows and the slots of a sharding, or "".
std::string problem_of(cpx::thd const& batch, law::subject const& a) {
    return std::visit(
        [&](auto const& sharding) -> std::string {
            auto const back = cpx::slots(sharding);
            if (std::ssize(back) != batch.tokens()) return "slots of other rows";
            for (int r = a.ranks; r-- > 0;) {
                auto const& want = a.rows[static_cast<std::size_t>(r)];
                if (cpx::global_rows(sharding, r) != want) return "global rows of rank " + std::to_string(r);
                std::vector<index_t> of_pieces;
                for (cpx::range const piece : cpx::pieces(sharding, r))
                    for (index_t row = piece.first; row < piece.last; ++row) of_pieces.push_back(row);
                if (of_pieces != want) return "pieces of rank " + std::to_string(r);
                for (std::size_t i = 0; i < want.size(); ++i) {
                    cpx::slot const place = back[static_cast<std::size_t>(want[i])];
                    if (place != cpx::slot{a.owners.empty() ? 0 : r, static_cast<index_t>(i)})
                        return "slot of row " + std::to_string(want[i]);
                }
            }
            return "";
        },
        a.sharding);
}

TEST_SUITE("plan") {
    TEST_CASE("segments are the maximal runs of consecutive tokens of one sequence") {
        for (int ranks = 1; ranks <= 6; ++ranks)
            for (spec const& s : all_specs(ranks, {0, 2}))
                for (index_t tokens = 0; tokens <= 9 - fewer; ++tokens)
                    for_each_packing(tokens, [&](cpx::thd const& batch) {
                        auto const a = law::tokens(batch, s);
                        for (int r = 0; r < ranks; ++r) {
                            auto const got = cpx::segments(std::get<0>(a.sharding), r);
                            auto const want = brute_segments(batch, a.rows[static_cast<std::size_t>(r)]);
                            if (got != want) FAIL(a.name << ", rank " << r << ", lengths " << text(batch));
                        }
                        std::string const problem = problem_of(batch, a);
                        if (!problem.empty()) FAIL(a.name << ", lengths " << text(batch) << ": " << problem);
                    });
    }

    TEST_CASE("segments of random packings are those of brute force") {
        splitmix numbers(7);
        for (int turn = 0; turn < 300; ++turn) {
            int const ranks = static_cast<int>(numbers.between(1, 16));
            std::vector<index_t> list;
            for (index_t n = numbers.between(0, 20); n-- > 0;)
                list.push_back(numbers.between(0, 3) ? numbers.between(0, 90) : 0);
            auto const specs = all_specs(ranks, {0, 1, 3, 64}, numbers.next() % 1000);
            auto const a = law::tokens(lengths(list), specs[numbers.next() % specs.size()]);
            for (int r = 0; r < ranks; ++r)
                CHECK_MESSAGE(cpx::segments(std::get<0>(a.sharding), r) ==
                                  brute_segments(lengths(list), a.rows[static_cast<std::size_t>(r)]),
                              a.name << ", rank " << r << ", lengths " << text(lengths(list)));
            std::string const problem = problem_of(lengths(list), a);
            CHECK_MESSAGE(problem.empty(), a.name << ", lengths " << text(lengths(list)) << ": " << problem);
        }
    }

    TEST_CASE("where every rank holds every row, global rows are all rows, and slots name rank 0") {
        for (auto const& list : std::vector<std::vector<index_t>>{{}, {1}, {3, 0, 4}}) {
            CHECK(problem_of(lengths(list), law::replicated(lengths(list), 3)) == "");
            CHECK(problem_of(lengths(list), law::heads(lengths(list), 3, {{4, 2}, {2, 1}})) == "");
        }
    }

    // A loader has the batch whole: every rank takes its rows, and what it computes goes back to where it belongs.
    TEST_CASE("rows that are taken by global rows and put back by slots are the batch") {
        std::vector<int> const position_ids = {0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1},
                               token_ids = {5, 3, 8, 1, 9, 2, 7, 4, 6, 0, 15, 13, 18, 11, 19, 12, 17, 14, 16};
        int const ranks = 3;
        std::vector<int> all[ranks], again;
        for (int rank = 0; rank < ranks; ++rank) {
            std::vector<int>& mine = all[rank];
            cpx::thd const batch = cpx::thd_from_positions(position_ids, cpx::pad::joins_last_sequence);
            auto const sharding = cpx::shard(batch, cpx::zigzag<>(ranks));
            for (cpx::index_t const row : cpx::global_rows(sharding, rank)) mine.push_back(token_ids[row]);
            CHECK(std::ssize(mine) == sharding.rows(rank));
        }
        auto const sharding = cpx::shard(lengths({7, 1, 11}), cpx::zigzag<>(ranks));
        for (cpx::slot const home : cpx::slots(sharding)) again.push_back(all[home.rank][home.row]);
        CHECK(again == token_ids);
    }

    TEST_CASE("global rows of a rank that is not there, or beyond memory, are rejected") {
        auto const sharding = cpx::shard(lengths({index_t{1} << 50}), cpx::zigzag<2>{});
        rejects({"segments.cpp", "global_rows: rank: expected 0 to 1, got 2"}, [&] { cpx::global_rows(sharding, 2); });
        rejects({"segments.cpp", "pieces: rank: expected 0 to 1, got -1"}, [&] { cpx::pieces(sharding, -1); });
        CHECK(cpx::pieces(sharding, 0).size() == 2);
        if (!support::memory_ends) return;
        rejects({"segments.cpp", "global_rows: memory"}, [&] { cpx::global_rows(sharding, 0); });
        rejects({"segments.cpp", "slots: memory"}, [&] { cpx::slots(sharding); });
        rejects({"segments.cpp", "positions: memory"}, [&] { cpx::positions(cpx::segments(sharding, 0)); });
    }

    TEST_CASE("where every rank holds every row, segments are the sequences that have tokens") {
        auto const batch = lengths({3, 0, 4});
        std::vector<segment> const whole = {{0, 0, 0, 3}, {2, 0, 3, 4}};
        CHECK(cpx::segments(cpx::replicated<2>(batch), 1) == whole);
        CHECK(cpx::segments(cpx::head_sharded<>(3, batch, {{2, 1}}), 2) == whole);
    }

    TEST_CASE("the middle chunks of a zigzag, which lie side by side on the last rank, are one segment") {
        auto const a = cpx::shard(lengths({16}), cpx::zigzag<4>{});
        CHECK(cpx::segments(a, 3) == std::vector<segment>{{0, 6, 0, 4}});
        CHECK(cpx::segments(a, 0) == std::vector<segment>{{0, 0, 0, 2}, {0, 14, 2, 2}});
    }

    TEST_CASE("offsets are the local cu_seqlens and positions the places in the sequence") {
        auto const list = cpx::segments(cpx::shard(lengths({8, 12}), cpx::zigzag<2>{}), 0);
        CHECK(cpx::offsets(list) == std::vector<index_t>{0, 2, 4, 7, 10});
        CHECK(cpx::positions(list) == std::vector<index_t>{0, 1, 6, 7, 0, 1, 2, 9, 10, 11});
        CHECK(cpx::offsets({}) == std::vector<index_t>{0});
        CHECK(cpx::positions({}).empty());
    }
}

} // namespace
