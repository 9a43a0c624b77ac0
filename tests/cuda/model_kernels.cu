// SPDX-License-Identifier: Apache-2.0
// Plain kernels of the main job and of the library against the host's operations.
#include "../../examples/qwen/cuda/products.cuh"

#include <cpx/cpx.hpp>
#include <cpx/cuda/elements.hpp>
#include <cpx/ops.hpp>
#include <cpx/ops/cuda/norm.hpp>

#include <cpx/conv_weight_sums.cuh>

#include <doctest/doctest.h>

#include "gpus.hpp"

#include <support/random.hpp>

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

using cpx::index_t;
using wide_rows = cpx::rows<float>;
namespace gpu = qwen::gpu;

/// Random numbers on the host and a copy of them on the device, before a kernel and after it.
struct both {
    index_t count, width;
    std::vector<float> host;
    cpx::cuda::buffer<float> device;

    both(support::splitmix& numbers, index_t rows, index_t columns)
        : count(rows), width(columns), host(static_cast<std::size_t>(rows * columns)) {
        for (float& x : host) x = static_cast<float>(numbers.between(-2000, 2000)) / 1000;
        device = cpx::cuda::buffer<float>(std::span<float const>(host));
    }
    wide_rows h() { return {host.data(), count, width}; }
    wide_rows d() const { return {device.data(), count, width}; }
    /// Returns how far the device is from the host, by the largest of its numbers.
    double error() const {
        auto const found = device.read();
        double difference = 0, largest = 0;
        for (std::size_t i = 0; i < host.size(); ++i) {
            if (!std::isfinite(found[i])) return INFINITY;
            difference = std::max(difference, std::abs(static_cast<double>(found[i]) - static_cast<double>(host[i])));
            largest = std::max(largest, std::abs(static_cast<double>(host[i])));
        }
        return difference / largest;
    }
};

double const tolerance = 3e-6;

std::span<float const> list(both const& x) { return x.host; }

using bf16 = __nv_bfloat16;

/// Numbers that bfloat16 holds, as floats on the host and as they are on the device.
struct rounded {
    index_t count, width;
    std::vector<float> host;
    cpx::cuda::buffer<bf16> device;

    rounded(support::splitmix& numbers, index_t rows, index_t columns)
        : count(rows), width(columns), host(static_cast<std::size_t>(rows * columns)) {
        for (float& x : host) x = bf16(static_cast<float>(numbers.between(-2000, 2000)) / 1000);
        std::vector<bf16> const there(host.begin(), host.end());
        device = cpx::cuda::buffer<bf16>(std::span<bf16 const>(there));
    }
    wide_rows h() { return {host.data(), count, width}; }
    cpx::rows<bf16> d() const { return {device.data(), count, width}; }
    /// Returns whether the device has the host's numbers, each rounded once.
    bool is_once_rounded() const {
        auto const found = device.read();
        float largest = 0;
        for (float const x : host) largest = std::max(largest, std::abs(x));
        for (std::size_t i = 0; i < host.size(); ++i)
            if (!(std::abs(float(found[i]) - host[i]) <= std::abs(host[i]) / 256 + 1e-5f * largest)) return false;
        return true;
    }
};

cpx::cuda::memory on_device() { return cpx::cuda::memory(nullptr); }

