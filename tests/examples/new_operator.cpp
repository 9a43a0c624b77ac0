// SPDX-License-Identifier: Apache-2.0
// How examples of any sharding compare two results.
#include "../../examples/common/whole.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <vector>

TEST_CASE("results agree if they have as many numbers and none is off by more than the tolerance") {
    auto const compare = [](std::vector<double> const& expected, std::vector<double> const& got) {
        examples::compare("test", "result", expected, got, 0.5);
    };
    compare({1, 2}, {1.5, 2});
    compare({}, {});
    CHECK_THROWS_WITH_AS(compare({1, 2}, {1, 2, 3}), doctest::Contains("elements of result: expected 2, got 3"),
                         cpx::error);
    CHECK_THROWS_WITH_AS(compare({1, 2}, {1}), doctest::Contains("elements of result: expected 2, got 1"), cpx::error);
    CHECK_THROWS_WITH_AS(compare({1, 2}, {1, 2.75}), doctest::Contains("got 0.75"), cpx::error);
    CHECK_THROWS_AS(compare({1, 2}, {std::numeric_limits<double>::quiet_NaN(), 2}), cpx::error);
    CHECK_THROWS_AS(compare({1, std::numeric_limits<double>::quiet_NaN()}, {1, 2}), cpx::error);
}
