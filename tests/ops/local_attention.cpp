// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/attention.hpp>

#include <doctest/doctest.h>

#include <ops/bits.hpp>

#include <numeric>

using bits::rows, bits::scattered, bits::size;

namespace {

std::vector<size> tokens(size count) {
    std::vector<size> result(static_cast<std::size_t>(count));
    std::iota(result.begin(), result.end(), size{0});
    return result;
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("attention is the softmax average of the values up to the query's token", T, float, double) {
        size const n = 37, dk = 11, dv = 19;
        auto const q = bits::uniform<T>(n, dk, 1, 3), k = bits::uniform<T>(n, dk, 2, 3), v = bits::uniform<T>(n, dv, 3);
        scattered<T> o(n, dv, 2, 1);
        cpx::attend_head<T>(q, tokens(n), k, v, T(0.5), o.view());
        scattered<double> expected(n, dv);
        for (size i = 0; i < n; ++i) {
            std::vector<double> sums(static_cast<std::size_t>(dv));
            double total = 0;
            for (size j = 0; j <= i; ++j) {
                double score = 0;
                for (size d = 0; d < dk; ++d)
                    score += static_cast<double>(q.view()(i, d)) * static_cast<double>(k.view()(j, d));
                total += std::exp(0.5 * score);
                for (size d = 0; d < dv; ++d)
                    sums[static_cast<std::size_t>(d)] += std::exp(0.5 * score) * static_cast<double>(v.view()(j, d));
            }
            for (size d = 0; d < dv; ++d) expected.view()(i, d) = sums[static_cast<std::size_t>(d)] / total;
        }
        CHECK(bits::relative_error<T, double>(o.view(), expected) <= 20 * std::numeric_limits<T>::epsilon());
    }

    TEST_CASE_TEMPLATE("attention does not overflow where scores are huge", T, float, double) {
        auto const q = bits::uniform<T>(5, 8, 1, 1e4), k = bits::uniform<T>(5, 8, 2, 1e4),
                   v = bits::uniform<T>(5, 8, 3);
        scattered<T> o(5, 8);
        cpx::attend_head<T>(q, tokens(5), k, v, T(1), o.view());
        for (size i = 0; i < 5; ++i)
            for (size d = 0; d < 8; ++d) CHECK(std::isfinite(o.view()(i, d)));
    }

    TEST_CASE_TEMPLATE("a row of attention does not depend on the queries beside it, bit for bit", T, float, double) {
        size const n = 23;
        auto const q = bits::uniform<T>(n, 13, 1), k = bits::uniform<T>(n, 13, 2), v = bits::uniform<T>(n, 21, 3);
        scattered<T> const k_elsewhere(k.view(), 5, 3), v_elsewhere(v.view(), 2, 1);
        auto const positions = tokens(n);
        bits::check_rows_are_independent<T>(q, 21, [&](size first, rows<T const> some, rows<T> o) {
            bool const here = first % 2 == 0;
            auto const count = static_cast<std::size_t>(some.count());
            cpx::attend_head<T>(some, std::span(positions).subspan(static_cast<std::size_t>(first), count),
                                here ? k : k_elsewhere, here ? v : v_elsewhere, T(0.3), o);
        });
    }

    TEST_CASE_TEMPLATE("queries in any order have the same bits, and later tokens have no influence", T, float,
                       double) {
        size const n = 9;
        auto const q = bits::uniform<T>(n, 6, 1);
        auto k = bits::uniform<T>(n, 6, 2), v = bits::uniform<T>(n, 6, 3);
        scattered<T> all(n, 6), reversed(n, 6), backwards(n, 6);
        cpx::attend_head<T>(q, tokens(n), k, v, T(1), all.view());
        auto positions = tokens(n);
        std::reverse(positions.begin(), positions.end());
        for (size i = 0; i < n; ++i) std::copy_n(q.view().row(n - 1 - i), 6, reversed.view().row(i));
        cpx::attend_head<T>(reversed, positions, k, v, T(1), backwards.view());
        for (size i = 0; i < n; ++i) CHECK(bits::same<T>(backwards.view().sub(n - 1 - i, 1), all.view().sub(i, 1)));
        for (size d = 0; d < 6; ++d) k.view()(7, d) = v.view()(7, d) = std::numeric_limits<T>::quiet_NaN();
        scattered<T> poisoned(n, 6);
        cpx::attend_head<T>(q, tokens(n), k, v, T(1), poisoned.view());
        CHECK(bits::same<T>(poisoned.view().sub(0, 7), all.view().sub(0, 7)));
    }

    TEST_CASE("no queries are ordinary, a position outside the sequence is an error") {
        auto const q = bits::uniform<float>(1, 4, 1), k = bits::uniform<float>(3, 4, 2);
        scattered<float> o(1, 4);
        cpx::attend_head<float>(q.view().sub(0, 0), {}, k, k, 1.0f, o.view().sub(0, 0));
        std::vector<size> const outside = {3};
        CHECK_THROWS_WITH_AS(cpx::attend_head<float>(q, outside, k, k, 1.0f, o.view()),
                             doctest::Contains("position: expected 0 to 2, got 3"), cpx::error);
    }
}
