// SPDX-License-Identifier: Apache-2.0
// Moves a tensor from the sharding that attention wants to the one that a recurrence wants, and back.
#include <cpx/cpx.hpp>

#include <cstdio>

int main() {
    cpx::thd const batch({0, 7, 20});                                             // two sequences, of 7 and 13 tokens
    auto const zigzag = cpx::shard(batch, cpx::zigzag<4>{});                      // what attention wants, on 4 ranks
    auto const sequential = cpx::shard(batch, cpx::sequential<4>{});              // what a recurrence wants
    static_assert(cpx::routes<cpx::zigzag<4>, cpx::sequential<4>>().size() == 6); // known before it runs

    cpx::threads::run(4, [&](cpx::threads& comm) { // the ranks are threads of this process
        auto x = cpx::make_tensor<float>(zigzag, comm.rank(), 2);
        for (cpx::index_t row = 0; row < x.data().count(); ++row) x.data()(row, 0) = float(comm.rank());

        auto const plan = cpx::relayout(zigzag, sequential, comm.rank()); // who sends which rows to whom
        auto const y = cpx::exchange(plan, x, comm);                      // moves those, and only those
        auto const z = cpx::exchange(plan.transposed(), y, comm);         // and back: this is also the backward
        // exchange(plan, y, comm) does not compile: y is sequential, and the plan begins at zigzag

        std::printf("rank %d sent %d of its %d rows\n", comm.rank(), int(plan.sent_rows()), int(plan.source_rows));
    });
}
