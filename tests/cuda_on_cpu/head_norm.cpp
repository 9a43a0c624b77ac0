// SPDX-License-Identifier: Apache-2.0
// Norms of rows and lengths of heads against float64's, forward and backward, of heads that lanes share in every way;
// the same bits wherever rows begin.
#include "words.hpp"

#include <cpx/cpx.hpp>
#include <cpx/head_norm.cuh>
#include <cpx/ops.hpp>

#include <doctest/doctest.h>

#include "matrix.hpp"

#include <random>
#include <vector>

namespace {

using cpx::index_t;
namespace kernels = cpx::kernels;

constexpr index_t count = 11, heads = 3;

/// A matrix of random numbers, and the same in float64.
template <class T>
struct both {
    matrix<T> own;
    std::vector<double> wide;

    both(std::mt19937& random, index_t rows, index_t width) : own(rows, width) {
        std::normal_distribution<float> number;
        for (index_t i = 0; i < rows * width; ++i) {
            own.data()[i] = static_cast<T>(number(random));
            wide.push_back(kernels::widen(own.data()[i]));
        }
    }
    cpx::rows<double const> exact() const { return {wide.data(), own.count(), own.width()}; }
};

/// What the kernels give; X: x's type, and that of its gradient.
template <class T, class X>
struct results {
    matrix<T> y, dz;
    matrix<X> dx;
    matrix<float> terms;

