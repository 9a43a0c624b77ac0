// SPDX-License-Identifier: Apache-2.0
// Gradients of the operators that need their neighbours: transformers' own, and bitwise those of one rank.
#include <cpx/cpx.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/gated_delta_rule_backward.hpp>

#include <doctest/doctest.h>

#include <support/files.hpp>

#include <ops/on_ranks.hpp>

#include <cmath>
#include <map>
#include <mutex>
#include <string>

namespace {

using cpx::index_t;
using on_ranks::relative_error;
using on_ranks::same_bits;

template <class T>
using gradients = std::map<std::string, std::vector<T>>;

/// The tensors of a golden file in the type of the computation.
template <class T>
struct golden {
    explicit golden(std::string const& name) : file(std::string(support::golden_dir) + '/' + name + ".safetensors") {
        for (auto const& tensor : file.names())
            if (tensor != "cu_seqlens") values[tensor] = file.read<T>(tensor);
        batch = cpx::thd(file.read<index_t>("cu_seqlens"));
    }
    index_t width(char const* name) const { return std::ssize(values.at(name)) / batch.tokens(); }

    cpx::safetensors file;
    std::map<std::string, std::vector<T>> values;
    cpx::thd batch;
};

/// Returns this rank's rows of a whole tensor.
template <class T, class S>
cpx::tensor<T, S> take(std::vector<T> const& whole, index_t width, S const& sharding, int rank) {
    cpx::tensor<T, S> local(sharding, rank, width);
    index_t row = 0;
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t global = piece.first; global < piece.last; ++global, ++row)
            std::copy_n(whole.data() + global * width, width, local.data().row(row));
    });
    return local;
}

/// Puts this rank's rows where they belong in a whole tensor.
template <class T, class S>
void put(cpx::tensor<T, S> const& local, int rank, std::vector<T>& whole) {
    index_t row = 0;
    whole.resize(static_cast<std::size_t>(local.sharding().batch().tokens() * local.width()));
    local.sharding().for_each_piece(rank, [&](cpx::range piece) {
        for (index_t global = piece.first; global < piece.last; ++global, ++row)
            std::copy_n(local.data().row(row), local.width(), whole.data() + global * local.width());
    });
}

template <class T, class S>
cpx::tensor<T, S> poisoned(S const& sharding, int rank, index_t width) {
    cpx::tensor<T, S> x(sharding, rank, width);
    std::fill_n(x.data().data(), x.data().count() * width, on_ranks::poison<T>());
    return x;
}

/// Runs forward and backward by tokens; `final` also gives the final states a gradient.
template <class How, class T, class S>
gradients<T> delta_rule(golden<T> const& f, S const& sharding, index_t chunk, bool final = false) {
    auto const &q = f.file.tensor("q").shape, &v = f.file.tensor("v").shape;
    cpx::delta_rule_heads const heads{q[1], v[1], q[2], v[2]};
    cpx::delta_rule_options const options{.chunk = chunk, .qk_l2norm = f.file.metadata("qk_l2norm") == "True"};
    index_t const state = heads.value_heads * heads.key_dim * heads.value_dim, n = f.batch.sequences();
    std::vector<T> dfinal(static_cast<std::size_t>(n * state));
    for (std::size_t i = 0; i < dfinal.size(); ++i) dfinal[i] = std::sin(T(0.1) * static_cast<T>(i));
    gradients<T> result;
    std::mutex guard;
    cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
        int const rank = comm.rank();
        std::map<std::string, cpx::tensor<T, S>> x, d;
        for (char const* name : {"q", "k", "v", "g", "beta", "do"})
            x.emplace(name, take(f.values.at(name), f.width(name), sharding, rank));
        for (char const* name : {"q", "k", "v", "g", "beta"})
            d.emplace(name, poisoned<T>(sharding, rank, f.width(name)));
        auto o = poisoned<T>(sharding, rank, f.width("v"));
        std::vector<T> dinitial(static_cast<std::size_t>(n * state));
        cpx::delta_rule_saved<T> saved;
        cpx::delta_rule_tensors<T, S> const t{x.at("q").view(),
                                              x.at("k").view(),
                                              x.at("v").view(),
                                              x.at("g").view(),
                                              x.at("beta").view(),
                                              o.view(),
                                              {},
                                              {},
                                              &saved};
        cpx::delta_rule_gradient_tensors<T, S> const to{x.at("do").view(),
                                                        d.at("q").view(),
                                                        d.at("k").view(),
                                                        d.at("v").view(),
                                                        d.at("g").view(),
                                                        d.at("beta").view(),
                                                        final ? cpx::rows<T const>(dfinal, state)
                                                              : cpx::rows<T const>(),
                                                        cpx::rows<T>(dinitial, state)};
        auto const plan = cpx::carry<How>(sharding, rank);
        gated_delta_rule(plan, t, heads, options, comm);
        gated_delta_rule_backward(plan, t, to, heads, options, comm);
        std::lock_guard const lock(guard);
        for (auto const& [name, gradient] : d) put(gradient, rank, result["d" + name]);
        auto& all = result["dinitial"];
        all.resize(dinitial.size());
        for (std::size_t i = 0; i < dinitial.size(); ++i) all[i] += dinitial[i]; // zero but where a sequence begins
    });
    return result;
}

