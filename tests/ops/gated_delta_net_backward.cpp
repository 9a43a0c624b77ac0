// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/gated_delta_net_backward.hpp>

#include <doctest/doctest.h>

#include <ops/backward.hpp>
#include <ops/golden.hpp>
#include <support/rejects.hpp>

namespace {

using namespace on_ranks;
using cpx::index_t, cpx::sum_order;
using reference::gradient, reference::gradient_by_heads, reference::inputs, reference::layer, reference::random_layer;
using support::lengths;

cpx::gated_delta_net_config const grouped{12, {2, 4, 4, 6}, 4, 16, 1e-6};
cpx::gated_delta_net_config const uneven{10, {3, 9, 5, 3}, 8, 5, 1e-6};
cpx::gated_delta_net_config const pointwise{4, {1, 1, 2, 2}, 1, 1, 1e-5};

std::vector<std::vector<index_t>> const packings = {{37, 0, 16, 1, 50}, {5, 3, 2}, {1}, {}, {0, 64, 65}, {0, 0}};

template <class T>
std::vector<T> random_upstream(layer<T> const& p) {
    support::splitmix numbers(77);
    return uniform<T>(numbers, std::ssize(p.x));
}

/// Checks that two problems hold the same bits.
template <class T>
void check_bits(layer<T> got, layer<T> expected) {
    auto const a = inputs(got), b = inputs(expected);
    REQUIRE(a.size() == 10);
    for (std::size_t i = 0; i < a.size(); ++i) {
        CAPTURE(a[i].first);
        CHECK(same_bits(*a[i].second, *b[i].second));
    }
}

template <class T>
void check_near(layer<T> got, layer<double> expected, double tolerance) {
    auto const a = inputs(got);
    auto const b = inputs(expected);
    REQUIRE(a.size() == 10);
    for (std::size_t i = 0; i < a.size(); ++i) {
        CAPTURE(a[i].first);
        CHECK(relative_error(*a[i].second, *b[i].second) <= tolerance);
    }
}

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("gradients of the layer agree with transformers on every sharding", T, double, float) {
        for (char const* name : {"gdn_layer_small", "gdn_layer_odd"}) {
            CAPTURE(std::string(name));
            auto const file = golden::open(name);
            auto const p = golden::read_layer(file).as<T>();
            auto const dy = file.template read<T>("d_output");
            auto const expected = golden::read_layer(file, "grad.");
            double const tolerance = sizeof(T) == 8 ? 1e-6 : 1e-5;
            std::size_t turn = 0;
            for (int const ranks : {1, 2, 3, 5, 8})
                for_each_sharding(p.batch, ranks, {1}, [&](std::string const& sharded, auto const& sharding) {
                    CAPTURE(sharded);
                    // the three ways to run, each with both orders in turn
                    auto const order = [&](std::size_t way) {
                        return (turn + way) / 3 % 2 ? sum_order::by_row : sum_order::by_rank;
                    };
                    if (turn % 3 != 0) check_near(gradient<cpx::scan>(p, dy, sharding, order(0)), expected, tolerance);
                    if (turn % 3 != 1)
                        check_near(gradient<cpx::serial>(p, dy, sharding, order(1)), expected, tolerance);
                    if (turn % 3 != 2) check_near(gradient_by_heads(p, dy, sharding, order(2)), expected, tolerance);
                    ++turn;
                });
        }
    }

    TEST_CASE_TEMPLATE("they have the bits of one rank: serial with aligned cuts, and by heads", T, float, double) {
        std::size_t turn = 0;
        for (auto const& config : {grouped, uneven, pointwise})
            for (auto const& packing : packings) {
                auto const p = random_layer<T>(lengths(packing), config, turn % 2 == 0, turn);
                CAPTURE(support::text(p.batch));
                auto const dy = random_upstream(p);
                auto const one = gradient<cpx::serial>(p, dy, one_rank(p.batch), sum_order::by_row);
                std::vector<int> const some = {2, 3, 4, 5, 8}; // more ranks than heads, and groups on several ranks
                for (std::size_t w = 0; w < 2; ++w) {
                    int const ranks = some[(turn + 2 * w) % some.size()];
                    for_each_sharding(p.batch, ranks, {80}, [&](std::string const& name, auto const& sharding) {
                        CAPTURE(name);
                        CHECK(cpx::is_exact<cpx::serial>(sharding, config.chunk));
                        check_bits(gradient<cpx::serial>(p, dy, sharding, sum_order::by_row), one);
                        check_bits(gradient_by_heads(p, dy, sharding, sum_order::by_row), one);
                        // dx does not ask how the weights' rows are added
                        CHECK(same_bits(gradient<cpx::serial>(p, dy, sharding, sum_order::by_rank).x, one.x));
                    });
                }
                check_bits(
                    gradient_by_heads(p, dy, by_tokens(cpx::shard(p.batch, cpx::zigzag<4>{})), sum_order::by_row), one);
                ++turn;
            }
        auto const p = random_layer<T>(lengths({200, 70, 1}), grouped, true, 5);
        auto const dy = random_upstream(p);
        auto const one = gradient<cpx::serial>(p, dy, one_rank(p.batch), sum_order::by_row);
        auto const check = [&](auto const& sharding) {
            check_bits(gradient<cpx::serial>(p, dy, sharding, sum_order::by_row), one);
        };
        check(cpx::shard(p.batch, cpx::zigzag<4>{}, cpx::aligned<16>{}));
        check(by_tokens(cpx::shard<cpx::scope::batch>(p.batch, cpx::striped<3>{}, cpx::aligned<>{})));
        for (int const ranks : {2, 4, 5, 8})
            check_bits(gradient_by_heads(p, dy,
                                         by_tokens(cpx::shard<cpx::scope::batch>(p.batch, cpx::sequential<>(ranks))),
                                         sum_order::by_row),
                       one);
    }

