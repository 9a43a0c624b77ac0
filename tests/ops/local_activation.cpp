// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/activation.hpp>

#include <doctest/doctest.h>

#include <ops/gradients.hpp>

using bits::rows, bits::scattered, bits::size;

TEST_SUITE("ops") {
    TEST_CASE("sigmoid and silu stay finite where exp overflows") {
        CHECK(cpx::sigmoid(-1e4) == 0);
        CHECK(cpx::sigmoid(1e4) == 1);
        CHECK(cpx::silu(-1e4f) == 0);
        CHECK(cpx::silu(1e4f) == 1e4f);
        CHECK(cpx::silu(0.5) == doctest::Approx(0.31122966560092729).epsilon(1e-15));
    }

    TEST_CASE("softplus is exact for small, large and huge arguments") {
        CHECK(cpx::softplus(0.0) == doctest::Approx(0.69314718055994531).epsilon(1e-15));
        CHECK(cpx::softplus(-40.0) == doctest::Approx(4.2483542552915889e-18).epsilon(1e-14));
        CHECK(cpx::softplus(1e30f) == 1e30f);
        CHECK(cpx::softplus(-1e30f) == 0);
    }

    TEST_CASE_TEMPLATE("silu_mul does each row as if it were alone, bit for bit", T, float, double) {
        auto const gate = bits::uniform<T>(23, 13, 1, 8), up = bits::uniform<T>(23, 13, 2);
        bits::check_rows_are_independent<T>(gate, 13, [&](size first, rows<T const> some, rows<T> y) {
            cpx::silu_mul<T>(some, up.view().sub(first, some.count()), y);
            for (size j = 0; j < 13; ++j) CHECK(y(0, j) == cpx::silu(some(0, j)) * up.view()(first, j));
        });
    }

    TEST_CASE("the gradients of activations are their differences") {
        auto x = bits::uniform<double>(40, 1, 1, 6);
        auto const dy = bits::uniform<double>(40, 1, 2);
        auto const agrees = [&](auto function, auto backward) {
            scattered<double> dx(40, 1);
            for (size i = 0; i < 40; ++i) dx.view()(i, 0) = backward(x.view()(i, 0), dy.view()(i, 0));
            gradients::check(x.view(), dx, [&] {
                double total = 0;
                for (size i = 0; i < 40; ++i) total += dy.view()(i, 0) * function(x.view()(i, 0));
                return total;
            });
        };
        agrees(cpx::sigmoid<double>, cpx::sigmoid_backward<double>);
        agrees(cpx::silu<double>, cpx::silu_backward<double>);
        agrees(cpx::softplus<double>, cpx::softplus_backward<double>);
    }

    TEST_CASE("the gradients of activations stay finite where exp overflows") {
        for (float const x : {-1e38f, -1e4f, 1e4f, 1e38f}) {
            CHECK(cpx::sigmoid_backward(x, 3.0f) == 0);
            CHECK(cpx::silu_backward(x, 3.0f) == (x > 0 ? 3 : 0));
            CHECK(cpx::softplus_backward(x, 3.0f) == (x > 0 ? 3 : 0));
        }
        CHECK(cpx::sigmoid_backward(40.0, 1.0) == doctest::Approx(4.2483542552915889e-18).epsilon(1e-14));
    }

    TEST_CASE("the gradients of silu_mul are its differences and may replace its inputs") {
        auto gate = bits::uniform<double>(5, 7, 1, 5), up = bits::uniform<double>(5, 7, 2);
        auto const dy = bits::uniform<double>(5, 7, 3);
        scattered<double> y(5, 7), dgate(5, 7, 1, 1), dup(5, 7, 2);
        auto const loss = [&] {
            cpx::silu_mul<double>(gate, up, y.view());
            return gradients::loss(y, dy);
        };
        cpx::silu_mul_backward<double>(gate, up, dy, dgate.view(), dup.view());
        gradients::check(gate.view(), dgate, loss);
        gradients::check(up.view(), dup, loss);
        cpx::silu_mul_backward<double>(gate, up, dy, gate.view(), up.view());
        CHECK(bits::same<double>(gate, dgate));
        CHECK(bits::same<double>(up, dup));
    }

    TEST_CASE_TEMPLATE("silu_mul_backward does each row as if it were alone, bit for bit", T, float, double) {
        auto const gate = bits::uniform<T>(23, 13, 1, 8), up = bits::uniform<T>(23, 13, 2),
                   dy = bits::uniform<T>(23, 13, 3);
        bits::check_rows_are_independent<T>(gate, 26, [&](size first, rows<T const> some, rows<T> both) {
            size const n = some.count();
            cpx::silu_mul_backward<T>(some, up.view().sub(first, n), dy.view().sub(first, n), both.columns(0, 13),
                                      both.columns(13, 13));
        });
    }
}
