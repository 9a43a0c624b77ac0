// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/norm.hpp>

#include <doctest/doctest.h>

#include <ops/gradients.hpp>

using bits::rows, bits::scattered, bits::size;

namespace {

double const eps = 1e-6;

/// The formula in double, one head after the other.
template <class T>
scattered<double> reference(rows<T const> x, std::vector<T> const& weight, double offset) {
    auto const head_dim = static_cast<size>(weight.size());
    scattered<double> y(x.count(), x.width());
    for (size i = 0; i < x.count(); ++i)
        for (size j = 0; j < x.width(); ++j) {
            double mean = 0;
            for (size d = 0; d < head_dim; ++d)
                mean +=
                    std::pow(static_cast<double>(x(i, j / head_dim * head_dim + d)), 2) / static_cast<double>(head_dim);
            y.view()(i, j) = static_cast<double>(x(i, j)) / std::sqrt(mean + eps) *
                             (offset + static_cast<double>(weight[static_cast<std::size_t>(j % head_dim)]));
        }
    return y;
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("rms_norm divides each head by its root mean square", T, float, double) {
        for (size const head_dim : {1, 6, 16, 70})
            for (double const offset : {0.0, 1.0}) {
                auto const x = bits::uniform<T>(9, 3 * head_dim, 1, 5);
                auto const w = bits::uniform<T>(1, head_dim, 2);
                std::vector<T> const weight(w.view().row(0), w.view().row(0) + head_dim);
                scattered<T> y(9, 3 * head_dim, 2, 1);
                cpx::rms_norm<T>(x, weight, T(eps), T(offset), y.view());
                auto const expected = reference<T>(x, weight, offset);
                CHECK(bits::relative_error<T, double>(y.view(), expected) <= 4 * std::numeric_limits<T>::epsilon());
            }
    }

    TEST_CASE_TEMPLATE("gated_rms_norm is rms_norm times silu of the gate", T, float, double) {
        auto const x = bits::uniform<T>(7, 24, 1, 3), z = bits::uniform<T>(7, 24, 2, 4);
        std::vector<T> const weight = {1, T(-0.5), 2, T(0.25), 3, T(0.125), 1, 1};
        scattered<T> y(7, 24);
        cpx::gated_rms_norm<T>(x, z, weight, T(eps), y.view());
        auto expected = reference<T>(x, weight, 0);
        for (size i = 0; i < 7; ++i)
            for (size j = 0; j < 24; ++j) expected.view()(i, j) *= cpx::silu(static_cast<double>(z.view()(i, j)));
        CHECK(bits::relative_error<T, double>(y.view(), expected) <= 4 * std::numeric_limits<T>::epsilon());
    }

    TEST_CASE_TEMPLATE("a row of a norm does not depend on the rows beside it, bit for bit", T, float, double) {
        auto const x = bits::uniform<T>(23, 42, 3), z = bits::uniform<T>(23, 42, 4);
        std::vector<T> const weight(21, T(0.75));
        bits::check_rows_are_independent<T>(
            x, 42, [&](size, rows<T const> some, rows<T> y) { cpx::rms_norm<T>(some, weight, T(eps), T(1), y); });
        bits::check_rows_are_independent<T>(x, 42, [&](size first, rows<T const> some, rows<T> y) {
            cpx::gated_rms_norm<T>(some, z.view().sub(first, some.count()), weight, T(eps), y);
        });
    }

    TEST_CASE_TEMPLATE("a head of a norm does not depend on the heads beside it and may be replaced", T, float,
                       double) {
        auto x = bits::uniform<T>(3, 5 * 11, 5);
        std::vector<T> const weight(11, T(0.3));
        scattered<T> all(3, 55), one(3, 11);
        cpx::rms_norm<T>(x, weight, T(eps), T(1), all.view());
        for (size head = 0; head < 5; ++head) {
            cpx::rms_norm<T>(x.view().columns(11 * head, 11), weight, T(eps), T(1), one.view());
            CHECK(bits::same<T>(one.view(), all.view().columns(11 * head, 11)));
        }
        cpx::rms_norm<T>(x, weight, T(eps), T(1), x.view());
        CHECK(bits::same<T>(x.view(), all.view()));
    }

    TEST_CASE("the gradients of norms are their differences") {
        for (size const head_dim : {1, 6, 17}) {
            size const width = 3 * head_dim;
            auto x = bits::uniform<double>(4, width, 1, 2), z = bits::uniform<double>(4, width, 2, 3);
            auto const dy = bits::uniform<double>(4, width, 3);
            auto const random = bits::uniform<double>(1, head_dim, 4);
            std::vector<double> weight(random.view().row(0), random.view().row(0) + head_dim);
            rows<double> const of_weight(weight, head_dim);
            scattered<double> y(4, width), dx(4, width, 2, 1), dz(4, width, 1);
            // An eps that matters: with one channel a head, only eps lets dx be other than zero.
            double const large = 0.3;
            {
                std::vector<double> dweight(weight.size());
                auto const loss = [&] {
                    cpx::rms_norm<double>(x, weight, large, 1, y.view());
                    return gradients::loss(y, dy);
                };
                cpx::rms_norm_backward<double>(x, weight, large, 1, dy, dx.view(), dweight);
                gradients::check(x.view(), dx, loss);
                gradients::check(of_weight, rows<double const>(dweight, head_dim), loss);
            }
            std::vector<double> dweight(weight.size());
            auto const loss = [&] {
                cpx::gated_rms_norm<double>(x, z, weight, large, y.view());
                return gradients::loss(y, dy);
            };
            cpx::gated_rms_norm_backward<double>(x, z, weight, large, dy, dx.view(), dz.view(), dweight);
            gradients::check(x.view(), dx, loss);
            gradients::check(z.view(), dz, loss);
            gradients::check(of_weight, rows<double const>(dweight, head_dim), loss);
        }
    }

    TEST_CASE_TEMPLATE("a row of a norm's gradient does not depend on the rows beside it, bit for bit", T, float,
                       double) {
        auto const x = bits::uniform<T>(23, 42, 3), z = bits::uniform<T>(23, 42, 4), dy = bits::uniform<T>(23, 42, 5);
        std::vector<T> const weight(21, T(0.75));
        bits::check_rows_are_independent<T>(x, 42, [&](size first, rows<T const> some, rows<T> dx) {
            auto const of_dy = dy.view().sub(first, some.count());
            std::vector<T> unused(21);
            cpx::rms_norm_backward<T>(some, weight, T(eps), T(1), of_dy, dx, unused);
            scattered<T> alone(some.count(), 42), in_place(some, 1, 2);
            cpx::rms_norm_backward<T>(some, weight, T(eps), T(1), of_dy, alone.view(), {});
            cpx::rms_norm_backward<T>(in_place, weight, T(eps), T(1), of_dy, in_place.view(), unused);
            CHECK(bits::same<T>(alone, dx));
            CHECK(bits::same<T>(in_place, dx));
        });
        bits::check_rows_are_independent<T>(x, 84, [&](size first, rows<T const> some, rows<T> both) {
            auto const of_z = z.view().sub(first, some.count()), of_dy = dy.view().sub(first, some.count());
            cpx::gated_rms_norm_backward<T>(some, of_z, weight, T(eps), of_dy, both.columns(0, 42),
                                            both.columns(42, 42), {});
            scattered<T> dx(of_dy, 1, 2), dz(of_dy, 2, 1);
            cpx::gated_rms_norm_backward<T>(some, of_z, weight, T(eps), dx.view(), dx.view(), {}, {});
            cpx::gated_rms_norm_backward<T>(some, of_z, weight, T(eps), dz.view(), {}, dz.view(), {});
            CHECK(bits::same<T>(dx, both.columns(0, 42)));
            CHECK(bits::same<T>(dz, both.columns(42, 42)));
        });
    }

    TEST_CASE_TEMPLATE("a norm's gradient of the weight is the sum of rows and heads in turn, bit for bit", T, float,
                       double) {
        auto const x = bits::uniform<T>(9, 39, 3), z = bits::uniform<T>(9, 39, 4), dy = bits::uniform<T>(9, 39, 5);
        std::vector<T> const weight(13, T(0.75)), start(13, T(0.1));
        auto const sums = [&](bool gated, size rows_at_once, size heads_at_once) {
            auto dweight = start;
            for (size row = 0; row < 9; row += rows_at_once)
                for (size head = 0; head < 3; head += heads_at_once) {
                    auto const block = [&](scattered<T> const& of) {
                        return scattered<T>(of.view().sub(row, rows_at_once).columns(head * 13, heads_at_once * 13),
                                            row % 3, head);
                    };
                    if (gated)
                        cpx::gated_rms_norm_backward<T>(block(x), block(z), weight, T(eps), block(dy), {}, {}, dweight);
                    else
                        cpx::rms_norm_backward<T>(block(x), weight, T(eps), T(1), block(dy), {}, dweight);
                }
            return dweight;
        };
        for (bool const gated : {false, true}) {
            auto const all = sums(gated, 9, 3);
            CHECK(all != start);
            CHECK(sums(gated, 3, 3) == all);
            CHECK(sums(gated, 1, 3) == all);
            CHECK(sums(gated, 1, 1) == all);
        }
    }

    TEST_CASE("a width that is not whole heads is an error") {
        auto const x = bits::uniform<float>(2, 10, 1);
        scattered<float> y(2, 10);
        std::vector<float> const weight(4, 1);
        CHECK_THROWS_AS(cpx::rms_norm<float>(x, weight, 1e-6f, 1.0f, y.view()), cpx::error);
    }
}
