// SPDX-License-Identifier: Apache-2.0
#include <cpx/mesh/mesh.hpp>
#include <cpx/ops/balance_loss.hpp>
#include <cpx/ops/local/moe_backward.hpp>
#include <cpx/ops/weight_sums.hpp>
#include <cpx/testing/transport.hpp>
#include <cpx/transport/subgroup.hpp>

#include <doctest/doctest.h>

#include <ops/backward.hpp>
#include <support/rejects.hpp>

#include <mutex>

namespace {

using namespace on_ranks;
using cpx::index_t, cpx::sum_order;
using support::lengths;

struct sizes {
    index_t hidden, experts, choices, inner, shared;
};

/// A layer of experts, the rows that it sees, and the gradient of its output; all whole.
template <class T>
struct layer {
    sizes n;
    cpx::thd batch;
    std::vector<T> x, dy, gate, gate_up, down, shared_gate, shared_up, shared_down, shared_expert_gate;
    std::vector<index_t> given = {}; ///< choices that are replayed; none: the router chooses

    layer(sizes const& s, cpx::thd const& packing, std::uint64_t seed) : n(s), batch(packing) {
        support::splitmix numbers(seed);
        auto const make = [&](index_t count) { return uniform<T>(numbers, count); };
        x = make(batch.tokens() * n.hidden), dy = make(batch.tokens() * n.hidden);
        gate = make(n.experts * n.hidden), gate_up = make(n.experts * 2 * n.inner * n.hidden);
        down = make(n.experts * n.hidden * n.inner), shared_gate = make(n.shared * n.hidden);
        shared_up = make(n.shared * n.hidden), shared_down = make(n.hidden * n.shared);
        shared_expert_gate = make(n.hidden);
    }
    /// Returns the weights, of some experts.
    cpx::moe_weights<T> of(cpx::range own) const {
        auto const all = [](std::vector<T> const& w, index_t width) { return cpx::rows<T const>(w, width); };
        return {all(gate, n.hidden),
                all(gate_up, n.hidden).sub(own.first * 2 * n.inner, own.size() * 2 * n.inner),
                all(down, n.inner).sub(own.first * n.hidden, own.size() * n.hidden),
                all(shared_gate, n.hidden),
                all(shared_up, n.hidden),
                all(shared_down, n.shared),
                all(shared_expert_gate, n.hidden)};
    }
};

/// What a layer gives, whole.
template <class T>
struct results {
    std::vector<T> y, dx, dgate_up, ddown;
};

/// Runs a layer whose tokens are sharded and whose experts every group of `share` neighbours shares.
template <class T>
results<T> run(layer<T> const& l, by_tokens const& sharding, int share, sum_order order) {
    results<T> all;
    reference::same_on_ranks<T> of_gate_up, of_down;
    std::mutex one_at_a_time;
    all.dx.resize(l.dy.size());
    all.y = assemble<T>(sharding, {{1, l.n.hidden}}, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const x = take(l.x, {{1, l.n.hidden}}, sharding, rank), dy = take(l.dy, {{1, l.n.hidden}}, sharding, rank);
        auto y = poisoned<T>(sharding, rank, l.n.hidden), dx = y;
        auto neighbours = cpx::neighbours(comm, share);
        auto const places = cpx::global_rows(sharding, rank);
        auto const gate = l.of({}).gate;
        auto choices = cpx::choose_experts<T>(gate, x.data(), l.n.choices);
        if (!l.given.empty()) { // they are sharded as the tokens are
            auto const given = take(l.given, {{1, l.n.choices}}, sharding, rank);
            choices = cpx::replay_experts<T>(gate, x.data(), given.data());
        }
        cpx::expert_exchange at(choices.chosen.view(), l.n.experts, places, neighbours);
        CHECK(std::ranges::is_sorted(at.begins()));
        auto const w = l.of(at.own());
        auto const saved = cpx::moe<T>(w, x.data(), std::move(choices), std::move(at), y.data());
        auto const g = cpx::moe_backward<T>(w, saved, dy.data(), dx.data());
        cpx::weight_sums const sums(sharding, order, comm);
        std::vector<T> dgate_up(l.gate_up.size()), ddown(l.down.size());
        sums.experts(saved.at, saved.input.view(), g.dgate_up.view(), cpx::rows<T>(dgate_up, l.n.hidden), comm);
        sums.experts(saved.at, saved.activation.view(), g.doutput.view(), cpx::rows<T>(ddown, l.n.inner), comm);
        cpx::sum_over_ranks(dgate_up, comm);
        cpx::sum_over_ranks(ddown, comm);
        of_gate_up.add(dgate_up), of_down.add(ddown);
        std::lock_guard const lock(one_at_a_time);
        for (std::size_t row = 0; row < places.size(); ++row)
            std::copy_n(dx.data().row(static_cast<index_t>(row)), l.n.hidden,
                        all.dx.begin() + places[row] * l.n.hidden);
        return y;
    });
    all.dgate_up = of_gate_up.get(), all.ddown = of_down.get();
    return all;
}