template <class T, class S>
gradients<T> convolution(golden<T> const& f, S const& sharding) {
    index_t const channels = f.width("x"), taps = f.file.tensor("weight").shape[1];
    auto const act = f.file.metadata("activation") == "silu" ? cpx::activation::silu : cpx::activation::none;
    std::vector<T> const none;
    auto const& bias = f.values.contains("bias") ? f.values.at("bias") : none;
    gradients<T> result;
    std::mutex guard;
    cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const x = take(f.values.at("x"), channels, sharding, rank),
                   dy = take(f.values.at("dy"), channels, sharding, rank);
        auto dx = poisoned<T>(sharding, rank, channels);
        std::vector<T> dweight(static_cast<std::size_t>(channels * taps)), dbias(static_cast<std::size_t>(channels));
        causal_conv1d_backward(cpx::halo(sharding, rank, taps - 1),
                               cpx::halo(sharding, rank, taps - 1, cpx::side::after), x.view(),
                               cpx::rows<T const>(f.values.at("weight"), taps), std::span<T const>(bias), act,
                               dy.view(), cpx::causal_conv1d_gradients{dx, dweight, dbias}, comm);
        sum_over_ranks(std::span(dweight), comm);
        sum_over_ranks(std::span(dbias), comm);
        std::lock_guard const lock(guard);
        put(dx, rank, result["dx"]);
        result["dweight"] = dweight; // every rank has the same
        if (!bias.empty()) result["dbias"] = dbias;
    });
    return result;
}

/// Calls `f(sharding)` for layouts over both scopes, cut at multiples of `unit` tokens: 2 types.
template <class F>
void everywhere(cpx::thd const& batch, int unit, F&& f) {
    for (int const ranks : {2, 3, 5, 8})
        for (cpx::table const& layout : {cpx::table(cpx::sequential<>(ranks)), cpx::table(cpx::zigzag<>(ranks)),
                                         cpx::table(cpx::striped<>(ranks))}) {
            CAPTURE(ranks);
            f(on_ranks::by_tokens(cpx::shard(batch, layout, cpx::aligned<cpx::dynamic>(unit))));
            f(on_ranks::by_tokens(cpx::shard<cpx::scope::batch>(batch, layout, cpx::aligned<cpx::dynamic>(unit))));
        }
}

