// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/token_loss.hpp>

#include <doctest/doctest.h>

#include <ops/gradients.hpp>
#include <ops/on_ranks.hpp>
#include <support/rejects.hpp>

#include <mutex>

namespace {

using namespace on_ranks;
using cpx::index_t;

std::vector<cpx::section> const one_column{{1, 1}};

/// A batch, its tokens, and logits of a small vocabulary; weights may be empty.
template <class T>
struct problem {
    cpx::thd batch;
    index_t vocabulary;
    std::vector<index_t> tokens;
    std::vector<T> logits, weights;
};

/// Sequences of every awkward length, without and with padding: valid lengths of 0, 1, less than and all of the tokens.
std::vector<cpx::thd> batches() {
    std::vector<cpx::thd> list;
    for (auto const& lengths : std::vector<std::vector<index_t>>{
             {1, 2, 0, 7, 13, 1}, {}, {0, 0}, {1}, {2}, {1, 1, 1}, {37, 8, 0, 21}, {16, 16}}) {
        list.push_back(support::lengths(lengths));
        std::vector<index_t> valid;
        for (std::size_t s = 0; s < lengths.size(); ++s)
            valid.push_back(std::max<index_t>(0, lengths[s] - std::vector<index_t>{0, 1, 0, 3, 13, 1}[s % 6]));
        auto const offsets = list.back().offsets();
        list.emplace_back(std::vector<index_t>(offsets.begin(), offsets.end()), valid);
    }
    return list;
}

template <class T>
problem<T> random_problem(cpx::thd const& batch, index_t vocabulary, bool weighted, std::uint64_t seed) {
    support::splitmix numbers(seed);
    problem<T> p{batch, vocabulary, {}, uniform<T>(numbers, batch.tokens() * vocabulary, 4), {}};
    for (index_t row = 0; row < batch.tokens(); ++row) p.tokens.push_back(numbers.between(0, vocabulary - 1));
    if (weighted)
        for (index_t row = 0; row < batch.tokens(); ++row)
            p.weights.push_back(static_cast<T>(numbers.between(0, 3)) / T(3)); // a third of 1 is no dyadic number
    return p;
}

/// The label of every row, from the definition.
std::vector<index_t> labels_of(cpx::thd const& batch, std::vector<index_t> const& tokens) {
    std::vector<index_t> labels(tokens.size(), cpx::ignored);
    for (index_t s = 0; s < batch.sequences(); ++s)
        for (index_t row = batch.offset(s); row + 1 < batch.offset(s) + batch.valid(s); ++row)
            labels[static_cast<std::size_t>(row)] = tokens[static_cast<std::size_t>(row) + 1];
    return labels;
}

/// Calls `f(name, sharding)` with every sharding of the batch: 4 layouts, both scopes, two cuts, whole rows everywhere,
/// and a few of their own types.
template <class F>
void for_each(cpx::thd const& batch, F&& f) {
    for (int const ranks : {1, 2, 3, 5, 8}) {
        for_each_sharding(batch, ranks, {1, 5}, f);
        f("heads on " + std::to_string(ranks) + " ranks", cpx::head_sharded<>(ranks, batch, {{4, 3}, {2, 5}}));
        f("replicated on " + std::to_string(ranks) + " ranks", cpx::replicated<>(ranks, batch));
    }
    f("static zigzag", cpx::shard(batch, cpx::zigzag<4>{}, cpx::aligned<16>{}));
    f("sequential<5> over batch", by_tokens(cpx::shard<cpx::scope::batch>(batch, cpx::sequential<5>{})));
    f("miles' rule", by_tokens(cpx::shard(batch, cpx::by_length{cpx::zigzag<4>{}, cpx::sequential<4>{},
                                                                [](index_t n) { return n % 8 == 0; }})));
}

/// What stands in a whole row of `width` on every rank, heads or not.
template <cpx::any_sharding S, class T>
cpx::tensor<T, S> rows_of(std::vector<T> const& whole, index_t width, S const& sharding, int rank) {
    cpx::tensor<T, S> local(sharding, rank, width);
    index_t row = 0;
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        for (index_t global = piece.first; global < piece.last; ++global, ++row)
            std::copy_n(whole.data() + global * width, width, local.data().row(row));
    });
    return local;
}

