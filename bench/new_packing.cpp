// SPDX-License-Identifier: Apache-2.0
// What a new packing costs the host that moves it between devices, but for launches: plans and tables, listed or by
// lanes.
#include <cpx/cpx.hpp>
#include <cpx/plan/capacity.hpp>
#include <cpx/plan/lane_rectangles.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <random>
#include <string>
#include <vector>

namespace {

using cpx::index_t;
constexpr index_t tokens = 32768, sequences = 64, width = 2048;

/// Tokens of `sequences` sequences, of which some are as short as is told; others for every number.
cpx::thd packing(std::uint32_t number, index_t shortest) {
    std::mt19937 random(number);
    std::vector<index_t> lengths(sequences, shortest);
    for (index_t left = tokens - sequences * shortest; left > 0;) {
        index_t const some = std::min<index_t>(left, 1 + static_cast<index_t>(random()) % 512);
        lengths[random() % (shortest > 8 ? sequences : sequences / 2)] += some;
        left -= some;
    }
    return cpx::thd::from_lengths(lengths);
}

/// Plan and tables of a plan of this kind for a batch, by lanes where they tell it. Returns whether they did.
template <class Plan>
bool make_tables(Plan const& first, typename cpx::detail::moved<Plan>::width row,
                 typename cpx::detail::moved<Plan>::batch const& batch, bool by_lanes) {
    using kind = cpx::detail::moved<Plan>;
    auto const shape = [&](index_t source, index_t target) {
        index_t const own = kind::row_width(row);
        index_t const from = source > 0 ? source : own, to = target > 0 ? target : own;
        return cpx::detail::row_shapes{from, to, from, to, 2};
    };
    auto const lanes = kind::lanes(first, row, false);
    if (by_lanes && !lanes.empty()) {
        cpx::detail::lane_tables all(std::get<0>(batch).batch(), nullptr);
        bool told = true;
        for (cpx::lane_plan const& p : lanes) {
            told = told && all.next(p, shape(p.source.width, p.target.width));
            if (told) benchmark::DoNotOptimize(cpx::detail::tables_of(all, {}));
        }
        if (told) benchmark::DoNotOptimize(all.work().list(std::get<0>(batch).batch()));
        if (told) return true;
    }
    std::vector<cpx::detail::rectangle> list;
    kind::exchanges(kind::next(first, batch, cpx::caller::here()), row, false, [&](std::span<cpx::plan const> plans) {
        for (cpx::plan const& p : plans) {
            cpx::detail::listed_rectangles all(p, shape(p.source_width, p.target_width), list);
            benchmark::DoNotOptimize(cpx::detail::tables_of(all, {}));
        }
    });
    benchmark::DoNotOptimize(list.data());
    return false;
}

/// Times what a pair of hybrid layers wants of a new packing: a relayout there and back, a halo and a carry.
template <class From, class To>
void add(std::string const& name, index_t shortest, From const& from, To const& to, index_t overwritten) {
    double const limit = overwritten < 32 << 20 ? 60 : 0; // more than the caches of a core: for information
    auto const label = "new packing after " + std::to_string(overwritten >> 20) + " MiB/" + name;
    benchmark::RegisterBenchmark(
        label.c_str(),
        [=](benchmark::State& state) {
            auto const first = packing(0, shortest);
            auto const move = cpx::relayout(from(first), to(first), 0);
            auto const beside = cpx::halo(to(first), 0, 3);
            auto const handed = cpx::carry<cpx::serial>(to(first), 0);
            std::vector<double> times[3];
            std::vector<char> others(static_cast<std::size_t>(overwritten));
            std::uint32_t number = 0;
            int listed = 0;
            for (auto _ : state) {
                auto const batch = packing(++number, shortest);
                auto const a = from(batch);
                auto const b = to(batch);
                for (char& c : others) ++c; // what caches hold after other work: a core's, or all
                auto last = std::chrono::steady_clock::now();
                double all = 0;
                auto const lap = [&](std::size_t what) {
                    auto const now = std::chrono::steady_clock::now();
                    times[what].push_back(std::chrono::duration<double>(now - last).count() * 1e6);
                    all += times[what].back(), last = now;
                };
                listed = !make_tables(move, width, {a, b}, true), lap(0);
                listed += 2 * !make_tables(beside, width, {b}, true), lap(1);
                listed += 4 * !make_tables(handed, {32, 0}, {b}, true), lap(2);
                state.SetIterationTime(all * 1e-6);
            }
            double sum = 0;
            for (std::size_t i = 0; i < 3; ++i) {
                std::ranges::nth_element(times[i], times[i].begin() + std::ssize(times[i]) / 2);
                double const median = times[i][times[i].size() / 2];
                sum += median;
                state.counters[std::array{"relayout_us", "halo_us", "carry_us"}[i]] = median;
            }
            state.counters["listed"] = listed;
            state.counters["median_us"] = sum;
            state.counters["limit_us"] = limit;
            state.SetLabel(limit == 0 ? "no limit" : sum <= limit ? "ok" : "MISSED");
        })
        ->Iterations(200)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
}

int add_all(index_t overwritten) {
    cpx::zigzag<> const zigzag(2);
    cpx::sequential<> const sequential(2);
    cpx::aligned<64> const aligned;
    auto const of = [](auto layout, auto cut) {
        return [=](cpx::thd const& batch) { return cpx::shard(batch, layout, cut); };
    };
    auto const over_batch = [](auto layout, auto cut) {
        return [=](cpx::thd const& batch) { return cpx::shard<cpx::scope::batch>(batch, layout, cut); };
    };
    cpx::balanced const balanced;
    add("each sequence", 16, of(zigzag, balanced), of(sequential, balanced), overwritten);
    add("each sequence aligned", 16, of(zigzag, aligned), of(sequential, aligned), overwritten);
    add("sequences of 0 tokens and more", 0, of(zigzag, balanced), of(sequential, balanced), overwritten);
    add("sequences of 3 tokens and more", 3, of(zigzag, balanced), of(sequential, balanced), overwritten);
    add("the batch", 16, over_batch(zigzag, balanced), over_batch(sequential, balanced), overwritten);
    add("the batch aligned", 16, over_batch(zigzag, aligned), over_batch(sequential, aligned), overwritten);
    add("each sequence to the batch", 16, of(zigzag, balanced), over_batch(sequential, balanced), overwritten);
    add("the batch to each sequence", 16, over_batch(zigzag, balanced), of(sequential, balanced), overwritten);
    cpx::by_length const rule{zigzag, sequential, [](index_t n) { return n % 4 == 0; }};
    add("by_length to each sequence", 16, of(rule, balanced), of(sequential, balanced), overwritten);
    add("each sequence to by_length", 16, of(sequential, balanced), of(rule, balanced), overwritten);
    return 0;
}

[[maybe_unused]] int const added = add_all(4 << 20) + add_all(32 << 20);

} // namespace
