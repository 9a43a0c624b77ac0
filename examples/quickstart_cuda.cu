// SPDX-License-Identifier: Apache-2.0
// The relayout of the quickstart between GPUs. Started by torchrun: a process and a GPU a rank.
#include <cpx/cpx.hpp>
#include <cpx/cuda/shared_communicator.hpp>

#include <cstdio>
#include <string>
#include <vector>

int main() try {
    auto const comm = cpx::nccl::from_environment(); // what torchrun says: which rank of how many, and which GPU
    cpx::thd const batch({0, 7, 20});
    auto const zigzag = cpx::shard(batch, cpx::zigzag<>(comm->ranks()));
    auto const sequential = cpx::shard(batch, cpx::sequential<>(comm->ranks()));

    cpx::cuda::stream const stream;
    cpx::cuda::shared_memory memory(*comm, 1 << 20); // bytes on every rank, which its peers write
    cpx::cuda::shared_communicator gpus(memory, stream);
    int const width = 2;
    cpx::capacity const most{64, 8};                                              // rows of a rank, sequences
    auto move = cpx::make_movement<float>(zigzag, sequential, width, most, gpus); // once, for every batch that fits
    auto x = cpx::make_tensor<float>(zigzag, gpus, width);
    x.write(std::vector<float>(x.elements().size(), float(comm->rank())));
    auto y = move.make_tensor(sequential);
    move(x, y);  // only enqueued
    gpus.wait(); // throws if a rank has died or does not come, and says which
    auto const& plan = move.plan();
    auto const values = y.read();
    std::string origins;
    for (cpx::index_t row = 0; row < plan.target_rows; ++row) origins += ' ' + std::to_string(int(values[row * width]));
    std::printf("rank %d sent %d of its %d rows, and holds rows that were on ranks%s\n", comm->rank(),
                int(plan.sent_rows()), int(plan.source_rows), origins.c_str());
} catch (std::exception const& error) {
    std::fprintf(stderr, "quickstart_cuda: %s\n", error.what());
    return 1;
}
