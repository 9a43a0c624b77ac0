// SPDX-License-Identifier: Apache-2.0
// The gated delta rule of one long sequence between GPUs, a process each: forward and backward, states carried by
// either carry, on layouts that hold a sequence in one segment and in two.
#include <cpx/cuda/shared_communicator.hpp>

#include "../../harness/processes.hpp"
#include "delta_rule_tensors.hpp"
#include "spin.hpp"
#include "timing.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

namespace {

using cpx::index_t;
namespace cuda = cpx::cuda;
constexpr index_t of_a_rank = 32768;

/// Rows that ranks exchange, so that their streams meet.
class meeting {
public:
    meeting(cpx::nccl& ranks, cudaStream_t stream)
        : plan_(plan_of(ranks.ranks(), ranks.rank())), stream_(stream), move_(plan_, width, ranks) {}
    void operator()() {
        move_(cpx::rows<float const>(from_.data(), plan_.source_rows, width),
              cpx::rows<float>(to_.data(), plan_.target_rows, width), stream_);
    }

private:
    static constexpr index_t width = 4;
    static cpx::plan plan_of(int ranks, int rank) {
        auto const batch = cpx::thd::from_lengths(std::vector<index_t>{64 * ranks});
        return cpx::relayout(cpx::shard(batch, cpx::sequential<>(ranks)), cpx::shard(batch, cpx::striped<>(ranks)),
                             rank);
    }

    cpx::plan plan_;
    cudaStream_t stream_;
    cuda::buffer<float> from_{plan_.source_rows * width}, to_{plan_.target_rows * width};
    cuda::exchange<float> move_;
};

/// Returns the slowest rank's milliseconds of a call, of so many in a row, the median of rounds that ranks begin
/// together. In a row, as layers are, a rank is with the next call while others wait for what it has sent them. GPUs
/// begin when the host has given them their work, as in training, where it is ahead of them.
double slowest_ms(cpx::nccl& ranks, cudaStream_t stream, meeting& meet, auto const& f, int calls = 5) {
    auto const all = [&](float ms) {
        std::vector<float> of(static_cast<std::size_t>(ranks.ranks()));
        ranks.gather(&ms, of.data(), sizeof ms);
        return of;
    };
    auto const begin_together = [&] {
        static_cast<void>(all(0));
        timing::spin<<<1, 1, 0, stream>>>(4'000'000);
        meet();
    };
    return static_cast<double>(std::ranges::max(all(timing::median_ms(stream, f, begin_together, calls))));
}

/// `window`: through which states go; null: they are sent and received.
template <cpx::carry_kind How>
void time(std::string const& layout, char const* how, auto const& sharding, cpx::delta_rule_heads const& heads,
          cpx::nccl& ranks, cuda::shared_memory* window, timing::limits& limits, float least_g = -1) {
    cuda::stream const stream;
    cuda::communicator sends(ranks, stream);
    std::optional<cuda::shared_communicator> stores;
    if (window) stores.emplace(*window, stream);
    cuda::communicator& comm = window ? *stores : sends;
    meeting meet(ranks, stream);
    using calls = timing::delta_rule<How, std::remove_cvref_t<decltype(sharding)>>;
    calls of(sharding, heads, false, comm, least_g);
    typename calls::saved kept;
    kept.keeps = true;
    auto const go = [&] { of.forward(nullptr); };
    auto const back = [&] { of.backward(kept); };
    auto const ms = [&](auto const& f, int calls) { return slowest_ms(ranks, stream, meet, f, calls); };
    double const forward = ms(go, 5), alone = ms(go, 1);
    of.forward(&kept);
    double const backward = ms(back, 5), back_alone = ms(back, 1);
    if (ranks.rank() != 0) return;
    std::printf("%2td/%-2td %-10s %-6s %-6s %3.0f %10.3f %10.3f %10.3f %10.3f\n", heads.key_heads, heads.value_heads,
                layout.c_str(), how, window ? "window" : "sent", static_cast<double>(least_g), forward, alone, backward,
                back_alone);
    std::fflush(stdout);
    if (ranks.ranks() != 2 || heads.key_heads != 16 || how != std::string("scan")) return;
    std::string const what = "forward, " + layout + ", scan, 16/32 heads, g from " +
                             std::to_string(static_cast<int>(least_g)) + (window ? ", through the window" : "");
    limits.at_most(what, 1000 * forward, 800, "us");
    limits.at_most(what + ", one alone", 1000 * alone, 800, "us");
}

std::string run(int rank) {
    auto const ranks = cpx::nccl::from_environment(std::chrono::minutes(1));
    int const count = ranks->ranks();
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{count * of_a_rank});
    if (rank == 0)
        std::printf("gated delta rule, %td tokens in one sequence over %d ranks, %s: bfloat16, heads of 128, g from so "
                    "much to 0, states sent and received or through the window; ms of the slowest rank, 5 calls in a "
                    "row but for one alone\n%-34s %10s %10s %10s %10s\n",
                    batch.tokens(), count, timing::device_name().c_str(), "", "forward", "one alone", "backward",
                    "one alone");
    timing::limits limits;
    cuda::shared_memory memory(*ranks, index_t{64} << 20);
    for (cpx::delta_rule_heads const& heads :
         {cpx::delta_rule_heads{16, 32, 128, 128}, cpx::delta_rule_heads{2, 8, 128, 128}}) {
        auto const both = [&](char const* name, auto const& layout) {
            auto const sharding = cpx::shard(batch, layout, cpx::aligned<64>());
            for (auto* const window : {static_cast<cuda::shared_memory*>(nullptr), &memory}) {
                if (window && !window->one_kernel()) continue;
                time<cpx::scan>(name, "scan", sharding, heads, *ranks, window, limits);
                time<cpx::serial>(name, "serial", sharding, heads, *ranks, window, limits);
                if (heads.key_heads != 16) continue;
                for (float const least_g : {-10.0f, 0.0f})
                    time<cpx::scan>(name, "scan", sharding, heads, *ranks, window, limits, least_g);
            }
        };
        both("sequential", cpx::sequential<>(count));
        both("zigzag", cpx::zigzag<>(count));
    }
    if (rank == 0) limits.print();
    return "";
}

} // namespace

int main(int argc, char**) try {
    if (argc > 1) return std::fprintf(stderr, "usage: bench.cuda.delta_rule_ranks (no arguments)\n"), 2;
    int const gpus = processes::gpus();
    if (gpus < 2) return std::printf("cpx: skipped, 2 GPUs wanted, %d found\n", gpus), 0;
    for (int const code : processes::run(gpus, run))
        if (code != 0) return 1;
    return 0;
} catch (std::exception const& error) {
    std::fprintf(stderr, "bench.cuda.delta_rule_ranks: %s\n", error.what());
    return 1;
}
