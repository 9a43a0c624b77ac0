// SPDX-License-Identifier: Apache-2.0
// A layout of one's own: the last rank, which also has the loss to compute, holds half as many tokens as the others.
#include "common/run.hpp"

#include <cpx/cpx.hpp>

#include <cstdio>

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

/// Returns this rank's part of a tensor of one column whose rows hold their own numbers: a row that strays is seen.
template <cpx::any_sharding S>
cpx::tensor<cpx::index, S> numbered(S const& sharding, int rank) {
    cpx::tensor<cpx::index, S> tensor(sharding, rank, 1);
    cpx::index* next = tensor.data().data();
    sharding.for_each_piece(rank, [&](cpx::range piece) {
        for (cpx::index row = piece.first; row < piece.last; ++row) *next++ = row;
    });
    return tensor;
}

template <class A, class B>
void check(char const* what, A const& expected, B const& got) {
    cpx::require(expected == got, "new_layout", what, expected, got);
}

template <cpx::any_sharding S>
void check_numbered(cpx::tensor<cpx::index, S> const& tensor, int rank) {
    auto const expected = numbered(tensor.sharding(), rank);
    for (cpx::index row = 0; row < tensor.data().count(); ++row)
        check("row after an exchange", expected.data()(row, 0), tensor.data()(row, 0));
}

/// Moves a tensor to another sharding and back.
template <cpx::any_sharding From, cpx::any_sharding To>
void move_there_and_back(From const& from, To const& to, cpx::threads& comm) {
    auto const here = numbered(from, comm.rank());
    cpx::tensor<cpx::index, To> there(to, comm.rank(), 1);
    cpx::tensor<cpx::index, From> back(from, comm.rank(), 1);

    auto const plan = cpx::relayout(from, to, comm.rank());
    cpx::exchange(plan, here.view(), there.view(), comm);
    check_numbered(there, comm.rank());
    cpx::exchange(plan.transposed(), there.view(), back.view(), comm);
    check_numbered(back, comm.rank());
}

/// Fetches the 3 rows before every segment, as a convolution of 4 taps needs them.
template <cpx::any_sharding S>
void fetch_rows_before(S const& sharding, cpx::threads& comm) {
    auto const mine = numbered(sharding, comm.rank());
    auto const plan = cpx::halo(sharding, comm.rank(), 3);
    std::vector<cpx::index> halo(static_cast<std::size_t>(plan.target_rows));
    cpx::exchange(plan, mine.data(), cpx::rows<cpx::index>(halo, 1), comm);

    for (std::size_t i = 0; i < plan.segments.size(); ++i) {
        cpx::segment const& segment = plan.segments[i];
        std::vector<cpx::index> before; // some of these rows may be the rank's own
        for (std::size_t h = plan.begin[i]; h < plan.begin[i + 1]; ++h) {
            cpx::history const& part = plan.histories[h];
            cpx::index const* rows = part.halo ? halo.data() : mine.data().data();
            before.insert(before.end(), rows + part.first, rows + part.first + part.count);
        }
        check("number of rows before a segment", std::min<cpx::index>(3, segment.token), std::ssize(before));
        cpx::index row = mine.data()(segment.row, 0) - std::ssize(before);
        for (cpx::index const got : before) check("row before a segment", row++, got);
    }
}

/// Sums every sequence, handing the total from segment to segment as a recurrence hands on its state.
template <cpx::any_sharding S>
void carry_totals(S const& sharding, cpx::threads& comm) {
    auto const mine = numbered(sharding, comm.rank());
    auto const carry = cpx::carry(sharding, comm.rank());
    std::vector<cpx::index> totals; // of the segments of one level
    for (std::size_t level = 0; level < carry.levels.size(); ++level) {
        totals.resize(carry.levels[level].size());
        for (std::size_t i = 0; i < totals.size(); ++i) {
            cpx::segment const& segment = carry.segments[static_cast<std::size_t>(carry.levels[level][i])];
            for (cpx::index row = 0; row < segment.count; ++row) totals[i] += mine.data()(segment.row + row, 0);

            cpx::index const first = sharding.batch().offset(segment.sequence), count = segment.token + segment.count;
            check("total", first * count + count * (count - 1) / 2, totals[i]);
        }
        if (level == carry.steps.size()) return;
        std::vector<cpx::index> next(static_cast<std::size_t>(carry.steps[level].target_rows));
        cpx::exchange(carry.steps[level], cpx::rows<cpx::index>(totals, 1), cpx::rows<cpx::index>(next, 1), comm);
        totals = next;
    }
}

template <cpx::any_sharding From, cpx::any_sharding To>
void print(char const* title, From const& from, To const& to) {
    std::vector<cpx::index> const moved = cpx::traffic(from, to);
    std::printf("%s: rows from rank (down) to rank (across)\n", title);
    for (std::size_t i = 0; i < moved.size(); ++i)
        std::printf("%6lld%s", static_cast<long long>(moved[i]), (i + 1) % ranks ? "" : "\n");
}

} // namespace

int main(int argc, char** argv) {
    CLI::App app("Defines a layout and uses it with everything that cpx derives from it.", "new_layout");
    return examples::run_example(argc, argv, app, [] {
        cpx::thd const batch({0, 8, 9, 9, 30, 133}); // sequences of 8, 1, 0, 21 and 103 tokens
        auto const zigzag = cpx::shard(batch, cpx::zigzag<ranks>{});
        auto const light = cpx::shard(batch, light_tail<ranks>{});
        auto const packed = cpx::shard<cpx::scope::batch>(batch, light_tail<ranks>{});

        print("zigzag -> light_tail", zigzag, light);
        print("light_tail -> light_tail over the batch", light, packed);
        cpx::threads::run(ranks, [&](cpx::threads& comm) {
            move_there_and_back(zigzag, light, comm);
            move_there_and_back(light, packed, comm);
            fetch_rows_before(light, comm);
            fetch_rows_before(packed, comm);
            carry_totals(light, comm);
            carry_totals(packed, comm);
        });
        std::printf("every row, halo and total is where it belongs\n");
    });
}
