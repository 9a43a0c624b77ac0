// SPDX-License-Identifier: Apache-2.0
// Exchanges by channels between processes, one a GPU: there are channels where windows are, on a communicator of a
// framework, too; rows arrive, of one batch after the other, and captured; ranks that disagree or die are named.
#include <cpx/cuda/channels.hpp>

#include <support/serial.hpp>

#include "../../harness/graph.hpp"
#include "member.hpp"

#include <csignal>

namespace {

using cpx::index_t;
using namespace std::chrono_literals;
namespace cuda = cpx::cuda;

/// Makes rows equal to none, in the order of the stream, so that only those that arrive are right.
void poison(cuda::buffer<float> const& rows, cudaStream_t stream) {
    cuda::check(cudaMemsetAsync(rows.data(), 0xff, static_cast<std::size_t>(rows.size()) * sizeof(float), stream),
                "cudaMemsetAsync");
}

/// One rank's channels, and rows that it exchanges by them.
struct rank_on_channels {
    std::unique_ptr<cpx::nccl> comm;
    std::unique_ptr<cuda::channels> by;
    cuda::stream stream;
    std::vector<cpx::section> sections{{1, 40}};
    index_t width = 40;

    explicit rank_on_channels(std::unique_ptr<cpx::nccl> joined)
        : comm(std::move(joined)), by(cuda::channels::over(*comm)) {}

    /// Returns a relayout of a batch, as many rows for any lengths.
    auto shardings(index_t first) const {
        int const ranks = comm->ranks();
        auto const batch = cpx::thd::from_lengths(std::vector<index_t>{first, 20000 - first, 7});
        return std::pair(cpx::shard(batch, cpx::zigzag<>(ranks)),
                         cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks)));
    }
    cpx::plan plan(index_t first) const {
        auto const [from, to] = shardings(first);
        return cpx::relayout(from, to, comm->rank());
    }
    /// Exchanges rows of a batch, there and back, `times` times; returns what is wrong.
    std::string exchange(cuda::channel_exchange<float>& move, index_t first, int times = 3) {
        auto const [from, to] = shardings(first);
        auto const x = whole::take<float>(from, comm->rank(), sections),
                   y = whole::take<float>(to, comm->rank(), sections);
        cuda::buffer<float> a{std::span<float const>(x)};
        cuda::buffer<float> const b(std::ssize(y));
        cpx::rows<float> const rows(a.data(), from.rows(comm->rank()), width),
            got(b.data(), to.rows(comm->rank()), width);
        for (int i = 0; i < times; ++i) {
            poison(b, stream);
            move(rows, got, stream);
            poison(a, stream);
            move(got, rows, stream, true);
        }
        by->wait(stream);
        if (b.read() != y) return "other rows, of lengths from " + std::to_string(first);
        return a.read() == x ? "" : "other rows come back, of lengths from " + std::to_string(first);
    }
    cpx::movement_room room() const { return {64, 20007}; }
};

/// Of heads that several ranks hold, one rank's are sent, and come back; the others become zeros.
std::string replicas(rank_on_channels& me) {
    int const ranks = me.comm->ranks();
    auto const rank = static_cast<std::size_t>(me.comm->rank());
    auto const batch = cpx::thd::from_lengths(std::vector<index_t>{700, 1, 33});
    std::vector<cpx::section> const sections{{2 * ranks, 16}, {1, 4}};
    cpx::head_sharded<> const from(ranks, batch, sections);
    auto const to = cpx::shard(batch, cpx::striped<>(ranks));
    std::vector<cpx::plan> plans;
    std::vector<std::vector<float>> targets;
    for (int r = 0; r < ranks; ++r) {
        plans.push_back(cpx::relayout(from, to, r));
        targets.push_back(whole::take<float>(to, r, sections));
    }
    auto const back = support::execute(support::transposed(plans), targets, 0, -1.0f);
    cpx::plan const& p = plans[rank];
    cuda::buffer<float> const a{std::span<float const>(whole::take<float>(from, me.comm->rank(), sections))},
        b(std::ssize(targets[rank]));
    cpx::rows<float> const source(a.data(), p.source_rows, p.source_width),
        target(b.data(), p.target_rows, p.target_width);
    cuda::channel_exchange<float> move(p, 0, *me.by);
    poison(b, me.stream);
    move(source, target, me.stream);
    poison(a, me.stream);
    move(target, source, me.stream, true);
    me.by->wait(me.stream);
    if (b.read() != targets[rank]) return "other heads arrive";
    return a.read() == back[rank] ? "" : "other heads come back";
}

