// SPDX-License-Identifier: Apache-2.0
#include <cpx/core/index.hpp>

#include <doctest/doctest.h>

#include <type_traits>

namespace {

using cpx::range;

static_assert(std::is_same_v<cpx::index_t, std::int64_t>);
static_assert(range{2, 5}.size() == 3 && !range{2, 5}.empty());
static_assert(range{}.empty() && range{4, 4}.empty() && range{5, 4}.empty());
static_assert(cpx::intersect({0, 5}, {3, 9}) == range{3, 5});
static_assert(cpx::intersect({3, 9}, {0, 5}) == range{3, 5});
static_assert(cpx::intersect({0, 9}, {3, 5}) == range{3, 5});
static_assert(cpx::intersect({0, 3}, {3, 5}).empty() && cpx::intersect({7, 9}, {3, 5}).empty());
static_assert(cpx::intersect({0, 3}, {5, 9}).size() == 0);
static_assert(cpx::slot{1, 2} == cpx::slot{1, 2} && cpx::slot{1, 2} != cpx::slot{2, 2});

TEST_SUITE("core") {
    TEST_CASE("the intersection of ranges holds the numbers that are in both") {
        for (cpx::index_t a = 0; a < 5; ++a)
            for (cpx::index_t b = a; b < 6; ++b)
                for (cpx::index_t c = 0; c < 5; ++c)
                    for (cpx::index_t d = c; d < 6; ++d) {
                        range const both = cpx::intersect({a, b}, {c, d});
                        cpx::index_t count = 0;
                        for (cpx::index_t n = 0; n < 6; ++n) {
                            bool const in = a <= n && n < b && c <= n && n < d;
                            count += in;
                            CHECK(in == (both.first <= n && n < both.last));
                        }
                        CHECK(both.size() == count);
                    }
    }
}

} // namespace
