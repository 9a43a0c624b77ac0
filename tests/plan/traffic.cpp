// SPDX-License-Identifier: Apache-2.0
#include <cpx/plan/traffic.hpp>

#include <doctest/doctest.h>

#include <law.hpp>
#include <support/rejects.hpp>

namespace {

using namespace support;
using cpx::index_t;

TEST_SUITE("plan") {
    TEST_CASE("traffic counts the rows of every pair of ranks") {
        for (int ranks : {1, 2, 3, 5, 8})
            for (auto const& list : std::vector<std::vector<index_t>>{{}, {8, 12}, {7, 0, 1, 100}, {64, 65, 3}}) {
                auto const batch = lengths(list);
                for (spec const& from : all_specs(ranks, {0, 3}))
                    for (spec const& to : all_specs(ranks, {0, 64}, 2)) {
                        auto const a = law::tokens(batch, from), b = law::tokens(batch, to);
                        std::vector<index_t> want(static_cast<std::size_t>(ranks * ranks));
                        for (std::size_t row = 0; row < a.owners.size(); ++row)
                            ++want[static_cast<std::size_t>(a.owners[row] * ranks + b.owners[row])];
                        auto const got = cpx::traffic(std::get<0>(a.sharding), std::get<0>(b.sharding));
                        if (got != want) FAIL(a.name << " -> " << b.name << ", lengths " << text(batch));
                    }
            }
    }

    // The table of bounds for one sequence that all chunks divide: the share of all rows that must leave their ranks.
    TEST_CASE("zigzag to sequential moves 1 - (1 + [W % 3 != 0]) / 2W of the rows") {
        for (int w : {2, 3, 4, 5, 8, 16}) {
            auto const batch = cpx::thd::uniform(3, 2 * w * 10);
            auto const bound =
                cpx::lower_bound(cpx::shard(batch, cpx::zigzag<>{w}), cpx::shard(batch, cpx::sequential<>{w}));
            CHECK(bound.rows == 3 * 10 * (2 * w - 1 - (w % 3 != 0)));
            CHECK(bound.elements == bound.rows);
        }
    }

    TEST_CASE("tokens to heads moves (W - 1) / W of the elements, whatever the layout of the tokens") {
        for (int w : {2, 4, 8}) {
            auto const batch = cpx::thd::uniform(5, 16 * w);
            cpx::head_sharded<> const heads(w, batch, {{16, 8}, {16, 8}, {32, 8}});
            index_t const all = batch.tokens() * 64 * 8;
            CHECK(cpx::lower_bound(cpx::shard(batch, cpx::zigzag<>{w}), heads).elements == all / w * (w - 1));
            CHECK(cpx::lower_bound(heads, cpx::shard<cpx::scope::batch>(batch, cpx::striped<>{w})).elements ==
                  all / w * (w - 1));
        }
    }

    TEST_CASE("the bound of thousands of ranks and heads takes no longer than their pairs") {
        int const w = 3000;
        auto const batch = lengths({w});
        cpx::head_sharded<> const heads(w, batch, {{w, 2}});
        auto const bound = cpx::lower_bound(heads, cpx::shard(batch, cpx::sequential<>{w}));
        CHECK(bound == cpx::volume{w * (w - 1), index_t{w} * (w - 1) * 2});
    }

    TEST_CASE("shardings of two groups or batches have no traffic") {
        auto const from = cpx::shard(lengths({10, 3}), cpx::zigzag<>(3));
        rejects({"traffic.cpp", "traffic: ranks of the target: expected 3, got 2"}, [&] {
            cpx::traffic(from, cpx::shard(lengths({10, 3}), cpx::sequential<>(2)));
        });
        rejects({"traffic.cpp", "traffic: batch of the target"}, [&] {
            cpx::traffic(from, cpx::shard(lengths({10, 4}), cpx::sequential<>(3)));
        });
    }

    TEST_CASE("a replication brings every rank the rows of all others") {
        auto const batch = lengths({10, 3, 8});
        auto const bound = cpx::lower_bound(cpx::shard(batch, cpx::zigzag<3>{}), cpx::replicated<3>(batch), 5);
        CHECK(bound == cpx::volume{2 * 21, 2 * 21 * 5});
        CHECK(cpx::lower_bound(cpx::replicated<3>(batch), cpx::shard(batch, cpx::zigzag<3>{})) == cpx::volume{});
    }

    TEST_CASE("a halo needs the rows before the cuts and no others") {
        auto const batch = lengths({16});
        CHECK(cpx::halo_lower_bound(cpx::shard(batch, cpx::sequential<4>{}), 3) == 9);
        CHECK(cpx::halo_lower_bound(cpx::shard(batch, cpx::sequential<4>{}), 0) == 0);
        rejects({"traffic.cpp", "halo_lower_bound: rows beside a segment"},
                [&] { cpx::halo_lower_bound(cpx::shard(batch, cpx::sequential<4>{}), index_t{1} << 62); });
        CHECK(cpx::halo_lower_bound(cpx::shard(batch, cpx::zigzag<4>{}), 2) == 12); // six cuts between two ranks
    }
}

} // namespace
