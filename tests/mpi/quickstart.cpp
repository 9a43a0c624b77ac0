// SPDX-License-Identifier: Apache-2.0
// The quickstart, with processes as ranks and any number of them.
#include <cpx/cpx.hpp>
#include <cpx/transport/mpi.hpp>

#include <cstdio>

int main() {
    cpx::mpi_environment environment;
    cpx::mpi::run([](cpx::mpi& comm) {
        cpx::thd const batch({0, 7, 20});
        auto const zigzag = cpx::shard(batch, cpx::zigzag<>{comm.ranks()});
        auto const sequential = cpx::shard(batch, cpx::sequential<>{comm.ranks()});
        auto x = cpx::make_tensor<float>(zigzag, comm.rank(), 2);
        for (cpx::index_t row = 0; row < x.data().count(); ++row) x.data()(row, 0) = float(100 * comm.rank() + row);

        auto const plan = cpx::relayout(zigzag, sequential, comm.rank());
        auto const y = cpx::exchange(plan, x, comm);
        auto const z = cpx::exchange(plan.transposed(), y, comm);
        std::printf("rank %d of %d sent %d of its %d rows\n", comm.rank(), comm.ranks(), int(plan.sent_rows()),
                    int(plan.source_rows));
        for (cpx::index_t row = 0; row < x.data().count(); ++row)
            cpx::require(z.data()(row, 0) == x.data()(row, 0), "quickstart", "row", x.data()(row, 0), z.data()(row, 0));
    });
}
