// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/gated_delta_net.hpp>

#include <cpx/ops/eigen.hpp>

#include <doctest/doctest.h>

#include <ops/on_ranks.hpp>
#include <ops/reference.hpp>
#include <support/rejects.hpp>

#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

using namespace on_ranks;
using cpx::index_t;
using reference::layer, reference::random_layer, reference::run, reference::run_by_heads;
using support::lengths;

cpx::gated_delta_net_config const grouped{12, {2, 4, 4, 6}, 4, 16, 1e-6};
cpx::gated_delta_net_config const uneven{10, {3, 9, 5, 3}, 8, 5, 1e-6};
cpx::gated_delta_net_config const pointwise{4, {1, 1, 2, 2}, 1, 1, 1e-5};

// Gates are made of float where weights have 16 bits.
using of_16_bits = cpx::gated_delta_net_parameters<Eigen::bfloat16>;
static_assert(std::is_same_v<decltype(of_16_bits::A_log), cpx::field<cpx::rows<float>>>);
static_assert(std::is_same_v<decltype(of_16_bits::norm), cpx::field<cpx::rows<Eigen::bfloat16>>>);
using read_16_bits = cpx::gated_delta_net_weights<Eigen::bfloat16>;
static_assert(std::is_same_v<decltype(read_16_bits::dt_bias), cpx::field<cpx::rows<float const>>>);
static_assert(
    std::is_same_v<decltype(cpx::gated_delta_net_weights<double>::A_log), cpx::field<cpx::rows<double const>>>);

std::vector<std::vector<index_t>> const packings = {{37, 0, 16, 1, 50}, {5, 3, 2}, {1}, {}, {64, 64}, {3, 0, 0, 20, 9}};

