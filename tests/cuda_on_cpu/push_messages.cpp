// SPDX-License-Identifier: Apache-2.0
// Messages that ranks pack where their peers unpack them: exchanges of threads, whose memory the others reach, have the
// bits of the host's.
#include "words.hpp"

#include <cpx/cpx.hpp>
#include <cpx/cuda/exchange_tables.hpp>

#include <doctest/doctest.h>

#include <support/packings.hpp>
#include <support/random.hpp>

#include <mutex>
#include <string>
#include <vector>

namespace {

using cpx::index_t, cpx::rows;
namespace kernels = cpx::kernels;
constexpr int blocks = 3;

/// What peers reach of a rank, and what kernels have found.
struct rank_memory {
    std::vector<char> window = std::vector<char>(1 << 20, '\x5a');
    std::vector<std::uint64_t> flags;
    std::vector<std::uint32_t> epochs = std::vector<std::uint32_t>(blocks + 1), others;
    kernels::faults found{};
    index_t landing; ///< bytes before the place of what comes

    rank_memory(int ranks, index_t place)
        : flags(static_cast<std::size_t>(kernels::meeting::count(blocks, ranks))),
          others(static_cast<std::size_t>(ranks)), landing(place) {}
};

void launch(unsigned of_blocks, auto const& kernel) { gpu::now().launch({of_blocks, 1}, {64, 1}, kernel); }

/// Runs one of some plans as `cuda::exchange` does, between ranks that reach each other.
void run(std::vector<rank_memory>& all, std::vector<cpx::plan> const& plans, index_t number, bool back,
         std::vector<float> const& from, std::vector<float>& to, index_t width, std::uint64_t word) {
    cpx::cuda::detail::exchange_tables made;
    for (cpx::plan const& p : plans) {
        cpx::cuda::detail::exchange_end const source{p.source_rows, width, width, p.covers_source()},
            target{p.target_rows, width, width, p.covers_target()};
        std::size_t const first = made.list.size();
        cpx::detail::listed_rectangles list(p, {width, width, width, width, sizeof(float)}, made.list);
        made.add({source, target, p.kind == cpx::flow::sums, first, cpx::detail::tables_of(list, {}, true)});
    }
    auto const known = made.known_to_kernels();
    auto const& plan = known[static_cast<std::size_t>(number)];
    int const rank = plans[0].rank, ranks = static_cast<int>(all.size());
    rank_memory& own = all[static_cast<std::size_t>(rank)];
    auto* const x = reinterpret_cast<char*>(const_cast<float*>(from.data()));
    auto* const y = reinterpret_cast<char*>(to.data());
    kernels::message_push push{};
    push.plan = &plan, push.list = made.list.data(), push.word = &word, push.source = x, push.target = y;
    push.target_pitch = push.target_bytes = static_cast<int>(width * static_cast<index_t>(sizeof(float)));
    push.target_vector = sizeof(float);
    push.landing = own.landing, push.others = own.others.data(), push.back = back;
    kernels::meeting m{};
    for (int r = 0; r < ranks; ++r) {
        rank_memory& peer = all[static_cast<std::size_t>(r)];
        push.base[r] = peer.window.data(), m.flags[r] = peer.flags.data();
    }
    m.epochs = own.epochs.data(), m.found = &own.found, m.patience = 20'000'000'000, m.rank = rank, m.ranks = ranks;
    launch(blocks, [&] { kernels::push_messages<>(push, m); });

    char* const landing = own.window.data() + own.landing;
    kernels::rectangle_buffers const buffers{{back ? y : x, back ? x : y, landing, landing}};
    auto const list = [&](kernels::list_part const* part, kernels::list_part const* next) {
        return kernels::rectangle_list{
            .list = made.list.data(), .back = back, .early = true, .part = part, .next = next};
    };
    if (plans[static_cast<std::size_t>(number)].kind != cpx::flow::sums) {
        auto const both = back ? list(&plan.pack, &plan.keep) : list(&plan.keep, &plan.unpack);
        launch(5, [&] { kernels::copy_rectangles<>(both, buffers, {}); });
        return;
    }
    for (int r = 0; r < ranks; ++r)
        launch(5, [&] { kernels::add_rectangles<float>(list(&plan.add[r], nullptr), buffers); });
}

/// Runs one of some plans both ways of moving rows, or that back, which is another plan of the host's. Returns whether
/// they bring the same.
bool same(std::vector<rank_memory>& all, std::vector<cpx::plan> const& plans, index_t number, cpx::plan const* back,
          index_t width, support::splitmix& random, cpx::threads& comm) {
    cpx::plan const& p = back ? *back : plans[static_cast<std::size_t>(number)];
    std::vector<float> from(static_cast<std::size_t>(p.source_rows * width)),
        to(static_cast<std::size_t>(p.target_rows * width), -77.0f), expected = to;
    for (float& x : from) x = static_cast<float>(random.between(-9, 9));
    run(all, plans, number, back != nullptr, from, to, width, 1234);
    cpx::exchange(p, rows<float const>(from.data(), p.source_rows, width),
                  rows<float>(expected.data(), p.target_rows, width), comm);
    return to == expected;
}

} // namespace

