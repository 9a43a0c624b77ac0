// SPDX-License-Identifier: Apache-2.0
// How fast ranks on threads exchange a tensor of 64 MiB, against memcpy by as many threads.
#include <cpx/cpx.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <string>

namespace {

using steady = std::chrono::steady_clock;
using element = std::uint16_t; // as wide as bfloat16

constexpr cpx::index_t tensor_bytes = cpx::index_t{64} << 20;
constexpr cpx::index_t width = 4096; // rows of 8 KiB
constexpr cpx::index_t tokens = tensor_bytes / (width * cpx::index_t{sizeof(element)});
constexpr double required_ratio = 0.4;
constexpr double no_limit = 0; // for information

/// 16 sequences of 32 to 992 tokens, multiples of 16.
cpx::thd packed() {
    std::vector<cpx::index_t> lengths;
    for (cpx::index_t i = 0; i < 8; ++i) lengths.insert(lengths.end(), {32 + 64 * i, 992 - 64 * i});
    cpx::thd batch = cpx::thd::from_lengths(lengths);
    cpx::require(batch.tokens() == tokens, "bench", "tokens", tokens, batch.tokens());
    return batch;
}

/// Where threads wait for each other. Remembers when the last of them came.
class meeting {
public:
    explicit meeting(int threads) : barrier_(threads, stamp{&last_}) {}

    /// Returns the seconds from when all threads had come to `before` until all had done `work`.
    template <class F>
    double time(F const& work) {
        barrier_.arrive_and_wait();
        steady::time_point const start = last_;
        work();
        barrier_.arrive_and_wait();
        return std::chrono::duration<double>(last_ - start).count();
    }

private:
    struct stamp {
        steady::time_point* last;
        void operator()() noexcept { *last = steady::now(); }
    };
    steady::time_point last_;
    std::barrier<stamp> barrier_;
};

double median(std::vector<double> values) {
    auto const middle = values.begin() + std::ssize(values) / 2;
    std::ranges::nth_element(values, middle);
    return *middle;
}

/// Bytes that come to the plan's rank from other ranks.
std::size_t received_bytes(cpx::plan const& plan) {
    cpx::index_t elements = 0;
    for (cpx::message const& m : plan.receives)
        if (m.peer != plan.rank) elements += cpx::total(m.rows) * (m.columns.empty() ? width : cpx::total(m.columns));
    return static_cast<std::size_t>(elements) * sizeof(element);
}

/// Times, in turn, an exchange, memcpy on every rank of as many bytes as it receives from others, and memcpy of all
/// those bytes on rank 0. The first exchange, with the ranks' agreement and fresh memory, is not timed.
///
/// `ratio` counts the bytes that change rank; `copied_ratio` also those that stay, which an exchange copies as well.
template <class From, class To>
void exchange(benchmark::State& state, From const& from, To const& to, double limit) {
    int const ranks = from.ranks();
    std::size_t moved = 0;
    for (int rank = 0; rank < ranks; ++rank) moved += received_bytes(cpx::relayout(from, to, rank));

    meeting all(ranks);
    std::vector<double> exchanges, copies, copies_by_one;
    cpx::threads::run(ranks, [&](cpx::threads& comm) {
        auto const plan = cpx::relayout(from, to, comm.rank());
        cpx::tensor<element, From> const source(from, comm.rank(), plan.source_width ? plan.source_width : width);
        cpx::tensor<element, To> target(to, comm.rank(), plan.target_width ? plan.target_width : width);
        bool const first = comm.rank() == 0;
        std::vector<std::byte> const whole_source(first ? moved : 0);
        std::vector<std::byte> whole_target(whole_source.size());

        auto const run = [&] { cpx::exchange(plan, source.view(), target.view(), comm); };
        auto const copy = [&] { std::memcpy(target.data().data(), source.data().data(), received_bytes(plan)); };
        auto const copy_by_one = [&] { std::memcpy(whole_target.data(), whole_source.data(), whole_source.size()); };
        run();
        auto const round = [&] {
            double const seconds[] = {all.time(run), all.time(copy), all.time(copy_by_one)};
            if (!first) return;
            exchanges.push_back(seconds[0]);
            copies.push_back(seconds[1]);
            copies_by_one.push_back(seconds[2]);
            state.SetIterationTime(seconds[0]);
        };
        if (first)
            for (auto _ : state) round();
        else
            for (benchmark::IterationCount i = 0; i < state.max_iterations; ++i) round();
        benchmark::DoNotOptimize(target);
        benchmark::DoNotOptimize(whole_target);
    });

    double const gigabytes = 1e-9 * static_cast<double>(moved);
    state.counters["moved_MiB"] = static_cast<double>(moved) / (1 << 20);
    state.counters["GB/s"] = gigabytes / median(exchanges);
    state.counters["memcpy_GB/s"] = gigabytes / median(copies);
    state.counters["one_memcpy_GB/s"] = gigabytes / median(copies_by_one);
    state.counters["ratio"] = median(copies) / median(exchanges);
    state.counters["copied_ratio"] = median(copies) / median(exchanges) * tensor_bytes / static_cast<double>(moved);
    state.counters["limit"] = limit;
}

template <class From, class To>
void add(std::string const& name, From const& from, To const& to, double limit) {
    auto const run = [=](benchmark::State& state) { exchange(state, from, to, limit); };
    benchmark::RegisterBenchmark(name.c_str(), run)
        ->Iterations(15)
        ->Repetitions(5)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
}

template <int W>
void add_ranks() {
    cpx::thd const batch = packed();
    auto const zigzag = cpx::shard(batch, cpx::zigzag<W>{});
    auto const sequential = cpx::shard(batch, cpx::sequential<W>{});
    cpx::head_sharded<W> const heads(batch, {{8, 128}, {8, 128}, {16, 128}});
    std::string const ranks = "/" + std::to_string(W) + " ranks";
    double const limit = W == 2 ? required_ratio : no_limit;
    add("exchange/zigzag to sequential" + ranks, zigzag, sequential, limit);
    add("exchange/sequential to zigzag" + ranks, sequential, zigzag, limit);
    add("exchange/zigzag to heads" + ranks, zigzag, heads, no_limit);
    add("exchange/heads to zigzag" + ranks, heads, zigzag, no_limit);
}

[[maybe_unused]] int const added = (add_ranks<2>(), add_ranks<4>(), add_ranks<8>(), 0);

} // namespace