    results(kernels::norm_input<T, X> const& n, cpx::rows<T const> dy, bool whole)
        : y(count, n.x.width()), dz(y), dx(count, n.x.width()), terms(count, n.dim()) {
        std::fill_n(terms.data(), count * n.dim(), 0.0f); // which is added to
        auto const by = kernels::norm_lanes_of<T>(n.dim(), whole);
        auto const launch = [](auto&& kernel) { gpu::now().launch({(count + 7) / 8, 1}, {32, 8}, kernel); };
        if (by.lanes > 0) {
            auto const run = [&](auto gated) {
                launch([&] { kernels::normalise_rows<T, gated, X>(n, y.rows(), by); });
                launch([&] {
                    kernels::normalise_rows_backward<T, gated, X>(n, dy, dx.rows(), dz.rows(), terms.rows(), by);
                });
            };
            n.z.data() ? run(std::true_type()) : run(std::false_type());
        } else {
            launch([&] { kernels::normalise_any_rows<T, X>(n, y.rows()); });
            launch([&] { kernels::normalise_any_rows_backward<T, X>(n, dy, dx.rows(), dz.rows(), terms.rows()); });
        }
    }
};

/// How far numbers may be from what they are rounded from: float's sums, or one rounding.
template <class T>
constexpr double unit = sizeof(T) == 4              ? 1e-6
                        : std::is_same_v<T, __half> ? 0x1p-12
                                                    : 0x1p-9;

template <class T, class X = T>
void check(index_t dim, bool gated, bool shared_by_lanes) {
    CAPTURE(dim);
    CAPTURE(gated);
    REQUIRE((kernels::norm_lanes_of<T>(dim, true).lanes > 0) == shared_by_lanes);
    std::mt19937 random(static_cast<unsigned>(dim));
    index_t const width = heads * dim;
    both<X> x(random, count, width);
    both<T> z(random, count, width), weight(random, 1, dim), dy(random, count, width);
    kernels::norm_input<T, X> const n{x.own, gated ? cpx::rows<T const>(z.own) : cpx::rows<T const>(), weight.own,
                                      1e-6f, gated ? 0.0f : 1.0f};
    results<T, X> got(n, dy.own, true), elsewhere(n, dy.own, false);

    std::vector<double> y(x.wide), dx(x.wide), dz(x.wide), dweight(static_cast<std::size_t>(dim));
    auto const wide = [&](std::vector<double>& to) { return cpx::rows<double>(to.data(), count, width); };
    if (gated) {
        cpx::gated_rms_norm<double>(x.exact(), z.exact(), weight.wide, 1e-6, wide(y));
        cpx::gated_rms_norm_backward<double>(x.exact(), z.exact(), weight.wide, 1e-6, dy.exact(), wide(dx), wide(dz),
                                             dweight);
    } else {
        cpx::rms_norm<double>(x.exact(), weight.wide, 1e-6, 1.0, wide(y));
        cpx::rms_norm_backward<double>(x.exact(), weight.wide, 1e-6, 1.0, dy.exact(), wide(dx), dweight);
    }
    CHECK(distance(got.y, y) < unit<T>);
    CHECK(distance(got.dx, dx) < unit<X>);
    if (gated) CHECK(distance(got.dz, dz) < unit<T>);
    matrix<float> sums(1, dim);
    std::fill_n(sums.data(), dim, 0.0f);
    for (index_t i = 0; i < count * dim; ++i) sums.data()[i % dim] += got.terms.data()[i];
    CHECK(distance(sums, dweight) < 1e-6);

    CHECK(got.y.has_the_bits_of(elsewhere.y));
    CHECK(got.dx.has_the_bits_of(elsewhere.dx));
    if (gated) CHECK(got.dz.has_the_bits_of(elsewhere.dz));
    CHECK(got.terms.has_the_bits_of(elsewhere.terms));
    if constexpr (!std::is_same_v<T, X>) { // a gradient that is multiplied, and nothing else is
        auto more = n;
        more.gradient_scale = 48;
        results<T, X> scaled(more, dy.own, true);
        for (double& d : dx) d *= 48;
        CHECK(distance(scaled.dx, dx) < unit<X>);
        CHECK(scaled.y.has_the_bits_of(got.y));
        if (gated) CHECK(scaled.dz.has_the_bits_of(got.dz));
        CHECK(scaled.terms.has_the_bits_of(got.terms));
    }
    if constexpr (std::is_same_v<T, X>) { // in place
        if (!shared_by_lanes) return;
        auto const by = kernels::norm_lanes_of<T>(dim, true);
        auto const run = [&](auto gate) {
            auto const launch = [](auto&& kernel) { gpu::now().launch({(count + 7) / 8, 1}, {32, 8}, kernel); };
            auto of_x = x.own, of_z = z.own, of_dy = dy.own, dz_of = z.own;
            kernels::norm_input<T> in = n;
            in.x = of_x;
            launch([&] { kernels::normalise_rows<T, gate>(in, of_x.rows(), by); });
            CHECK(of_x.has_the_bits_of(got.y));
            if (gate) {
                in.x = x.own, in.z = of_z;
                launch([&] { kernels::normalise_rows<T, gate>(in, of_z.rows(), by); });
                CHECK(of_z.has_the_bits_of(got.y));
            }
            matrix<float> terms(count, dim);
            std::fill_n(terms.data(), count * dim, 0.0f);
            launch([&] {
                kernels::normalise_rows_backward<T, gate>(n, of_dy, of_dy.rows(), dz_of.rows(), terms.rows(), by);
            });
            CHECK(of_dy.has_the_bits_of(got.dx));
        };
        gated ? run(std::true_type()) : run(std::false_type());
    }
}

/// Heads divided by their lengths, y, and then the gradient of that, in place of dy.
template <class T>
void check_lengths(index_t dim, bool shared_by_lanes) {
    CAPTURE(dim);
    std::mt19937 random(static_cast<unsigned>(dim));
    index_t const width = heads * dim;
    both<T> x(random, count, width), dy(random, count, width);
    auto const run = [&](bool whole, matrix<T>& y, bool back) {
        auto const by = kernels::norm_lanes_of<T>(dim, whole);
        REQUIRE((by.lanes > 0) == shared_by_lanes);
        gpu::now().launch({(count + 7) / 8, 1}, {32, 8}, [&] {
            int const columns = static_cast<int>(dim);
            if (by.lanes > 0)
                (back ? kernels::normalise_heads<T, true>
                      : kernels::normalise_heads<T, false>)(x.own.data(), width, y.data(), width, count,
                                                            static_cast<int>(width), columns, by);
            else
                kernels::normalise_any_heads<T>(x.own.data(), width, y.data(), width, count, heads, columns, back);
        });
    };
    std::vector<double> exact_y(x.wide), exact_dx(x.wide);
    for (index_t i = 0; i < count * width; i += dim) {
        double squares = 0, along = 0;
        auto const at = [&](std::vector<double> const& of, index_t d) { return of[static_cast<std::size_t>(i + d)]; };
        for (index_t d = 0; d < dim; ++d) {
            squares += at(x.wide, d) * at(x.wide, d);
            along += at(x.wide, d) * at(dy.wide, d);
        }
        double const factor = 1 / std::sqrt(squares + 1e-6);
        for (index_t d = 0; d < dim; ++d) {
            exact_y[static_cast<std::size_t>(i + d)] *= factor;
            exact_dx[static_cast<std::size_t>(i + d)] =
                factor * (at(dy.wide, d) - at(x.wide, d) * factor * factor * along);
        }
    }
    matrix<T> y(count, width), elsewhere(count, width), dx(dy.own), dx_elsewhere(dy.own);
    run(true, y, false), run(false, elsewhere, false);
    run(true, dx, true), run(false, dx_elsewhere, true);
    double const unit = sizeof(T) == 4 ? 1e-6 : 0x1p-8;
    CHECK(distance(y, exact_y) < unit);
    CHECK(distance(dx, exact_dx) < unit);
    CHECK(y.has_the_bits_of(elsewhere));
    CHECK(dx.has_the_bits_of(dx_elsewhere));
}

} // namespace

TEST_SUITE("cuda_on_cpu") {
    TEST_CASE("heads are divided by their lengths, however lanes share a head") {
        for (index_t const dim : {8, 128, 256}) check_lengths<float>(dim, true);
        for (index_t const dim : {8, 64, 128, 256, 512}) check_lengths<__nv_bfloat16>(dim, true);
        check_lengths<float>(40, false);
        check_lengths<__nv_bfloat16>(20, false);
    }
    TEST_CASE("norms of rows are float64's, however lanes share a head") {
        for (bool const gated : {false, true}) {
            for (index_t const dim : {8, 16, 128, 512}) check<float>(dim, gated, true);
            for (index_t const dim : {8, 64, 256, 1024}) check<__nv_bfloat16>(dim, gated, true);
            check<__half>(128, gated, true);
            for (index_t const dim : {64, 512}) {
                check<__nv_bfloat16, __half>(dim, gated, true);
                check<__half, __nv_bfloat16>(dim, gated, true);
            }
            check<__nv_bfloat16, __half>(20, gated, false);
            check<float>(40, gated, false);
            check<__nv_bfloat16>(20, gated, false);
        }
    }
}
