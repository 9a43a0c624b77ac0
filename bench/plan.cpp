// SPDX-License-Identifier: Apache-2.0
// How long one rank takes to make its plan: 4096 sequences over 64 ranks, 256 over 8 to 4096, 64 over 4.
#include <cpx/cpx.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <random>
#include <string>

namespace {

constexpr int ranks = 64;
constexpr double limit_ms = 1;
constexpr double no_limit = 0; // for information

/// Lengths from 0 to `most` tokens; the same on every machine.
cpx::thd unequal(cpx::index_t most, std::size_t sequences = 4096) {
    std::mt19937 random(2026);
    std::vector<cpx::index_t> lengths(sequences);
    for (cpx::index_t& length : lengths) length = static_cast<cpx::index_t>(random()) % (most + 1);
    return cpx::thd::from_lengths(lengths);
}

/// Times `make(rank)`, and the end of what it returns, for 64 of `of` ranks, one after another: their mean.
///
/// `slowest_ms` is the slowest rank's fastest time. The verdict is of it: waiting for a core that others use is
/// no part of it.
template <class Make>
void each_rank(benchmark::State& state, double limit, int of, Make const& make) {
    using clock = std::chrono::steady_clock;
    std::array<double, ranks> fastest;
    fastest.fill(1e9);
    std::size_t rank = 0;
    for (auto _ : state) {
        auto const start = clock::now();
        {
            auto plan = make(static_cast<int>(rank) * of / ranks);
            benchmark::DoNotOptimize(plan);
        }
        double const seconds = std::chrono::duration<double>(clock::now() - start).count();
        state.SetIterationTime(seconds);
        fastest[rank] = std::min(fastest[rank], 1e3 * seconds);
        rank = (rank + 1) % ranks;
    }
    double const slowest = *std::ranges::max_element(fastest);
    state.counters["slowest_ms"] = slowest;
    state.counters["limit_ms"] = limit;
    state.SetLabel(limit == no_limit ? "no limit" : slowest <= limit ? "ok" : "MISSED");
}

template <class Make>
void add(std::string const& name, double limit, int rounds, int of, Make const& make) {
    auto const times = [=](benchmark::State& state) { each_rank(state, limit, of, make); };
    benchmark::RegisterBenchmark(name.c_str(), times)
        ->Iterations(rounds * ranks)
        ->Repetitions(5)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
}

template <class From, class To>
void add_relayout(std::string const& name, From const& from, To const& to, double limit = limit_ms) {
    add("relayout/" + name, limit, 8, from.ranks(), [=](int rank) { return cpx::relayout(from, to, rank); });
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
    cpx::thd const batch = unequal(8192);
    cpx::zigzag<ranks> const zigzag;
    cpx::sequential<ranks> const sequential;
    cpx::zigzag<> const any_zigzag(ranks);
    cpx::sequential<> const any_sequential(ranks);
    cpx::aligned<64> const aligned;

    add_relayouts("static", batch, zigzag, sequential, cpx::balanced{});
    add_relayouts("dynamic", batch, any_zigzag, any_sequential, cpx::balanced{});
    add_relayouts("static aligned", batch, zigzag, sequential, aligned);
    add_relayouts("dynamic aligned", batch, any_zigzag, any_sequential, cpx::aligned<cpx::dynamic>(64));
    add_relayouts("static of 4096 tokens each", cpx::thd::uniform(4096, 4096), zigzag, sequential, cpx::balanced{});
    add_relayouts("static of 0 to 64 tokens", unequal(64), zigzag, sequential, cpx::balanced{});

    auto const zigzags = cpx::shard(batch, zigzag);
    cpx::head_sharded<ranks> const heads(batch, {{64, 128}, {64, 128}, {64, 128}});
    add_relayout("zigzag to heads", zigzags, heads);
    add_relayout("heads to zigzag", heads, zigzags);

    auto const add_carries = [](std::string const& name, auto const& sharding, double limit) {
        add("carry serial/" + name, limit, 4, sharding.ranks(),
            [=](int rank) { return cpx::carry<cpx::serial>(sharding, rank); });
        add("carry scan/" + name, limit, 4, sharding.ranks(),
            [=](int rank) { return cpx::carry<cpx::scan>(sharding, rank); });
    };
    auto const add_neighbours = [&](std::string const& name, auto const& sharding) {
        add("halo/" + name, no_limit, 8, sharding.ranks(), [=](int rank) { return cpx::halo(sharding, rank, 3); });
        add_carries(name, sharding, limit_ms);
    };
    add_neighbours("zigzag", zigzags);
    add_neighbours("sequential", cpx::shard(batch, sequential));
    add_neighbours("sequential over batch", cpx::shard<cpx::scope::batch>(batch, sequential));
    add_carries("zigzag aligned", cpx::shard(batch, zigzag, aligned), no_limit);
    add_carries("zigzag of 0 to 64 tokens", cpx::shard(unequal(64), zigzag), no_limit);

    auto const add_small = [&](std::string const& name, auto zigzag_4, auto sequential_4) { // ranks in the type, or not
        cpx::thd const packing = unequal(1024, 64);
        auto const a = cpx::shard(packing, zigzag_4), b = cpx::shard(packing, sequential_4);
        add_relayout("zigzag to sequential/64 sequences over 4, " + name, a, b, 0.01);
        add_relayout("sequential to zigzag/64 sequences over 4, " + name, b, a, 0.01);
        add_carries("zigzag/64 sequences over 4, " + name, a, limit_ms);
    };
    add_small("static", cpx::zigzag<4>{}, cpx::sequential<4>{});
    add_small("dynamic", cpx::zigzag<>(4), cpx::sequential<>(4));

    for (int const w : {8, 64, 512, 4096}) { // 256 sequences, 8600 rows a rank
        cpx::thd const wide = unequal(2 * 8600 * w / 256, 256);
        std::string const of = "256 sequences over " + std::to_string(w);
        auto const wide_zigzag = cpx::shard(wide, cpx::zigzag<>(w));
        add_relayout("zigzag to sequential/" + of, wide_zigzag, cpx::shard(wide, cpx::sequential<>(w)), 0.15);
        cpx::head_sharded<> const wide_heads(w, wide, {{w, 128}, {w, 128}, {w, 128}});
        add_relayout("zigzag to heads/" + of, wide_zigzag, wide_heads, 0.0005 * w);
        add_relayout("heads to zigzag/" + of, wide_heads, wide_zigzag, 0.0005 * w);
        add_carries("zigzag/" + of, wide_zigzag, limit_ms);
    }
    return 0;
}

[[maybe_unused]] int const added = add_all();

} // namespace
