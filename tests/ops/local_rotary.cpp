// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/local/rotary.hpp>

#include <cpx/ops/eigen.hpp>

#include <doctest/doctest.h>

#include <ops/gradients.hpp>
#include <support/random.hpp>
#include <support/rejects.hpp>

#include <limits>
#include <numbers>
#include <numeric>

using bits::rows, bits::scattered, bits::size;

namespace {

std::vector<size> counted(size count) {
    std::vector<size> positions(static_cast<std::size_t>(count));
    std::iota(positions.begin(), positions.end(), size{1000});
    return positions;
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE("rotary pairs the halves of the rotated channels, and other channels pass through") {
        std::vector<double> const x = {1, 2, 3, 4, 5, 6};
        std::vector<size> const positions = {7};
        scattered<double> y(1, 6);
        cpx::rotary<double>(rows<double const>(x, 6), 6, positions, {.theta = 10000, .rotary_dim = 4}, y.view());
        std::vector<double> const angle = {7, 7 * 0.01};
        for (size i = 0; i < 2; ++i) {
            auto const a = static_cast<std::size_t>(i);
            double const c = std::cos(angle[a]), s = std::sin(angle[a]);
            CHECK(y.view()(0, i) == doctest::Approx(x[a] * c - x[a + 2] * s).epsilon(1e-14));
            CHECK(y.view()(0, i + 2) == doctest::Approx(x[a + 2] * c + x[a] * s).epsilon(1e-14));
        }
        CHECK(y.view()(0, 4) == 5);
        CHECK(y.view()(0, 5) == 6);
    }

    TEST_CASE("rotary in double has the full precision of double") {
        std::vector<size> const positions = {1, 12345, 262143};
        auto const frequencies = cpx::rotary_frequencies<double>({.theta = 1e7, .rotary_dim = 64});
        scattered<double> cos(3, 32), sin(3, 32);
        cpx::rotary_table<double>(positions, frequencies, cos.view(), sin.view());
        for (size row = 0; row < 3; ++row)
            for (size i = 0; i < 32; ++i) {
                auto const turns = static_cast<long double>(positions[static_cast<std::size_t>(row)]) *
                                   std::pow(1e7L, -2.0L * static_cast<long double>(i) / 64);
                double const bound = 4e-16 * std::max(1.0, static_cast<double>(turns)); // of the angle
                CHECK(std::abs(cos.view()(row, i) - static_cast<double>(std::cos(turns))) <= bound);
                CHECK(std::abs(sin.view()(row, i) - static_cast<double>(std::sin(turns))) <= bound);
            }
    }

    TEST_CASE("rotary in float rounds the frequency and the angle to float") {
        std::vector<size> const positions = {100003};
        auto const frequencies = cpx::rotary_frequencies<float>({.theta = 1e6, .rotary_dim = 8});
        scattered<float> cos(1, 4), sin(1, 4);
        cpx::rotary_table<float>(positions, frequencies, cos.view(), sin.view());
        for (size i = 0; i < 4; ++i)
            CHECK(cos.view()(0, i) == std::cos(100003.0f * (1.0f / std::pow(1e6f, static_cast<float>(2 * i) / 8.0f))));
    }

    TEST_CASE_TEMPLATE("rotary_backward is the inverse, by tables and by positions, in place too", T, float, double) {
        auto const x = bits::uniform<T>(9, 3 * 22, 1);
        auto const positions = counted(9);
        cpx::rotary_options const options = {.theta = 1e4, .rotary_dim = 18};
        scattered<T> cos(9, 9, 1), sin(9, 9, 2), y(9, 66), back(9, 66);
        cpx::rotary_table<T>(positions, cpx::rotary_frequencies<T>(options), cos.view(), sin.view());
        cpx::rotary<T>(x, 22, cos, sin, y.view());
        cpx::rotary_backward<T>(y, 22, cos, sin, back.view());
        CHECK(bits::relative_error<T, T>(back.view(), x.view()) <= 4 * std::numeric_limits<T>::epsilon());
        cpx::rotary_backward<T>(y, 22, positions, options, y.view());
        CHECK(bits::same<T>(y, back));
    }

    TEST_CASE("the gradient of rotary is its differences") {
        auto x = bits::uniform<double>(5, 2 * 9, 1);
        auto const dy = bits::uniform<double>(5, 2 * 9, 2);
        auto const positions = counted(5);
        cpx::rotary_options const options = {.theta = 100, .rotary_dim = 6};
        scattered<double> y(5, 18), dx(5, 18);
        cpx::rotary_backward<double>(dy, 9, positions, options, dx.view());
        gradients::check(x.view(), dx, [&] {
            cpx::rotary<double>(x, 9, positions, options, y.view());
            return gradients::loss(y, dy);
        });
    }

    TEST_CASE_TEMPLATE("a row of rotary_backward does not depend on the rows beside it, bit for bit", T, float,
                       double) {
        auto const dy = bits::uniform<T>(23, 2 * 27, 2);
        auto const positions = counted(23);
        bits::check_rows_are_independent<T>(dy, 54, [&](size first, rows<T const> some, rows<T> dx) {
            auto const at =
                std::span(positions).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(some.count()));
            cpx::rotary_backward<T>(some, 27, at, {.theta = 1e5, .rotary_dim = 22}, dx);
        });
    }

