// SPDX-License-Identifier: Apache-2.0
// Exchanges by channels, whose ranks are blocks of one launch on one GPU.
#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/layout/striped.hpp>
#include <cpx/layout/zigzag.hpp>
#include <cpx/plan/relayout.hpp>

#include <cpx/channels.cuh>

#include <doctest/doctest.h>

#include <support/packings.hpp>
#include <support/random.hpp>
#include <support/serial.hpp>

#include "../../harness/whole.hpp"
#include "gpus.hpp"
#include "one_gpu.hpp"

#include <array>
#include <cstring>
#include <utility>

namespace {

using cpx::index_t;
using whole::take;
namespace kernels = cpx::kernels;

__global__ void __launch_bounds__(1024, 1)
    all_channels(kernels::channel_rows const* rows, kernels::channel_memory const* memory) {
    __shared__ kernels::channel_block block;
    kernels::run_channel(rows[blockIdx.y], memory[blockIdx.y], block);
}

template <class T>
cpx::cuda::buffer<T> on_device(std::vector<T> const& values) {
    return cpx::cuda::buffer<T>(std::span<T const>(values));
}

/// Memory of ranks, and the launch that they share.
struct wired {
    one_gpu::ranks gpu;
    int channels;
    std::int32_t slot;
    cpx::cuda::buffer<std::uint32_t> others; ///< (ranks, ranks)
    std::vector<cpx::cuda::buffer<char>> zeros;
    std::vector<kernels::channel_memory> memory;

    wired(int ranks, int channels, std::int32_t slot, std::uint64_t patience = 20'000'000'000)
        : gpu(ranks, 16, channels, patience), channels(channels), slot(slot),
          others(on_device(std::vector<std::uint32_t>(static_cast<std::size_t>(ranks * ranks)))) {
        auto const size = static_cast<std::size_t>(kernels::channel_memory::bytes(channels, ranks, slot));
        for (int r = 0; r < ranks; ++r) zeros.push_back(on_device(std::vector<char>(size)));
        for (auto const& peers : gpu.peers) {
            auto& m = memory.emplace_back();
            for (int r = 0; r < ranks; ++r) m.base[r] = zeros[static_cast<std::size_t>(r)].data();
            m.slot = slot;
            m.all = peers.meeting;
        }
    }
    /// Runs the first ranks' part, `times` times.
    void run(std::vector<kernels::channel_rows> rows, int threads, int times = 1) {
        for (std::size_t r = 0; r < rows.size(); ++r) rows[r].others = others.data() + static_cast<int>(r) * gpu.count;
        auto const arguments = on_device(rows);
        auto const places = on_device(memory);
        dim3 const grid(static_cast<unsigned>(channels), static_cast<unsigned>(rows.size()));
        for (int i = 0; i < times; ++i)
            all_channels<<<grid, static_cast<unsigned>(threads)>>>(arguments.data(), places.data());
        cpx::cuda::check(cudaDeviceSynchronize(), "all_channels");
    }
};

/// One rank's tables and rows on the device.
template <class T>
struct rank_part {
    cpx::cuda::buffer<cpx::detail::channel_message> messages;
    cpx::cuda::buffer<cpx::detail::channel_column> columns;
    cpx::cuda::buffer<cpx::detail::channel_run> runs;
    cpx::cuda::buffer<T> source, target;
    cpx::plan plan;

