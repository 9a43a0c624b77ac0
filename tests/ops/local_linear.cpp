// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/linear.hpp>

#include <doctest/doctest.h>

#include <ops/bits.hpp>

using bits::rows, bits::scattered, bits::size;

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("linear is the product of every row with every row of the weight", T, float, double) {
        for (size const in : {0, 1, 3, 4, 7, 64, 129})
            for (size const out : {1, 2, 5, 40})
                for (size const count : {0, 1, 4, 6}) {
                    auto const x = bits::uniform<T>(count, in, 1), weight = bits::uniform<T>(out, in, 2);
                    scattered<T> y(count, out, 3, 1);
                    cpx::linear<T>(x, weight, y.view());
                    for (size i = 0; i < count; ++i)
                        for (size j = 0; j < out; ++j) {
                            double expected = 0;
                            for (size c = 0; c < in; ++c)
                                expected +=
                                    static_cast<double>(x.view()(i, c)) * static_cast<double>(weight.view()(j, c));
                            double const bound = static_cast<double>(in) * std::numeric_limits<T>::epsilon();
                            CHECK(std::abs(static_cast<double>(y.view()(i, j)) - expected) <= bound);
                        }
                }
    }

    TEST_CASE_TEMPLATE("a row of linear does not depend on the rows beside it, bit for bit", T, float, double) {
        for (size const in : {5, 16, 67}) {
            auto const x = bits::uniform<T>(23, in, 3), weight = bits::uniform<T>(13, in, 4);
            bits::check_rows_are_independent<T>(
                x, 13, [&](size, rows<T const> some, rows<T> y) { cpx::linear<T>(some, weight, y); });
        }
    }

    TEST_CASE_TEMPLATE("an output of linear does not depend on the outputs beside it, bit for bit", T, float, double) {
        auto const x = bits::uniform<T>(5, 37, 5), weight = bits::uniform<T>(300, 37, 6);
        scattered<T> all(5, 300);
        cpx::linear<T>(x, weight, all.view());
        for (size const count : {1, 2, 3, 17})
            for (size first = 0; first + count <= 300; first += 7) {
                scattered<T> const some(weight.view().sub(first, count), 3, first % 5);
                scattered<T> y(5, count);
                cpx::linear<T>(x, some, y.view());
                CHECK(bits::same<T>(y.view(), all.view().columns(first, count)));
            }
    }

    TEST_CASE("a weight of another width is an error that names it") {
        auto const x = bits::uniform<float>(2, 3, 1), weight = bits::uniform<float>(5, 4, 2);
        scattered<float> y(2, 5);
        CHECK_THROWS_WITH_AS(cpx::linear<float>(x, weight, y.view()),
                             doctest::Contains("shape of weight: expected (5, 3), got (5, 4)"), cpx::error);
    }
}