/// Checks norms of 3 heads, with and without a gate, against the host's.
void check_norms(support::splitmix& numbers, index_t rows, index_t dim) {
    CAPTURE(dim);
    index_t const heads = 3;
    both of(numbers, rows, heads * dim), z(numbers, rows, heads * dim), gain(numbers, 1, dim),
        dy(numbers, rows, heads * dim), dx(numbers, rows, heads * dim), dz(numbers, rows, heads * dim);
    for (bool const gated : {false, true}) {
        cpx::head_norm<float> const n{of.d(), gated ? wide_rows(z.d()) : wide_rows(), gain.d(), 1e-6f,
                                      gated ? 0.f : 1.f};
        both normed(numbers, rows, heads * dim), terms(numbers, rows, dim), dgain(numbers, 1, dim);
        terms.device.write(std::vector<float>(terms.host.size()));
        normalise(on_device(), n, normed.d());
        normalise_backward(on_device(), n, dy.d(), dx.d(), dz.d(), terms.d());
        auto const all = terms.device.read();
        std::vector<float> sums(static_cast<std::size_t>(dim));
        for (std::size_t i = 0; i < all.size(); ++i) sums[i % sums.size()] += all[i];
        dgain.device.write(sums);
        dgain.host.assign(sums.size(), 0);
        if (gated) {
            cpx::gated_rms_norm<float>(of.h(), z.h(), list(gain), 1e-6f, normed.h());
            cpx::gated_rms_norm_backward<float>(of.h(), z.h(), list(gain), 1e-6f, dy.h(), dx.h(), dz.h(), dgain.host);
            CHECK(dz.error() < tolerance);
        } else {
            cpx::rms_norm<float>(of.h(), list(gain), 1e-6f, 1.f, normed.h());
            cpx::rms_norm_backward<float>(of.h(), list(gain), 1e-6f, 1.f, dy.h(), dx.h(), dgain.host);
        }
        CHECK(normed.error() < tolerance);
        CHECK(dx.error() < tolerance);
        CHECK(dgain.error() < 2 * tolerance);
    }
}

