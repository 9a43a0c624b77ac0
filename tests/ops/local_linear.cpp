// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/linear.hpp>

#include <doctest/doctest.h>

#include <ops/gradients.hpp>

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

    TEST_CASE("the gradients of linear are its differences") {
        for (size const count : {0, 1, 5})
            for (size const out : {1, 7, 20}) {
                auto x = bits::uniform<double>(count, 11, 1), weight = bits::uniform<double>(out, 11, 2);
                auto const dy = bits::uniform<double>(count, out, 3);
                scattered<double> y(count, out), dx(count, 11, 2, 1), dweight(bits::uniform<double>(out, 11, 1, 0));
                auto const loss = [&] {
                    cpx::linear<double>(x, weight, y.view());
                    return gradients::loss(y, dy);
                };
                cpx::linear_backward_input<double>(dy, weight, dx.view());
                cpx::linear_backward_weight<double>(dy, x, dweight.view());
                gradients::check(x.view(), dx, loss);
                gradients::check(weight.view(), dweight, loss);
            }
    }

    TEST_CASE_TEMPLATE("a gradient of linear's input does not depend on other rows and columns, bit for bit", T, float,
                       double) {
        for (size const out : {1, 19, 600}) {
            auto const dy = bits::uniform<T>(23, out, 3), weight = bits::uniform<T>(out, 45, 4);
            bits::check_rows_are_independent<T>(
                dy, 45, [&](size, rows<T const> some, rows<T> dx) { cpx::linear_backward_input<T>(some, weight, dx); });
            scattered<T> all(23, 45);
            cpx::linear_backward_input<T>(dy, weight, all.view());
            for (size first = 0; first + 6 <= 45; ++first) {
                scattered<T> dx(23, 6, 3, first % 4);
                cpx::linear_backward_input<T>(dy, weight.view().columns(first, 6), dx.view());
                CHECK(bits::same<T>(dx, all.view().columns(first, 6)));
            }
        }
    }

    TEST_CASE_TEMPLATE("a gradient of linear's weight is the sum of its rows in turn, bit for bit", T, float, double) {
        size const n = 600;
        auto const dy = bits::uniform<T>(n, 9, 5), x = bits::uniform<T>(n, 37, 6), start = bits::uniform<T>(9, 37, 7);
        auto all = start, in_turn = start;
        cpx::linear_backward_weight<T>(dy, x, all.view());
        for (size row = 0; row < n; ++row)
            cpx::linear_backward_weight<T>(dy.view().sub(row, 1), x.view().sub(row, 1), in_turn.view());
        CHECK(bits::same<T>(in_turn, all));
        for (size const cut : {0, 1, 255, 256, 257, 599}) {
            scattered<T> some(start.view(), 1, 2);
            cpx::linear_backward_weight<T>(dy.view().sub(0, cut), x.view().sub(0, cut), some.view());
            cpx::linear_backward_weight<T>(dy.view().sub(cut, n - cut), x.view().sub(cut, n - cut), some.view());
            CHECK(bits::same<T>(some, all));
        }
        for (size out = 0; out + 2 <= 9; ++out)
            for (size in = 0; in + 5 <= 37; ++in) {
                scattered<T> some(start.view().sub(out, 2).columns(in, 5), in % 3, out % 4);
                cpx::linear_backward_weight<T>(dy.view().columns(out, 2), x.view().columns(in, 5), some.view());
                CHECK(bits::same<T>(some, all.view().sub(out, 2).columns(in, 5)));
            }
    }

    TEST_CASE("a weight of another width is an error that names it") {
        auto const x = bits::uniform<float>(2, 3, 1), weight = bits::uniform<float>(5, 4, 2);
        scattered<float> y(2, 5);
        CHECK_THROWS_WITH_AS(cpx::linear<float>(x, weight, y.view()),
                             doctest::Contains("shape of weight: expected (5, 3), got (5, 4)"), cpx::error);
    }
}
