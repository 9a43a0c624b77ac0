// SPDX-License-Identifier: Apache-2.0
// What a call of the gated delta rule's operator takes of the host, and of the device, on one rank: what
// python/bench/overhead_cuda.py prints of cpx.torch.
#include <cpx/cuda/shared_communicator.hpp>

#include "delta_rule_tensors.hpp"
#include "timing.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace {

using cpx::index_t;
namespace cuda = cpx::cuda;

/// Returns the microseconds that the host takes for one of ten calls, the median of many tens, while the device has
/// nothing else to do.
template <class F>
double host_us(cudaStream_t stream, F&& f) {
    constexpr int calls = 10, rounds = 101;
    std::vector<double> times;
    for (int round = 0; round < rounds; ++round) {
        cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        auto const begin = std::chrono::steady_clock::now();
        for (int i = 0; i < calls; ++i) f();
        auto const spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin);
        times.push_back(spent.count() / calls * 1e6);
    }
    std::ranges::sort(times);
    return times[times.size() / 2];
}

/// Prints the times of a forward that saves nothing, of one that saves what the backward needs, and of the backward.
void time(cuda::communicator& comm, std::vector<index_t> const& lengths, cpx::delta_rule_heads const& heads,
          bool normalise, bool of_host) {
    auto const sharding = cpx::shard(cpx::thd::from_lengths(lengths), cpx::zigzag<1>());
    using calls = timing::delta_rule<cpx::scan, std::remove_cvref_t<decltype(sharding)>>;
    calls of(sharding, heads, normalise, comm);
    typename calls::saved kept;
    kept.keeps = true;
    of.forward(&kept);
    auto const saves = [&] {
        typename calls::saved saved;
        saved.keeps = true;
        of.forward(&saved);
    };
    auto const took = [&](auto&& f) {
        if (of_host) return host_us(comm.stream(), f);
        return static_cast<double>(timing::median_ms(
            comm.stream(), f, [] {}, 10));
    };
    double const alone = took([&] { of.forward(nullptr); }), saving = took(saves),
                 backward = took([&] { of.backward(kept); });
    std::printf("C++    %-6s %2td x %-6td %-5s %10.*f %10.*f %10.*f\n", of_host ? "us" : "ms", std::ssize(lengths),
                lengths[0], normalise ? "norms" : "", of_host ? 1 : 3, alone, of_host ? 1 : 3, saving, of_host ? 1 : 3,
                backward);
    std::fflush(stdout);
}

} // namespace

int main(int argc, char** argv) try {
    if (int const code = timing::refusal(argc, argv); code >= 0) return code;
    cpx::nccl joined(cpx::nccl::new_id(), 0, 1);
    cpx::cuda::stream const stream;
    cpx::cuda::communicator comm(joined, stream);
    std::printf("gated delta rule, one rank, %s: us of the host for a call, of tiny tensors; ms of the device\n",
                timing::device_name().c_str());
    std::printf("%-28s %10s %10s %10s\n", "", "forward", "saving", "backward");
    for (bool const normalise : {false, true}) {
        time(comm, {20}, {2, 2, 16, 16}, normalise, true);
        for (auto const& lengths : {std::vector<index_t>(1, 32768), std::vector<index_t>(4, 8192)})
            time(comm, lengths, {16, 32, 128, 128}, normalise, false);
    }
    comm.wait();
    return 0;
} catch (std::exception const& error) {
    std::fprintf(stderr, "bench.cuda.delta_rule_calls: %s\n", error.what());
    return 1;
}