template <class T>
constexpr double tolerance = sizeof(T) == 8 ? 1e-6 : 1e-5;

} // namespace

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("gradients of the delta rule agree with transformers on every sharding", T, double, float) {
        for (char const* name : {"gdr_small", "gdr_odd", "gdr_fast_decay"}) {
            CAPTURE(name);
            golden<T> const f(name);
            auto const check = [&](gradients<T> const& got) {
                for (char const* gradient : {"dq", "dk", "dv", "dg", "dbeta"}) {
                    CAPTURE(gradient);
                    CHECK(relative_error(got.at(gradient), f.file.template read<double>(gradient)) <= tolerance<T>);
                }
            };
            everywhere(f.batch, 1, [&](auto const& sharding) {
                check(delta_rule<cpx::scan>(f, sharding, 64));
                check(delta_rule<cpx::serial>(f, sharding, 64));
            });
        }
    }

    TEST_CASE_TEMPLATE("with serial and aligned cuts they are bitwise those of one rank, those of states too", T,
                       double, float) {
        golden<T> const f("gdr_odd");
        for (int const chunk : {16, 64}) {
            auto const one = delta_rule<cpx::serial>(f, on_ranks::one_rank(f.batch), chunk, true);
            everywhere(f.batch, chunk, [&](auto const& sharding) {
                auto const got = delta_rule<cpx::serial>(f, sharding, chunk, true);
                for (auto const& [given_name, gradient] : one) {
                    auto const& name = given_name;
                    CAPTURE(name);
                    CHECK(same_bits(got.at(name), gradient));
                }
            });
        }
    }

    TEST_CASE("scan hands gradients of final states back within rounding") {
        golden<double> const f("gdr_odd");
        auto const one = delta_rule<cpx::serial>(f, on_ranks::one_rank(f.batch), 64, true);
        everywhere(f.batch, 1, [&](auto const& sharding) {
            auto const got = delta_rule<cpx::scan>(f, sharding, 64, true);
            for (auto const& [given_name, gradient] : one) {
                auto const& name = given_name;
                CAPTURE(name);
                CHECK(relative_error(got.at(name), gradient) <= 1e-12);
            }
        });
    }

    TEST_CASE_TEMPLATE("gradients of the convolution agree with transformers, dx bitwise with one rank", T, double,
                       float) {
        for (char const* name : {"conv_bias", "conv_silu", "conv_linear"}) {
            CAPTURE(name);
            golden<T> const f(name);
            auto const one = convolution(f, on_ranks::one_rank(f.batch));
            everywhere(f.batch, 1, [&](auto const& sharding) {
                auto const got = convolution(f, sharding);
                CHECK(same_bits(got.at("dx"), one.at("dx")));
                for (auto const& [given_gradient, values] : got) {
                    auto const& gradient = given_gradient;
                    CAPTURE(gradient);
                    CHECK(relative_error(values, f.file.template read<double>(gradient)) <= tolerance<T>);
                }
            });
        }
    }

    TEST_CASE("the gradient of one sequence does not reach another") {
        golden<double> f("gdr_odd");
        on_ranks::by_tokens const zigzag = cpx::shard<cpx::scope::batch>(f.batch, cpx::zigzag<3>{});
        auto const before = delta_rule<cpx::scan>(f, zigzag, 16);
        cpx::index_t const row = f.batch.offset(3) + 5; // a token of sequence 3
        f.values.at("do")[static_cast<std::size_t>(row * f.width("do"))] += 1;
        f.values.at("k")[static_cast<std::size_t>(row * f.width("k") + 1)] += 1;
        auto const after = delta_rule<cpx::scan>(f, zigzag, 16);
        for (char const* name : {"dq", "dk", "dv", "dg", "dbeta"}) {
            CAPTURE(name);
            cpx::index_t const width = f.width(name + 1), tokens = f.batch.tokens();
            CHECK(on_ranks::same_rows(before.at(name), after.at(name), width, 0, f.batch.offset(3)));
            CHECK(on_ranks::same_rows(before.at(name), after.at(name), width, f.batch.offset(4), tokens));
            CHECK_FALSE(
                on_ranks::same_rows(before.at(name), after.at(name), width, f.batch.offset(3), f.batch.offset(4)));
        }
    }
}
