// SPDX-License-Identifier: Apache-2.0
// How long it takes to find where a token lives and which token lives in a row, by what layouts list of a rank and by a
// walk over all chunks.
#include <cpx/cpx.hpp>

#include <benchmark/benchmark.h>

#include <string>

namespace {

/// Hides what a layout lists, so that all chunks are walked.
template <cpx::layout L>
struct unlisted {
    L all;
    int ranks() const { return all.ranks(); }
    int chunks() const { return all.chunks(); }
    int owner(int chunk) const { return all.owner(chunk); }
};

/// Finds the slot of tokens all over a run, and their tokens again.
template <class L>
void there_and_back(benchmark::State& state, L const& layout) {
    cpx::index_t const n = 1'000'003, step = 618'033;
    cpx::index_t t = 0;
    for (auto _ : state) {
        cpx::slot const place = cpx::locate(layout, t, n);
        if (cpx::token(layout, place, n) != t) state.SkipWithError("another token lives there");
        t = (t + step) % n;
    }
}

template <class L>
void add(std::string const& name, L const& layout) {
    auto const times = [](auto const& any) { return [any](benchmark::State& state) { there_and_back(state, any); }; };
    std::string const of = name + '/' + std::to_string(layout.ranks()) + " ranks/";
    benchmark::RegisterBenchmark((of + "listed").c_str(), times(layout));
    benchmark::RegisterBenchmark((of + "walked").c_str(), times(unlisted<L>{layout}));
}

[[maybe_unused]] bool const added = [] {
    for (int ranks = 8; ranks <= 1024; ranks *= 2) {
        add("sequential", cpx::sequential<>(ranks));
        add("zigzag", cpx::zigzag<>(ranks));
        add("striped", cpx::striped<>(ranks));
    }
    return true;
}();

} // namespace
