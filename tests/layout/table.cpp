// SPDX-License-Identifier: Apache-2.0
#include <cpx/layout/table.hpp>

#include <cpx/layout/zigzag.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

namespace {

using cpx::table;
using support::rejects;

static_assert(std::copyable<table>);
static_assert(!std::is_convertible_v<cpx::zigzag<2>, table>);

TEST_SUITE("layout") {
    TEST_CASE("a table owns what its list says") {
        table const t(3, {0, 2, 2, 1});
        CHECK(t.ranks() == 3);
        CHECK(t.chunks() == 4);
        CHECK(t.owner(0) == 0);
        CHECK(t.owner(2) == 2);
        CHECK(t.owner(3) == 1);
        table const copy = t;
        CHECK(copy == t);
        CHECK(t == table(3, {0, 2, 2, 1}));
        CHECK(t != table(3, {0, 2, 2, 0}));
        CHECK(t != table(4, {0, 2, 2, 1}));
    }

    TEST_CASE("ranks without chunks are ordinary") { CHECK(table(5, {4}).ranks() == 5); }

    TEST_CASE("a table takes the owners of any other layout") {
        CHECK(table(cpx::zigzag<3>{}) == table(3, {0, 1, 2, 2, 1, 0}));
        CHECK(table(cpx::zigzag<>{2}) == table(2, {0, 1, 1, 0}));
    }

    TEST_CASE("a table rejects owners that are no ranks, naming the chunk") {
        rejects({"table: owner of chunk 2: expected 0 to 1, got 2"}, [] { table(2, {0, 1, 2, 3}); });
        rejects({"table: owner of chunk 0: expected 0 to 1, got -1"}, [] { table(2, {-1}); });
        rejects({"table: number of chunks: expected at least 1, got 0"}, [] { table(2, std::vector<int>{}); });
        rejects({"table: ranks: expected at least 1, got 0"}, [] { table(0, {0}); });
    }
}

} // namespace
