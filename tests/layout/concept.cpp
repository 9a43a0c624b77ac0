// SPDX-License-Identifier: Apache-2.0
#include <cpx/layout/concept.hpp>

#include <cpx/layout/algorithm.hpp>
#include <cpx/layout/either.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/layout/striped.hpp>
#include <cpx/layout/table.hpp>
#include <cpx/layout/zigzag.hpp>

#include <doctest/doctest.h>

namespace {

using cpx::sequential;
using cpx::striped;
using cpx::zigzag;

// A layout with its ranks in its type is empty; one that knows them at run time only holds one int.
template <class Fixed, class Loose>
constexpr bool well_made =
    cpx::static_layout<Fixed> && cpx::layout<Loose> && !cpx::static_layout<Loose> && sizeof(Loose) == sizeof(int) &&
    std::is_trivially_copyable_v<Fixed> && std::is_trivially_copyable_v<Loose> && !std::is_convertible_v<int, Loose>;
static_assert(well_made<sequential<4>, sequential<>>);
static_assert(well_made<zigzag<4>, zigzag<>>);
static_assert(well_made<striped<4>, striped<>>);
static_assert(well_made<striped<4, 7>, striped<cpx::dynamic, 7>>);
static_assert(cpx::layout<cpx::table> && !cpx::static_layout<cpx::table>);

// Nothing else is a layout, and a rule is a policy but no layout.
struct no_owner {
    int ranks() const { return 1; }
    int chunks() const { return 1; }
};
struct owner_of_another_type : no_owner {
    long owner(int) const { return 0; }
};
struct counts_that_are_not_const {
    int ranks() { return 1; }
    int chunks() { return 1; }
    int owner(int) { return 0; }
};
using always = decltype([](cpx::index_t) { return true; });
using rule = cpx::by_length<zigzag<4>, sequential<4>, always>;
static_assert(!cpx::layout_policy<int> && !cpx::layout_policy<no_owner> && !cpx::layout_policy<owner_of_another_type> &&
              !cpx::layout_policy<counts_that_are_not_const>);
static_assert(cpx::length_rule<rule> && cpx::layout_policy<rule> && !cpx::layout<rule>);
static_assert(cpx::layout<cpx::either<zigzag<4>, sequential<4>>>);
static_assert(!cpx::length_rule<zigzag<4>>);

static_assert(cpx::static_ranks<zigzag<4>> == 4);
static_assert(cpx::static_ranks<zigzag<>> == cpx::dynamic);
static_assert(cpx::static_ranks<cpx::table> == cpx::dynamic);

// A layout whose functions are not constexpr is a layout, but not one that is known at compile time.
struct without_constexpr {
    int ranks() const { return 2; }
    int chunks() const { return 2; }
    int owner(int chunk) const { return chunk; }
};
static_assert(cpx::layout<without_constexpr> && !cpx::static_layout<without_constexpr>);
static_assert(cpx::static_ranks<without_constexpr> == cpx::dynamic);

// The owners, written out.
template <class L>
constexpr bool owners(L const& layout, std::initializer_list<int> expected) {
    int c = 0;
    for (int const owner : expected)
        if (c >= layout.chunks() || layout.owner(c++) != owner) return false;
    return c == layout.chunks();
}
static_assert(owners(sequential<4>{}, {0, 1, 2, 3}) && owners(sequential<>{3}, {0, 1, 2}));
static_assert(owners(zigzag<3>{}, {0, 1, 2, 2, 1, 0}) && owners(zigzag<>{1}, {0, 0}));
static_assert(owners(striped<2>{}, {0, 1, 0, 1, 0, 1, 0, 1}) && owners(striped<3, 1>{}, {0, 1, 2}));
static_assert(owners(striped<cpx::dynamic, 2>{3}, {0, 1, 2, 0, 1, 2}));

static_assert(sequential<>{4} == sequential<>{4} && sequential<>{4} != sequential<>{5});
static_assert(zigzag<2>{} == zigzag<2>{} && zigzag<>{2} != zigzag<>{3});

// A layout proves where it is defined that it loses nothing.
template <class... L>
constexpr bool partition(cpx::index_t n) {
    return (cpx::is_partition(L{}, n) && ...);
}
template <int W>
constexpr bool partitions(cpx::index_t n) {
    return partition<sequential<W>, zigzag<W>, striped<W>, striped<W, 3>>(n) && cpx::is_partition(zigzag<>{W}, n) &&
           cpx::is_partition(zigzag<W>{}, n, cpx::aligned<3>{}) &&
           cpx::is_partition(sequential<W>{}, n, cpx::aligned<cpx::dynamic>{2});
}
static_assert(partitions<1>(0) && partitions<1>(1) && partitions<2>(1) && partitions<2>(7) && partitions<3>(31));
static_assert(partitions<4>(3) && partitions<4>(64) && partitions<5>(8) && partitions<8>(17) && partitions<16>(40));
static_assert(cpx::is_partition(rule{}, 40));

TEST_SUITE("layout") {
    TEST_CASE("static equals dynamic for every layout") {
        auto const same = [](auto const& fixed, auto const& loose) {
            CHECK(fixed.ranks() == loose.ranks());
            REQUIRE(fixed.chunks() == loose.chunks());
            for (int c = 0; c < fixed.chunks(); ++c) CHECK(fixed.owner(c) == loose.owner(c));
        };
        same(sequential<7>{}, sequential<>{7});
        same(zigzag<7>{}, zigzag<>{7});
        same(striped<7>{}, striped<>{7});
        same(striped<7, 2>{}, striped<cpx::dynamic, 2>{7});
        same(zigzag<7>{}, cpx::table(zigzag<7>{}));
    }
}

} // namespace
