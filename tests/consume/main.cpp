// SPDX-License-Identifier: Apache-2.0
// A small program that uses cpx: something computed when it is compiled, rows moved there and back, something thrown.
#include <cpx/cpx.hpp>

#include <cstdio>

static_assert(cpx::extent<4>().get() == 4);

namespace {

/// Moves rows to another sharding and back. Returns whether every row came home.
bool there_and_back() {
    cpx::thd const batch({0, 7, 20});
    auto const zigzag = cpx::shard(batch, cpx::zigzag<3>{});
    auto const sequential = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(3), cpx::aligned<4>{});
    bool home[3] = {};
    cpx::threads::run(3, [&](cpx::threads& comm) {
        auto x = cpx::make_tensor<float>(zigzag, comm.rank(), 1);
        for (cpx::index_t row = 0; row < x.data().count(); ++row) x.data()(row, 0) = static_cast<float>(row + 1);
        auto const plan = cpx::relayout(zigzag, sequential, comm.rank());
        auto const back = cpx::exchange(plan.transposed(), cpx::exchange(plan, x, comm), comm);
        bool same = cpx::halo(zigzag, comm.rank(), 3).source_rows == x.data().count();
        for (cpx::index_t row = 0; row < x.data().count(); ++row)
            same = same && back.data()(row, 0) == x.data()(row, 0);
        home[comm.rank()] = same;
    });
    return home[0] && home[1] && home[2];
}

} // namespace

int main() {
    if (!there_and_back()) return 1;
    try {
        cpx::require(false, "consumer", "an expected error", 1, 2);
    } catch (cpx::error const& error) {
        std::puts(error.what());
        return 0;
    }
    return 1;
}
