// SPDX-License-Identifier: Apache-2.0
#include <cpx/layout/head_sharded.hpp>

#include <doctest/doctest.h>

#include <law.hpp>
#include <support/rejects.hpp>

namespace {

using namespace support;
using cpx::head_sharded;
using cpx::index_t;
using cpx::section;

static_assert(cpx::any_sharding<head_sharded<>> && cpx::any_sharding<head_sharded<4>>);
static_assert(cpx::any_sharding<cpx::replicated<>> && cpx::any_sharding<cpx::replicated<4>>);
static_assert(head_sharded<4>::every_row && cpx::replicated<>::every_row);
static_assert(cpx::static_ranks<head_sharded<4>> == 4 && cpx::static_ranks<head_sharded<>> == cpx::dynamic);

TEST_SUITE("layout") {
    TEST_CASE("every head stands on a rank, shares ascend, and ranks share a head only if they must") {
        auto const batch = lengths({3});
        for (int ranks = 1; ranks <= 9; ++ranks)
            for (index_t groups = 1; groups <= 12; ++groups)
                for (index_t heads = 1; heads <= groups; ++heads) {
                    if (groups % heads != 0) continue;
                    head_sharded<> const sharding(ranks, batch, {{heads, 2}, {groups, 3}});
                    std::vector<int> holders(static_cast<std::size_t>(heads));
                    cpx::range previous{0, 0};
                    for (int r = 0; r < ranks; ++r) {
                        cpx::range const share = sharding.heads(r, heads);
                        CHECK(!share.empty());
                        CHECK(share.first >= previous.first);
                        CHECK(share.last >= previous.last);
                        CHECK(share.first <= previous.last); // no gap
                        previous = share;
                        for (index_t h = 0; h < heads; ++h) {
                            bool const held = share.first <= h && h < share.last;
                            CHECK(held == law::holds_head(r, ranks, h, heads, groups));
                            holders[static_cast<std::size_t>(h)] += held;
                        }
                    }
                    for (int const count : holders) CHECK(count >= 1);
                    if (heads == groups && groups >= ranks)
                        for (int const count : holders) CHECK(count == 1);
                }
    }

    TEST_CASE("shares of heads that ranks divide are equal") {
        head_sharded<4> const sharding(lengths({5}), {{16, 128}, {4, 128}, {32, 128}});
        for (int r = 0; r < 4; ++r) {
            CHECK(sharding.heads(r, 16) == cpx::range{4 * r, 4 * r + 4});
            CHECK(sharding.heads(r, 4) == cpx::range{r, r + 1});
            CHECK(sharding.heads(r, 32) == cpx::range{8 * r, 8 * r + 8});
        }
    }

    TEST_CASE("with fewer heads than ranks, ranks repeat heads") {
        head_sharded<> const sharding(4, lengths({5}), {{2, 8}});
        std::vector<cpx::range> shares;
        for (int r = 0; r < 4; ++r) shares.push_back(sharding.heads(r, 2));
        CHECK(shares == std::vector<cpx::range>{{0, 1}, {0, 1}, {1, 2}, {1, 2}});
    }

    TEST_CASE("a rank has the group's head of every head that it has") {
        // 6 q heads in 2 groups over 4 ranks: shares of q are 0, 1 2, 3, 4 5.
        head_sharded<> const sharding(4, lengths({5}), {{6, 8}, {2, 8}});
        std::vector<cpx::range> q, k;
        for (int r = 0; r < 4; ++r) {
            q.push_back(sharding.heads(r, 6));
            k.push_back(sharding.heads(r, 2));
        }
        CHECK(q == std::vector<cpx::range>{{0, 1}, {1, 3}, {3, 4}, {4, 6}});
        CHECK(k == std::vector<cpx::range>{{0, 1}, {0, 1}, {1, 2}, {1, 2}});
        // 5 heads over 2 ranks, uneven.
        head_sharded<2> const uneven(lengths({5}), {{5, 1}, {1, 1}});
        CHECK(uneven.heads(0, 5) == cpx::range{0, 2});
        CHECK(uneven.heads(1, 5) == cpx::range{2, 5});
        CHECK(uneven.heads(1, 1) == cpx::range{0, 1});
    }

    TEST_CASE("every rank holds every row, in sequence order") {
        auto const batch = lengths({3, 0, 4});
        head_sharded<3> const heads(batch, {{3, 1}});
        cpx::replicated<> const everything(3, batch);
        for (int r = 0; r < 3; ++r) {
            CHECK(heads.rows(r) == 7);
            CHECK(everything.rows(r) == 7);
            std::vector<cpx::range> pieces;
            heads.for_each_piece(r, [&](cpx::range piece) { pieces.push_back(piece); });
            CHECK(pieces == std::vector<cpx::range>{{0, 7}});
        }
        std::vector<int> holders;
        index_t hint = 0;
        everything.for_each_holder({2, 5}, hint, [&](int rank, cpx::range common) {
            holders.push_back(rank);
            CHECK(common == cpx::range{2, 5});
        });
        CHECK(holders == std::vector<int>{0, 1, 2});
        CHECK(everything.heads(1, 6) == cpx::range{0, 6});
        CHECK(everything.sections().empty());
        head_sharded<2>(cpx::thd(), {{2, 1}}).for_each_piece(0, [](cpx::range) { FAIL("there is no row"); });
    }

    TEST_CASE("shardings are equal if their ranks, batches and sections are") {
        auto const batch = lengths({8});
        CHECK(head_sharded<2>(batch, {{2, 4}}) == head_sharded<2>(lengths({8}), {{2, 4}}));
        CHECK_FALSE(head_sharded<2>(batch, {{2, 4}}) == head_sharded<2>(batch, {{2, 5}}));
        CHECK_FALSE(head_sharded<2>(batch, {{2, 4}}) == head_sharded<2>(lengths({9}), {{2, 4}}));
        CHECK_FALSE(head_sharded<>(2, batch, {{2, 4}}) == head_sharded<>(3, batch, {{2, 4}}));
        CHECK(cpx::replicated<>(2, batch) == cpx::replicated<>(2, batch));
        CHECK_FALSE(cpx::replicated<>(2, batch) == cpx::replicated<>(3, batch));
    }

    TEST_CASE("bad sections are rejected, naming the section") {
        auto const batch = lengths({8});
        auto const with = [&](std::vector<section> sections) { return [=] { head_sharded<2>(batch, sections); }; };
        rejects({"head_sharded: number of sections: expected at least 1, got 0"}, with({}));
        rejects({"head_sharded: heads of section 1: expected a divisor of 6, got 4"}, with({{6, 1}, {4, 1}}));
        rejects({"head_sharded: heads of section 0: expected 1 to 2147483647, got 0"}, with({{0, 1}, {4, 1}}));
        rejects({"head_sharded: heads of section 0", "got -2"}, with({{-2, 1}}));
        rejects({"head_sharded: width of section 1: expected 1 to ", "got 0"}, with({{2, 1}, {2, 0}}));
        index_t const huge = std::numeric_limits<index_t>::max();
        rejects({"head_sharded.cpp", "head_sharded: heads of section 0: expected 1 to 2147483647, got 4294967296"},
                with({{index_t{1} << 32, 1}}));
        rejects({"heads of section 1: expected 1 to 2147483647, got 9223372036854775807"}, with({{2, 1}, {huge, 1}}));
        rejects({"width of section 0: expected 1 to 2305843009213693951, got 92233"}, with({{2, huge}}));
        rejects({"width of section 1: expected 1 to "}, with({{1, index_t{1} << 61}, {1, index_t{1} << 61}}));
        rejects({"head_sharded: tokens x columns: expected less than 2^62, got 8 x "}, with({{1, index_t{1} << 59}}));
        head_sharded<> const most(1 << 20, batch, {{2147483647, 1}});
        CHECK(most.heads((1 << 20) - 1, 2147483647).last == 2147483647);
        rejects({"head_sharded.cpp", "replicated: tokens times ranks: expected less than 2^62"},
                [] { cpx::replicated<>(1 << 20, lengths({index_t{1} << 42})); });
        rejects({"head_sharded: ranks: expected at least 1, got 0"}, [&] { head_sharded<>(0, batch, {{2, 1}}); });
        rejects({"replicated: ranks: expected at least 1, got -1"}, [&] { cpx::replicated<>(-1, batch); });
    }
}

} // namespace
