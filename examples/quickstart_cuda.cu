// SPDX-License-Identifier: Apache-2.0
// The relayout of the quickstart between GPUs. Started by torchrun: a process and a GPU a rank.
#include <cpx/cpx.hpp>
#include <cpx/cuda/shared_memory.hpp>

#include <cstdio>
#include <string>
#include <vector>

int main() try {
    auto const comm = cpx::nccl::from_environment(); // what torchrun says: which rank of how many, and which GPU
    cpx::thd const batch({0, 7, 20});
    auto const zigzag = cpx::shard(batch, cpx::zigzag<>(comm->ranks()));
    auto const sequential = cpx::shard(batch, cpx::sequential<>(comm->ranks()));
    auto const plan = cpx::relayout(zigzag, sequential, comm->rank());

    int const width = 2;
    cpx::cuda::shared_memory memory(*comm, 1 << 20);                         // bytes on every rank, for all relayouts
    auto move = cpx::cuda::make_shared_relayout<float>(plan, width, memory); // made once a batch, used by every layer
    cpx::cuda::buffer<float> const x(std::vector<float>(plan.source_rows * width, float(comm->rank())));
    cpx::cuda::buffer<cpx::index_t> const cu_seqlens(batch.offsets());
    cpx::cuda::stream const stream;
    move({x.data(), plan.source_rows, width}, {cu_seqlens.data(), int(batch.sequences())}, stream); // only enqueued
    memory.wait(stream); // throws if a rank has died or does not come, and says which

    std::vector<float> y(plan.target_rows * width);
    cpx::cuda::check(cudaMemcpy(y.data(), move.target().data(), y.size() * sizeof(float), cudaMemcpyDeviceToHost),
                     "cudaMemcpy");
    std::string origins;
    for (cpx::index_t row = 0; row < plan.target_rows; ++row) origins += ' ' + std::to_string(int(y[row * width]));
    std::printf("rank %d sent %d of its %d rows, and holds rows that were on ranks%s\n", comm->rank(),
                int(plan.sent_rows()), int(plan.source_rows), origins.c_str());
} catch (std::exception const& error) {
    std::fprintf(stderr, "quickstart_cuda: %s\n", error.what());
    return 1;
}
