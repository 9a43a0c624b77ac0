// SPDX-License-Identifier: Apache-2.0
// A convolution, the gated delta rule and a gated norm between rows of bfloat16, whose q, k, v and o are of bfloat16 or
// of half, against float64's, there and back.
#include "delta_rule_call.hpp"

#include <cpx/cuda/causal_conv1d.hpp>
#include <cpx/cuda/head_norm.hpp>
#include <cpx/ops/local/causal_conv.hpp>
#include <cpx/ops/local/norm.hpp>

#include <support/rejects.hpp>

#include <cmath>
#include <string>
#include <vector>

namespace {

using namespace packed_delta_rule;
using element = __nv_bfloat16;

constexpr index_t taps = 4, dim = 128;

/// What such a part of a layer reads. `of`: its gates, betas and sizes, and the gradient of its result as `dout`.
struct mixing {
    problem of;
    numbers x, weight, z, gain;

    explicit mixing(kind what) : of(make<element>({200, 311, 0, 65}, 1, 2, dim, dim, what, 91)) {
        support::splitmix random(92);
        auto const some = [&](index_t count, double most) {
            return widen(convert<element>(on_ranks::uniform<double>(random, count, most)));
        };
        x = some(of.tokens() * channels(), 1), z = some(of.tokens() * of.values(), 2);
        weight = some(channels() * taps, 1), gain = some(dim, 1);
    }
    index_t channels() const { return 2 * of.keys() + of.values(); }
};

/// Its result, and the gradients of x, z, g and beta.
struct outcome {
    numbers y, dx, dz, dg, dbeta;
};

outcome in_double(mixing const& m) {
    problem p = m.of;
    index_t const channels = m.channels(), tokens = p.tokens(), keys = p.keys(), values = p.values();
    rows<double const> const weight(m.weight, taps);
    numbers mixed(m.x.size()), dmixed(m.x.size()), dz_of_conv(m.x.size());
    auto const segment = [&](auto& tensor, index_t n) {
        auto const first = p.offsets[static_cast<std::size_t>(n)], last = p.offsets[static_cast<std::size_t>(n + 1)];
        return rows(tensor, channels).sub(first, last - first);
    };
    for (index_t n = 0; n < p.sequences(); ++n)
        cpx::convolve_segment<double>({}, segment(m.x, n), weight, nullptr, cpx::activation::silu, segment(mixed, n));
    // Heads of q and k, and what their lengths are divided by.
    numbers lengths;
    auto const for_each_head = [&](auto&& f) {
        for (index_t row = 0; row < tokens; ++row)
            for (index_t head = 0; head < 2 * keys; head += dim) f(static_cast<std::size_t>(row * channels + head));
    };
    for_each_head([&](std::size_t head) {
        double squares = 1e-6;
        for (std::size_t i = head; i < head + dim; ++i) squares += mixed[i] * mixed[i];
        lengths.push_back(std::sqrt(squares));
        for (std::size_t i = head; i < head + dim; ++i) mixed[i] /= lengths.back();
    });
    for (index_t row = 0; row < tokens; ++row) {
        auto const from = mixed.begin() + row * channels;
        std::copy_n(from, keys, p.q.begin() + row * keys);
        std::copy_n(from + keys, keys, p.k.begin() + row * keys);
        std::copy_n(from + 2 * keys, values, p.v.begin() + row * values);
    }
    std::ranges::fill(p.state, 0), std::ranges::fill(p.dlast, 0);
    auto const o = on_host(p, false).o;
    outcome r{numbers(o.size()), numbers(m.x.size()), numbers(o.size()), {}, {}};
    rows<double const> const of_o(o, values), of_z(m.z, values);
    cpx::gated_rms_norm<double>(of_o, of_z, m.gain, 1e-6, rows<double>(r.y, values));
    numbers d_o(o.size()), dgain(m.gain.size());
    cpx::gated_rms_norm_backward<double>(of_o, of_z, m.gain, 1e-6, rows<double const>(p.dout, values),
                                         rows<double>(d_o, values), rows<double>(r.dz, values), dgain);
    p.dout = d_o;
    auto const back = on_host(p, true);
    r.dg = back.dg, r.dbeta = back.dbeta;
    for (index_t row = 0; row < tokens; ++row) {
        auto const to = dmixed.begin() + row * channels;
        std::copy_n(back.dq.begin() + row * keys, keys, to);
        std::copy_n(back.dk.begin() + row * keys, keys, to + keys);
        std::copy_n(back.dv.begin() + row * values, values, to + 2 * keys);
    }
    auto length = lengths.begin();
    for_each_head([&](std::size_t head) {
        double along = 0;
        for (std::size_t i = head; i < head + dim; ++i) along += mixed[i] * dmixed[i];
        for (std::size_t i = head; i < head + dim; ++i) dmixed[i] = (dmixed[i] - mixed[i] * along) / *length;
        ++length;
    });
    for (index_t n = 0; n < p.sequences(); ++n) {
        cpx::convolve_segment_backward_sums<double>({}, segment(m.x, n), weight, nullptr, cpx::activation::silu,
                                                    segment(dmixed, n), segment(dz_of_conv, n));
        cpx::convolve_segment_backward_input<double>(segment(dz_of_conv, n), {}, weight, segment(r.dx, n));
    }
    return r;
}

/// The same on a GPU. T: the elements of q, k, v and o and of their gradients, which are `scale` times what they stand
/// for: those of dO times `small`, divided by it.
template <class T>
outcome on_gpu(mixing const& m, float scale = 1, float small = 1) {
    problem const& p = m.of;
    auto const& shape = p.shape;
    index_t const channels = m.channels(), tokens = p.tokens(), keys = p.keys(), values = p.values();
    auto const sharding = on_ranks::one_rank(cpx::thd::from_offsets(p.offsets));
    gpu::stream const stream;
    gpu::conv_plan const plan(cpx::halo(sharding, 0, taps - 1), cpx::halo(sharding, 0, taps - 1, cpx::side::after));
    auto const x = upload<element>(m.x), z = upload<element>(m.z), weight = upload<element>(m.weight),
               gain = upload<element>(m.gain);
    numbers of_y = p.dout;
    for (double& d : of_y) d *= small;
    auto const dy = upload<element>(of_y);
    auto const g = upload<float>(p.g), beta = upload<float>(p.beta);
    buffer<index_t> const offsets{std::span<index_t const>(p.offsets)};
    auto const q = poisoned<T>(tokens * keys), k = poisoned<T>(tokens * keys), v = poisoned<T>(tokens * values),
               o = poisoned<T>(tokens * values), dq = poisoned<T>(tokens * keys), dk = poisoned<T>(tokens * keys),
               dv = poisoned<T>(tokens * values), d_o = poisoned<T>(tokens * values);
    auto const y = poisoned<element>(tokens * values), dz = poisoned<element>(tokens * values),
               dx = poisoned<element>(tokens * channels);
    auto const dg = poisoned<float>(std::ssize(p.g)), dbeta = poisoned<float>(std::ssize(p.g));
    auto const room = poisoned<char>(gpu::gated_delta_rule_workspace<T>(shape, tokens, p.sequences())),
               more = poisoned<char>(gpu::gated_delta_rule_backward_workspace<T>(shape, tokens, p.sequences()));
    buffer<float> const terms{std::span<float const>(std::vector<float>(static_cast<std::size_t>(tokens * dim)))};
    auto const as = [&]<class U>(buffer<U> const& b, index_t width) {
        return rows<U>(const_cast<U*>(b.data()), b.size() / width, width);
    };
    auto const read = [&]<class U>(buffer<U> const& b, index_t width) {
        return rows<U const>(b.data(), b.size() / width, width);
    };

    gpu::causal_conv1d(plan, read(x, channels), {}, read(weight, taps), {}, gpu::activation::silu,
                       gpu::conv_parts<T>{{{{as(q, keys), dim}, {as(k, keys), dim}, {as(v, values), 0}}}}, stream);
    gpu::gated_delta_rule_input<T> const in{
        read(q, keys), read(k, keys), read(v, values), read(g, shape.value_heads), read(beta, shape.value_heads),
        all(offsets)};
    auto const path = gpu::gated_delta_rule<T>(shape, in, as(o, values), {}, all(room), stream);
    CHECK(path == core_path<T>());
    gpu::norm_input<element, T> const norm{read(o, values), read(z, values), read(gain, dim), 1e-6f, 0, scale};
    gpu::normalise_rows(norm, as(y, values), stream);

    gpu::normalise_rows_backward(norm, read(dy, values), as(d_o, values), as(dz, values), as(terms, dim), stream);
    gpu::gated_delta_rule_backward<T>(
        shape, in, read(d_o, values), {},
        {as(dq, keys), as(dk, keys), as(dv, values), as(dg, shape.value_heads), as(dbeta, shape.value_heads), {}},
        all(more), stream);
    gpu::conv_parts<T const> const of_parts{
        {{{read(dq, keys), dim}, {read(dk, keys), dim}, {read(dv, values), 0}}}, 1e-6f, scale};
    buffer<float> const none(0);
    gpu::causal_conv1d_backward(plan, read(x, channels), {}, read(weight, taps), {}, gpu::activation::silu, of_parts,
                                {}, {}, {as(dx, channels)}, stream);
    outcome r{widen(y.read()), widen(dx.read()), widen(dz.read()), widen(dg.read()), widen(dbeta.read())};
    for (double& d : r.dx) d /= small;
    for (double& d : r.dz) d /= small;
    for (numbers* const gates : {&r.dg, &r.dbeta})
        for (double& d : *gates) d /= small * static_cast<double>(scale);
    return r;
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("between rows of bfloat16 the gated delta rule can be half's: most of the error is gone") {
        if (!has_gpus()) return;
        for (kind const what : {kind::mild, kind::slow, kind::strong}) {
            CAPTURE(static_cast<int>(what));
            mixing const m(what);
            outcome const exact = in_double(m), plain = on_gpu<element>(m), finer = on_gpu<__half>(m);
            auto const compare = [&](char const* name, numbers outcome::*of, double most, double times) {
                double const error = on_ranks::relative_error(finer.*of, exact.*of),
                             before = on_ranks::relative_error(plain.*of, exact.*of);
                CHECK_MESSAGE(error <= most, std::string(name) << ": " << error << ", with bfloat16 " << before);
                CHECK_MESSAGE(error <= times * before, std::string(name)
                                                           << ": " << error << ", with bfloat16 " << before);
            };
            // y, dx and dz are rounded to bfloat16, by 1.7e-3; dg and dbeta are float. With hardly any decay dg sums
            // what all later tokens give, and that nearly cancels.
            compare("y", &outcome::y, 2e-3, 0.5), compare("dx", &outcome::dx, 2e-3, 0.5);
            compare("dz", &outcome::dz, 2e-3, 0.5);
            compare("dg", &outcome::dg, what == kind::slow ? 2e-3 : 1e-3, 0.25);
            compare("dbeta", &outcome::dbeta, 1e-3, 0.25);
        }
    }

    TEST_CASE("gradients of half that are multiplied on the way have the bits of those of a larger dO") {
        if (!has_gpus()) return;
        mixing const m(kind::mild);
        outcome const expected = on_gpu<__half>(m);
        for (float const small : {0x1p-40f, 0x1p10f}) {
            outcome const got = on_gpu<__half>(m, 1 / small, small);
            CHECK(got.y == expected.y);
            CHECK(got.dx == expected.dx);
            CHECK(got.dz == expected.dz);
            CHECK(got.dg == expected.dg);
            CHECK(got.dbeta == expected.dbeta);
        }
        for (float const scale : {0.f, -1.f, 1e-40f, 1e38f, NAN})
            support::rejects({"cuda::normalise_rows: gradient_scale: expected 2^-126 to 2^126, got "},
                             [&] { on_gpu<__half>(m, scale); });
        support::rejects(
            {"cuda::normalise_rows: gradient_scale: expected 1, for gradients have the elements of all else, got 2"},
            [&] { on_gpu<element>(m, 2); });
    }

    TEST_CASE("a convolution refuses parts whose gradients cannot be so many times what they stand for") {
        if (!has_gpus()) return;
        auto const sharding = on_ranks::one_rank(cpx::thd::from_offsets(std::vector<index_t>{0, 3}));
        gpu::stream const stream;
        gpu::conv_plan const plan(cpx::halo(sharding, 0, taps - 1), cpx::halo(sharding, 0, taps - 1, cpx::side::after));
        auto const x = upload<element>(numbers(3 * 8, 1)), weight = upload<element>(numbers(8 * taps, 1)),
                   dx = upload<element>(numbers(3 * 8, 1));
        auto const dy = upload<__half>(numbers(3 * 8, 1));
        rows<element const> const of_x(x.data(), 3, 8), of_weight(weight.data(), 8, taps);
        auto const back = [&]<class T>(T const* gradient, float scale) {
            gpu::causal_conv1d_backward(plan, of_x, {}, of_weight, {}, gpu::activation::silu,
                                        gpu::conv_parts<T const>{{{{rows<T const>(gradient, 3, 8), 0}}}, 1e-6f, scale},
                                        {}, {}, {rows<element>(const_cast<element*>(dx.data()), 3, 8)}, stream);
        };
        for (float const scale : {0.f, -1.f, 1e-40f, 1e38f, NAN})
            support::rejects({"cuda::causal_conv1d_backward: gradient_scale: expected 2^-126 to 2^126, got "},
                             [&] { back(dy.data(), scale); });
        support::rejects({"cuda::causal_conv1d_backward: gradient_scale: expected 1, for gradients have"},
                         [&] { back(x.data(), 2); });
        CHECK(widen(dx.read()) == numbers(3 * 8, 1));
    }
}
