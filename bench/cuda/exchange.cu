// SPDX-License-Identifier: Apache-2.0
// Relayouts between GPUs by one kernel and by send and receive, beside NCCL's own collectives of the same bytes.
// One process a GPU: `exchange [RANKS [BLOCKS]]`, all GPUs and 128 blocks a kernel by default.
#include <cpx/cpx.hpp>
#include <cpx/cuda/shared_memory.hpp>

#include "../../tests/cuda/processes.hpp"
#include "../../tests/cuda/whole.hpp"
#include "timing.hpp"

#include <cstring>

namespace {

using cpx::index;
using element = std::uint16_t; // bf16, as far as movement is concerned

struct rank_bench {
    cpx::nccl& comm;
    cpx::cuda::shared_memory& window;
    cpx::cuda::stream stream;

    /// Returns the time of the slowest rank.
    template <class F>
    float slowest(F&& f) {
        std::vector<float> all(static_cast<std::size_t>(comm.ranks()));
        std::vector<float> scratch(all.size());
        float const mine = timing::median_ms(stream, f, [&] {
            float const zero = 0;
            comm.gather(&zero, scratch.data(), sizeof zero);
        });
        comm.gather(&mine, all.data(), sizeof mine);
        return *std::ranges::max_element(all);
    }

    template <class From, class To>
    void run(char const* name, From const& from, To const& to, std::vector<cpx::section> const& sections,
             bool gathers) {
        int const rank = comm.rank(), ranks = comm.ranks();
        index width = 0;
        for (cpx::section const& s : sections) width += s.heads * s.width;
        auto const plan = cpx::relayout(from, to, rank);
        index const in = std::ssize(whole::columns(from, rank, sections)),
                    out = std::ssize(whole::columns(to, rank, sections));
        auto const source = whole::part<element>(from, rank, sections),
                   target = whole::part<element>(to, rank, sections);
        cpx::cuda::buffer<element> const x{std::span<element const>(source)};
        cpx::cuda::buffer<element> y(std::ssize(target));
        std::vector<std::int64_t> const host(from.batch().offsets().begin(), from.batch().offsets().end());
        cpx::cuda::buffer<std::int64_t> const offsets{std::span<std::int64_t const>(host)};
        cpx::rows<element const> const rows(x.data(), from.rows(rank), in);

        auto const push = cpx::cuda::make_relayout<element>(plan, width);
        float const one_kernel = slowest([&] {
            push(rows, window.peers(), 0, {offsets.data(), static_cast<int>(host.size()) - 1}, stream);
        });
        std::vector<element> got(target.size());
        cpx::cuda::check(cudaMemcpy(got.data(), window.data(), got.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
        bool right = got == target;

        cpx::cuda::exchange<element> move(plan, width, comm);
        float const send_receive =
            slowest([&] { move(rows, cpx::rows<element>(y.data(), to.rows(rank), out), stream); });
        comm.wait(stream);
        right = right && y.read() == target;

        index const shard = from.batch().tokens() * width / ranks;
        cpx::cuda::buffer<element> a(shard), b(shard);
        float const all_to_all = slowest([&] {
            comm.call("ncclAlltoAll", [&] {
                return ncclAlltoAll(a.data(), b.data(), static_cast<std::size_t>(shard / ranks), ncclBfloat16,
                                    comm.get(), stream);
            });
        });
        float gather = 0;
        if (gathers) { // every rank gathers everything and slices its rows, as trainers do
            cpx::cuda::buffer<element> all(from.batch().tokens() * width);
            cpx::replicated<> const everywhere(ranks, from.batch());
            cpx::cuda::exchange<element> slice(cpx::relayout(everywhere, to, rank), width, comm);
            gather = slowest([&] {
                comm.call("ncclAllGather", [&] {
                    return ncclAllGather(a.data(), all.data(), static_cast<std::size_t>(shard), ncclBfloat16,
                                         comm.get(), stream);
                });
                slice(cpx::rows<element const>(all.data(), from.batch().tokens(), width),
                      cpx::rows<element>(y.data(), to.rows(rank), out), stream);
            });
        }
        index sent = 0;
        for (cpx::message const& m : plan.sends)
            if (m.peer != rank) sent += cpx::total(m.rows) * (m.columns.empty() ? width : cpx::total(m.columns)) * 2;
        std::vector<index> everyones(static_cast<std::size_t>(ranks));
        comm.gather(&sent, everyones.data(), sizeof sent);
        sent = *std::ranges::max_element(everyones);
        char const ok = right;
        std::vector<char> oks(static_cast<std::size_t>(ranks));
        comm.gather(&ok, oks.data(), 1);
        if (rank != 0) return;
        bool const all_right = std::ranges::find(oks, 0) == oks.end();
        auto const gb = [](index bytes, float ms) { return static_cast<double>(bytes) / ms * 1e-6; };
        std::printf("%-44s %8.1f %7.0f %8.1f %7.0f %8.1f %7.0f %8.1f  %s\n", name, one_kernel * 1e3,
                    gb(sent, one_kernel), send_receive * 1e3, gb(sent, send_receive), all_to_all * 1e3,
                    gb(shard * 2 / ranks * (ranks - 1), all_to_all), gather * 1e3, all_right ? "correct" : "WRONG");
        std::fflush(stdout);
    }
};

std::string run(int rank, int blocks) {
    auto const comm = cpx::nccl::from_environment();
    int const ranks = comm->ranks();
    cpx::cuda::shared_memory window(*comm, index{420} << 20, true, blocks);
    rank_bench bench{*comm, window, {}};
    if (rank == 0) {
        double const copy = timing::copy_bandwidth(bench.stream);
        std::printf("%d GPUs, bf16, microseconds of the slowest rank and GB/s that leave the busiest rank; device copy "
                    "%.2f TB/s\n",
                    ranks, copy * 1e-12);
        std::printf("%-44s %8s %7s %8s %7s %8s %7s %8s\n", "", "one", "", "send/", "", "all to", "", "gather,");
        std::printf("%-44s %8s %7s %8s %7s %8s %7s %8s\n", "", "kernel", "GB/s", "receive", "GB/s", "all", "GB/s",
                    "slice");
    }
    for (auto const& [name, tokens, sequences] :
         {std::tuple("zigzag -> sequential:batch, 131072 x 2048, 8", 131072, 8),
          std::tuple("zigzag -> sequential:batch, 131072 x 2048, 1", 131072, 1),
          std::tuple("zigzag -> sequential:batch, 32768 x 2048, 8", 32768, 8),
          std::tuple("zigzag -> sequential:batch, 1 MiB a rank, 8", 256 * ranks, 8)}) {
        std::vector<index> lengths; // unequal, of the same sum
        for (int s = 0; s < sequences; ++s)
            lengths.push_back(tokens / sequences + (sequences > 1 ? (s % 2 ? 37 : -37) : 0));
        if (tokens < 100 * sequences) lengths.assign(static_cast<std::size_t>(sequences), tokens / sequences);
        auto const batch = cpx::thd::from_lengths(lengths);
        bench.run(name, cpx::shard(batch, cpx::zigzag<>(ranks)),
                  cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks)), {{1, 2048}}, true);
    }
    auto const batch = cpx::thd::from_lengths(std::vector<index>{12000, 9000, 11768});
    std::vector<cpx::section> const sections{{16, 128}, {16, 128}, {32, 128}, {32, 128}, {32, 1}, {32, 1}};
    cpx::head_sharded<> const heads(ranks, batch, sections);
    auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
    bench.run("zigzag -> heads, q k v z b a, 32768 x 12352", zigzag, heads, sections, false);
    std::vector<cpx::section> const o{{32, 128}};
    bench.run("heads -> zigzag, o, 32768 x 4096", cpx::head_sharded<>(ranks, batch, o), zigzag, o, false);
    return "";
}

} // namespace

int main(int argc, char** argv) {
    int const gpus = processes::gpus(), ranks = argc > 1 ? std::atoi(argv[1]) : gpus;
    int const blocks = argc > 2 ? std::atoi(argv[2]) : 0;
    if (gpus < 2 || ranks > gpus) {
        std::printf("cpx: skipped, %d GPUs wanted, %d found\n", std::max(ranks, 2), gpus);
        return 0;
    }
    for (int const code : processes::run(ranks, [=](int rank) { return run(rank, blocks); }))
        if (code != 0) return 1;
}
