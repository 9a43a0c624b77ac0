// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/sections.hpp>

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/zigzag.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

#include <cstddef>
#include <numeric>

namespace {

/// Returns (count, 2) elements that tell their row and column.
std::vector<int> numbered(int count) {
    std::vector<int> values(2 * static_cast<std::size_t>(count));
    std::iota(values.begin(), values.end(), 0);
    return values;
}

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;
    cpx::thd const batch = cpx::thd::uniform(1, 4);
    std::vector<cpx::section> const qkv{{2, 3}, {2, 3}, {6, 1}};

    TEST_CASE("a rank that holds whole rows needs every row of a weight") {
        auto const values = numbered(18);
        auto const sharding = cpx::shard(batch, cpx::zigzag<3>{});
        for (int rank = 0; rank < 3; ++rank)
            CHECK(cpx::local_rows(sharding, rank, qkv, cpx::rows<int const>(values, 2)) == values);
    }

    TEST_CASE("a rank that holds heads needs their rows, section after section") {
        auto const values = numbered(18);
        for (int const ranks : {1, 2, 3, 4, 6, 9}) {
            cpx::head_sharded<> const sharding(ranks, batch, qkv);
            for (int rank = 0; rank < ranks; ++rank) {
                std::vector<int> expected;
                index_t first = 0;
                for (cpx::section const& s : qkv) {
                    for (index_t head = 0; head < s.heads; ++head) {
                        cpx::range const held = sharding.heads(rank, s.heads);
                        if (head < held.first || head >= held.last) continue;
                        auto const begin = values.begin() + (first + head * s.width) * 2;
                        expected.insert(expected.end(), begin, begin + s.width * 2);
                    }
                    first += s.heads * s.width;
                }
                CAPTURE(ranks);
                CAPTURE(rank);
                CHECK(cpx::local_rows(sharding, rank, qkv, cpx::rows<int const>(values, 2)) == expected);
            }
        }
        cpx::head_sharded<2> const two(batch, {{2, 1}});
        CHECK(cpx::local_rows(two, 1, two.sections(), cpx::rows<int const>(values.data(), 2, 2)) == std::vector{2, 3});
    }

    TEST_CASE("rows of a weight may lie in wider rows") {
        std::vector<int> const wide{0, 1, 9, 2, 3, 9};
        cpx::head_sharded<2> const two(batch, {{2, 1}});
        CHECK(cpx::local_rows(two, 1, two.sections(), cpx::rows<int const>(wide.data(), 2, 2, 3)) == std::vector{2, 3});
    }

    TEST_CASE("a weight of another number of rows is rejected") {
        auto const values = numbered(19);
        auto const call = [&](index_t count) {
            return [&, count] {
                cpx::local_rows(cpx::shard(batch, cpx::zigzag<3>{}), 0, qkv,
                                cpx::rows<int const>(values.data(), count, 2));
            };
        };
        support::rejects({"local_rows: rows of the weight: expected 18, got 19"}, call(19));
        support::rejects({"local_rows: rows of the weight: expected 18, got 17"}, call(17));
        auto const of = [&](std::vector<cpx::section> const& sections, int rank) {
            return
                [=] { cpx::local_rows(cpx::shard(batch, cpx::zigzag<3>{}), rank, sections, cpx::rows<int const>()); };
        };
        index_t const big = index_t{1} << 62;
        support::rejects({"sections.cpp", "local_rows: heads of section 1: expected 1 to ", "got -2"},
                         of({{2, 1}, {-2, 1}}, 0));
        support::rejects({"local_rows: width of section 1: expected 1 to ", "got 4611686018427387904"},
                         of({{2, 1}, {2, big}}, 0));
        support::rejects({"sections.cpp", "local_rows: rank: expected 0 to 2, got 3"}, of({}, 3));
        CHECK(support::message(call(18)) == "");
    }

    TEST_CASE("ranks' rows of a weight's gradient add up to the whole once, whoever holds the heads") {
        auto const values = numbered(18);
        for (int const ranks : {1, 2, 3, 4, 6, 9, 13}) {
            CAPTURE(ranks);
            auto const sum = [&](auto const& sharding, int start) {
                std::vector<int> all(values.size(), start);
                for (int rank = 0; rank < ranks; ++rank) {
                    auto const local = cpx::local_rows(sharding, rank, qkv, cpx::rows<int const>(values, 2));
                    cpx::add_local_rows(sharding, rank, qkv, cpx::rows<int const>(local, 2), cpx::rows<int>(all, 2));
                }
                return all;
            };
            auto const times = [&](int factor, int start) {
                std::vector<int> all;
                for (int const value : values) all.push_back(factor * value + start);
                return all;
            };
            CHECK(sum(cpx::head_sharded<>(ranks, batch, qkv), 0) == values);
            CHECK(sum(cpx::head_sharded<>(ranks, batch, qkv), 7) == times(1, 7));
            CHECK(sum(cpx::replicated<>(ranks, batch), 0) == values);
            // where tokens are sharded every rank adds to every row
            CHECK(sum(cpx::shard(batch, cpx::zigzag<>(ranks)), 7) == times(ranks, 7));
        }
        // rows of a gradient may lie in wider rows
        std::vector<int> wide{1, 1, 9, 1, 1, 9};
        std::vector<int> const own{5, 6};
        cpx::head_sharded<2> const two(batch, {{2, 1}});
        cpx::add_local_rows(two, 1, two.sections(), cpx::rows<int const>(own, 2), cpx::rows<int>(wide.data(), 2, 2, 3));
        CHECK(wide == std::vector{1, 1, 9, 6, 7, 9});
    }

    TEST_CASE("rows that do not fit are rejected before anything is added") {
        cpx::head_sharded<> const three(3, batch, qkv); // rank 0: head 0 of q and k, 2 of v
        std::vector<int> all(40, 1);
        auto const local = numbered(9);
        auto const call = [&](cpx::rows<int const> from, index_t count, index_t width) {
            return [&, from, count, width] {
                cpx::add_local_rows(three, 0, qkv, from, cpx::rows<int>(all.data(), count, width));
            };
        };
        cpx::rows<int const> const from(local, 2);
        auto const rejects = [&](std::string const& passage, auto const& f) {
            support::rejects({"add_local_rows: " + passage}, f);
            CHECK(all == std::vector<int>(40, 1));
        };
        std::string const counts = "rows of the weight, and of it on this rank: expected 18 and 8, got ";
        rejects(counts + "17 and 8", call(from.sub(0, 8), 17, 2));
        rejects(counts + "19 and 8", call(from.sub(0, 8), 19, 2));
        rejects(counts + "18 and 7", call(from.sub(0, 7), 18, 2));
        rejects(counts + "18 and 9", call(from, 18, 2));
        rejects("width of the rows on this rank: expected 1, got 2", call(from.sub(0, 8), 18, 1));
        rejects("width of the rows on this rank: expected 2, got 1", call(from.sub(0, 8).columns(0, 1), 18, 2));
        rejects("overlap of weight and local: expected none, got some", call({all.data() + 3, 8, 2}, 18, 2));
        CHECK(support::message(call(from.sub(0, 8), 18, 2)) == "");
    }
}
