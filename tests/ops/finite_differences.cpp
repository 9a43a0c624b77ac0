// SPDX-License-Identifier: Apache-2.0
// Every gradient of every operator, on three ranks, against central differences in double.
//
// All partial derivatives of the plain formulas of reference.hpp, then derivatives along random directions of the
// operators themselves as the ranks run them.
#include <cpx/ops.hpp>

#include <doctest/doctest.h>

#include <ops/backward.hpp>

namespace {

using namespace on_ranks;
using cpx::index_t;
using reference::attention, reference::conv, reference::delta, reference::layer, reference::result;
using reference::gathered, reference::gradient, reference::gradient_by_heads, reference::gradient_gathered;
using reference::inputs, reference::run, reference::run_by_heads, reference::run_gathered;
using support::lengths;

constexpr double tolerance = 1e-6;

std::vector<std::vector<index_t>> const packings = {{5, 1, 0, 9, 14}, {2, 7, 1}, {1, 1}};

double dot(std::vector<double> const& a, std::vector<double> const& b) {
    REQUIRE(a.size() == b.size());
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}

double dot(result<double> const& a, result<double> const& b) { return dot(a.o, b.o) + dot(a.final, b.final); }

/// Returns all partial derivatives of `loss(p)`.
template <class P, class F>
P differences(P const& p, F&& loss) {
    double const step = 1e-5;
    P at = p, d = p;
    auto const points = inputs(at), slopes = inputs(d);
    for (std::size_t i = 0; i < points.size(); ++i)
        for (std::size_t j = 0; j < points[i].second->size(); ++j) {
            double& x = (*points[i].second)[j];
            double const value = x;
            x = value + step;
            double const above = loss(at);
            x = value - step;
            (*slopes[i].second)[j] = (above - loss(at)) / (2 * step);
            x = value;
        }
    return d;
}

template <class P>
void check_same(P got, P expected) {
    auto const a = inputs(got), b = inputs(expected);
    for (std::size_t i = 0; i < a.size(); ++i) {
        CAPTURE(a[i].first);
        CHECK(relative_error(*a[i].second, *b[i].second) <= tolerance);
    }
}

/// Checks the derivatives of `loss(p)` along two random directions of every input.
template <class P, class F>
void check_directions(P const& p, P gradient, F&& loss) {
    support::splitmix numbers(11);
    P at = p;
    auto const points = inputs(at), slopes = inputs(gradient);
    for (std::size_t i = 0; i < points.size(); ++i)
        for (int turn = 0; turn < 2; ++turn) {
            CAPTURE(points[i].first);
            auto& x = *points[i].second;
            if (x.empty()) continue;
            auto const value = x, direction = uniform<double>(numbers, std::ssize(x));
            double const length = std::sqrt(dot(direction, direction)), step = 3e-5 / length;
            auto const move = [&](double by) {
                for (std::size_t j = 0; j < x.size(); ++j) x[j] = value[j] + by * direction[j];
                return loss(at);
            };
            double const slope = (move(step) - move(-step)) / (2 * step);
            double const size = std::sqrt(dot(*slopes[i].second, *slopes[i].second)) * length;
            CHECK(std::abs(slope - dot(*slopes[i].second, direction)) <= tolerance * size);
            x = value;
        }
}

/// Calls `f(sharding)` with three layouts on three ranks, over both scopes.
template <class F>
void on_three_ranks(cpx::thd const& batch, F&& f) {
    auto const call = [&](std::string const& name, auto const& sharding) {
        CAPTURE(name);
        f(sharding);
    };
    cpx::aligned<cpx::dynamic> const any(1);
    for (auto const& layout :
         {cpx::table(cpx::zigzag<>(3)), cpx::table(cpx::sequential<>(3)), cpx::table(cpx::striped<>(3))}) {
        call("over sequence", by_tokens(cpx::shard(batch, layout, any)));
        call("over batch", by_tokens(cpx::shard<cpx::scope::batch>(batch, layout, any)));
    }
}

constexpr cpx::sum_order orders[] = {cpx::sum_order::by_rank, cpx::sum_order::by_row};

/// Checks that <u, A x> = <transposed A u, x> where A is an exchange: u and x differ on every rank, in replicas, too.
template <cpx::any_sharding From, cpx::any_sharding To>
void check_transposed(From const& from, To const& to, index_t width) {
    auto const columns = [&](auto const& sharding, int rank) {
        index_t n = 0;
        auto const sections = from.sections().empty() ? to.sections() : from.sections();
        for (cpx::section const& s : sections) n += sharding.heads(rank, s.heads).size() * s.width;
        return sections.empty() ? width : n;
    };
    std::mutex guard;
    double moved = 0, pulled = 0, size = 0;
    cpx::threads::run(from.ranks(), [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const random = [&](auto const& sharding, int seed) {
            support::splitmix numbers(static_cast<std::uint64_t>(seed + rank));
            index_t const n = sharding.rows(rank) * columns(sharding, rank);
            return uniform<double>(numbers, n);
        };
        auto const x = random(from, 100), u = random(to, 200);
        std::vector<double> y(u.size(), poison<double>()), dx(x.size(), poison<double>());
        auto const at_from = [&](auto& values) {
            return cpx::sharded(cpx::rows(values.data(), from.rows(rank), columns(from, rank)), from, rank);
        };
        auto const at_to = [&](auto& values) {
            return cpx::sharded(cpx::rows(values.data(), to.rows(rank), columns(to, rank)), to, rank);
        };
        auto const plan = cpx::relayout(from, to, rank);
        cpx::exchange(plan, at_from(x), at_to(y), comm);
        cpx::exchange(plan.transposed(), at_to(u), at_from(dx), comm);
        std::lock_guard const lock(guard);
        moved += dot(u, y);
        pulled += dot(dx, x);
        size += dot(u, u);
    });
    CHECK(std::abs(moved - pulled) <= 1e-13 * size);
}

/// Operators that see one token at a time, one after the other: y = linear(gated norm(rotary(norm(x)), z)), and the
/// gate of each head from the first columns of y.
struct token_wise {
    cpx::thd batch;
    index_t heads = 2, dim = 5, width = 3;
    std::vector<double> x, z, gain, gated_gain, weight, a_log, dt_bias;
    double eps = 0.1;
    cpx::rotary_options rotary{10, 4};

