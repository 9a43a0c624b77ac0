// SPDX-License-Identifier: Apache-2.0
// What a new packing costs the host: movements there and back by send and receive, while the device is busy.
// One process a GPU: `bench.cuda.new_packing`.
#include <cpx/cpx.hpp>
#include <cpx/cuda/communicator.hpp>

#include "../../harness/processes.hpp"
#include "timing.hpp"

#include <chrono>
#include <vector>

namespace {

using cpx::index_t;
using clock = std::chrono::steady_clock;
namespace cuda = cpx::cuda;

/// Keeps a stream busy for so many nanoseconds.
__global__ void spin(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
}

double median(std::vector<double> times) {
    std::ranges::sort(times);
    return times[times.size() / 2];
}

std::string run(int rank) {
    auto const joined = cpx::nccl::from_environment(std::chrono::seconds(60));
    int const ranks = joined->ranks();
    cuda::stream const stream;
    cuda::communicator comm(*joined, stream);
    index_t const tokens = 32768, sequences = 64, width = 2048;
    auto const packing = [&](index_t i) { // every one another, as many tokens in as many sequences
        std::vector<index_t> lengths(static_cast<std::size_t>(sequences), tokens / sequences);
        lengths[0] += i, lengths[1] -= i;
        return cpx::thd::from_lengths(lengths);
    };
    auto const zigzag = [&](cpx::thd const& batch) { return cpx::shard(batch, cpx::zigzag<>(ranks)); };
    auto const sequential = [&](cpx::thd const& batch) { return cpx::shard(batch, cpx::sequential<>(ranks)); };
    auto const first = packing(0);
    cpx::capacity const most{tokens / ranks + 8 * sequences, sequences};
    using element = std::uint16_t; // bf16, as far as movement is concerned
    auto there = cpx::make_movement<element>(zigzag(first), sequential(first), width, most, comm);
    auto back = cpx::make_movement<element>(sequential(first), zigzag(first), width, most, comm);

    std::vector<double> known, fresh;
    std::size_t free_before = 0, free_after = 0, all = 0;
    for (index_t round = 0; round < 240; ++round) {
        auto const batch = packing(round % 120 * 2); // after its thd ...
        auto x = cpx::make_tensor<element>(zigzag(batch), comm, width),
             z = cpx::make_tensor<element>(zigzag(batch), comm, width);
        auto y = cpx::make_tensor<element>(sequential(batch), comm, width);
        comm.wait();
        if (round == 40) cuda::check(cudaMemGetInfo(&free_before, &all), "cudaMemGetInfo");
        for (auto* const times : {&fresh, &known}) {
            spin<<<1, 1, 0, stream>>>(10'000'000); // of which the host sees nothing
            auto const begin = clock::now();
            there(x, y);
            back(y, z);
            std::chrono::duration<double> const took = clock::now() - begin;
            if (round >= 40) times->push_back(took.count() * 1e6);
            comm.wait();
        }
    }
    cuda::check(cudaMemGetInfo(&free_after, &all), "cudaMemGetInfo");
    double const seen = median(known), made = median(fresh);
    if (rank == 0) {
        std::printf("%s, %d ranks, %ld tokens in %ld sequences x %ld bf16, zigzag to sequential and back, by send and "
                    "receive, the device busy for 10 ms; host time of both calls, medians of %zu\n"
                    "  packing seen before %8.1f us\n  packing that is new %8.1f us, %.1f us more\n",
                    timing::device_name().c_str(), ranks, long(tokens), long(sequences), long(width), known.size(),
                    seen, made, made - seen);
        timing::limits limits;
        limits.at_most("a new packing, two relayouts", made - seen, 60, "us");
        limits.print();
    }
    return free_after >= free_before ? "" : "device memory has grown";
}

} // namespace

int main() try {
    int const gpus = processes::gpus();
    if (gpus < 2) {
        std::printf("cpx: skipped, 2 GPUs wanted, %d found\n", gpus);
        return 0;
    }
    for (int const code : processes::run(gpus, run))
        if (code != 0) return 1;
} catch (std::exception const& error) {
    std::fprintf(stderr, "bench.cuda.new_packing: %s\n", error.what());
    return 1;
}