    TEST_CASE("a token of one sequence changes no bit of dx of another, not even by NaN") {
        auto const p = random_layer<double>(lengths({19, 1, 24, 0, 6}), grouped, true, 6);
        auto const dy = random_upstream(p);
        index_t const hidden = grouped.hidden;
        for (double const change : {1e-3, std::numeric_limits<double>::quiet_NaN()})
            for (int const ranks : {1, 3, 5})
                for_each_sharding(p.batch, ranks, {1}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    auto const in_place = gradient<cpx::scan>(p, dy, sharding, sum_order::by_rank),
                               by_heads = gradient_by_heads(p, dy, sharding, sum_order::by_rank);
                    for (index_t const row : {17, 19, 33}) {
                        CAPTURE(row);
                        for (bool const of_x : {false, true}) {
                            auto other = p;
                            auto upstream = dy;
                            (of_x ? other.x : upstream)[static_cast<std::size_t>(row * hidden + 1)] += change;
                            index_t const s = p.batch.sequence(row);
                            index_t const first = p.batch.offset(s), last = p.batch.offset(s + 1);
                            auto const check = [&](layer<double> const& before, layer<double> const& after) {
                                CHECK(same_rows(after.x, before.x, hidden, 0, first));
                                CHECK(same_rows(after.x, before.x, hidden, last, p.batch.tokens()));
                                CHECK_FALSE(same_rows(after.x, before.x, hidden, row, row + 1));
                            };
                            check(in_place, gradient<cpx::scan>(other, upstream, sharding, sum_order::by_rank));
                            check(by_heads, gradient_by_heads(other, upstream, sharding, sum_order::by_rank));
                        }
                    }
                });
    }

    TEST_CASE("the backward rejects what does not fit, before anything moves, and adds to what weights hold") {
        auto const batch = lengths({6, 5});
        using S = by_tokens;
        auto const on = [](cpx::thd const& of) -> S { return cpx::shard(of, cpx::zigzag<>(1)); };
        S const sharding = on(batch), other = on(lengths({5, 6})), longer = on(lengths({6, 7}));
        using net = cpx::gated_delta_net<cpx::scan, S>;
        auto const p = random_layer<double>(batch, grouped, false, 1);
        auto const expected = gradient<cpx::scan>(p, p.x, sharding, sum_order::by_rank);
        std::vector<double> values = p.x, dx_values(p.x.size());
        cpx::sharded<double, S> const x({values, 12}, sharding, 0), foreign({values, 12}, other, 0),
            dx({dx_values, 12}, sharding, 0), foreign_dx({dx_values, 12}, other, 0);
        std::vector<double> all;
        auto const weights = reference::parameters(all, grouped);
        std::ranges::fill(all, 1.);
        auto const forward = [&](layer<double> const& of, S const& where, auto& saved) {
            cpx::threads::run(1, [&](cpx::threads& comm) {
                cpx::tensor<double, S> in(where, 0, 12), y(where, 0, 12);
                std::copy(of.x.begin(), of.x.end(), in.data().data());
                net(cpx::carry<cpx::scan>(where, 0), of.config)(of.view(), in.view(), y.view(), comm, {{}, &saved});
            });
        };
        cpx::gated_delta_net_saved<double, S, S> good, none, of_other;
        forward(p, sharding, good);
        forward(random_layer<double>(longer.batch(), grouped, false, 1), longer, of_other);
        std::vector<double> conv(10'000), recurrent(10'000);
        index_t const state = grouped.heads.value_heads * grouped.heads.key_dim * grouped.heads.value_dim;
        index_t const taps = grouped.kernel * (2 * grouped.heads.key_heads * grouped.heads.key_dim +
                                               grouped.heads.value_heads * grouped.heads.value_dim);
        index_t const n = sharding.batch().sequences();
        support::rejects({"gated_delta_net: memory: expected states to go on from, or tensors to be saved"}, [&] {
            cpx::threads::run(1, [&](cpx::threads& comm) { // its backward would not know what came before
                cpx::gated_delta_net_saved<double, S, S> both;
                net(cpx::carry<cpx::scan>(sharding, 0),
                    p.config)(p.view(), x, dx, comm, {{{conv.data(), n, taps}, {recurrent.data(), n, state}}, &both});
            });
        });
        auto const call = [&](layer<double> const& q, auto& saved, cpx::sharded<double, S> const& in,
                              cpx::sharded<double, S> const& of_y, cpx::sharded<double, S> const& of_x,
                              cpx::gated_delta_net_parameters<double> const& to) {
            return [=, &saved] {
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    gated_delta_net_backward(net(cpx::carry<cpx::scan>(sharding, 0), q.config), q.view(), in, saved,
                                             of_y, cpx::gated_delta_net_gradients<double, S>{of_x, to}, comm);
                });
            };
        };
        std::string const where = "gated_delta_net_backward: ";
        auto const rejects = [&](std::string const& passage, auto const& f) {
            support::rejects({"gated_delta_net_backward.cpp", where + passage}, f);
            CHECK(std::ranges::all_of(all, [](double weight) { return weight == 1; }));
            CHECK(std::ranges::all_of(dx_values, [](double d) { return d == 0; }));
        };
        rejects("saved tensors: expected those of the forward, got none", call(p, none, x, x, dx, weights));
        rejects("saved tensors: expected those of the forward, got those of another",
                call(p, of_other, x, x, dx, weights));
        auto others_states = good;
        others_states.states = of_other.states;
        rejects("saved states: expected those of the forward, got those of another batch",
                call(p, others_states, x, x, dx, weights));
        rejects("sharding of x: expected the layer's", call(p, good, foreign, x, dx, weights));
        rejects("sharding of dy: expected the layer's", call(p, good, x, foreign, dx, weights));
        rejects("sharding of dx: expected the layer's", call(p, good, x, x, foreign_dx, weights));
        cpx::sharded<double, S> const low(x.data().sub(0, 10), sharding, 0), low_dx(dx.data().sub(0, 10), sharding, 0);
        rejects("shape of x: expected (11, 12), got (10, 12)", call(p, good, low, x, dx, weights));
        rejects("shape of dy: expected (11, 12), got (11, 11)", call(p, good, x, x.columns(0, 11), dx, weights));
        rejects("shape of dx: expected (11, 12), got (10, 12)", call(p, good, x, x, low_dx, weights));
        for (std::size_t w = 0; w < p.weights.size(); ++w) {
            auto q = p;
            q.weights[w].resize(q.weights[w].size() + static_cast<std::size_t>(p.widths()[w]));
            rejects("shape of ", call(q, good, x, x, dx, weights));
            auto cut = weights;
            std::size_t i = 0;
            for_each_parameter(cut, grouped,
                               [&](std::string const&, cpx::rows<double>& rows, index_t count, index_t width) {
                                   if (i++ == w) rows = rows.columns(0, width - 1).sub(0, count);
                               });
            rejects("shape of " + inputs(q)[w + 1].first, call(p, good, x, x, dx, cut));
        }
        rejects("overlap of dx and x: expected none, got some", call(p, good, dx, x, dx, weights));
        rejects("overlap of dx and dy", call(p, good, x, dx, dx, weights));
        auto const kept = good.projected->read();
        rejects("overlap of dx and saved tensors", call(p, good, x, x, good.projected->columns(0, 12), weights));
        support::rejects({"gated_delta_net_backward.cpp", "gated_delta_net: overlap of saved tensors and y"}, [&] {
            cpx::threads::run(1, [&](cpx::threads& comm) { // they would be freed before y is written
                auto const y = good.projected->columns(0, 12);
                net(cpx::carry<cpx::scan>(sharding, 0), p.config)(p.view(), x, y, comm, {{}, &good});
            });
        });
        CHECK(same_bits(good.projected->read(), kept));
        support::rejects(
            {"gated_delta_net_backward.cpp", ": gated_delta_net_backward: ranks disagree on operation"}, [&] {
                cpx::threads::run(2, [&](cpx::threads& comm) {
                    S const split = cpx::shard(batch, cpx::zigzag<>(2));
                    cpx::tensor<double, S> in(split, comm.rank(), 12), of_x = in;
                    cpx::gated_delta_net_saved<double, S, S> saved;
                    net const layer(cpx::carry<cpx::scan>(split, comm.rank()), grouped);
                    layer(p.view(), in, of_x, comm, {{}, &saved});
                    std::vector<double> own;
                    auto const order = comm.rank() == 0 ? sum_order::by_rank : sum_order::by_row;
                    gated_delta_net_backward(
                        layer, p.view(), in, saved, in,
                        cpx::gated_delta_net_gradients<double, S>{of_x, reference::parameters(own, grouped), order},
                        comm);
                });
            });
        auto twice = weights;
        twice.in_proj_a = twice.in_proj_b;
        rejects("overlap of in_proj_b.weight and in_proj_a.weight", call(p, good, x, x, dx, twice));
        CHECK(support::message(call(p, good, x, x, dx, weights)) == "");
        CHECK(same_bits(dx_values, expected.x));
        std::vector<double> sums;
        for (auto const& weight : expected.weights)
            for (double const d : weight) sums.push_back(d + 1);
        CHECK(relative_error(all, sums) <= 1e-14);
    }
}