/// Puts rows where they belong in a whole tensor that began as poison. Throws if another rank has put other bits there.
template <cpx::any_sharding S, class T>
void put(cpx::tensor<T, S> const& local, int rank, std::vector<T>& whole) {
    index_t const width = local.width();
    index_t row = 0;
    local.sharding().for_each_piece(rank, [&](cpx::range piece) {
        for (index_t global = piece.first; global < piece.last; ++global, ++row)
            for (index_t c = 0; c < width; ++c) {
                T& place = whole[static_cast<std::size_t>(global * width + c)];
                T const value = local.data()(row, c);
                if (!same_bits(place, poison<T>()) && !same_bits(place, value))
                    throw cpx::error("put", "row " + std::to_string(global), "the same bits on every rank", "others");
                place = value;
            }
    });
}

template <class T>
std::span<T> flat(cpx::rows<T> const& column) {
    return {column.data(), static_cast<std::size_t>(column.count())};
}

/// What all ranks have computed, put together.
template <class T>
struct outcome {
    std::vector<index_t> labels;
    std::vector<T> logp, dlogits;
    cpx::token_loss loss;
};

/// Tokens to labels, log-probabilities, loss, and back to the gradient of the logits.
template <class T, cpx::any_sharding S>
outcome<T> run(problem<T> const& p, S const& sharding, double upstream = 1) {
    auto const count = p.tokens.size();
    outcome<T> all{std::vector<index_t>(count, poison<index_t>()),
                   std::vector<T>(count, poison<T>()),
                   std::vector<T>(p.logits.size(), poison<T>()),
                   {}};
    std::vector<cpx::token_loss> losses(static_cast<std::size_t>(sharding.ranks()));
    std::mutex guard;
    cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const tokens = rows_of(p.tokens, 1, sharding, rank);
        auto const logits = rows_of(p.logits, p.vocabulary, sharding, rank);
        std::vector<T> weights;
        if (!p.weights.empty()) {
            auto const local = rows_of(p.weights, 1, sharding, rank);
            auto const values = flat(local.data());
            weights.assign(values.begin(), values.end());
        }
        auto labels = poisoned<index_t>(sharding, rank, 1);
        auto logp = poisoned<T>(sharding, rank, 1), dlogp = logp;
        auto dlogits = poisoned<T>(sharding, rank, p.vocabulary);
        cpx::next_token_labels(cpx::halo(sharding, rank, 1, cpx::side::after), tokens.view(), labels.view(), comm);
        std::span<index_t const> const of_rows = flat(labels.data());
        cpx::log_probabilities<T>(logits.data(), of_rows, flat(logp.data()));
        auto const loss = cpx::mean_token_loss(logp.view(), labels.view(), comm, weights);
        cpx::mean_token_loss_backward(loss, labels.view(), upstream, dlogp.view(), weights);
        cpx::log_probabilities_backward<T>(logits.data(), of_rows, flat(dlogp.data()), dlogits.data());
        std::lock_guard const lock(guard);
        losses[static_cast<std::size_t>(rank)] = loss;
        put(labels, rank, all.labels);
        put(logp, rank, all.logp);
        put(dlogits, rank, all.dlogits);
    });
    all.loss = losses.front();
    for (auto const& loss : losses)
        if (!same_bits(loss.mean, all.loss.mean) || !same_bits(loss.weight, all.loss.weight))
            all.loss = {poison<double>(), poison<double>()};
    return all;
}