    std::vector<cpx::section> rows() const { return {{1, heads * dim}}; }
    std::vector<cpx::section> outputs() const { return {{1, width + heads}}; }
};

reference::named_inputs<double> inputs(token_wise& p) {
    return {{"x", &p.x},           {"z", &p.z},         {"gain", &p.gain},      {"gated gain", &p.gated_gain},
            {"weight", &p.weight}, {"a_log", &p.a_log}, {"dt_bias", &p.dt_bias}};
}

token_wise random_token_wise(cpx::thd const& batch) {
    support::splitmix numbers(5);
    token_wise p;
    p.batch = batch;
    auto const random = [&](index_t count) { return uniform<double>(numbers, count, 2); };
    index_t const columns = p.heads * p.dim;
    p.x = random(batch.tokens() * columns);
    p.z = random(batch.tokens() * columns);
    p.gain = random(p.dim);
    p.gated_gain = random(p.dim);
    p.weight = random(p.width * columns);
    p.a_log = random(p.heads);
    p.dt_bias = random(p.heads);
    return p;
}

/// What one rank computes, and keeps for the backward.
template <cpx::any_sharding S>
struct token_wise_rank {
    using rows = cpx::rows<double const>;

    token_wise_rank(token_wise const& of, S const& sharding, int rank)
        : p(of), x(take(of.x, of.rows(), sharding, rank)), z(take(of.z, of.rows(), sharding, rank)), normed(x),
          rotated(x), gated(x), y(poisoned<double>(sharding, rank, of.width + of.heads)),
          weight(of.weight, of.heads * of.dim) {
        cpx::rms_norm<double>(x.data(), of.gain, of.eps, 1, normed.data());
        cpx::rotary(normed.view(), of.dim, of.rotary, rotated.view());
        cpx::gated_rms_norm<double>(rotated.data(), z.data(), of.gated_gain, of.eps, gated.data());
        cpx::linear<double>(gated.data(), weight, y.data().columns(0, of.width));
        for (index_t row = 0; row < y.data().count(); ++row)
            for (index_t h = 0; h < of.heads; ++h)
                y.data()(row, of.width + h) =
                    cpx::delta_rule_gate(y.data()(row, h), of.a_log[std::size_t(h)], of.dt_bias[std::size_t(h)]);
    }

