// SPDX-License-Identifier: Apache-2.0
// A layout of one's own: the last rank, which also has the loss to compute, holds half as many tokens as the others.
#include "common/command_line.hpp"
#include "common/whole.hpp"

#include <cpx/cpx.hpp>
#include <cpx/ops.hpp>

#include <cmath>
#include <cstdio>
#include <mutex>

/// 2W - 1 chunks; every rank owns two that follow each other, the last rank one.
template <int W>
struct light_tail {
    constexpr int ranks() const { return W; }
    constexpr int chunks() const { return 2 * W - 1; }
    constexpr int owner(int chunk) const { return chunk / 2; }
    friend constexpr bool operator==(light_tail, light_tail) = default;
};

// That is all. The compiler proves that it is a layout, that no token is lost or doubled, and what an exchange costs.
static_assert(cpx::static_layout<light_tail<4>>);
static_assert(cpx::is_partition(light_tail<4>{}, 64));
static_assert(cpx::is_partition(light_tail<4>{}, 3)); // fewer tokens than chunks
static_assert(cpx::route_messages<cpx::zigzag<4>, light_tail<4>>() == 8);

namespace {

constexpr int ranks = 4;
using results = std::vector<std::vector<double>>;

/// Runs every operator in place on a sharding. Returns their results, whole, in global order.
template <cpx::carry_kind How, cpx::any_sharding S>
results run_operators(How, S const& sharding) {
    results all;
    std::mutex guard;
    cpx::threads::run(sharding.ranks(), [&](cpx::threads& comm) {
        int const rank = comm.rank();
        results mine;
        auto const keep = [&](auto const& x) { mine.push_back(examples::gather(comm, x)); };
        auto const tensor = [&](cpx::index_t width) { return cpx::make_tensor<double>(sharding, rank, width); };

        auto const numbers = [&](cpx::index_t width, double f) { return examples::numbers(sharding, rank, width, f); };

        auto const x = numbers(6, 0.7);
        auto y = tensor(6);
        std::vector<double> const weight(6 * 4, 0.25); // 6 channels, 4 taps
        cpx::causal_conv1d(halo(sharding, rank, 3), x.view(), cpx::rows<double const>(weight, 4),
                           std::span<double const>(), cpx::activation::silu, y.view(), comm);
        keep(y);

        cpx::delta_rule_heads const heads{1, 2, 3, 3}; // 1 key head and 2 value heads of width 3
        auto const q = numbers(3, 0.3), k = numbers(3, 1.1);
        auto const v = numbers(6, 0.9);
        auto g = numbers(2, 0.2), beta = numbers(2, 0.05), o = tensor(6);
        for (cpx::index_t row = 0; row < g.data().count(); ++row)
            for (cpx::index_t h = 0; h < 2; ++h) {
                g.data()(row, h) = -0.01 - 0.01 * std::abs(g.data()(row, h)); // slow decay: a lost state would show
                beta.data()(row, h) = std::abs(beta.data()(row, h));
            }
        cpx::gated_delta_rule(
            carry<How>(sharding, rank),
            cpx::delta_rule_tensors<double, S>{q.view(), k.view(), v.view(), g.view(), beta.view(), o.view()}, heads,
            {.chunk = 8}, comm);
        keep(o);

        auto const keys =
            exchange(relayout(sharding, cpx::replicated<S::static_ranks>(sharding.batch()), rank), k, comm);
        auto attended = tensor(3);
        cpx::attention(q.view(), keys.view(), keys.view(), {1, 1, 3}, 0.5, attended.view());
        keep(attended);

        std::lock_guard const lock(guard);
        if (rank == 0) all = std::move(mine);
    });
    return all;
}

/// Throws unless two results agree to within `tolerance`.
void compare(results const& expected, results const& got, double tolerance) {
    char const* const names[] = {"causal_conv1d", "gated_delta_rule", "attention"};
    for (std::size_t i = 0; i < std::size(names); ++i)
        examples::compare("new_layout", names[i], expected.at(i), got.at(i), tolerance);
}

template <cpx::any_sharding From, cpx::any_sharding To>
void print_traffic(char const* title, From const& from, To const& to) {
    std::vector<cpx::index_t> const moved = cpx::traffic(from, to);
    std::printf("%s: rows from rank (down) to rank (across)\n", title);
    for (std::size_t i = 0; i < moved.size(); ++i)
        std::printf("%6lld%s", static_cast<long long>(moved[i]), (i + 1) % ranks ? "" : "\n");
}

} // namespace

int main(int argc, char** argv) {
    examples::command_line app("Defines a layout and uses it with everything that cpx derives from it.", "new_layout");
    return app.run(argc, argv, [] {
        cpx::thd const batch({0, 8, 9, 9, 30, 133}); // sequences of 8, 1, 0, 21 and 103 tokens
        auto const light = cpx::shard(batch, light_tail<ranks>{});
        auto const packed = cpx::shard<cpx::scope::batch>(batch, light_tail<ranks>{});
        auto const aligned = cpx::shard(batch, light_tail<ranks>{}, cpx::aligned<8>{});

        print_traffic("zigzag -> light_tail", cpx::shard(batch, cpx::zigzag<ranks>{}), light);
        print_traffic("light_tail -> light_tail over the batch", light, packed);

        auto const one_rank = run_operators(cpx::serial{}, cpx::shard(batch, cpx::sequential<1>{}));
        std::printf("light_tail, scan\n");
        compare(one_rank, run_operators(cpx::scan{}, light), 1e-12);
        std::printf("light_tail over the batch, serial\n");
        compare(one_rank, run_operators(cpx::serial{}, packed), 1e-12);
        std::printf("light_tail cut at multiples of the delta rule's chunk, serial: exact\n");
        compare(one_rank, run_operators(cpx::serial{}, aligned), 0);
    });
}