/// Runs `prepare(p)` for layers p of every config and packing, then `check(p, sharding, prepared)` on shardings.
template <class T, class P, class F>
void for_each_case(std::vector<int> const& units, P&& prepare, F&& check) {
    std::size_t turn = 0;
    for (auto const& config : {grouped, uneven, pointwise})
        for (auto const& packing : packings) {
            auto const p = random_layer<T>(lengths(packing), config, turn % 2 == 0, turn);
            CAPTURE(support::text(p.batch));
            auto const prepared = prepare(p);
            for (std::size_t w = 0; w < 3; ++w)
                for_each_sharding(p.batch, rank_counts[(turn + 2 * w) % std::size(rank_counts)], units,
                                  [&](std::string const& name, auto const& sharding) {
                                      CAPTURE(name);
                                      check(p, sharding, prepared);
                                  });
            ++turn;
        }
}

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("the layer is the same formula on every sharding, whatever the carry", T, float, double) {
        // Some hundred roundings follow each other: projections, K products, the recurrence, a norm.
        double const tolerance = 500 * std::numeric_limits<T>::epsilon();
        for_each_case<T>(
            {1, 16}, [](layer<T> const& p) { return run(p.template as<double>()); },
            [&](layer<T> const& p, auto const& sharding, std::vector<double> const& expected) {
                CHECK(relative_error(run<cpx::scan>(p, sharding), expected) <= tolerance);
                CHECK(relative_error(run<cpx::serial>(p, sharding), expected) <= tolerance);
                CHECK(relative_error(run_by_heads(p, sharding), expected) <= tolerance);
            });
    }

    TEST_CASE_TEMPLATE("the layer gives the bits of one rank: serial with aligned cuts, and by heads", T, float,
                       double) {
        for_each_case<T>(
            {80}, [](layer<T> const& p) { return run<cpx::serial>(p, one_rank(p.batch)); },
            [&](layer<T> const& p, auto const& sharding, std::vector<T> const& one) {
                CHECK(cpx::is_exact<cpx::serial>(sharding, p.config.chunk));
                CHECK(same_bits(run<cpx::serial>(p, sharding), one));
                CHECK(same_bits(run_by_heads(p, sharding), one));
            });
        auto const p = random_layer<T>(lengths({200, 70, 1}), grouped, true, 5);
        auto const one = run<cpx::serial>(p, one_rank(p.batch));
        CHECK(same_bits(run<cpx::serial>(p, cpx::shard(p.batch, cpx::zigzag<4>{}, cpx::aligned<16>{})), one));
        CHECK(same_bits(
            run<cpx::serial>(p, by_tokens(cpx::shard<cpx::scope::batch>(p.batch, cpx::striped<3>{}, cpx::aligned<>{}))),
            one));
        CHECK(same_bits(run_by_heads(p, by_tokens(cpx::shard<cpx::scope::batch>(p.batch, cpx::sequential<5>{}))), one));
    }

    TEST_CASE("the layer of twinkle's tiny Qwen3.5 is right when a rank begins inside a sequence") {
        // twinkle test_twinkle_qwen3_5_text_model.py: lengths 3 and 5 on two ranks, the cut at row 4
        cpx::gated_delta_net_config const tiny{64, {2, 4, 16, 16}, 4, 64, 1e-6};
        auto const p = random_layer<float>(lengths({3, 5}), tiny, true, 1);
        auto const expected = run(p.as<double>());
        by_tokens const sharding = cpx::shard<cpx::scope::batch>(p.batch, cpx::sequential<2>{});
        CHECK(relative_error(run<cpx::scan>(p, sharding), expected) <= 1e-5);
        CHECK(relative_error(run<cpx::serial>(p, sharding), expected) <= 1e-5);
        CHECK(relative_error(run_by_heads(p, sharding), expected) <= 1e-5);
    }

    TEST_CASE("a token changes no bit of another sequence and of no token before it, not even by NaN") {
        auto const p = random_layer<double>(lengths({19, 1, 24, 0, 6}), grouped, true, 6); // with slow decay
        index_t const hidden = grouped.hidden;
        for (double const change : {1e-3, std::numeric_limits<double>::quiet_NaN()})
            for (int const ranks : {1, 3, 4})
                for_each_sharding(p.batch, ranks, {1}, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    auto const in_place = run<cpx::scan>(p, sharding), by_heads = run_by_heads(p, sharding);
                    for (index_t const row : {0, 17, 19, 20, 33}) {
                        CAPTURE(row);
                        auto other = p;
                        for (index_t c = 0; c < hidden; ++c)
                            other.x[static_cast<std::size_t>(row * hidden + c)] += change;
                        index_t const end = p.batch.offset(p.batch.sequence(row) + 1);
                        auto const check = [&](std::vector<double> const& before, std::vector<double> const& after) {
                            CHECK(same_rows(after, before, hidden, 0, row));
                            CHECK(same_rows(after, before, hidden, end, p.batch.tokens()));
                            CHECK_FALSE(same_rows(after, before, hidden, row, row + 1));
                            CHECK_FALSE(same_rows(after, before, hidden, end - 1, end));
                        };
                        check(in_place, run<cpx::scan>(other, sharding));
                        check(by_heads, run_by_heads(other, sharding));
                    }
                });
    }

    TEST_CASE_TEMPLATE("a sequence has the bits that it has alone, whatever it is packed with", T, float, double) {
        for (auto const& order :
             std::vector<std::vector<index_t>>{{33, 1, 70, 16}, {70, 16, 33, 1}, {16, 0, 1, 70, 33}}) {
            auto const p = random_layer<T>(lengths(order), grouped, true, 8);
            by_tokens const cut = cpx::shard<cpx::scope::batch>(p.batch, cpx::zigzag<3>{}, cpx::aligned<16>{});
            for (auto const& all :
                 {run<cpx::scan>(p, one_rank(p.batch)), run<cpx::serial>(p, cut), run_by_heads(p, cut)})
                for (index_t s = 0; s < p.batch.sequences(); ++s) {
                    auto own = p;
                    index_t const first = p.batch.offset(s), last = p.batch.offset(s + 1);
                    own.batch = lengths({last - first});
                    own.x = slice(p.x, grouped.hidden, first, last);
                    CHECK(same_bits(slice(all, grouped.hidden, first, last), run<cpx::scan>(own, one_rank(own.batch))));
                }
        }
    }

    TEST_CASE("the layer multiplies by what it is given, and says what its operators have sent") {
        auto const p = random_layer<double>(lengths({19, 1, 24, 0, 6}), grouped, true, 6);
        by_tokens const sharding = cpx::shard(p.batch, cpx::zigzag<3>{});
        auto const expected = run<cpx::scan>(p, sharding);
        std::vector<cpx::section> const hidden{{1, grouped.hidden}};
        struct given : cpx::host_products<double> {
            cpx::threads& comm;
            index_t products = 0, rows = 0, states = 0;
            cpx::threads& carrier() const { return comm; }
            void linear(cpx::rows<double const> x, cpx::rows<double const> w, cpx::rows<double> y) {
                ++products;
                host_products::linear(x, w, y);
            }
            void ended(cpx::plan const& halo, index_t width) { rows += halo.sent_elements(width); }
            void ended_states(cpx::carry_plan<cpx::scan, by_tokens> const& plan, cpx::state_shape const&) {
                states += plan.steps;
            }
        };
        auto const y = assemble<double>(sharding, hidden, [&](cpx::threads& comm) {
            auto const x = take(p.x, hidden, sharding, comm.rank());
            auto to = poisoned<double>(sharding, comm.rank(), grouped.hidden);
            auto const plan = cpx::carry<cpx::scan>(sharding, comm.rank());
            given by{{}, comm};
            cpx::gated_delta_net(plan, grouped)(p.view(), x, to, by);
            CHECK(by.products == 4); // q, k and v; b and a; z; y
            CHECK(by.rows == cpx::halo(sharding, comm.rank(), 3).sent_elements(40));
            CHECK(by.states == plan.steps);
            return to;
        });
        CHECK(same_bits(y, expected));
    }

    TEST_CASE("where ranks do not agree on what comes, the layer leaves the states that it goes on from") {
        by_tokens const sharding = cpx::shard(lengths({8}), cpx::sequential<>(2));
        auto const p = random_layer<float>(sharding.batch(), grouped, false, 1);
        std::atomic<int> written = 0;
        support::rejects({"gated_delta_net.cpp", ": gated_delta_net: ranks disagree on chunk"}, [&] {
            cpx::threads::run(2, [&](cpx::threads& comm) {
                auto config = p.config;
                config.chunk += comm.rank();
                cpx::gated_delta_net const net(cpx::carry<cpx::scan>(sharding, comm.rank()), config);
                std::vector<float> conv(static_cast<std::size_t>(net.widths().conv), 7.0f),
                    recurrent(static_cast<std::size_t>(net.widths().recurrent), 7.0f);
                cpx::tensor<float, by_tokens> x(sharding, comm.rank(), config.hidden);
                auto const one_row = [](std::vector<float>& v) { return cpx::rows<float>(v.data(), 1, std::ssize(v)); };
                try {
                    net(p.view(), x, x, comm, {.state = {one_row(conv), one_row(recurrent)}});
                } catch (cpx::error const&) {
                    for (auto const& state : {conv, recurrent})
                        written += static_cast<int>(std::ssize(state) - std::ranges::count(state, 7.0f));
                    throw;
                }
            });
        });
        CHECK(written == 0);
    }

    TEST_CASE("the layer rejects what does not fit") {
        auto const batch = lengths({6, 5});
        using S = by_tokens;
        S const sharding = cpx::shard(batch, cpx::zigzag<>(1)), other = cpx::shard(lengths({5, 6}), cpx::zigzag<>(1));
        auto const p = random_layer<float>(batch, grouped, false, 1);
        support::splitmix numbers(1);
        std::vector<float> values = uniform<float>(numbers, 12 * 12), written(values.size());
        cpx::sharded<float, S> const x({values.data(), 11, 12}, sharding, 0), y({written.data(), 11, 12}, sharding, 0),
            foreign({values.data(), 11, 12}, other, 0);
        auto const call = [&](layer<float> const& q, cpx::sharded<float, S> const& in,
                              cpx::sharded<float, S> const& out) {
            return [=] {
                cpx::threads::run(1, [&](cpx::threads& comm) {
                    cpx::gated_delta_net const net(cpx::carry<cpx::scan>(sharding, 0), q.config);
                    net(q.view(), in, out, comm);
                });
            };
        };
        CHECK(support::message(call(p, x, y)) == "");
        auto in_place = values;
        cpx::sharded<float, S> const same({in_place.data(), 11, 12}, sharding, 0);
        CHECK(support::message(call(p, same, same)) == "");
        CHECK(same_rows(in_place, written, 12, 0, 11));
        support::rejects(
            {"gated_delta_net.cpp", "gated_delta_net: overlap of y and x: expected none, or the same rows"},
            call(p, x, {{values.data() + 12, 11, 12}, sharding, 0}));
        auto of_weights = p;
        support::rejects({"gated_delta_net.cpp", "overlap of y and in_proj_qkv.weight: expected none"}, [&] {
            cpx::threads::run(1, [&](cpx::threads& comm) {
                cpx::gated_delta_net const net(cpx::carry<cpx::scan>(sharding, 0), p.config);
                net(of_weights.view(), x, cpx::sharded<float, S>({of_weights.weights[0].data(), 11, 12}, sharding, 0),
                    comm);
            });
        });
        support::rejects({"gated_delta_net.cpp", "gated_delta_net: sharding of x: expected the layer's"},
                         call(p, foreign, x));
        support::rejects({"gated_delta_net.cpp", "gated_delta_net: sharding of y: expected the layer's"},
                         call(p, x, foreign));
        std::vector<std::pair<std::string, index_t>> const weights = {{"in_proj_qkv.weight: expected (40, 12)", 40},
                                                                      {"in_proj_z.weight: expected (24, 12)", 24},
                                                                      {"in_proj_b.weight: expected (4, 12)", 4},
                                                                      {"in_proj_a.weight: expected (4, 12)", 4},
                                                                      {"conv1d.weight: expected (40, 4)", 40},
                                                                      {"A_log: expected (4, 1)", 4},
                                                                      {"dt_bias: expected (4, 1)", 4},
                                                                      {"norm.weight: expected (1, 6)", 1},
                                                                      {"out_proj.weight: expected (12, 24)", 12}};
        for (std::size_t w = 0; w < weights.size(); ++w) {
            auto q = p;
            q.weights[w].resize(static_cast<std::size_t>((weights[w].second + 1) * p.widths()[w]));
            support::rejects({"gated_delta_net.cpp", "gated_delta_net: shape of " + weights[w].first}, call(q, x, x));
        }
        support::rejects({"gated_delta_net: shape of x: expected (11, 12), got (10, 12)"},
                         call(p, {x.data().sub(0, 10), sharding, 0}, x));
        support::rejects({"gated_delta_net: shape of y: expected (11, 12), got (11, 11)"},
                         call(p, x, x.columns(0, 11)));
        support::rejects({"gated_delta_net.cpp", ": gated_delta_net: ranks disagree on offset 1 of cu_seqlens"}, [&] {
            cpx::threads::run(2, [&](cpx::threads& comm) {
                S const own = cpx::shard(comm.rank() == 0 ? batch : lengths({5, 6}), cpx::zigzag<>(2));
                cpx::tensor<float, S> same_rows(own, comm.rank(), 12);
                cpx::gated_delta_net const net(cpx::carry<cpx::scan>(own, comm.rank()), p.config);
                net(p.view(), same_rows, same_rows, comm);
            });
        });
        cpx::head_sharded<> const mix(1, batch, grouped.sections()), o(1, batch, grouped.output_sections());
        auto const by_heads = [&](auto const& to, auto const& from) {
            return [&] {
                cpx::gated_delta_net(cpx::carry<cpx::serial>(mix, 0), relayout(sharding, to, 0),
                                     relayout(from, sharding, 0), grouped);
            };
        };
        CHECK(support::message(by_heads(mix, o)) == "");
        for (auto const& wrong : {by_heads(o, o), by_heads(mix, mix)})
            support::rejects({"gated_delta_net.cpp", "gated_delta_net: relayouts: expected of the plan's rank, to its "
                                                     "sharding, by the config's sections, and back, got others"},
                             wrong);
        auto three = p;
        three.config.heads = {2, 3, 4, 6};
        support::rejects({"gated_delta_net: value heads: expected a multiple of the key heads 2, got 3"},
                         call(three, x, x));
        auto const refused = [&](std::string const& name, auto change) {
            for (index_t const none : {0, -1}) {
                auto of_none = p;
                change(of_none.config, none);
                support::rejects({"gated_delta_net.cpp", "gated_delta_net: " + name + ": expected at least 1"},
                                 call(of_none, x, x));
            }
        };
        refused("hidden", [](auto& c, index_t n) { c.hidden = n; });
        refused("kernel", [](auto& c, index_t n) { c.kernel = n; });
        refused("chunk", [](auto& c, index_t n) { c.chunk = n; });
        refused("key heads", [](auto& c, index_t n) { c.heads.key_heads = n; });
        refused("value heads", [](auto& c, index_t n) { c.heads.value_heads = 2 * n; });
        refused("key_dim", [](auto& c, index_t n) { c.heads.key_dim = n; });
        refused("value_dim", [](auto& c, index_t n) { c.heads.value_dim = n; });
        for (double const eps : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
            auto wrong_eps = p;
            wrong_eps.config.eps = eps;
            support::rejects({"gated_delta_net: eps: expected 0 or above"}, call(wrong_eps, x, x));
        }
        support::rejects({"head_sharded: heads of section 0: expected a divisor of 3, got 2"},
                         [&] { cpx::head_sharded<>(2, batch, three.config.sections()); });
    }
}
