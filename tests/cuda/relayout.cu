// SPDX-License-Identifier: Apache-2.0
// The one-kernel relayout, its ranks being streams of one GPU that store into each other's buffers.
#include <cpx/cuda/relayout.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>
#include <support/random.hpp>

#include "../../harness/graph.hpp"
#include "../../harness/whole.hpp"
#include "gpus.hpp"
#include "one_gpu.hpp"

#include <algorithm>
#include <cstring>

namespace {

using cpx::index_t;
using whole::columns, whole::take;

template <class T, class From, class To>
void check_relayout(From const& from, To const& to, std::vector<cpx::section> const& sections, index_t pad,
                    bool streams) {
    int const ranks = from.ranks();
    INFO(std::string(cpx::detail::type_name<From>())
         << " to " << std::string(cpx::detail::type_name<To>()) << ", " << sizeof(T) << " bytes, on " << ranks);
    auto const offset = [](int rank) { return index_t{256} + 48 * (rank * 5 % 7); }; // not the same on all ranks
    std::vector<cpx::cuda::buffer<T>> sources;
    std::vector<cpx::cuda::relayout<T, From, To>> moves;
    index_t bytes = 0, width = 0;
    for (cpx::section const& s : sections) width += s.heads * s.width;
    for (int r = 0; r < ranks; ++r) {
        auto const stride = std::ssize(columns(from, r, sections)) + pad;
        sources.emplace_back(std::span<T const>(take<T>(from, r, sections, stride)));
        moves.emplace_back(cpx::relayout(from, to, r), width);
        bytes = std::max(bytes, moves.back().target_bytes());
    }
    one_gpu::ranks gpu(ranks, offset(4) + bytes + 64, 4);
    one_gpu::offsets const on_device(from.batch());
    auto const batch = on_device.list();
    std::vector<cpx::kernels::relayout_rows> arguments;
    for (int r = 0; r < ranks; ++r) {
        auto const i = static_cast<std::size_t>(r);
        auto const stride = std::ssize(columns(from, r, sections)) + pad;
        cpx::rows<T const> const rows(sources[i].data(), from.rows(r), stride - pad, stride);
        if (streams)
            for (int again = 0; again < 2; ++again) moves[i](rows, gpu.peers[i], offset(r), batch, gpu.streams[i]);
        arguments.push_back(moves[i].arguments(rows, gpu.peers[i], offset(r), batch));
    }
    if (!streams) one_gpu::run(moves, arguments, gpu, 2);
    for (int r = 0; r < ranks; ++r) {
        auto const got = gpu.memory[static_cast<std::size_t>(r)].read();
        auto const expected = take<T>(to, r, sections);
        std::size_t const size = expected.size() * sizeof(T);
        CAPTURE(r);
        auto const begin = static_cast<std::size_t>(offset(r));
        CHECK((size == 0 || std::memcmp(got.data() + begin, expected.data(), size) == 0));
        for (std::size_t i = 0; i < got.size(); ++i) // nothing else is written
            if (i < begin || i >= begin + size)
                if (got[i] != '\x7f') {
                    FAIL_CHECK("byte " << i << " was written");
                    break;
                }
    }
    CHECK(gpu.faults() == "");
}

/// Runs the kernels of one group of ranks and compares every byte of their memory.
template <class T, class From, class To>
void check_group(From const& from, To const& to, std::vector<cpx::section> const& sections, cpx::range group) {
    int const first = static_cast<int>(group.first), ranks = static_cast<int>(group.size());
    index_t width = 0, bytes = 0;
    for (cpx::section const& s : sections) width += s.heads * s.width;
    std::vector<cpx::cuda::buffer<T>> sources;
    std::vector<cpx::cuda::relayout<T, From, To>> moves;
    for (int r = first; r < first + ranks; ++r) {
        sources.emplace_back(std::span<T const>(take<T>(from, r, sections)));
        moves.emplace_back(cpx::relayout(from, to, r), width);
        bytes = std::max(bytes, moves.back().target_bytes());
    }
    one_gpu::offsets const offsets(from.batch());
    one_gpu::ranks gpu(ranks, bytes + 64, 3);
    std::vector<cpx::kernels::relayout_rows> arguments;
    for (int i = 0; i < ranks; ++i) {
        auto const at = static_cast<std::size_t>(i);
        gpu.peers[at].first = first;
        cpx::rows<T const> const rows(sources[at].data(), from.rows(first + i),
                                      std::ssize(columns(from, first + i, sections)));
        arguments.push_back(moves[at].arguments(rows, gpu.peers[at], 0, offsets.list()));
    }
    one_gpu::run(moves, arguments, gpu, 2);
    CHECK(gpu.faults() == "");
    for (int i = 0; i < ranks; ++i) {
        auto const all = take<T>(to, first + i, sections);
        index_t const row_width = std::ssize(columns(to, first + i, sections));
        std::vector<T> expected(all.size());
        std::memset(static_cast<void*>(expected.data()), 0x7f, expected.size() * sizeof(T));
        for (cpx::message const& m : cpx::relayout(from, to, first + i).receives) {
            if (m.peer < group.first || m.peer >= group.last) continue;
            auto const runs = m.columns.empty() ? std::vector<cpx::run>{{0, row_width}} : m.columns;
            for (cpx::run const row : m.rows)
                for (index_t y = row.first; y < row.first + row.count; ++y)
                    for (cpx::run const c : runs)
                        for (index_t x = c.first; x < c.first + c.count; ++x)
                            expected[static_cast<std::size_t>(y * row_width + x)] =
                                all[static_cast<std::size_t>(y * row_width + x)];
        }
        auto const got = gpu.memory[static_cast<std::size_t>(i)].read();
        CAPTURE(i);
        CHECK((expected.empty() || std::memcmp(got.data(), expected.data(), expected.size() * sizeof(T)) == 0));
        CHECK(std::all_of(got.begin() + static_cast<std::ptrdiff_t>(expected.size() * sizeof(T)), got.end(),
                          [](char c) { return c == '\x7f'; }));
    }
}

template <int W>
void check_all(cpx::thd const& batch, index_t width, bool streams) {
    using cpx::scope, cpx::shard;
    auto const zigzag = shard(batch, cpx::zigzag<W>{});
    auto const sequential = shard<scope::batch>(batch, cpx::sequential<W>{});
    auto const striped = shard(batch, cpx::striped<>(W), cpx::aligned<cpx::dynamic>(4));
    auto const aligned = shard<scope::batch>(batch, cpx::zigzag<>(W), cpx::aligned<8>{});
    std::vector<cpx::section> const whole{{1, width}};
    check_relayout<float>(zigzag, sequential, whole, 0, streams);
    check_relayout<std::uint16_t>(sequential, zigzag, whole, 3, streams);
    check_relayout<double>(striped, aligned, whole, 1, streams);
    check_relayout<std::uint16_t>(aligned, striped, whole, 0, streams);
    check_relayout<std::uint16_t>(zigzag, cpx::replicated<>(W, batch), whole, 0, streams);
    std::vector<cpx::section> const sections{{4, width}, {2, width}, {8, width}, {8, 1}};
    cpx::head_sharded<> const heads(W, batch, sections);
    check_relayout<std::uint16_t>(zigzag, heads, sections, 0, streams);
    check_relayout<float>(heads, sequential, sections, 2, streams);
    check_relayout<float>(aligned, heads, sections, 5, streams);
}

/// Runs many packings, layouts and widths; in streams of their own the ranks are kernels, else blocks of one.
void check_packings(bool streams) {
    support::splitmix numbers(5);
    std::vector<std::vector<index_t>> packings = {{}, {0}, {1}, {7, 13}, {0, 3, 0, 0, 64, 5}, {500, 1, 333}};
    packings.emplace_back(1000, 3);
    for (int i = 0; i < 4; ++i) {
        std::vector<index_t> lengths;
        for (index_t k = numbers.between(1, 12); k > 0; --k) lengths.push_back(numbers.between(0, 70));
        packings.push_back(lengths);
    }
    for (auto const& lengths : packings) {
        auto const batch = cpx::thd::from_lengths(lengths);
        CAPTURE(support::text(batch));
        index_t const width = numbers.between(1, 40);
        CAPTURE(width);
        check_all<1>(batch, width, streams);
        check_all<3>(batch, 8 * width, streams);
        check_all<4>(batch, width, streams);
        check_all<8>(batch, 16, streams);
    }
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("every row and column goes to its place and nothing else is written") {
        if (has_gpus()) check_packings(false);
    }
    TEST_CASE("so it does when ranks are streams") {
        if (has_gpus()) check_packings(true);
    }

    TEST_CASE("a graph in streams moves another packing when its offsets have changed in place") {
        if (!has_gpus()) return;
        constexpr int ranks = 4;
        auto const batch_of = [](std::vector<cpx::index_t> const& lengths) { return cpx::thd::from_lengths(lengths); };
        std::vector<cpx::thd> const batches = {batch_of({100, 37, 63}), batch_of({1, 198, 1}), batch_of({66, 67, 67})};
        std::vector<cpx::section> const whole{{1, 24}};
        cpx::cuda::buffer<std::int64_t> offsets(4);
        one_gpu::ranks gpu(ranks, 200 * 24 * 4, 4);
        std::vector<cpx::cuda::buffer<float>> sources;
        std::vector<harness::graph> graphs;
        auto const from = [](cpx::thd const& b) { return cpx::shard(b, cpx::zigzag<ranks>{}); };
        auto const to = [](cpx::thd const& b) { return cpx::shard<cpx::scope::batch>(b, cpx::sequential<ranks>{}); };
        for (int r = 0; r < ranks; ++r) {
            sources.emplace_back(200 * 24);
            cpx::cuda::relayout<float, decltype(from(batches[0])), decltype(to(batches[0]))> const move(
                cpx::relayout(from(batches[0]), to(batches[0]), r), 24);
            auto const& stream = gpu.streams[static_cast<std::size_t>(r)];
            graphs.emplace_back(stream, [&] {
                move(cpx::rows<float const>(sources.back().data(), 200, 24), gpu.peers[static_cast<std::size_t>(r)], 0,
                     std::span<index_t const>(offsets.data(), 4), stream);
            });
        }
        for (int round = 0; round < 6; ++round) {
            cpx::thd const& batch = batches[static_cast<std::size_t>(round) % batches.size()];
            offsets.write(std::span<std::int64_t const>(batch.offsets().data(), 4));
            for (int r = 0; r < ranks; ++r) {
                auto values = take<float>(from(batch), r, whole);
                values.resize(200 * 24);
                sources[static_cast<std::size_t>(r)].write(values);
            }
            for (int r = 0; r < ranks; ++r)
                graphs[static_cast<std::size_t>(r)].launch(gpu.streams[static_cast<std::size_t>(r)]);
            for (int r = 0; r < ranks; ++r) {
                auto const got = gpu.memory[static_cast<std::size_t>(r)].read();
                auto const expected = take<float>(to(batch), r, whole);
                CHECK(std::memcmp(got.data(), expected.data(), expected.size() * sizeof(float)) == 0);
            }
        }
    }

    TEST_CASE("a rank whose stream never comes is named, and nothing hangs") {
        if (!has_gpus()) return;
        constexpr int ranks = 3;
        auto const batch = cpx::thd::from_lengths(std::vector<cpx::index_t>{30, 11});
        auto const from = cpx::shard(batch, cpx::zigzag<ranks>{});
        auto const to = cpx::shard(batch, cpx::sequential<ranks>{});
        one_gpu::ranks gpu(ranks, 41 * 4, 2, 50'000'000);
        one_gpu::offsets const offsets(batch);
        cpx::cuda::buffer<float> const source{std::span<float const>(std::vector<float>(64, 1.0f))};
        for (int r : {0, 2}) {
            cpx::cuda::relayout<float, std::remove_const_t<decltype(from)>, std::remove_const_t<decltype(to)>> const
                move(cpx::relayout(from, to, r), 1);
            move(cpx::rows<float const>(source.data(), from.rows(r), 1), gpu.peers[static_cast<std::size_t>(r)], 0,
                 offsets.list(), gpu.streams[static_cast<std::size_t>(r)]);
        }
        auto const untouched = gpu.memory[0].read(); // waits for both kernels
        CHECK(gpu.faults() == "missing 1");
        CHECK(untouched == std::vector<char>(untouched.size(), '\x7f'));
    }

    TEST_CASE("ranks in groups move what stays in a group and touch nothing else") {
        if (!has_gpus()) return;
        using cpx::scope, cpx::shard;
        std::vector<cpx::section> const plain{{1, 24}}, sections{{4, 8}, {2, 16}, {8, 1}};
        for (auto const& lengths :
             {std::vector<cpx::index_t>{7, 13, 0, 164}, std::vector<cpx::index_t>{3}, std::vector<cpx::index_t>{}}) {
            auto const batch = cpx::thd::from_lengths(lengths);
            CAPTURE(support::text(batch));
            auto const zigzag = shard(batch, cpx::zigzag<5>{});
            auto const striped = shard(batch, cpx::striped<>(5), cpx::aligned<cpx::dynamic>(4));
            auto const sequential = shard<scope::batch>(batch, cpx::sequential<>(5));
            cpx::head_sharded<> const heads(5, batch, sections);
            for (cpx::range const group : {cpx::range{0, 2}, cpx::range{2, 5}, cpx::range{4, 5}}) {
                CAPTURE(group.first);
                check_group<float>(zigzag, sequential, plain, group);
                check_group<std::uint16_t>(sequential, striped, plain, group);
                check_group<std::uint16_t>(striped, cpx::replicated<>(5, batch), plain, group);
                check_group<std::uint16_t>(zigzag, heads, sections, group);
                check_group<double>(heads, striped, sections, group);
            }
        }
    }

    TEST_CASE("offsets that differ, do not ascend or do not fit are found, and who has them is named") {
        if (!has_gpus()) return;
        constexpr int ranks = 3;
        auto const batch = cpx::thd::from_lengths(std::vector<cpx::index_t>{30, 11});
        auto const from = cpx::shard(batch, cpx::zigzag<ranks>{});
        auto const to = cpx::shard(batch, cpx::sequential<ranks>{});
        std::vector<cpx::cuda::relayout<float, std::remove_const_t<decltype(from)>, std::remove_const_t<decltype(to)>>>
            moves;
        for (int r = 0; r < ranks; ++r) moves.emplace_back(cpx::relayout(from, to, r), 4);
        cpx::cuda::buffer<float> const source{std::span<float const>(std::vector<float>(16 * 4, 1.0f))};
        using offsets = std::vector<std::int64_t>;
        auto const faults = [&](std::vector<offsets> const& of_ranks, cpx::index_t source_rows_of_2, bool untouched,
                                cpx::index_t target_rows_of_1 = 16, cpx::kernels::relayout_words other_in_1 = {}) {
            one_gpu::ranks const gpu(ranks, 16 * 4 * 4, 2);
            std::vector<cpx::cuda::buffer<std::int64_t>> device;
            std::vector<cpx::kernels::relayout_rows> arguments;
            for (int r = 0; r < ranks; ++r) {
                auto const i = static_cast<std::size_t>(r);
                device.emplace_back(std::span<std::int64_t const>(of_ranks[i]));
                cpx::index_t const rows = r == 2 ? source_rows_of_2 : 16;
                arguments.push_back(moves[i].arguments(cpx::rows<float const>(source.data(), rows, 4), gpu.peers[i], 0,
                                                       std::span<index_t const>(device.back().data(), 3)));
            }
            arguments[1].target.last = target_rows_of_1 * 4 * 4;
            auto& words = arguments[1].words;
            words = {words.plan ^ other_in_1.plan, words.source ^ other_in_1.source, words.target ^ other_in_1.target};
            one_gpu::run(moves, arguments, gpu);
            for (auto const& memory : gpu.memory)
                if (untouched) CHECK(memory.read() == std::vector<char>(16 * 4 * 4, '\x7f'));
            return gpu.faults();
        };
        offsets const right{0, 30, 41};
        CHECK(faults({right, right, right}, 16, false) == "");
        CHECK(faults({right, {0, 31, 41}, right}, 16, true) == "cu_seqlens 0 1 2");
        CHECK(faults({right, {0, 31, 41}, right}, 16, true, 16, {4, 1}) == "cu_seqlens 0 1 2"); // the first field
        CHECK(faults({right, right, right}, 16, true, 16, {4, 1}) == "source 0 1 2");
        CHECK(faults({right, right, right}, 16, true, 16, {4, 0, 1u << 31}) == "target 0 1 2");
        CHECK(faults({right, right, right}, 16, true, 16, {4}) == "other 0 1 2");
        CHECK(faults({right, {0, 42, 41}, right}, 16, true) == "refused 1");
        CHECK(faults({right, {1, 30, 41}, right}, 16, true) == "refused 1");
        CHECK(faults({right, {0, 30, std::int64_t{1} << 40}, right}, 16, true) == "refused 1");
        CHECK(faults({right, right, right}, 12, false) == "refused 2");
        CHECK(faults({right, right, right}, 16, true, 13) == "refused 1"); // by all: it has 14
        offsets const large{0, 300, 410};
        CHECK(faults({large, large, large}, 16, true) == "refused 0 1 2");
    }
}
