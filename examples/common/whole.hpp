// SPDX-License-Identifier: Apache-2.0
// For examples that run on any sharding: numbers that do not depend on it, and results whole again and compared.
#pragma once

#include <cpx/cpx.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace examples {

/// Returns what `rank` holds of a tensor whose values follow from the row of the batch and the column.
template <cpx::any_sharding S>
auto numbers(S const& sharding, int rank, cpx::index_t width, double frequency) {
    cpx::index_t const first = sharding.heads(rank, width).first;
    auto x = cpx::make_tensor<double>(sharding, rank, sharding.heads(rank, width).size());
    cpx::index_t row = 0;
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        for (cpx::index_t global = piece.first; global < piece.last; ++global, ++row)
            for (cpx::index_t j = 0; j < x.width(); ++j)
                x.data()(row, j) = std::sin(frequency * static_cast<double>(global * width + first + j));
    });
    return x;
}

/// Returns the elements of whole tensors, one after the other, on every rank. Collective.
template <class Comm, cpx::any_sharding... S>
std::vector<double> gather(Comm& comm, cpx::tensor<double, S> const&... tensors) {
    std::vector<double> results;
    auto const add = [&](auto const& x) {
        cpx::replicated<> const everywhere(comm.ranks(), x.sharding().batch());
        auto const all = exchange(relayout(x.sharding(), everywhere, comm.rank()), x, comm);
        results.insert(results.end(), all.data().data(), all.data().row(all.data().count()));
    };
    (add(tensors), ...);
    return results;
}

/// Runs `program(comm)` on the ranks of a sharding. Returns what it returns on rank 0: numbers, gathered.
template <cpx::any_sharding S, class F>
std::vector<double> on_ranks(S const& sharding, F&& program) {
    std::vector<std::vector<double>> results(static_cast<std::size_t>(sharding.ranks()));
    cpx::threads::run(sharding.ranks(),
                      [&](cpx::threads& comm) { results[static_cast<std::size_t>(comm.rank())] = program(comm); });
    return results.front();
}

/// Prints the largest difference. Throws `cpx::error` for `program` if it is more than `tolerance`, or if one of both
/// has more numbers.
inline void compare(char const* program, char const* what, std::vector<double> const& expected,
                    std::vector<double> const& got, double tolerance) {
    cpx::require(got.size() == expected.size(), program, (std::string("elements of ") + what).c_str(), expected.size(),
                 got.size());
    double worst = 0;
    for (std::size_t i = 0; i < expected.size() && !std::isnan(worst); ++i) { // std::max would pass over a NaN
        double const off = std::abs(expected[i] - got[i]);
        if (!(off <= worst)) worst = off;
    }
    std::printf("  %-16s largest difference to one rank %.1e\n", what, worst);
    cpx::require(worst <= tolerance, program, what, "at most " + std::to_string(tolerance), worst);
}

/// Compares what `f(carry, sharding, comm)` returns on every layout, scope and carry, and by heads, with one rank's.
template <class F>
void compare_everywhere(char const* program, cpx::thd const& batch, cpx::section section, double tolerance, F&& f) {
    auto const run = [&](auto how, auto const& sharding) {
        return on_ranks(sharding, [&](cpx::threads& comm) { return f(how, sharding, comm); });
    };
    std::pair<char const*, cpx::table> const layouts[] = {{"sequential", cpx::table(cpx::sequential<>(5))},
                                                          {"zigzag", cpx::table(cpx::zigzag<>(4))},
                                                          {"striped", cpx::table(cpx::striped<>(3))}};
    auto const one = run(cpx::serial{}, cpx::shard(batch, cpx::table(cpx::sequential<>(1))));
    for (auto const& [name, layout] : layouts) {
        auto const check = [&, name = name](auto const& sharding) {
            compare(program, name, one, run(cpx::scan{}, sharding), tolerance);
            compare(program, name, one, run(cpx::serial{}, sharding), tolerance);
        };
        check(cpx::shard(batch, layout));
        check(cpx::shard<cpx::scope::batch>(batch, layout));
    }
    compare(program, "head_sharded", one, run(cpx::serial{}, cpx::head_sharded<>(4, batch, {section})), tolerance);
}

} // namespace examples