/// The whole batch by the formulas, in long double.
template <class T>
outcome<long double> reference(problem<T> const& p, double upstream) {
    auto const count = p.tokens.size(), vocabulary = static_cast<std::size_t>(p.vocabulary);
    outcome<long double> all{
        labels_of(p.batch, p.tokens), std::vector<long double>(count), std::vector<long double>(p.logits.size()), {}};
    long double sum = 0, weight = 0;
    auto const weight_of = [&](std::size_t row) -> long double { return p.weights.empty() ? T(1) : p.weights[row]; };
    std::vector<long double> probability(p.logits.size());
    for (std::size_t row = 0; row < count; ++row) {
        if (all.labels[row] == cpx::ignored) continue;
        long double total = 0;
        for (std::size_t j = 0; j < vocabulary; ++j)
            total += probability[row * vocabulary + j] =
                std::exp(static_cast<long double>(p.logits[row * vocabulary + j]));
        for (std::size_t j = 0; j < vocabulary; ++j) probability[row * vocabulary + j] /= total;
        all.logp[row] = std::log(probability[row * vocabulary + static_cast<std::size_t>(all.labels[row])]);
        sum -= weight_of(row) * all.logp[row];
        weight += weight_of(row);
    }
    for (std::size_t row = 0; row < count && weight > 0; ++row)
        for (std::size_t j = 0; j < vocabulary && all.labels[row] != cpx::ignored; ++j)
            all.dlogits[row * vocabulary + j] =
                upstream * weight_of(row) / weight *
                (probability[row * vocabulary + j] - (static_cast<index_t>(j) == all.labels[row]));
    all.loss = {static_cast<double>(weight > 0 ? sum / weight : 0), static_cast<double>(weight)};
    return all;
}

template <class T>
bool same(outcome<T> const& a, outcome<T> const& b) {
    return a.labels == b.labels && same_bits(a.logp, b.logp) && same_bits(a.dlogits, b.dlogits) &&
           same_bits(a.loss.mean, b.loss.mean) && same_bits(a.loss.weight, b.loss.weight);
}

} // namespace