    TEST_CASE_TEMPLATE("a row of rotary does not depend on the rows beside it, bit for bit", T, float, double) {
        auto const x = bits::uniform<T>(23, 2 * 27, 2);
        auto const positions = counted(23);
        cpx::rotary_options const options = {.theta = 1e5, .rotary_dim = 22};
        bits::check_rows_are_independent<T>(x, 54, [&](size first, rows<T const> some, rows<T> y) {
            auto const at =
                std::span(positions).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(some.count()));
            cpx::rotary<T>(some, 27, at, options, y);
            scattered<T> in_place(some, 1, 1);
            cpx::rotary<T>(in_place, 27, at, options, in_place.view());
            CHECK(bits::same<T>(in_place.view(), y));
        });
    }

    TEST_CASE_TEMPLATE("a head of rotary does not depend on the heads beside it, bit for bit", T, float, double) {
        auto const x = bits::uniform<T>(4, 5 * 11, 3);
        auto const positions = counted(4);
        scattered<T> all(4, 55), one(4, 11);
        cpx::rotary<T>(x, 11, positions, {.theta = 1e5, .rotary_dim = 10}, all.view());
        for (size head = 0; head < 5; ++head) {
            cpx::rotary<T>(x.view().columns(11 * head, 11), 11, positions, {.theta = 1e5, .rotary_dim = 10},
                           one.view());
            CHECK(bits::same<T>(one.view(), all.view().columns(11 * head, 11)));
        }
    }

    // "axis thwt" and "axis tthw" of the project's notes on transformers' apply_interleaved_mrope and
    // apply_multimodal_rotary_pos_emb.
    TEST_CASE("rotary by three axes is that of worked examples, and a strip of axes is that of one") {
        std::vector<double> const x = {1, 2, 3, 4, 5, 6, 7, 8};
        std::vector<size> const positions = {3, 5, 7};
        rows<size const> const axes(positions, 1);
        std::pair<cpx::axis_order, std::vector<double>> const known[] = {
            {cpx::axis_order::interleaved,
             {-1.695593, -1.121388, 2.503053, 3.975982, -4.808842, 6.224346, 7.192686, 8.011964}},
            {cpx::axis_order::sectioned,
             {-1.695593, 0.137552, 2.646397, 3.943902, -4.808842, 6.323059, 7.141189, 8.027804}}};
        auto const frequencies = cpx::rotary_frequencies<double>({.theta = 1e4, .rotary_dim = 8});
        for (auto const& [order, expected] : known) {
            cpx::rotary_pairs<double> const pairs{frequencies, cpx::rotary_axes({2, 1, 1}, order, 4)};
            scattered<double> y(1, 8), back(1, 8);
            cpx::rotary<double>(rows<double const>(x, 8), 8, axes, pairs, y.view());
            for (size i = 0; i < 8; ++i)
                CHECK(std::abs(y.view()(0, i) - expected[static_cast<std::size_t>(i)]) <= 1e-6);
            cpx::rotary_backward<double>(y, 8, axes, pairs, back.view());
            for (size i = 0; i < 8; ++i)
                CHECK(back.view()(0, i) == doctest::Approx(x[static_cast<std::size_t>(i)]).epsilon(1e-15));

            // Text is at the same position on all axes, so that axes do not matter.
            std::vector<size> const same = {9, 9, 9}, one = {9};
            scattered<double> plain(1, 8);
            cpx::rotary<double>(rows<double const>(x, 8), 8, rows<size const>(same, 1), pairs, y.view());
            cpx::rotary<double>(rows<double const>(x, 8), 8, one, {.theta = 1e4, .rotary_dim = 8}, plain.view());
            CHECK(bits::same<double>(y, plain));
        }
    }

    TEST_CASE("pairs have the axes of transformers") {
        auto const text = [](std::array<size, 3> section, cpx::axis_order order) {
            std::string result;
            for (int const axis : cpx::rotary_axes(section, order)) result += "thw"[axis];
            return result;
        };
        CHECK(text({2, 1, 1}, cpx::axis_order::interleaved) == "thwt");
        CHECK(text({3, 3, 2}, cpx::axis_order::interleaved) == "thwthwth");
        CHECK(text({2, 1, 1}, cpx::axis_order::sectioned) == "tthw");
        support::rejects(
            {"local_rotary.cpp", "rotary_axes: sum of the sections: expected half the rotary size, 4, got 32"}, [] {
                cpx::rotary_axes({16, 8, 8}, cpx::axis_order::interleaved, 4);
            }); // clipped there
        support::rejects({"rotary_axes: section: expected not negative, got -1"}, [] {
            cpx::rotary_axes({3, -1, 2}, cpx::axis_order::sectioned, 4);
        });
    }

    TEST_CASE_TEMPLATE("16 bits are rounded after each operation, or once, as is asked", T, Eigen::bfloat16,
                       Eigen::half) {
        support::splitmix numbers(3);
        size const count = 40, head_dim = 10, half = 4;
        std::vector<T> x, once(static_cast<std::size_t>(count * head_dim)), each(once.size()), back(once.size());
        for (size i = 0; i < count * head_dim; ++i)
            x.push_back(static_cast<T>(static_cast<float>(numbers.between(-1000, 1000)) / 300.0f));
        auto const positions = counted(count);
        rows<size const> const at(positions.data(), 1, count);
        cpx::rotary_pairs<float> pairs{cpx::rotary_frequencies<float>({.theta = 1e4, .rotary_dim = 2 * half})};
        cpx::rotary<T>(rows<T const>(x, head_dim), head_dim, at, pairs, rows<T>(once, head_dim));
        pairs.how = cpx::rounding::round_each_op;
        cpx::rotary<T>(rows<T const>(x, head_dim), head_dim, at, pairs, rows<T>(each, head_dim));
        size differ = 0;
        for (size row = 0; row < count; ++row)
            for (size i = 0; i < half; ++i) {
                auto const low = static_cast<std::size_t>(row * head_dim + i), high = low + half;
                float const angle = static_cast<float>(positions[static_cast<std::size_t>(row)]) *
                                    pairs.frequencies[static_cast<std::size_t>(i)];
                float const c = std::cos(angle), s = std::sin(angle), a = static_cast<float>(x[low]),
                            b = static_cast<float>(x[high]);
                CHECK(once[low] == static_cast<T>(a * c - b * s));
                CHECK(once[high] == static_cast<T>(b * c + a * s));
                T const cosine(c), sine(s); // whose arithmetic rounds each result
                CHECK(each[low] == x[low] * cosine - x[high] * sine);
                CHECK(each[high] == x[high] * cosine + x[low] * sine);
                differ += each[low] != once[low];
            }
        CHECK(differ > 10);
        cpx::rotary_backward<T>(rows<T const>(each, head_dim), head_dim, at, pairs, rows<T>(back, head_dim));
        CHECK(bits::relative_error<T, T>(rows<T const>(back, head_dim), rows<T const>(x, head_dim)) <= 0.02);
    }

    TEST_CASE("positions whose rows are in the wrong dimension, or sections of another size, are rejected") {
        auto const x = bits::uniform<float>(5, 8, 1);
        scattered<float> y(5, 8);
        std::vector<size> const positions(20);
        cpx::rotary_pairs<float> pairs{cpx::rotary_frequencies<float>({.theta = 1e4, .rotary_dim = 8})};
        auto const rotate = [&](size axes, size count) {
            cpx::rotary<float>(x, 8, rows<size const>(positions.data(), axes, count), pairs, y.view());
        };
        support::rejects({"local_rotary.cpp", "rotary: shape of positions, whose rows are in the wrong dimension: "
                                              "expected (1, 5) or (3, 5), got (5, 3)"},
                         [&] { rotate(5, 3); });
        support::rejects({"rotary: shape of positions: expected (1, 5) or (3, 5), got (4, 5)"}, [&] { rotate(4, 5); });
        support::rejects({"rotary_backward: shape of positions: expected (1, 5) or (3, 5), got (4, 5)"}, [&] {
            cpx::rotary_backward<float>(x, 8, rows<size const>(positions.data(), 4, 5), pairs, y.view());
        });
        support::rejects({"rotary_backward: width of dy: expected a multiple of head_dim, 9, got 8"}, [&] {
            cpx::rotary_backward<float>(x, 9, rows<size const>(positions.data(), 3, 5), pairs, y.view());
        });
        pairs.axes = cpx::rotary_axes({2, 2, 1}, cpx::axis_order::interleaved);
        support::rejects({"rotary: number of axes, which the sections make together: expected one a pair, 4, got 5"},
                         [&] { rotate(3, 5); });
        pairs.axes = {0, 1, 2, 3};
        support::rejects({"rotary: axis: expected one of 3, got 3"}, [&] { rotate(3, 5); });
    }

    TEST_CASE("an odd number of rotated channels, or more than a head has, is an error") {
        auto const x = bits::uniform<float>(1, 8, 1);
        std::vector<size> const positions = {0};
        scattered<float> y(1, 8);
        CHECK_THROWS_AS(cpx::rotary<float>(x, 8, positions, {.theta = 1e4, .rotary_dim = 3}, y.view()), cpx::error);
        for (double const theta : {0.0, -1e4, std::numeric_limits<double>::quiet_NaN()})
            CHECK_THROWS_AS(cpx::rotary<float>(x, 8, positions, {.theta = theta, .rotary_dim = 4}, y.view()),
                            cpx::error);
        for (char const* const dim : {"3", "-2"})
            support::rejects({"local_rotary.cpp", "rotary_frequencies: rotary_dim: expected 0, 2, 4 or another even "
                                                  "number, got " +
                                                      std::string(dim)},
                             [&] { cpx::rotary_frequencies<float>({.rotary_dim = std::stoi(dim)}); });
        for (cpx::index_t const dim : {cpx::index_t{6}, cpx::index_t{1} << 60})
            support::rejects({"local_rotary.cpp", "rotary: rotary_dim: expected at most head_dim, 4"},
                             [&] { cpx::rotary<float>(x, 4, positions, {.theta = 1e4, .rotary_dim = dim}, y.view()); });
    }
}