std::string moves(int, bool lent) {
    auto world = cpx::nccl::from_environment(60s);
    bool const wanted = cuda::window::supported(*world) && cuda::devices() >= world->ranks();
    std::optional<framework> of;
    if (lent) of.emplace(*world, false); // whose calls do not block
    rank_on_channels me(lent ? cpx::nccl::adopt(of->get(), cpx::adopted::is_left, 60s) : std::move(world));
    if (wanted != (me.by != nullptr)) return wanted ? "there are windows, and no channels" : "channels without windows";
    if (cuda::channels::over(*me.comm, 0)) return "channels of no blocks";
    if (!me.by) return "";
    cuda::channel_exchange<float> move(me.plan(9000), me.width, *me.by, me.room());
    for (index_t const first : {9000, 1, 12345, 19999}) {
        move.set(me.plan(first), me.stream);
        if (auto const problem = me.exchange(move, first); !problem.empty()) return problem;
    }
    if (auto const problem = replicas(me); !problem.empty()) return problem;
    auto const shardings = me.shardings(19999);
    auto const& from = shardings.first;
    auto const& to = shardings.second;
    int const rank = me.comm->rank();
    auto const target = whole::take<float>(to, rank, me.sections);
    cuda::buffer<float> const x{std::span<float const>(whole::take<float>(from, rank, me.sections))},
        y(std::ssize(target));
    harness::graph const captured(me.stream, [&] {
        move(cpx::rows<float const>(x.data(), from.rows(rank), me.width),
             cpx::rows<float>(y.data(), to.rows(rank), me.width), me.stream);
    });
    for (int again = 0; again < 3; ++again) {
        poison(y, me.stream);
        captured.launch(me.stream);
        me.by->wait(me.stream);
        if (y.read() != target) return "a graph moves other rows";
    }
    return "";
}

std::string disagrees(int rank) {
    rank_on_channels me(cpx::nccl::from_environment(60s));
    if (!me.by) return "";
    cuda::channel_exchange<float> move(me.plan(50), me.width, *me.by, me.room());
    for (int again = 0; again < 2; ++again) {
        index_t const own = rank == 1 ? 51 : 60;
        move.set(me.plan(own), me.stream);
        std::string got = "no error";
        try {
            got += me.exchange(move, own, 1);
        } catch (cpx::error const& e) {
            got = e.what();
        }
        if (got.find("plan by which rows move") == std::string::npos)
            return "expected that ranks have other plans, got: " + got;
        move.set(me.plan(70), me.stream);
        if (auto const problem = me.exchange(move, 70); !problem.empty()) return problem;
    }
    return "";
}

std::string dies(int rank) {
    rank_on_channels me(cpx::nccl::from_environment(5s));
    if (!me.by) return rank == 1 ? (::raise(SIGKILL), "") : "";
    cuda::channel_exchange<float> move(me.plan(50), me.width, *me.by);
    if (auto const problem = me.exchange(move, 50); !problem.empty()) return problem;
    if (rank == 1) ::raise(SIGKILL);
    while (me.comm->on_this_host(1)) std::this_thread::sleep_for(1ms);
    auto const begin = std::chrono::steady_clock::now();
    for (int again = 0; again < 2; ++again) {
        std::string got = "no error";
        try {
            got += me.exchange(move, 50);
        } catch (cpx::error const& e) {
            got = e.what();
        }
        char const* const wanted = again ? "one that has not failed" : "nothing from ranks 1";
        if (got.find(wanted) == std::string::npos) return std::string("expected ") + wanted + ", got: " + got;
    }
    return std::chrono::steady_clock::now() - begin > 12s ? "the error came late" : "";
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("rows go through channels wherever there are windows, of one batch after the other, and captured") {
        if (!enough_gpus(2)) return;
        for (bool const lent : {false, true})
            check_codes(processes::run(std::min(processes::gpus(), 4), [=](int rank) { return moves(rank, lent); }));
    }
    TEST_CASE("ranks whose plans differ are told so, and the next exchange works") {
        if (enough_gpus(2)) check_codes(processes::run(2, disagrees));
    }
    TEST_CASE("a rank that dies is named by those whose channels wait for it") {
        if (enough_gpus(2)) check_codes(processes::run(2, dies), 1);
    }
}
