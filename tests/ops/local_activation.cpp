// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/activation.hpp>

#include <doctest/doctest.h>

#include <ops/bits.hpp>

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
}
