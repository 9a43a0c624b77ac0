// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/sections.hpp>

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/zigzag.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

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
    using cpx::index;
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
                index first = 0;
                for (cpx::section const& s : qkv) {
                    for (index head = 0; head < s.heads; ++head) {
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
        auto const call = [&](index count) {
            return [&, count] {
                cpx::local_rows(cpx::shard(batch, cpx::zigzag<3>{}), 0, qkv,
                                cpx::rows<int const>(values.data(), count, 2));
            };
        };
        support::rejects({"local_rows: rows of the weight: expected 18, got 19"}, call(19));
        support::rejects({"local_rows: rows of the weight: expected 18, got 17"}, call(17));
        CHECK(support::message(call(18)) == "");
    }
}
