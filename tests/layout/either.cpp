// SPDX-License-Identifier: Apache-2.0
#include <cpx/layout/either.hpp>

#include <cpx/cpx.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>
#include <support/rejects.hpp>

namespace {

using cpx::index_t;
using support::lengths;

static_assert(cpx::either<cpx::zigzag<2>, cpx::sequential<2>>{{}, {}, true}.chunks() == 4);
static_assert(cpx::either<cpx::zigzag<2>, cpx::sequential<2>>{{}, {}, false}.chunks() == 2);
static_assert(cpx::either<cpx::zigzag<2>, cpx::sequential<2>>{{}, {}, true}.owner(3) == 0);

std::vector<index_t> rows(auto const& sharding, int rank) {
    std::vector<index_t> list;
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t row = piece.first; row < piece.last; ++row) list.push_back(row);
    });
    return list;
}

TEST_SUITE("layout") {
    // miles relays out rows to zigzag where 2W divides a sequence, and takes other sequences (its tail pad) as
    // sequential.
    TEST_CASE("by_length is miles' rule") {
        auto const rule = [](index_t n) { return n % 4 == 0; };
        auto const sharding =
            cpx::shard(lengths({8, 6, 4}), cpx::by_length{cpx::zigzag<2>{}, cpx::sequential<2>{}, rule});
        CHECK(rows(sharding, 0) == std::vector<index_t>{0, 1, 6, 7, 8, 9, 10, 14, 17});
        CHECK(rows(sharding, 1) == std::vector<index_t>{2, 3, 4, 5, 11, 12, 13, 15, 16});
    }

    TEST_CASE("a rule that always or never holds is one of its layouts") {
        for (bool const answer : {true, false}) {
            auto const batch = lengths({9, 0, 1, 16});
            auto const rule = [answer](index_t) { return answer; };
            auto const mixed = cpx::shard(batch, cpx::by_length{cpx::zigzag<3>{}, cpx::sequential<3>{}, rule});
            for (int r = 0; r < 3; ++r)
                CHECK(rows(mixed, r) == (answer ? rows(cpx::shard(batch, cpx::zigzag<3>{}), r)
                                                : rows(cpx::shard(batch, cpx::sequential<3>{}), r)));
        }
    }

    TEST_CASE("over the batch a rule is asked for the length of the batch") {
        auto const rule = [](index_t n) { return n == 12; };
        auto const sharding = cpx::shard<cpx::scope::batch>(
            lengths({5, 7}), cpx::by_length{cpx::zigzag<2>{}, cpx::sequential<2>{}, rule});
        CHECK(rows(sharding, 0) == std::vector<index_t>{0, 1, 2, 9, 10, 11});
    }

    TEST_CASE("rules that hold nothing are compared by their type, others by what they choose of a batch") {
        auto const by = [](auto const& rule) { return cpx::by_length{cpx::zigzag<>{2}, cpx::sequential<>{2}, rule}; };
        auto const even = [](index_t n) { return n % 2 == 0; };
        static_assert(std::equality_comparable<decltype(by(even))>);
        CHECK(by(even) == by(even));
        CHECK_FALSE(by(even) == cpx::by_length{cpx::zigzag<>{2}, cpx::sequential<>{3}, even});
        auto const multiple = [](index_t of) { return [of](index_t n) { return n % of == 0; }; };
        static_assert(!std::equality_comparable<decltype(by(multiple(2)))>);
        CHECK(cpx::shard(lengths({8, 6}), by(multiple(2))) == cpx::shard(lengths({8, 6}), by(multiple(1))));
        CHECK_FALSE(cpx::shard(lengths({8, 7}), by(multiple(2))) == cpx::shard(lengths({8, 7}), by(multiple(1))));
    }

    TEST_CASE("layouts over other numbers of ranks do not go together") {
        for (index_t const longest : {4, 0, 100}) { // of one layout or the other, or both
            auto const rule = [longest](index_t n) { return n > longest; };
            auto const over = [&](int first, int second) {
                return [=] {
                    cpx::shard(lengths({8, 4}), cpx::by_length{cpx::zigzag<>{first}, cpx::sequential<>{second}, rule});
                };
            };
            std::string const text = "sharding: ranks of the second layout of by_length: expected ";
            support::rejects({"either.cpp", text + "2, got 4"}, over(2, 4));
            support::rejects({"either.cpp", text + "4, got 2"}, over(4, 2)); // two ranks would never have rows of it
        }
    }
}

} // namespace