/// The same of bfloat16, which are computed in float and rounded once; rows that begin anywhere have the same bits.
void check_rounded_norms(support::splitmix& numbers, index_t rows, index_t dim) {
    CAPTURE(dim);
    index_t const width = 3 * dim;
    rounded x(numbers, rows, width), z(numbers, rows, width), gain(numbers, 1, dim), dy(numbers, rows, width),
        y(numbers, rows, width), dx(numbers, rows, width), dz(numbers, rows, width);
    both terms(numbers, rows, dim), sums(numbers, rows, dim);
    cpx::head_norm<float> const of_host{x.h(), z.h(), gain.h(), 1e-6f, 0.f};
    cpx::head_norm<bf16> const of_device{x.d(), z.d(), gain.d(), 1e-6f, 0.f};
    normalise(cpx::host_memory(), of_host, y.h());
    normalise(on_device(), of_device, y.d());
    CHECK(y.is_once_rounded());
    normalise_backward(cpx::host_memory(), of_host, dy.h(), dx.h(), dz.h(), terms.h());
    normalise_backward(on_device(), of_device, dy.d(), dx.d(), dz.d(), terms.d());
    CHECK(dx.is_once_rounded());
    CHECK(dz.is_once_rounded());
    CHECK(terms.error() < 2 * tolerance);

    auto const apart = [&](rounded const& from) { // rows at odd places
        auto const given = from.device.read();
        std::vector<bf16> moved(given.size() + static_cast<std::size_t>(rows));
        for (std::size_t i = 0; i < given.size(); ++i) moved[i + i / static_cast<std::size_t>(width)] = given[i];
        return cpx::cuda::buffer<bf16>(std::span<bf16 const>(moved));
    };
    auto const view = [&](auto const& b) { return cpx::rows<bf16>(b.data(), rows, width, width + 1); };
    auto const x_apart = apart(x), z_apart = apart(z), dy_apart = apart(dy), y_apart = apart(dx), dx_apart = apart(dx),
               dz_apart = apart(dx);
    cpx::head_norm<bf16> const of_apart{view(x_apart), view(z_apart), gain.d(), 1e-6f, 0.f};
    both terms_apart(numbers, rows, dim);
    sums.device.write(std::vector<float>(sums.host.size()));
    terms_apart.device.write(std::vector<float>(sums.host.size()));
    normalise(on_device(), of_device, y.d());
    normalise(on_device(), of_apart, view(y_apart));
    normalise_backward(on_device(), of_device, dy.d(), dx.d(), dz.d(), sums.d());
    normalise_backward(on_device(), of_apart, view(dy_apart), view(dx_apart), view(dz_apart), terms_apart.d());
    auto const same = [&](rounded const& aligned, cpx::cuda::buffer<bf16> const& odd) {
        auto const a = aligned.device.read(), b = odd.read();
        for (std::size_t i = 0; i < a.size(); ++i)
            if (float(a[i]) != float(b[i + i / static_cast<std::size_t>(width)])) return false;
        return true;
    };
    CHECK(same(y, y_apart));
    CHECK(same(dx, dx_apart));
    CHECK(same(dz, dz_apart));
    CHECK(sums.device.read() == terms_apart.device.read());
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("the main job's products, norms and experts give what the host's give") {
        if (!has_gpus()) return;
        support::splitmix numbers(14);
        for (index_t const rows : {1, 7, 70}) {
            both x(numbers, rows, 48), w(numbers, 24, 48), y(numbers, rows, 24), dw(numbers, 24, 48);
            cpx::linear<float>(x.h(), w.h(), y.h());
            for_each_element(on_device(), rows, 24,
                             gpu::fixed_product{gpu::plain(x.d()), gpu::plain(w.d()), 48, 0, y.d()});
            CHECK(y.error() < tolerance);
            cpx::linear_backward_weight<float>(y.h(), x.h(), dw.h());
            for_each_element(on_device(), 24, 48,
                             gpu::fixed_product{gpu::transposed(y.d()), gpu::transposed(x.d()), rows, 1, dw.d()});
            CHECK(dw.error() < tolerance);
            cpx::linear_backward_input<float>(y.h(), w.h(), x.h());
            for_each_element(on_device(), rows, 48,
                             gpu::fixed_product{gpu::plain(y.d()), gpu::transposed(w.d()), 24, 0, x.d()});
            CHECK(x.error() < tolerance);

            for (index_t const dim : {40, 16, 128, 512}) check_norms(numbers, rows, dim);
        }
    }

    TEST_CASE("functions of elements and rows give on a device what they give on the host") {
        if (!has_gpus()) return;
        support::splitmix numbers(16);
        index_t const rows = 37, width = 24, choices = 3;
        both logits(numbers, rows, width), up(numbers, rows, width), y(numbers, rows, width), logp(numbers, rows, 1),
            d(numbers, rows, width), probabilities(numbers, rows, width), weights(numbers, rows, choices),
            dweights(numbers, rows, choices);
        std::vector<index_t> labels, chosen(static_cast<std::size_t>(rows * choices));
        for (index_t row = 0; row < rows; ++row) labels.push_back(row % 5 == 0 ? cpx::ignored : row % width);
        cpx::cuda::buffer<index_t> const labels_there{std::span<index_t const>(labels)};
        cpx::cuda::buffer<index_t> chosen_there{std::span<index_t const>(chosen)};
        cpx::rows<index_t> const chosen_d(chosen_there.data(), rows, choices), chosen_h(chosen.data(), rows, choices);

        cpx::silu_mul<float>(logits.h(), up.h(), y.h());
        for_each_element(on_device(), rows, width, cpx::rowwise::silu_mul<float>{logits.d(), up.d(), y.d()});
        CHECK(y.error() < tolerance);
        cpx::log_probabilities<float>(logits.h(), labels, logp.host);
        for_each_element(on_device(), rows, 1,
                         cpx::rowwise::log_probability<float>{logits.d(), labels_there.data(), logp.d()});
        CHECK(logp.error() < tolerance);
        cpx::log_probabilities_backward<float>(logits.h(), labels, logp.host, d.h());
        for_each_element(
            on_device(), rows, 1,
            cpx::rowwise::log_probability_backward<float>{logits.d(), labels_there.data(), logp.d(), d.d()});
        CHECK(d.error() < 2 * tolerance);
        cpx::choose_experts<float>(logits.h(), chosen_h, weights.h());
        for_each_element(on_device(), rows, 1,
                         cpx::rowwise::choose_experts<float>{logits.d(), probabilities.d(), chosen_d, weights.d()});
        CHECK(weights.error() < tolerance);
        CHECK(chosen_there.read() == chosen);
        cpx::rowwise::choose_experts_backward<float> const on_host{chosen_h, weights.h(), dweights.h(), d.h()};
        for_each_element(cpx::host_memory(), rows, 1, on_host);
        for_each_element(on_device(), rows, 1,
                         cpx::rowwise::choose_experts_backward<float>{chosen_d, weights.d(), dweights.d(), d.d()});
        CHECK(d.error() < 2 * tolerance);
    }

    TEST_CASE("of bfloat16, products, norms and functions of elements are computed in float and rounded once") {
        if (!has_gpus()) return;
        support::splitmix numbers(17);
        for (index_t const dim : {40, 128, 1024}) check_rounded_norms(numbers, 37, dim);
        index_t const rows = 37, width = 120;
        rounded x(numbers, rows, width), z(numbers, rows, width), dy(numbers, rows, width), dx(numbers, rows, width),
            dz(numbers, rows, width);
        cpx::silu_mul_backward<float>(x.h(), z.h(), dy.h(), dx.h(), dz.h());
        for_each_element(on_device(), rows, width,
                         cpx::rowwise::silu_mul_backward<bf16>{x.d(), z.d(), dy.d(), dx.d(), dz.d()});
        CHECK(dx.is_once_rounded());
        CHECK(dz.is_once_rounded());
        rounded w(numbers, 24, width), product(numbers, rows, 24);
        both dw(numbers, 24, width);
        cpx::linear<float>(x.h(), w.h(), product.h());
        for_each_element(on_device(), rows, 24,
                         gpu::fixed_product{gpu::plain(x.d()), gpu::plain(w.d()), width, 0, product.d()});
        CHECK(product.is_once_rounded());
        rounded const dproduct(numbers, rows, 24);
        cpx::rows<float const> const d(dproduct.host.data(), rows, 24);
        cpx::linear_backward_weight<float>(d, x.h(), dw.h());
        for_each_element(on_device(), 24, width,
                         gpu::fixed_product{gpu::transposed(dproduct.d()), gpu::transposed(x.d()), rows, 1, dw.d()});
        CHECK(dw.error() < tolerance);
    }

    TEST_CASE("the gradient of a convolution's weight in the order of the batch is the host's") {
        if (!has_gpus()) return;
        support::splitmix numbers(15);
        cpx::thd const batch({0, 1, 18, 18, 60});
        index_t const tokens = batch.tokens(), taps = 4, channels = 10;
        both x(numbers, tokens, channels), dy(numbers, tokens, channels), dx(numbers, tokens, channels),
            weight(numbers, channels, taps), dweight(numbers, channels, taps);
        for (index_t s = 0; s < batch.sequences(); ++s) {
            auto const of = [&](both& all) { return all.h().sub(batch.offset(s), batch.length(s)); };
            wide_rows const before(nullptr, 0, channels), dz = of(dx);
            cpx::convolve_segment_backward_sums<float>(before, of(x), weight.h(), nullptr, cpx::activation::silu,
                                                       of(dy), dz);
            cpx::convolve_segment_backward_weight<float>(before, of(x), dz, dweight.h(), nullptr);
        }
        cpx::cuda::buffer<index_t> const offsets{batch.offsets()};
        for_each_element(on_device(), channels, taps,
                         cpx::kernels::conv_weight_sums<float>{x.d(), dy.d(), weight.d(), nullptr, true, offsets.data(),
                                                               batch.sequences(), dweight.d(), nullptr});
        CHECK(dweight.error() < tolerance);
    }
}
