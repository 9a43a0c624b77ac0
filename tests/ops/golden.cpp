// SPDX-License-Identifier: Apache-2.0
// The operators against transformers, on every sharding: tests/golden/README.md says what the files hold.
#include <cpx/ops.hpp>

#include <doctest/doctest.h>

#include <ops/golden.hpp>
#include <ops/on_ranks.hpp>
#include <ops/reference.hpp>

namespace {

using namespace on_ranks;
using cpx::index_t;
using golden::batch_of, golden::open, golden::read_layer;
using reference::conv, reference::delta, reference::layer, reference::run, reference::run_by_heads;

conv<double> read_conv(cpx::safetensors const& file) {
    auto const& shape = file.tensor("weight").shape;
    return {batch_of(file),
            shape[0],
            shape[1],
            file.metadata("activation") == "silu" ? cpx::activation::silu : cpx::activation::none,
            file.read<double>("x"),
            file.read<double>("weight"),
            file.contains("bias") ? file.read<double>("bias") : std::vector<double>()};
}

delta<double> read_delta(cpx::safetensors const& file) {
    auto const &k = file.tensor("k").shape, &v = file.tensor("v").shape;
    delta<double> p{batch_of(file),
                    {k[1], v[1], k[2], v[2]},
                    {.chunk = 16, .qk_l2norm = file.metadata("qk_l2norm") == "True"},
                    {},
                    {}};
    REQUIRE(file.metadata("scale") == std::to_string(k[2]) + "**-0.5"); // the default
    std::vector<std::pair<std::vector<double>, index_t>> const inputs = {{file.read<double>("q"), k[1] * k[2]},
                                                                         {file.read<double>("k"), k[1] * k[2]},
                                                                         {file.read<double>("v"), v[1] * v[2]},
                                                                         {file.read<double>("g"), v[1]},
                                                                         {file.read<double>("beta"), v[1]}};
    for (index_t row = 0; row < p.batch.tokens(); ++row)
        for (auto const& [values, columns] : inputs)
            p.x.insert(p.x.end(), values.begin() + row * columns, values.begin() + (row + 1) * columns);
    return p;
}

/// The files hold float32, most of them rounded once from float64.
template <class T>
constexpr double tolerance = sizeof(T) == 8 ? 2e-7 : 5e-6;

/// Calls `f(sharding)` with every layout, scope and cut over every number of ranks.
template <class F>
void everywhere(cpx::thd const& batch, F&& f) {
    for (int const ranks : rank_counts)
        for_each_sharding(batch, ranks, {1, 16}, [&](std::string const& name, auto const& sharding) {
            CAPTURE(name);
            f(sharding);
        });
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("the convolution agrees with transformers on every sharding", T, double, float) {
        for (char const* name : {"conv_bias", "conv_linear", "conv_silu"}) {
            CAPTURE(name);
            auto const file = open(name);
            auto const p = read_conv(file);
            auto const q = p.as<T>();
            auto const expected = file.read<double>("y");
            double const bound = sizeof(T) == 8 ? 1e-6 : tolerance<T>; // transformers computed in float32
            CHECK(relative_error(run(p), expected) <= 1e-6);
            everywhere(p.batch, [&](auto const& sharding) {
                CHECK(relative_error(run(q, sharding), expected) <= bound);
                cpx::head_sharded<> const split(sharding.ranks(), p.batch, {{p.channels, 1}});
                CHECK(relative_error(run(q, split), expected) <= bound);
            });
        }
    }

    TEST_CASE_TEMPLATE("the delta rule agrees with transformers on every sharding", T, double, float) {
        for (char const* name : {"gdr_small", "gdr_odd", "gdr_fast_decay"}) {
            CAPTURE(name);
            auto const file = open(name);
            auto const p = read_delta(file);
            auto const q = p.as<T>();
            auto const o = file.read<double>("o"), final = file.read<double>("final_state");
            auto const check = [&](auto const& got) {
                CHECK(relative_error(got.o, o) <= tolerance<T>);
                CHECK(relative_error(got.final, final) <= tolerance<T>);
            };
            check(run(p));
            everywhere(p.batch, [&](auto const& sharding) {
                check(run<cpx::scan>(q, sharding));
                check(run<cpx::serial>(q, sharding));
            });
            for (int const ranks : rank_counts)
                check(run<cpx::scan>(q, cpx::head_sharded<>(ranks, p.batch, p.sections())));
        }
    }

    TEST_CASE_TEMPLATE("the layer agrees with transformers on every sharding", T, double, float) {
        for (char const* name : {"gdn_layer_small", "gdn_layer_odd"}) {
            CAPTURE(name);
            auto const file = open(name);
            auto const p = read_layer(file);
            auto const q = p.as<T>();
            auto const expected = file.read<double>("output");
            auto const check = [&](std::vector<T> const& got) { CHECK(relative_error(got, expected) <= tolerance<T>); };
            CHECK(relative_error(run(p), expected) <= tolerance<double>);
            everywhere(p.batch, [&](auto const& sharding) {
                check(run<cpx::scan>(q, sharding));
                check(run<cpx::serial>(q, sharding));
                check(run_by_heads(q, sharding));
            });
        }
    }
}