    token_wise const& p;
    cpx::tensor<double, S> x, z, normed, rotated, gated, y;
    rows weight;
};

template <cpx::any_sharding S>
std::vector<double> run(token_wise const& p, S const& sharding) {
    return assemble<double>(sharding, p.outputs(),
                            [&](cpx::threads& comm) { return token_wise_rank<S>(p, sharding, comm.rank()).y; });
}

template <cpx::any_sharding S>
token_wise gradient(token_wise const& p, std::vector<double> const& dy, S const& sharding, cpx::sum_order order) {
    token_wise d = p;
    std::mutex guard;
    index_t const width = p.heads * p.dim;
    auto const whole = assemble<double>(sharding, {{1, 2 * width}}, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        token_wise_rank<S> const f(p, sharding, rank);
        cpx::weight_sums const sums(sharding, order, comm);
        auto dout = take(dy, p.outputs(), sharding, rank);
        std::vector<double> gates(2 * p.a_log.size()), dgains(2 * p.gain.size()), dweight(p.weight.size());
        auto const add_terms = [&](std::span<double> to, auto const& term) {
            cpx::tensor<double, S> terms(sharding, rank, std::ssize(to));
            for (index_t row = 0; row < sharding.rows(rank); ++row)
                term(row, std::span(terms.data().row(row), to.size()));
            cpx::add_terms(sums, terms, cpx::rows<double>(to, std::ssize(to)));
        };
        add_terms(gates, [&](index_t row, std::span<double> into) {
            for (index_t h = 0; h < p.heads; ++h) {
                auto const head = static_cast<std::size_t>(h);
                auto const gate = cpx::delta_rule_gate_backward(f.y.data()(row, h), p.a_log[head], p.dt_bias[head],
                                                                dout.data()(row, p.width + h));
                dout.data()(row, h) += gate.a;
                into[head] += gate.a_log;
                into[p.a_log.size() + head] += gate.dt_bias;
            }
        });
        auto const of_linear = dout.view().columns(0, p.width);
        sums.linear(sums.whole(f.gated.view()), of_linear, cpx::rows<double>(dweight, width),
                    [](auto of_y, auto x, auto to) { cpx::linear_backward_weight<double>(of_y, x, to); });
        cpx::tensor<double, S> dgated(sharding, rank, width);
        auto dxz = poisoned<double>(sharding, rank, 2 * width);
        auto const dx = dxz.data().columns(0, width), dz = dxz.data().columns(width, width);
        cpx::linear_backward_input<double>(of_linear.data(), f.weight, dgated.data());
        auto const one = [](auto const& values, index_t row) { return values.sub(row, 1); };
        std::span<double> const both(dgains);
        add_terms(both.last(p.gain.size()), [&](index_t row, std::span<double> into) {
            auto const back = one(dgated.data(), row);
            cpx::gated_rms_norm_backward<double>(one(f.rotated.data(), row), one(f.z.data(), row), p.gated_gain, p.eps,
                                                 back, back, one(dz, row), into);
        });
        cpx::rotary_backward(dgated.view(), p.dim, p.rotary, dgated.view());
        add_terms(both.first(p.gain.size()), [&](index_t row, std::span<double> into) {
            cpx::rms_norm_backward<double>(one(f.x.data(), row), p.gain, p.eps, 1, one(dgated.data(), row),
                                           one(dx, row), into);
        });
        for (auto* values : {&gates, &dgains, &dweight}) cpx::sum_over_ranks(std::span(*values), comm);
        std::lock_guard const lock(guard);
        auto const half = [](std::vector<double> const& two, bool second) {
            auto const middle = two.begin() + std::ssize(two) / 2;
            return second ? std::vector(middle, two.end()) : std::vector(two.begin(), middle);
        };
        d.a_log = half(gates, false), d.dt_bias = half(gates, true);
        d.gain = half(dgains, false), d.gated_gain = half(dgains, true);
        d.weight = dweight;
        return dxz;
    });
    d.x.clear(), d.z.clear();
    for (auto row = whole.begin(); row != whole.end(); row += 2 * width) {
        d.x.insert(d.x.end(), row, row + width);
        d.z.insert(d.z.end(), row + width, row + 2 * width);
    }
    return d;
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE("the transposed plan is the gradient of an exchange, replicas included") {
        for (auto const& packing : packings) {
            auto const batch = lengths(packing);
            by_tokens const zigzag = cpx::shard(batch, cpx::zigzag<>(3));
            by_tokens const sequential = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(3));
            cpx::replicated<> const everywhere(3, batch);
            check_transposed(zigzag, sequential, 5);
            check_transposed(sequential, zigzag, 1);
            check_transposed(zigzag, everywhere, 4);
            check_transposed(everywhere, sequential, 4);
            for (auto const& sections : std::vector<std::vector<cpx::section>>{
                     {{2, 3}, {6, 2}}, {{2, 3}, {4, 2}}, {{1, 2}, {2, 1}}, {{1, 4}}}) {
                cpx::head_sharded<> const split(3, batch, sections);
                check_transposed(zigzag, split, 0);
                check_transposed(split, sequential, 0);
                check_transposed(split, everywhere, 0);
            }
        }
    }

    TEST_CASE("gradients of the convolution are its differences") {
        for (std::size_t turn = 0; turn < 2 * packings.size(); ++turn) {
            bool const even = turn % 2 == 0;
            auto const p =
                reference::random_conv<double>(lengths(packings[turn / 2]), 4, even ? 4 : 8, even || turn == 3,
                                               even ? cpx::activation::silu : cpx::activation::none, turn);
            support::splitmix numbers(turn + 50);
            auto const upstream = uniform<double>(numbers, std::ssize(p.x));
            CAPTURE(support::text(p.batch));
            auto const expected = differences(p, [&](auto const& at) { return dot(run(at), upstream); });
            auto const check = [&](auto const& sharding, auto const&... sections) {
                for (cpx::sum_order const order : orders) {
                    auto const got = gradient(p, upstream, sharding, order, sections...);
                    check_same(got, expected);
                    check_directions(p, got,
                                     [&](auto const& at) { return dot(run(at, sharding, sections...), upstream); });
                }
            };
            on_three_ranks(p.batch, [&](auto const& sharding) { check(sharding); });
            std::vector<cpx::section> const split{{2, 1}, {1, 2}};
            check(cpx::head_sharded<>(3, p.batch, split), split);
        }
    }

    TEST_CASE("gradients of the delta rule are its differences, with those of states") {
        for (std::size_t turn = 0; turn < 8; ++turn) {
            // value heads that the ranks share evenly, in split groups, and with one key head on two ranks
            cpx::delta_rule_heads const heads[] = {{2, 6, 2, 3}, {2, 4, 3, 2}, {1, 3, 2, 2}, {2, 2, 3, 1}};
            double const decays[] = {1e-3, 2, 30, 0.1};
            bool const l2norm = turn % 2 == 0, states = turn % 4 < 3;
            auto const p = reference::random_delta<double>(
                lengths(packings[turn % packings.size()]), heads[turn % 4],
                {.chunk = turn % 3 == 0 ? 3 : 64, .qk_l2norm = l2norm, .scale = turn == 5 ? 0.7 : 0}, decays[turn / 2],
                states, turn);
            support::splitmix numbers(turn + 70);
            result<double> const upstream{
                uniform<double>(numbers, p.batch.tokens() * p.heads.value_heads * p.heads.value_dim),
                uniform<double>(numbers, p.batch.sequences() * p.heads.value_heads * p.state())};
            CAPTURE(support::text(p.batch));
            CAPTURE(turn);
            auto const expected = differences(p, [&](auto const& at) { return dot(run(at), upstream); });
            auto const check = [&]<class How>(How, auto const& sharding) {
                auto const got = gradient<How>(p, upstream, sharding);
                check_same(got, expected);
                check_directions(p, got, [&](auto const& at) { return dot(run<How>(at, sharding), upstream); });
            };
            on_three_ranks(p.batch, [&](auto const& sharding) {
                check(cpx::scan{}, sharding);
                check(cpx::serial{}, sharding);
            });
            check(cpx::serial{}, cpx::head_sharded<>(3, p.batch, p.sections()));
            check(cpx::scan{}, cpx::head_sharded<>(3, p.batch, p.sections()));
        }
    }

    TEST_CASE("gradients of norms, rotary, linear and the gate are their differences, weights' by any order") {
        for (auto const& packing : packings) {
            auto const p = random_token_wise(lengths(packing));
            support::splitmix numbers(6);
            auto const upstream = uniform<double>(numbers, p.batch.tokens() * (p.width + p.heads));
            auto const one = one_rank(p.batch);
            auto const expected = differences(p, [&](token_wise const& at) { return dot(run(at, one), upstream); });
            on_three_ranks(p.batch, [&](auto const& sharding) {
                for (cpx::sum_order const order : orders) {
                    auto const got = gradient(p, upstream, sharding, order);
                    check_same(got, expected);
                    check_directions(p, got, [&](token_wise const& at) { return dot(run(at, sharding), upstream); });
                }
            });
        }
    }

    TEST_CASE("gradients of attention are its differences, whichever side is gathered, and by heads") {
        for (std::size_t turn = 0; turn < 4; ++turn) {
            cpx::attention_heads const heads[] = {{4, 2, 3}, {6, 2, 2}, {3, 1, 2}, {2, 2, 5}};
            auto const p =
                reference::random_attention<double>(lengths(packings[turn % packings.size()]), heads[turn], turn);
            support::splitmix numbers(turn + 90);
            auto const upstream = uniform<double>(numbers, std::ssize(p.q));
            CAPTURE(support::text(p.batch));
            auto const expected = differences(p, [&](auto const& at) { return dot(run(at), upstream); });
            on_three_ranks(p.batch, [&](auto const& sharding) {
                for (gathered const what : {gathered::queries, gathered::keys})
                    check_same(gradient_gathered(p, upstream, sharding, what), expected);
                check_directions(p, expected,
                                 [&](auto const& at) { return dot(run_gathered(at, sharding), upstream); });
            });
            check_same(gradient_by_heads(p, upstream, 3), expected);
            check_directions(p, expected, [&](auto const& at) { return dot(run_by_heads(at, 3), upstream); });
        }
    }

    TEST_CASE("gradients of the gated delta net layer are its differences, of x and of every weight") {
        for (std::size_t turn = 0; turn < 4; ++turn) {
            cpx::gated_delta_net_config const configs[] = {
                {5, {2, 4, 3, 2}, 4, 4, 1e-2}, {3, {2, 6, 2, 2}, 8, 3, 1e-3}, {4, {1, 2, 2, 3}, 2, 64, 1e-2}};
            auto const p = reference::random_layer<double>(lengths(packings[turn % packings.size()]),
                                                           configs[turn % std::size(configs)], turn % 2 == 1, turn);
            support::splitmix numbers(turn + 90);
            auto const upstream = uniform<double>(numbers, std::ssize(p.x));
            CAPTURE(support::text(p.batch));
            auto const expected = differences(p, [&](auto const& at) { return dot(run(at), upstream); });
            on_three_ranks(p.batch, [&](auto const& sharding) {
                for (cpx::sum_order const order : orders) {
                    check_same(gradient<cpx::scan>(p, upstream, sharding, order), expected);
                    check_same(gradient<cpx::serial>(p, upstream, sharding, order), expected);
                    check_same(gradient_by_heads(p, upstream, sharding, order), expected);
                }
                check_directions(p, expected,
                                 [&](auto const& at) { return dot(run<cpx::scan>(at, sharding), upstream); });
                check_directions(p, expected,
                                 [&](auto const& at) { return dot(run<cpx::serial>(at, sharding), upstream); });
                check_directions(p, expected,
                                 [&](auto const& at) { return dot(run_by_heads(at, sharding), upstream); });
            });
        }
    }
}