TEST_CASE("halos, carries and relayouts that ranks store where their peers unpack are those of the host") {
    support::splitmix packings(7);
    for (int round = 0; round < 25; ++round) {
        int const ranks = static_cast<int>(packings.between(1, 4));
        std::vector<index_t> list;
        for (index_t s = packings.between(0, 4); s > 0; --s)
            list.push_back(packings.between(0, 2) == 0 ? 0 : packings.between(1, 90));
        auto const batch = support::lengths(list);
        index_t const width = packings.between(1, 9);
        auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
        CAPTURE(support::text(batch));
        CAPTURE(ranks);
        std::vector<rank_memory> all;
        for (int r = 0; r < ranks; ++r) all.emplace_back(ranks, packings.between(0, 5) * kernels::message_unit);
        std::mutex guard;
        std::vector<std::string> problems;
        cpx::threads::run(ranks, [&](cpx::threads& comm) {
            int const rank = comm.rank();
            support::splitmix random(static_cast<std::uint64_t>(rank + 1));
            auto const check = [&](char const* what, std::vector<cpx::plan> const& plans, index_t number,
                                   cpx::plan const* back, index_t of) {
                if (same(all, plans, number, back, of, random, comm)) return;
                std::lock_guard const lock(guard);
                problems.push_back(what + (" on rank " + std::to_string(rank)));
            };
            auto const halo = cpx::halo(zigzag, rank, 3);
            check("halo", {halo}, 0, nullptr, width);
            check("halo, transposed", {halo.transposed()}, 0, nullptr, width);
            auto const serial = cpx::carry<cpx::serial>(zigzag, rank);
            auto const scan = cpx::carry<cpx::scan>(zigzag, rank);
            std::vector<cpx::plan> states, steps;
            for (index_t k = 0; k < serial.steps; ++k) states.push_back(serial.step(k, cpx::side::before));
            for (index_t k = 0; k < serial.steps; ++k) {
                auto const other = serial.step(k, cpx::side::after);
                index_t const state = round % 5 == 0 ? 20000 + width : width; // and rows of several slices
                check("states", states, k, nullptr, state);
                check("states, back", states, k, &other, state);
            }
            for (auto const from : {cpx::side::before, cpx::side::after})
                for (index_t k = 0; k < scan.steps; ++k) steps.push_back(scan.step(k, from, 6, 4));
            for (index_t k = 0; k < std::ssize(steps); ++k) check("steps", steps, k, nullptr, 2);
            auto const replicas = cpx::relayout(zigzag, cpx::replicated<>(ranks, batch), rank);
            check("sum", {replicas.transposed()}, 0, nullptr, width);
            auto const few = support::lengths({5, 0, 2});
            auto const wide = cpx::relayout(cpx::shard(few, cpx::zigzag<>(ranks)), cpx::replicated<>(ranks, few), rank);
            if (round % 5 == 0) check("sum of rows of two slices", {wide.transposed()}, 0, nullptr, 8192 + width);
            auto const move = cpx::relayout(zigzag, cpx::shard(batch, cpx::sequential<>(ranks)), rank);
            cpx::plan const other = move.transposed();
            check("relayout", {move}, 0, nullptr, width);
            check("relayout, back", {move}, 0, &other, width);
            check("halo again", {halo}, 0, nullptr, width);
        });
        CHECK(problems == std::vector<std::string>());
        for (rank_memory const& r : all) CHECK(r.others == std::vector<std::uint32_t>(r.others.size()));
    }
}

TEST_CASE("ranks with another plan are found, and nothing is stored") {
    auto const sharding = cpx::shard(support::lengths({40, 7}), cpx::zigzag<3>{});
    std::vector<rank_memory> all;
    for (int r = 0; r < 3; ++r) all.emplace_back(3, 0);
    cpx::threads::run(3, [&](cpx::threads& comm) {
        auto const halo = cpx::halo(sharding, comm.rank(), 2);
        std::vector<float> const from(static_cast<std::size_t>(halo.source_rows), 1);
        std::vector<float> to(static_cast<std::size_t>(halo.target_rows));
        run(all, {halo}, 0, false, from, to, 1, comm.rank() == 1 ? 5 : 6);
    });
    CHECK(all[0].others == std::vector<std::uint32_t>{0, 1, 0});
    CHECK(all[1].others == std::vector<std::uint32_t>{1, 0, 1});
    CHECK(all[2].others == std::vector<std::uint32_t>{0, 1, 0});
    for (rank_memory const& r : all) CHECK(r.window == std::vector<char>(r.window.size(), '\x5a'));
}