/// The same on one rank that has all experts.
template <class T>
results<T> alone(layer<T> const& l) {
    results<T> all{std::vector<T>(l.x.size()), std::vector<T>(l.x.size()), std::vector<T>(l.gate_up.size()),
                   std::vector<T>(l.down.size())};
    auto const view = [&](std::vector<T>& of, index_t width) { return cpx::rows<T>(of, width); };
    auto const w = l.of({0, l.n.experts});
    cpx::rows<T const> const x(l.x, l.n.hidden);
    auto choices = l.given.empty() ? cpx::choose_experts<T>(w.gate, x, l.n.choices)
                                   : cpx::replay_experts<T>(w.gate, x, cpx::rows<index_t const>(l.given, l.n.choices));
    cpx::expert_rows at(choices.chosen.view(), l.n.experts);
    auto const saved = cpx::moe<T>(w, x, std::move(choices), std::move(at), view(all.y, l.n.hidden));
    auto const g = cpx::moe_backward<T>(w, saved, cpx::rows<T const>(l.dy, l.n.hidden), view(all.dx, l.n.hidden));
    cpx::expert_linear_backward_weight<T>(saved.at.begins(), g.dgate_up.view(), saved.input.view(),
                                          view(all.dgate_up, l.n.hidden));
    cpx::expert_linear_backward_weight<T>(saved.at.begins(), g.doutput.view(), saved.activation.view(),
                                          view(all.ddown, l.n.inner));
    return all;
}

template <class T>
void check_layer(layer<T> const& l, by_tokens const& sharding) {
    auto const expected = alone(l);
    int const ranks = sharding.ranks();
    for (int share = 1; share <= ranks; ++share) {
        if (ranks % share != 0 || l.n.experts % share != 0) continue;
        CAPTURE(ranks);
        CAPTURE(share);
        for (sum_order const order : {sum_order::by_row, sum_order::by_rank}) {
            auto const got = run(l, sharding, share, order);
            CHECK(same_bits(got.y, expected.y));
            CHECK(same_bits(got.dx, expected.dx));
            if (order == sum_order::by_row) {
                CHECK(same_bits(got.dgate_up, expected.dgate_up));
                CHECK(same_bits(got.ddown, expected.ddown));
            }
            CHECK(relative_error(got.dgate_up, expected.dgate_up) <= 40 * std::numeric_limits<T>::epsilon());
            CHECK(relative_error(got.ddown, expected.ddown) <= 40 * std::numeric_limits<T>::epsilon());
        }
    }
}

template <class Body>
void on(int ranks, Body&& body) {
    cpx::threads::run(ranks, [&](cpx::threads& comm) { body(comm); });
}

} // namespace