TEST_SUITE("ops") {
    using cpx::index_t;

    TEST_CASE_TEMPLATE("labels, loss and gradient are those of the whole batch, the same bits on every sharding", T,
                       float, double) {
        std::uint64_t seed = 0;
        for (auto const& batch : batches())
            for (bool const weighted : {false, true}) {
                CAPTURE(support::text(batch));
                CAPTURE(weighted);
                auto const p = random_problem<T>(batch, 5, weighted, ++seed);
                auto const one = run(p, one_rank(batch), 0.75);
                auto const expected = reference(p, 0.75);
                double const within = 64 * std::numeric_limits<T>::epsilon(); // logits of 4 under exp, few of them
                CHECK(one.labels == expected.labels);
                CHECK(relative_error(one.logp, expected.logp) <= within);
                CHECK(relative_error(one.dlogits, expected.dlogits) <= within);
                CHECK(std::abs(one.loss.mean - expected.loss.mean) <= within * (1 + expected.loss.mean));
                CHECK(one.loss.weight == doctest::Approx(expected.loss.weight).epsilon(1e-14));
                for_each(batch, [&](std::string const& name, auto const& sharding) {
                    CAPTURE(name);
                    CHECK(same(run(p, sharding, 0.75), one));
                });
            }
    }

    TEST_CASE("a batch without labels has a loss of 0 and gradients of 0") {
        for (auto const& batch : {support::lengths({1, 1, 0, 1}), cpx::thd({0, 5, 9}, {1, 0}), cpx::thd()})
            for_each(batch, [&](std::string const& name, auto const& sharding) {
                CAPTURE(name);
                auto const got = run(random_problem<double>(batch, 3, false, 1), sharding);
                CHECK(got.loss.mean == 0);
                CHECK(got.loss.weight == 0);
                for (auto const* values : {&got.logp, &got.dlogits})
                    CHECK(*values == std::vector<double>(values->size()));
            });
        // nor does one whose weights are all 0, though its labels have log-probabilities
        auto p = random_problem<double>(support::lengths({4, 3}), 3, true, 2);
        std::ranges::fill(p.weights, 0.0);
        auto const got = run(p, by_tokens(cpx::shard(p.batch, cpx::zigzag<>(3))));
        CHECK(got.logp[0] < 0);
        CHECK(got.loss.mean == 0);
        CHECK(got.loss.weight == 0);
        CHECK(got.dlogits == std::vector<double>(got.dlogits.size()));
    }

    TEST_CASE("the gradient of the loss is its difference, on ranks") {
        for (bool const weighted : {false, true}) {
            auto p = random_problem<double>(cpx::thd({0, 7, 7, 12, 13}, {5, 0, 5, 1}), 4, weighted, 9);
            by_tokens const sharding = cpx::shard(p.batch, cpx::zigzag<>(3));
            auto const all = run(p, sharding, 1.5);
            gradients::check(cpx::rows<double>(p.logits, 4), cpx::rows<double const>(all.dlogits, 4),
                             [&] { return 1.5 * run(p, sharding).loss.mean; });
        }
    }

    TEST_CASE("a sequence changes the loss and no bit of another's labels, log-probabilities and gradients") {
        auto const batch = cpx::thd({0, 9, 10, 24, 24, 27}, {9, 1, 11, 0, 3});
        auto const p = random_problem<float>(batch, 4, true, 3);
        for (int const ranks : {1, 3, 5})
            for_each_sharding(batch, ranks, {1}, [&](std::string const& name, auto const& sharding) {
                CAPTURE(name);
                auto const before = run(p, sharding);
                for (float const change : {0.5f, std::numeric_limits<float>::quiet_NaN()})
                    for (index_t s = 0; s < batch.sequences(); ++s) {
                        CAPTURE(s);
                        index_t const first = batch.offset(s), last = batch.offset(s + 1);
                        auto other = p;
                        for (index_t row = first; row < last; ++row) {
                            other.tokens[static_cast<std::size_t>(row)] =
                                (p.tokens[static_cast<std::size_t>(row)] + 1) % 4;
                            other.logits[static_cast<std::size_t>(4 * row + 1)] += change;
                        }
                        auto const after = run(other, sharding);
                        for (auto const& [from, to] : {std::pair(index_t{0}, first), std::pair(last, batch.tokens())}) {
                            CHECK(same_rows(after.labels, before.labels, 1, from, to));
                            CHECK(same_rows(after.logp, before.logp, 1, from, to));
                            CHECK(same_rows(after.dlogits, before.dlogits, 4, from, to));
                        }
                        bool const counts = batch.valid(s) > 1;
                        CHECK(same_rows(after.logp, before.logp, 1, first, last) == !counts);
                        CHECK(same_bits(after.loss.mean, before.loss.mean) == !counts);
                        CHECK(std::isnan(after.loss.mean) == (counts && std::isnan(change)));
                        CHECK(after.loss.weight == before.loss.weight);
                    }
            });
    }

    TEST_CASE("a row that does not count may hold anything, and one that counts may be impossible") {
        auto const batch = support::lengths({3, 2});
        for_each(batch, [&](std::string const& name, auto const& sharding) {
            CAPTURE(name);
            auto const mean = [&](std::vector<double> const& logp, std::vector<double> const& weights) {
                cpx::token_loss result;
                std::mutex guard;
                cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
                    auto const labels = rows_of(std::vector<index_t>{0, 0, -1, 0, -1}, 1, sharding, comm.rank());
                    auto const local = rows_of(logp, 1, sharding, comm.rank());
                    auto const scale = rows_of(weights, 1, sharding, comm.rank());
                    auto const loss = cpx::mean_token_loss(local.view(), labels.view(), comm, flat(scale.data()));
                    std::lock_guard const lock(guard);
                    result = loss;
                });
                return result;
            };
            double const nan = poison<double>(), infinity = std::numeric_limits<double>::infinity();
            auto const loss = mean({-1, -infinity, nan, -5, infinity}, {3, 0, 1, 1, 2});
            CHECK(loss.mean == 2); // (3 * 1 + 1 * 5) / (3 + 1)
            CHECK(loss.weight == 4);
            CHECK(mean({-1, -infinity, 0, -5, 0}, {3, 1, 1, 1, 2}).mean == infinity);
            CHECK(std::isnan(mean({-1, nan, 0, -5, 0}, {3, 1, 1, 1, 2}).mean));
        });
    }

    TEST_CASE("labels cross the borders of chunks as peers' splits of responses do, and cost one token a segment") {
        // miles slice_log_prob_with_cp: total and response lengths, zigzag, the last token predicts nothing
        std::vector<index_t> const total = {34017, 2630, 1024, 97, 11}, response = {33789, 2402, 512, 96, 7};
        auto p = random_problem<float>(support::lengths(total), 1, true, 4);
        for (std::size_t row = 0; row < p.tokens.size(); ++row)
            p.tokens[row] = static_cast<index_t>(row * row % 151936);
        for (std::size_t s = 0; s < total.size(); ++s)
            for (index_t t = 0; t < total[s]; ++t) // the token before the response is the first to predict one
                p.weights[static_cast<std::size_t>(p.batch.offset(static_cast<index_t>(s)) + t)] =
                    t + 1 >= total[s] - response[s];
        auto const expected = labels_of(p.batch, p.tokens);
        for (int const ranks : {2, 4, 8}) {
            CAPTURE(ranks);
            by_tokens const sharding = cpx::shard(p.batch, cpx::zigzag<>(ranks));
            std::vector<index_t> labels(p.tokens.size(), poison<index_t>());
            std::mutex guard;
            cpx::threads::run(ranks, [&](cpx::threads& threads) {
                cpx::counted comm(threads);
                int const rank = comm.rank();
                auto const tokens = rows_of(p.tokens, 1, sharding, rank);
                auto local = poisoned<index_t>(sharding, rank, 1);
                auto const plan = cpx::halo(sharding, rank, 1, cpx::side::after);
                cpx::next_token_labels(plan, tokens.view(), local.view(), comm);
                auto const logp = rows_of(std::vector<float>(p.tokens.size(), -2), 1, sharding, rank);
                auto const weights = rows_of(p.weights, 1, sharding, rank);
                auto const loss = cpx::mean_token_loss(logp.view(), local.view(), comm, flat(weights.data()));
                std::lock_guard const lock(guard);
                put(local, rank, labels);
                CHECK(loss.mean == 2);
                CHECK(loss.weight == 33789 + 2402 + 512 + 96 + 7);
                CHECK(plan.target_rows <= std::ssize(plan.segments));
                CHECK(comm.sent("halo after").rows <= 2 * std::ssize(total));
                CHECK(comm.sent("relayout").bytes == 16 * sharding.rows(rank) * (ranks - 1));
            });
            CHECK(labels == expected);
        }
    }

    TEST_CASE("ranks that shift by another k, or by another operator, are told which") {
        by_tokens const sharding = cpx::shard(cpx::thd({0, 12}), cpx::zigzag<2>{});
        auto const disagree = [&](std::string const& passage, auto const& odd) {
            std::array<std::string, 2> texts;
            static_cast<void>(support::message([&] {
                cpx::threads::run(2, [&](cpx::threads& comm) {
                    int const rank = comm.rank();
                    auto const x = cpx::make_tensor<index_t>(sharding, rank, 1);
                    auto y = cpx::make_tensor<index_t>(sharding, rank, 1);
                    auto const plan = [&](index_t k) { return cpx::halo(sharding, rank, k, cpx::side::after); };
                    texts[static_cast<std::size_t>(rank)] = support::message([&] {
                        if (rank == 1)
                            odd(plan, x, y, comm);
                        else
                            cpx::shift_rows(plan(1), x, y, comm);
                    });
                });
            }));
            for (auto const& text : texts) CHECK_MESSAGE(text.find(passage) != text.npos, text);
        };
        disagree("ranks disagree on reach: expected one value on all ranks, got 1 (rank 0), 2 (rank 1)",
                 [](auto const& plan, auto const& x, auto& y, auto& comm) { cpx::shift_rows(plan(2), x, y, comm); });
        disagree("shift_rows: ranks disagree on fill (hash): expected one value on all ranks",
                 [](auto const& plan, auto const& x, auto& y, auto& comm) {
                     cpx::shift_rows(plan(1), x, y, comm, index_t{-100});
                 });
        disagree(
            "on operation: expected one value on all ranks, got shift_rows: halo after (rank 0), "
            "next_token_labels: halo after (rank 1)",
            [](auto const& plan, auto const& x, auto& y, auto& comm) { cpx::next_token_labels(plan(1), x, y, comm); });
    }

    TEST_CASE("labels and embeddings k ahead are those of the whole batch, and gradients go back to one row each") {
        constexpr index_t width = 4;
        for (index_t k = 1; k <= 4; ++k) {
            auto const batch = cpx::thd({0, 0, 1, 3, 6, 10, 15, 22, 35}, {0, 1, 2, 3, 4, k, 5, 13});
            auto const p = random_problem<double>(batch, 50, false, static_cast<std::uint64_t>(k));
            support::splitmix numbers(static_cast<std::uint64_t>(90 + k));
            auto const tokens = static_cast<std::size_t>(batch.tokens()), all = tokens * width;
            std::vector<double> const x = uniform<double>(numbers, static_cast<index_t>(all), 1),
                                      dy = uniform<double>(numbers, static_cast<index_t>(all), 1);
            std::vector<index_t> labels(tokens, cpx::ignored);
            std::vector<double> ahead(all), home(all);
            for (index_t s = 0; s < batch.sequences(); ++s)
                for (index_t t = 0; t + k < batch.valid(s); ++t) {
                    auto const from = static_cast<std::size_t>(batch.offset(s) + t + k),
                               to = static_cast<std::size_t>(batch.offset(s) + t);
                    labels[to] = p.tokens[from];
                    std::copy_n(&x[from * width], width, &ahead[to * width]);
                    std::copy_n(&dy[to * width], width, &home[from * width]); // the one row that it came from
                }
            for_each(batch, [&](std::string const& name, auto const& sharding) {
                std::vector<index_t> got(tokens, poison<index_t>());
                std::vector<double> y(all, poison<double>()), dx(all, poison<double>());
                std::mutex guard;
                cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
                    int const rank = comm.rank();
                    auto const after = cpx::halo(sharding, rank, k, cpx::side::after),
                               before = cpx::halo(sharding, rank, k);
                    auto own_labels = poisoned<index_t>(sharding, rank, 1);
                    auto own_y = poisoned<double>(sharding, rank, width), own_dx = own_y;
                    cpx::next_token_labels(after, rows_of(p.tokens, 1, sharding, rank), own_labels, comm);
                    cpx::shift_rows(after, rows_of(x, width, sharding, rank), own_y, comm);
                    cpx::shift_rows(before, rows_of(dy, width, sharding, rank), own_dx, comm);
                    std::lock_guard const lock(guard);
                    put(own_labels, rank, got);
                    put(own_y, rank, y);
                    put(own_dx, rank, dx);
                });
                CHECK_MESSAGE((got == labels && same_bits(y, ahead) && same_bits(dx, home)), name << ", k " << k);
            });
        }
    }

    TEST_CASE("the gradient of embeddings k ahead is their difference, on ranks") {
        index_t const width = 2;
        auto const batch = cpx::thd({0, 0, 1, 5, 12}, {0, 1, 3, 7});
        by_tokens const sharding = cpx::shard(batch, cpx::zigzag<>(3));
        support::splitmix numbers(95);
        auto x = uniform<double>(numbers, batch.tokens() * width, 1);
        for (index_t k = 1; k <= 4; ++k) {
            auto const shift = [&](std::vector<double> const& of, cpx::side where) {
                std::vector<double> shifted(of.size(), poison<double>());
                std::mutex guard;
                cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
                    auto own = poisoned<double>(sharding, comm.rank(), width);
                    cpx::shift_rows(cpx::halo(sharding, comm.rank(), k, where),
                                    rows_of(of, width, sharding, comm.rank()), own, comm);
                    std::lock_guard const lock(guard);
                    put(own, comm.rank(), shifted);
                });
                return shifted;
            };
            auto const loss = [&] { // sum y^3 / 3
                double sum = 0;
                for (double const y : shift(x, cpx::side::after)) sum += y * y * y / 3;
                return sum;
            };
            auto dy = shift(x, cpx::side::after);
            for (double& y : dy) y *= y;
            auto const dx = shift(dy, cpx::side::before);
            for (std::size_t i = 0; i < x.size(); ++i) {
                double const kept = x[i], step = 1e-4;
                x[i] = kept + step;
                double const more = loss();
                x[i] = kept - step;
                double const less = loss();
                x[i] = kept;
                CHECK(std::abs((more - less) / (2 * step) - dx[i]) <= 1e-8);
            }
        }
    }

    TEST_CASE("where every rank holds every row nothing is sent") {
        auto const p = random_problem<double>(support::lengths({5, 0, 8}), 3, false, 5);
        auto const silent = [&](auto const& sharding) {
            cpx::threads::run(sharding.ranks(), [&](cpx::threads& threads) {
                cpx::counted comm(threads);
                auto const tokens = rows_of(p.tokens, 1, sharding, comm.rank());
                auto labels = poisoned<index_t>(sharding, comm.rank(), 1);
                cpx::next_token_labels(cpx::halo(sharding, comm.rank(), 1, cpx::side::after), tokens.view(),
                                       labels.view(), comm);
                auto const logp = cpx::make_tensor<double>(sharding, comm.rank(), 1);
                cpx::mean_token_loss(logp.view(), labels.view(), comm);
                for (char const* operation : {"halo after", "relayout", "agreement"})
                    if (comm.sent(operation).messages != 0) throw cpx::error("test", operation, "nothing sent");
            });
        };
        silent(cpx::replicated<>(3, p.batch));
        silent(cpx::head_sharded<>(3, p.batch, {{2, 4}}));
    }

    TEST_CASE("labels and loss reject what does not fit, before anything moves") {
        auto const batch = support::lengths({6, 5});
        using S = by_tokens;
        S const sharding = cpx::shard(batch, cpx::zigzag<>(1)),
                another = cpx::shard(support::lengths({5, 6}), cpx::zigzag<>(1));
        std::vector<index_t> ids(22);
        std::vector<double> values(22), weights(11, 1);
        cpx::sharded<index_t, S> const tokens({ids.data(), 11, 1}, sharding, 0),
            foreign({ids.data(), 11, 1}, another, 0), wide({ids, 2}, sharding, 0),
            low({ids.data(), 10, 1}, sharding, 0);
        cpx::sharded<double, S> const logp({values.data(), 11, 1}, sharding, 0), wide_logp({values, 2}, sharding, 0);
        auto const plan = cpx::halo(sharding, 0, 1, cpx::side::after);
        auto const label = [](auto const& p, auto const& from, auto const& to) {
            return
                [=] { cpx::threads::run(1, [&](cpx::threads& comm) { cpx::next_token_labels(p, from, to, comm); }); };
        };
        support::rejects({"token_loss.cpp", "next_token_labels: sharding of tokens: expected the plan's"},
                         label(plan, foreign, tokens));
        support::rejects({"sharding of labels: expected the plan's"}, label(plan, tokens, foreign));
        support::rejects({"rows after a segment in the plan: expected at least 1, got 0"},
                         label(cpx::halo(sharding, 0, 0, cpx::side::after), tokens, tokens));
        support::rejects({"next_token_labels: side of the plan: expected side::after, of the tokens to come"},
                         label(cpx::halo(sharding, 0, 1), tokens, tokens));
        support::rejects({"shape of tokens: expected (11, 1), got (10, 1)"}, label(plan, low, tokens));
        support::rejects({"shape of labels: expected (11, 1), got (11, 2)"}, label(plan, tokens, wide));

        support::rejects({"token_loss.cpp", "next_token_labels: overlap of labels and tokens: expected none, got some"},
                         label(plan, tokens, tokens));

        auto const mean = [](auto const& of, auto const& labels, std::vector<double> const& w, int ranks = 1) {
            return [=] {
                cpx::threads::run(ranks, [&](cpx::threads& comm) { cpx::mean_token_loss(of, labels, comm, w); });
            };
        };
        auto const back = [](auto const& labels, auto const& to, std::span<double const> w) {
            return [=] { cpx::mean_token_loss_backward({1, 1}, labels, 1, to, w); };
        };
        auto const with = [&](double weight) {
            auto w = weights;
            w[7] = weight;
            return w;
        };
        support::rejects({"token_loss.cpp", "mean_token_loss: ranks of the transport: expected 1, got 2"},
                         mean(logp, tokens, {}, 2));
        support::rejects({"mean_token_loss: sharding of labels: expected that of logp"}, mean(logp, foreign, {}));
        support::rejects({"mean_token_loss: shape of logp: expected (11, 1), got (11, 2)"},
                         mean(wide_logp, tokens, {}));
        support::rejects({"mean_token_loss: shape of labels: expected (11, 1), got (10, 1)"}, mean(logp, low, {}));
        support::rejects({"mean_token_loss: number of weights: expected 11, got 3"}, mean(logp, tokens, {1, 2, 3}));
        support::rejects({"mean_token_loss: weight of row 7: expected finite and not negative, got -0.5"},
                         mean(logp, tokens, with(-0.5)));
        double const endless = std::numeric_limits<double>::infinity();
        support::rejects({"weight of row 7: expected finite and not negative, got nan"},
                         mean(logp, tokens, with(std::nan(""))));
        support::rejects({"weight of row 7: expected finite and not negative, got inf"},
                         mean(logp, tokens, with(endless)));
        support::rejects({"mean_token_loss: weights: expected on every rank or on none, got on some ranks"}, [&] {
            cpx::threads::run(2, [&](cpx::threads& comm) {
                cpx::tensor<double, S> p(S(cpx::shard(batch, cpx::zigzag<>(2))), comm.rank(), 1);
                cpx::tensor<index_t, S> const of(p.sharding(), comm.rank(), 1);
                std::vector<double> const w(comm.rank() == 1 ? p.elements().size() : 0, 2);
                cpx::mean_token_loss(p, of, comm, w);
            });
        });
        support::rejects(
            {"mean_token_loss_backward: weight of the loss: expected that of the batch, more than 0"}, [&] {
                cpx::mean_token_loss_backward(cpx::token_loss(),
                                              cpx::sharded<index_t, S>({ids.data(), 11, 1}, sharding, 0), 1, logp);
            });
        support::rejects({"token_loss.cpp", "mean_token_loss_backward: sharding of dlogp: expected that of labels"},
                         back(foreign, logp, {}));
        support::rejects({"mean_token_loss_backward: shape of labels: expected (11, 1), got (11, 2)"},
                         back(wide, logp, {}));
        support::rejects({"mean_token_loss_backward: shape of dlogp: expected (11, 1), got (11, 2)"},
                         back(tokens, wide_logp, {}));
        support::rejects({"mean_token_loss_backward: number of weights: expected 11, got 1"},
                         back(tokens, logp, std::span(weights).first(1)));
        auto const negative = with(-1);
        support::rejects({"mean_token_loss_backward: weight of row 7"}, back(tokens, logp, negative));
        support::rejects({"token_loss.cpp", "mean_token_loss_backward: overlap of dlogp and weights"},
                         back(tokens, logp, std::span(values).first(11)));
        CHECK(support::message(mean(logp, tokens, weights)) == "");
        CHECK(support::message(back(tokens, logp, weights)) == "");
    }
}