    rank_part(cpx::plan p, std::vector<T> const& x, std::vector<T> const& y, cpx::detail::channel_table const& t)
        : messages(on_device(t.messages)), columns(on_device(t.columns)), runs(on_device(t.runs)), source(on_device(x)),
          target(on_device(y)), plan(std::move(p)) {}
    kernels::channel_rows rows(bool back = false) const {
        char* const x = reinterpret_cast<char*>(source.data());
        char* const y = reinterpret_cast<char*>(target.data());
        auto const print = static_cast<std::uint32_t>(plan.fingerprint()) | 1;
        return {messages.data(), columns.data(), runs.data(), back ? y : x, back ? x : y, print, nullptr, back};
    }
};

template <class T, class From, class To>
std::vector<rank_part<T>> parts_of(From const& from, To const& to, std::vector<cpx::section> const& sections,
                                   wired const& by) {
    std::vector<rank_part<T>> parts;
    for (int r = 0; r < from.ranks(); ++r) {
        cpx::plan const p = cpx::relayout(from, to, r);
        index_t const source = std::ssize(whole::columns(from, r, sections)),
                      target = std::ssize(whole::columns(to, r, sections));
        cpx::detail::channel_table const table(p, {source, target, source, target, static_cast<index_t>(sizeof(T))},
                                               {by.channels, by.slot});
        parts.emplace_back(p, take<T>(from, r, sections),
                           std::vector<T>(static_cast<std::size_t>(p.target_rows * target)), table);
    }
    return parts;
}

template <class T>
bool same(std::vector<T> const& a, std::vector<T> const& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T, class From, class To>
void check(From const& from, To const& to, std::vector<cpx::section> const& sections, wired& by, int threads) {
    auto const parts = parts_of<T>(from, to, sections, by);
    std::vector<kernels::channel_rows> there, back;
    std::vector<cpx::plan> plans;
    std::vector<std::vector<T>> targets;
    for (auto const& part : parts) {
        there.push_back(part.rows()), back.push_back(part.rows(true));
        plans.push_back(part.plan);
        targets.push_back(take<T>(to, part.plan.rank, sections));
    }
    by.run(there, threads, 3);
    for (int r = 0; r < from.ranks(); ++r) {
        CAPTURE(r);
        CHECK(same(parts[static_cast<std::size_t>(r)].target.read(), targets[static_cast<std::size_t>(r)]));
    }
    if (plans[0].kind == cpx::flow::copies) return;
    for (auto const& part : parts) // of replicas one was sent, to which rows come back: the others are to be zeros
        cpx::cuda::check(cudaMemset(part.source.data(), part.plan.covers_source() ? 0x7f : 0,
                                    static_cast<std::size_t>(part.source.size()) * sizeof(T)),
                         "cudaMemset");
    by.run(back, threads, 2);
    index_t const width = std::ssize(whole::columns(to, 0, sections)); // of whole rows, if the plan moves such
    auto const sources = support::execute(support::transposed(plans), targets, width, T{});
    for (int r = 0; r < from.ranks(); ++r) {
        CAPTURE(r);
        CHECK(same(parts[static_cast<std::size_t>(r)].source.read(), sources[static_cast<std::size_t>(r)]));
    }
    CHECK(by.gpu.faults() == "");
    for (std::uint32_t const other : by.others.read()) CHECK(other == 0);
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("channels bring every row to its place, there and back, through rings that are used again and again") {
        if (!has_gpus()) return;
        support::splitmix numbers(5);
        for (auto const [ranks, channels, slot, threads] :
             {std::array{2, 8, 1 << 12, 1024}, {3, 3, 256, 128}, {4, 1, 512, 64}, {8, 4, 1 << 13, 256}}) {
            wired by(ranks, channels, slot);
            CAPTURE(by.gpu.count);
            for (auto const& lengths : std::vector<std::vector<index_t>>{{}, {1}, {0, 3, 0, 64, 5}, {500, 1, 333}}) {
                auto const batch = cpx::thd::from_lengths(lengths);
                CAPTURE(support::text(batch));
                index_t const width = numbers.between(1, 40);
                CAPTURE(width);
                auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
                auto const sequential = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks));
                auto const striped = cpx::shard(batch, cpx::striped<>(ranks));
                std::vector<cpx::section> const one{{1, width}}, wide{{1, 8 * width}},
                    sections{{8, width}, {16, 3}, {8, 1}};
                check<std::uint16_t>(zigzag, sequential, wide, by, threads);
                check<char>(sequential, striped, one, by, threads);
                check<double>(striped, zigzag, wide, by, threads);
                check<float>(zigzag, cpx::replicated<>(ranks, batch), one, by, threads);
                cpx::head_sharded<> const heads(ranks, batch, sections);
                check<std::uint16_t>(zigzag, heads, sections, by, threads);
                check<float>(heads, striped, sections, by, threads);
            }
        }
    }

    TEST_CASE("where one rank has another plan nothing moves, all are told, and the next call works") {
        if (!has_gpus()) return;
        wired by(3, 2, 256);
        std::vector<cpx::section> const sections{{1, 8}};
        auto const batch = cpx::thd::from_lengths(std::vector<index_t>{64, 13});
        auto const from = cpx::shard(batch, cpx::zigzag<>(3));
        auto const to = cpx::shard(batch, cpx::striped<>(3));
        auto const parts = parts_of<float>(from, to, sections, by);
        std::vector<kernels::channel_rows> rows;
        for (auto const& part : parts) rows.push_back(part.rows());
        rows[1].word += 2;
        by.run(rows, 128);
        CHECK(by.others.read() == std::vector<std::uint32_t>{0, 1, 0, 1, 0, 1, 0, 1, 0});
        for (auto const& part : parts)
            for (float const y : part.target.read()) REQUIRE(y == 0);
        rows[1].word -= 2;
        by.run(rows, 128);
        for (int r = 0; r < 3; ++r)
            CHECK(same(parts[static_cast<std::size_t>(r)].target.read(), take<float>(to, r, sections)));
        CHECK(by.gpu.faults() == "");
    }

    TEST_CASE("a rank that does not come is named, and kernels end") {
        if (!has_gpus()) return;
        wired by(3, 2, 256, 50'000'000);
        std::vector<cpx::section> const sections{{1, 8}};
        auto const batch = cpx::thd::from_lengths(std::vector<index_t>{64, 13});
        auto const parts =
            parts_of<float>(cpx::shard(batch, cpx::zigzag<>(3)), cpx::shard(batch, cpx::striped<>(3)), sections, by);
        by.run({parts[0].rows(), parts[1].rows()}, 128, 2);
        CHECK(by.gpu.faults().starts_with("missing"));
        CHECK(by.gpu.found->missing[2] == 1);
    }
}