TEST_SUITE("ops") {
    TEST_CASE_TEMPLATE("experts spread over ranks have the bits of one rank, gradients too", T, float, double) {
        sizes const n{6, 8, 3, 5, 4};
        for (int const ranks : {1, 2, 4, 8}) {
            auto const batch = lengths({7, 0, 1, 12, 5});
            check_layer(layer<T>(n, batch, 1), cpx::shard(batch, cpx::zigzag<>(ranks)));
        }
        auto const batch = lengths({4, 9, 2});
        check_layer(layer<T>(n, batch, 2), cpx::shard(batch, cpx::striped<>(4)));
        check_layer(layer<T>({3, 9, 1, 2, 1}, batch, 3), cpx::shard(batch, cpx::sequential<>(3)));
        layer<T> replayed(n, batch, 6);
        for (index_t row = 0; row < batch.tokens(); ++row)
            for (index_t s = 0; s < n.choices; ++s) replayed.given.push_back((row * row + 5 * s) % n.experts);
        check_layer(replayed, cpx::shard(batch, cpx::zigzag<>(4)));
        auto const short_batch = lengths({2, 1}); // ranks without tokens, and most experts without rows
        check_layer(layer<T>(n, short_batch, 4), cpx::shard(short_batch, cpx::sequential<>(8)));
        check_layer(layer<T>(n, lengths({}), 5), cpx::shard(lengths({}), cpx::sequential<>(2)));
    }

    TEST_CASE("experts lie over data parallelism, too: in a mesh of 4 batches on 2 ranks each, 8 ranks share them") {
        using cpx::axis;
        cpx::mesh const all({.world = 8, .cp = 2, .ep = 8, .etp = 1});
        layer<double> const l({6, 8, 3, 5, 4}, lengths({3, 0, 7, 1, 11, 2, 6, 5}), 8); // two sequences a batch
        auto const expected = alone(l);
        reference::same_on_ranks<double> of_gate_up;
        on(8, [&](cpx::threads& world) {
            cpx::subgroup<cpx::threads> of_context(world, all.group(axis::cp, world.rank())),
                of_experts(world, all.group(axis::ep, world.rank()));
            auto const own = all.sequences(l.batch.sequences(), world.rank());
            index_t const begin = l.batch.offset(own.first);
            auto const batch = lengths({l.batch.length(own.first), l.batch.length(own.first + 1)});
            by_tokens const sharding = cpx::shard(batch, cpx::zigzag<>(2));
            int const rank = of_context.rank();
            auto const part = [&](std::vector<double> const& whole) {
                std::vector<double> const rows(whole.begin() + begin * l.n.hidden,
                                               whole.begin() + l.batch.offset(own.last) * l.n.hidden);
                return take(rows, {{1, l.n.hidden}}, sharding, rank);
            };
            auto const x = part(l.x), dy = part(l.dy), want_y = part(expected.y), want_dx = part(expected.dx);
            auto y = poisoned<double>(sharding, rank, l.n.hidden), dx = y;
            auto places = cpx::global_rows(sharding, rank);
            for (index_t& place : places) place += begin;
            auto choices = cpx::choose_experts<double>(l.of({}).gate, x.data(), l.n.choices);
            cpx::expert_exchange at(choices.chosen.view(), l.n.experts, places, of_experts);
            auto const w = l.of(at.own());
            auto const saved = cpx::moe<double>(w, x.data(), std::move(choices), std::move(at), y.data());
            auto const g = cpx::moe_backward<double>(w, saved, dy.data(), dx.data());
            CHECK(std::ranges::equal(y.elements(), want_y.elements()));
            CHECK(std::ranges::equal(dx.elements(), want_dx.elements()));
            std::vector<double> dgate_up(l.gate_up.size());
            cpx::weight_sums(sharding, sum_order::by_row, of_context)
                .experts(saved.at, saved.input.view(), g.dgate_up.view(), cpx::rows<double>(dgate_up, l.n.hidden),
                         world);
            cpx::sum_over_ranks(dgate_up, world);
            of_gate_up.add(dgate_up);
        });
        CHECK(same_bits(of_gate_up.get(), expected.dgate_up));
    }

    TEST_CASE("one expert of all tokens, and rows that stay, are exchanges, too") {
        auto const batch = lengths({5, 6});
        on(4, [&](cpx::threads& comm) {
            by_tokens const sharding = cpx::shard(batch, cpx::zigzag<>(4));
            auto const places = cpx::global_rows(sharding, comm.rank());
            cpx::row_buffer<index_t> chosen(sharding.rows(comm.rank()), 1);
            for (index_t row = 0; row < chosen.count(); ++row) chosen.view()(row, 0) = 5; // of 8: rank 2's
            cpx::expert_exchange const at(chosen.view(), 8, places, comm);
            CHECK(at.own() == cpx::range{2 * comm.rank(), 2 * comm.rank() + 2});
            CHECK(at.count() == (comm.rank() == 2 ? 11 : 0));
            for (index_t row = 0; row < at.count(); ++row) CHECK(at.places()[static_cast<std::size_t>(row)] == row);
            std::vector<double> x(places.begin(), places.end()), y(x.size(), -1);
            auto const there = at.to_experts(cpx::rows<double const>(x, 1), 1);
            for (index_t row = 0; row < there.count(); ++row) CHECK(there.view()(row, 0) == static_cast<double>(row));
            at.to_tokens(there.view(), cpx::rows<double>(y, 1));
            CHECK(y == x);
        });
    }

    TEST_CASE("some ranks of a transport are a transport") {
        auto const on_every_second = [](auto const& program, std::chrono::milliseconds deadline) {
            cpx::threads::run(
                6,
                [&](cpx::threads& comm) {
                    if (comm.rank() % 2 == 0) return;
                    cpx::subgroup<cpx::threads> odd(comm, {1, 3, 5});
                    program(odd);
                },
                deadline);
        };
        auto const found = cpx::testing::check_transport(on_every_second, std::chrono::milliseconds(200));
        CHECK_MESSAGE(found.all_duties(), found.text());
        using support::rejects;
        on(4, [&](cpx::threads& comm) {
            using group = cpx::subgroup<cpx::threads>;
            rejects({"expert_exchange.cpp", "subgroup: member 1: expected ascending ranks of 0 to 3, got 4"}, [&] {
                group(comm, {comm.rank(), 4});
            });
            rejects({"subgroup: member 1: expected ascending ranks of 0 to 3"}, [&] { group(comm, {2, 1}); });
            rejects({"subgroup: members: expected rank " + std::to_string(comm.rank()) + ", got others"},
                    [&] { group(comm, {(comm.rank() + 1) % 4}); });
            rejects({"neighbours: size: expected a divisor of the ranks, 4, got 3"}, [&] { cpx::neighbours(comm, 3); });
        });
    }

    TEST_CASE("what ranks cannot share is an error that names the sizes") {
        using support::rejects;
        on(4, [&](cpx::threads& comm) {
            cpx::row_buffer<index_t> chosen(3, 2);
            std::vector<index_t> const places{0, 1, 2};
            auto const make = [&](index_t experts, std::span<index_t const> some) {
                cpx::expert_exchange(chosen.view(), experts, some, comm);
            };
            rejects({"expert_exchange.cpp", "expert_exchange: experts: expected a multiple of the ranks that share "
                                            "them, 4, got 6"},
                    [&] { make(6, places); });
            rejects({"experts: expected a multiple of the ranks that share them, 4, got 2"}, [&] { make(2, places); });
            rejects({"experts: expected a multiple of the ranks that share them, 4, got 0"}, [&] { make(0, places); });
            rejects({"places: expected 3, got 2"}, [&] { make(8, std::span(places).first(2)); });
            chosen.view()(1, 1) = 8;
            rejects({"chosen expert: expected 0 to 7, got 8"}, [&] { make(8, places); });
            chosen.view()(1, 1) = 0;
            rejects({"expert_exchange: ranks disagree on ", "8 experts and 2 choices a token (ranks 0 2 3), 4 experts"},
                    [&] { make(comm.rank() == 1 ? 4 : 8, places); });
        });
        on(2, [&](cpx::threads& comm) {
            cpx::row_buffer<index_t> const chosen(0, 2 + comm.rank());
            rejects({"expert_exchange: ranks disagree on ", "and 2 choices a token (rank 0), ",
                     "and 3 choices a token (rank 1)"},
                    [&] { cpx::expert_exchange(chosen.view(), 8, std::vector<index_t>(), comm); });
        });
        on(2, [&](cpx::threads& comm) {
            cpx::row_buffer<index_t> const chosen(3, 1);
            index_t const first = 3 * comm.rank();
            cpx::expert_exchange const at(chosen.view(), 8, std::vector{first, first + 1, first + 2}, comm);
            cpx::row_buffer<float> const x(4, 3), of_experts(at.count(), 3);
            cpx::row_buffer<float> y(3, 2);
            rejects({"expert_exchange.cpp", "expert_exchange::to_experts: shape of x: expected (3, 3), got (4, 3)"},
                    [&] { at.to_experts<float>(x.view(), 3); });
            rejects({"expert_exchange.cpp", "expert_exchange::to_tokens: shape of y: expected (3, 3), got (3, 2)"},
                    [&] { at.to_tokens<float>(of_experts.view(), y.view()); });
        });
        // The same places on both ranks, as rows counted from 0 on each are: the owner says so.
        std::string told;
        try {
            on(2, [&](cpx::threads& comm) {
                cpx::row_buffer<index_t> const chosen(3, 1);
                cpx::expert_exchange(chosen.view(), 2, std::vector<index_t>{0, 1, 2}, comm);
            });
        } catch (cpx::error const& e) {
            told = e.what();
        }
        CHECK(told.find("expert_exchange: place of a token: expected one of its own in the batch") != told.npos);
        on(4, [&](cpx::threads& comm) {
            auto pairs = cpx::neighbours(comm, 2);
            std::vector<float> values(comm.rank() == 3 ? 9 : 8);
            auto const sum = [&] { cpx::sum_over_ranks(values, pairs); };
            if (comm.rank() < 2)
                CHECK(support::message(sum) == "");
            else
                rejects({"sum_over_ranks of the subgroup 2 3: ranks disagree on ", "8 (rank 0), 9 (rank 1)"}, sum);
        });
        on(2, [&](cpx::threads& comm) {
            auto const batch = lengths({6});
            by_tokens const sharding = cpx::shard(batch, cpx::sequential<>(2));
            cpx::tensor<float, by_tokens> const x(sharding, comm.rank(), 3);
            for (sum_order const order : {sum_order::by_rank, sum_order::by_row})
                for (index_t const columns : {0, 2, -3})
                    rejects({"weight_sums::share: columns of a section: expected a divisor of the width, 3, got " +
                             std::to_string(columns)},
                            [&] { cpx::weight_sums(sharding, order, comm).share(x, columns); });
            rejects({"weight_sums: order: expected by_rank or by_row, got 7"},
                    [&] { cpx::weight_sums(sharding, static_cast<sum_order>(7), comm); });
        });
    }

    TEST_CASE_TEMPLATE("the loss that balances experts is the formula, on any sharding, padding left out", T, float,
                       double) {
        index_t const experts = 5, choices = 2, hidden = 4;
        cpx::thd const batch({0, 7, 7, 9, 20}, {5, 0, 2, 9});
        support::splitmix numbers(7);
        auto x = uniform<T>(numbers, batch.tokens() * hidden, 2);
        auto const gate = uniform<T>(numbers, experts * hidden, 2);
        auto const run_on = [&](auto const& sharding, cpx::balance_over over, std::vector<T>& whole_dlogits) {
            std::vector<T> losses;
            std::mutex one_at_a_time;
            whole_dlogits.assign(static_cast<std::size_t>(batch.tokens() * experts), 0);
            on(sharding.ranks(), [&](cpx::threads& comm) {
                int const rank = comm.rank();
                auto const own = take(x, {{1, hidden}}, sharding, rank);
                auto const of = cpx::choose_experts<T>(cpx::rows<T const>(gate, hidden), own.data(), choices);
                auto const loss = cpx::expert_balance(of, sharding, over, comm);
                cpx::row_buffer<T> dlogits(sharding.rows(rank), experts);
                cpx::balance_loss_backward<T>(loss, of, sharding, T(0.5), dlogits.view());
                auto const places = cpx::global_rows(sharding, rank);
                std::lock_guard const lock(one_at_a_time);
                losses.push_back(loss.loss);
                for (std::size_t row = 0; row < places.size(); ++row)
                    std::copy_n(dlogits.view().row(static_cast<index_t>(row)), experts,
                                whole_dlogits.begin() + places[row] * experts);
            });
            for (T const loss : losses) CHECK(same_bits(loss, losses[0]));
            return losses[0];
        };
        for (auto const over : {cpx::balance_over::sequence, cpx::balance_over::batch}) {
            // The formula, in double, of the tokens that count.
            auto const of_all =
                cpx::choose_experts<T>(cpx::rows<T const>(gate, hidden), cpx::rows<T const>(x, hidden), choices);
            auto const formula = [&](std::vector<double> const& logits) {
                std::vector<std::vector<index_t>> units;
                if (over == cpx::balance_over::batch) units.emplace_back();
                for (index_t s = 0; s < batch.sequences(); ++s) {
                    if (over == cpx::balance_over::sequence) units.emplace_back();
                    for (index_t i = 0; i < batch.valid(s); ++i)
                        units.back().push_back(batch.offsets()[static_cast<std::size_t>(s)] + i);
                }
                double sum = 0, counted = 0;
                for (auto const& tokens : units) {
                    if (tokens.empty()) continue;
                    std::vector<double> f(experts), p(experts), each(experts);
                    for (index_t const t : tokens) {
                        cpx::detail::softmax(logits.data() + t * experts, experts, each.data());
                        for (std::size_t e = 0; e < f.size(); ++e) p[e] += each[e] / static_cast<double>(tokens.size());
                        for (index_t s = 0; s < choices; ++s)
                            f[static_cast<std::size_t>(of_all.chosen.view()(t, s))] +=
                                1.0 / static_cast<double>(std::ssize(tokens) * choices);
                    }
                    for (std::size_t e = 0; e < f.size(); ++e) sum += static_cast<double>(experts) * f[e] * p[e];
                    ++counted;
                }
                return sum / counted;
            };
            T const* const first = of_all.logits.view().data();
            std::vector<double> logits(first, first + batch.tokens() * experts);
            double const expected = formula(logits), eps = std::numeric_limits<T>::epsilon();
            std::vector<T> one, other;
            CHECK(std::abs(static_cast<double>(run_on(one_rank(batch), over, one)) - expected) <= 20 * eps);
            for (std::size_t i = 0; i < logits.size(); ++i) { // half the loss, by differences
                double const step = 1e-5, kept = logits[i];
                logits[i] = kept + step;
                double const more = formula(logits);
                logits[i] = kept - step;
                double const less = formula(logits);
                logits[i] = kept;
                CHECK(std::abs((more - less) / (2 * step) / 2 - static_cast<double>(one[i])) <= 1e-9 + 10 * eps);
            }
            for (int const ranks : {2, 3, 5}) {
                T const loss = run_on(by_tokens(cpx::shard(batch, cpx::zigzag<>(ranks))), over, other);
                CHECK(std::abs(static_cast<double>(loss) - expected) <= 20 * eps);
                CHECK(same_bits(other, one));
                run_on(by_tokens(cpx::shard(batch, cpx::striped<>(ranks))), over, other);
                CHECK(same_bits(other, one));
                run_on(by_tokens(cpx::shard<cpx::scope::batch>(batch, cpx::zigzag<>(ranks))), over, other);
                CHECK(same_bits(other, one));
                run_on(cpx::replicated<>(ranks, batch), over, other);
                CHECK(same_bits(other, one));
            }
        }
        cpx::row_buffer<T> wrong(3, experts);
        on(1, [&](cpx::threads& comm) {
            auto const of = cpx::choose_experts<T>(cpx::rows<T const>(gate, hidden), cpx::rows<T const>(x, hidden), 2);
            by_tokens const sharding = cpx::shard(batch, cpx::sequential<>(1));
            auto const loss = cpx::expert_balance(of, sharding, cpx::balance_over::batch, comm);
            support::rejects({"balance_loss_backward: shape of dlogits: expected (20, 5), got (3, 5)"},
                             [&] { cpx::balance_loss_backward<T>(loss, of, sharding, 1, wrong.view()); });
            by_tokens const few = cpx::shard(lengths({4}), cpx::sequential<>(1));
            support::rejects({"expert_exchange.cpp", "expert_balance: shape of logits: expected (4, 5), got (20, 5)"},
                             [&] { cpx::expert_balance(of, few, cpx::balance_over::batch, comm); });
            support::rejects({"expert_balance: over: expected sequence or batch, got 7"},
                             [&] { cpx::expert_balance(of, sharding, static_cast<cpx::balance_over>(7), comm); });
        });
        for (int const wrong_choices : {0, 1}) // else another batch of as many tokens
            support::rejects(
                {"ranks are in different exchanges: ", wrong_choices ? "target width: expected " : "cu_seqlens"}, [&] {
                    on(2, [&](cpx::threads& comm) {
                        bool const other = comm.rank() == 1;
                        by_tokens const sharding =
                            cpx::shard(other && !wrong_choices ? lengths({8, 12}) : lengths({6, 14}), cpx::zigzag<>(2));
                        auto const own = take(x, {{1, hidden}}, sharding, comm.rank());
                        auto const of = cpx::choose_experts<T>(cpx::rows<T const>(gate, hidden), own.data(),
                                                               other && wrong_choices ? 3 : 2);
                        cpx::expert_balance(of, sharding, cpx::balance_over::batch, comm);
                    });
                });
    }
}
