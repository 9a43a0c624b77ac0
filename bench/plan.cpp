// SPDX-License-Identifier: Apache-2.0
// How long one rank takes to make its plan: 4096 sequences over 64 ranks.
#include <cpx/cpx.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <random>
#include <string>

namespace {

constexpr int ranks = 64;
constexpr int sequences = 4096;
constexpr double limit_ms = 1;
constexpr double no_limit = 0; // for information

/// Lengths from 0 to `most` tokens; the same on every machine.
cpx::thd unequal(unsigned most) {
    std::mt19937 random(2026);
    std::vector<cpx::index_t> lengths(sequences);
    for (cpx::index_t& length : lengths) length = random() % (most + 1);
    return cpx::thd::from_lengths(lengths);
}

/// Times `make(rank)`, and the end of what it returns, for one rank after another: their mean.
///
/// `slowest_ms` is the slowest rank's fastest time.
template <class Make>
void each_rank(benchmark::State& state, double limit, Make const& make) {
    using clock = std::chrono::steady_clock;
    std::array<double, ranks> fastest;
    fastest.fill(1e9);
    std::size_t rank = 0;
    for (auto _ : state) {
        auto const start = clock::now();
        {
            auto plan = make(static_cast<int>(rank));
            benchmark::DoNotOptimize(plan);
        }
        double const seconds = std::chrono::duration<double>(clock::now() - start).count();
        state.SetIterationTime(seconds);
        fastest[rank] = std::min(fastest[rank], 1e3 * seconds);
        rank = (rank + 1) % ranks;
    }
    double const made = static_cast<double>(sequences) * static_cast<double>(state.iterations());
    state.counters["sequences/s"] = benchmark::Counter(made, benchmark::Counter::kIsRate);
    state.counters["slowest_ms"] = *std::ranges::max_element(fastest);
    state.counters["limit_ms"] = limit;
}

template <class Make>
void add(std::string const& name, double limit, int rounds, Make const& make) {
    auto const run = [=](benchmark::State& state) { each_rank(state, limit, make); };
    benchmark::RegisterBenchmark(name.c_str(), run)
        ->Iterations(rounds * ranks)
        ->Repetitions(5)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
}

template <class From, class To>
void add_relayout(std::string const& name, From const& from, To const& to, double limit = limit_ms) {
    int const rounds = From::every_row || To::every_row ? 1 : 8; // plans for heads are large
    add("relayout/" + name, limit, rounds, [=](int rank) { return cpx::relayout(from, to, rank); });
}

/// Adds the plans of a batch between zigzag and sequential over the sequences, and sequential over the batch.
template <class Zigzag, class Sequential, class Cut>
void add_relayouts(std::string const& name, cpx::thd const& batch, Zigzag zigzag, Sequential sequential, Cut cut) {
    auto const zigzags = cpx::shard(batch, zigzag, cut);
    auto const sequentials = cpx::shard(batch, sequential, cut);
    auto const over_batch = cpx::shard<cpx::scope::batch>(batch, sequential, cut);
    add_relayout("zigzag to sequential/" + name, zigzags, sequentials);
    add_relayout("zigzag to sequential over batch/" + name, zigzags, over_batch);
    add_relayout("sequential over batch to zigzag/" + name, over_batch, zigzags);
}

int add_all() {
    cpx::thd const batch = unequal(8192), brief = unequal(64);
    cpx::zigzag<ranks> const zigzag;
    cpx::sequential<ranks> const sequential;
    cpx::zigzag<> const any_zigzag(ranks);
    cpx::sequential<> const any_sequential(ranks);
    cpx::aligned<64> const aligned;

    add_relayouts("static", batch, zigzag, sequential, cpx::balanced{});
    add_relayouts("dynamic", batch, any_zigzag, any_sequential, cpx::balanced{});
    add_relayouts("static aligned", batch, zigzag, sequential, aligned);
    add_relayouts("dynamic aligned", batch, any_zigzag, any_sequential, cpx::aligned<cpx::dynamic>(64));
    add_relayouts("static of 4096 tokens each", cpx::thd::uniform(sequences, 4096), zigzag, sequential,
                  cpx::balanced{});
    add_relayouts("static of 0 to 64 tokens", brief, zigzag, sequential, cpx::balanced{});

    auto const zigzags = cpx::shard(batch, zigzag);
    cpx::head_sharded<ranks> const heads(batch, {{64, 128}, {64, 128}, {64, 128}});
    add_relayout("zigzag to heads", zigzags, heads, no_limit);
    add_relayout("heads to zigzag", heads, zigzags, no_limit);

    auto const add_neighbours = [](std::string const& name, auto const& sharding) {
        add("halo/" + name, no_limit, 8, [=](int rank) { return cpx::halo(sharding, rank, 3); });
        add("carry/" + name, no_limit, 1, [=](int rank) { return cpx::carry(sharding, rank); });
    };
    add_neighbours("zigzag", zigzags);
    add_neighbours("sequential", cpx::shard(batch, sequential));
    add_neighbours("sequential over batch", cpx::shard<cpx::scope::batch>(batch, sequential));
    return 0;
}

[[maybe_unused]] int const added = add_all();

} // namespace
