// SPDX-License-Identifier: Apache-2.0
// NCCL started by MPI: a rank and a GPU a process. What moves between the GPUs is bitwise what MPI moves between hosts.
#include <cpx/cuda/exchange.hpp>
#include <cpx/transport/mpi.hpp>

#include "../../harness/whole.hpp"
#include <cuda/gpus.hpp>
#include <mpi/job.hpp>
#include <support/packings.hpp>
#include <support/random.hpp>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace {

using namespace std::chrono_literals;
using cpx::index_t;
using support::lengths, support::text;

/// Returns this rank's place among the ranks of its host.
int local_rank() {
    MPI_Comm host = MPI_COMM_NULL;
    int rank = 0;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &rank);
    MPI_Comm_free(&host);
    return rank;
}

/// Takes a GPU of its own for every rank. If one finds none, or is alone, says so and returns false on all ranks.
bool every_rank_has_a_gpu() {
    int const ranks = job::ranks(), local = local_rank(), found = usable_gpus(local + 1);
    int fits = local < found && ranks > 1, all = 0, world = 0;
    MPI_Allreduce(&fits, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    MPI_Comm_rank(MPI_COMM_WORLD, &world);
    if (all)
        cpx::cuda::use_device(gpu_of(local));
    else if (world == 0)
        std::printf("cpx: skipped, a GPU a rank, and two ranks, wanted; rank 0 of %d found %d\n", ranks, found);
    return all != 0;
}

/// A rank of MPI and, joined over it, of NCCL.
struct member {
    cpx::mpi host;
    std::unique_ptr<cpx::nccl> gpu = cpx::nccl::over(host);
};

member world() { return {cpx::mpi(MPI_COMM_WORLD, 60s)}; }

template <class T>
bool same(std::vector<T> const& a, std::vector<T> const& b) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](T const& x, T const& y) {
               return std::memcmp(&x, &y, sizeof(T)) == 0;
           });
}

template <class T>
std::vector<T> poisoned(std::size_t count, int byte) {
    std::vector<T> values(count);
    std::ranges::fill(std::as_writable_bytes(std::span(values)), std::byte(byte));
    return values;
}

/// Runs a plan between GPUs and between hosts, into unlike poisons, and returns what is wrong on this rank, or "".
template <class T>
std::string problem_of(cpx::plan const& plan, index_t width, std::vector<T> const& source, std::vector<T> const& target,
                       member& m) {
    index_t const in = plan.source_width ? plan.source_width : width,
                  out = plan.target_width ? plan.target_width : width;
    cpx::cuda::stream const stream;
    cpx::cuda::buffer<T> const x{std::span<T const>(source)};
    auto const ones = poisoned<T>(target.size(), 0xff);
    cpx::cuda::buffer<T> y{std::span<T const>(ones)};
    cpx::cuda::exchange<T> move(plan, width, *m.gpu);
    move(cpx::rows<T const>(x.data(), plan.source_rows, in), cpx::rows<T>(y.data(), plan.target_rows, out), stream);
    m.gpu->wait(stream);
    auto const got = y.read();
    auto host = poisoned<T>(target.size(), 0x55);
    cpx::exchange(plan, cpx::rows<T const>(source.data(), plan.source_rows, in),
                  cpx::rows<T>(host.data(), plan.target_rows, out), m.host);
    return !same(got, host)          ? "NCCL and MPI brought different bytes"
           : !same(got, target)      ? "both brought other bytes than the whole tensor's"
           : !same(x.read(), source) ? "another source"
                                     : "";
}

/// Moves a whole tensor and back.
template <class T, class From, class To>
void check_both_ways(From const& from, To const& to, std::vector<cpx::section> const& sections, member& m) {
    int const rank = m.host.rank();
    index_t width = 0;
    for (cpx::section const& s : sections) width += s.heads * s.width;
    auto const source = whole::take<T>(from, rank, sections), target = whole::take<T>(to, rank, sections);
    auto const plan = cpx::relayout(from, to, rank);
    auto const check = [&](cpx::plan const& p, std::string const& way, auto const& x, auto const& y) {
        std::string const problem = problem_of<T>(p, width, x, y, m);
        CHECK_MESSAGE(problem.empty(), plan.id.text() << way << ": " << problem << ", " << text(from.batch()));
    };
    check(plan, "", source, target);
    check(plan.transposed(), ", back", target, source);
}

void check_relayouts(cpx::thd const& batch, index_t width, member& m) {
    int const ranks = m.host.ranks();
    auto const zigzag = cpx::shard(batch, cpx::zigzag<>(ranks));
    auto const sequential = cpx::shard<cpx::scope::batch>(batch, cpx::sequential<>(ranks));
    std::vector<cpx::section> const plain{{1, width}}, sections{{2 * ranks, 16}, {ranks, 16}, {2 * ranks, 1}};
    check_both_ways<std::uint16_t>(zigzag, sequential, plain, m);
    check_both_ways<double>(zigzag, sequential, plain, m);
    check_both_ways<std::uint16_t>(zigzag, cpx::head_sharded<>(ranks, batch, sections), sections, m);
    check_both_ways<float>(zigzag, cpx::head_sharded<>(ranks, batch, sections), sections, m);
}

cpx::plan relayout(cpx::thd const& batch, member const& m) {
    return cpx::relayout(cpx::shard(batch, cpx::zigzag<>(m.host.ranks())),
                         cpx::shard(batch, cpx::sequential<>(m.host.ranks())), m.host.rank());
}

/// Returns the error of `call`, or one of which nothing is right.
template <class F>
cpx::error error_of(F&& call) {
    try {
        call();
    } catch (cpx::error const& e) {
        return e;
    }
    return {"nothing", "no error"};
}

} // namespace

TEST_SUITE("mpi") {
    using cpx::index_t;

    TEST_CASE("a rank of MPI is the same rank among the GPUs, on the device that was current") {
        if (!every_rank_has_a_gpu()) return;
        member m = world();
        CHECK(m.gpu->rank() == m.host.rank());
        CHECK(m.gpu->ranks() == job::ranks());
        CHECK(m.gpu->device() == local_rank());
        int const mine = 100 + m.host.rank();
        std::vector<int> all(static_cast<std::size_t>(job::ranks()), -1);
        m.gpu->gather(&mine, all.data(), sizeof mine);
        for (int rank = 0; rank < job::ranks(); ++rank) CHECK(all[static_cast<std::size_t>(rank)] == 100 + rank);
    }

    TEST_CASE("relayouts between GPUs bring the bytes that MPI brings to the hosts, there and back") {
        if (!every_rank_has_a_gpu()) return;
        member m = world();
        for (auto const& batch :
             {lengths({}), lengths({1}), lengths({2, 0, 1}), lengths({700, 1, 123}), lengths({5000})})
            check_relayouts(batch, 33, m);
        support::splitmix numbers(11); // the same on every rank
        for (int i = 0; i < 6; ++i) {
            std::vector<index_t> list;
            for (index_t k = numbers.between(1, 9); k > 0; --k) list.push_back(numbers.between(0, 300));
            check_relayouts(lengths(list), numbers.between(1, 100), m);
        }
    }

    TEST_CASE("groups of the world have GPUs of their own") {
        if (!every_rank_has_a_gpu()) return;
        int rank = 0;
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        member m{cpx::mpi::split(rank % 2, MPI_COMM_WORLD, 60s)};
        CHECK(m.gpu->rank() == rank / 2);
        CHECK(m.gpu->ranks() == (job::ranks() - rank % 2 + 1) / 2);
        check_relayouts(rank % 2 ? lengths({40, 9}) : lengths({7, 200, 31}), 8, m);
    }

    TEST_CASE("ranks that disagree about cu_seqlens are all told who has which, and go on over both") {
        if (!every_rank_has_a_gpu()) return;
        member m = world();
        int const rank = m.host.rank();
        std::string others = job::ranks() > 2 ? "(ranks 0" : "(rank 0";
        for (int other = 2; other < job::ranks(); ++other) others += ' ' + std::to_string(other);
        auto const plan =
            relayout(lengths(rank == 1 ? std::vector<index_t>{13, 29, 6} : std::vector<index_t>{12, 30, 6}), m);
        auto const told = error_of([&] { cpx::cuda::exchange<float>(plan, 4, *m.gpu); });
        CHECK(told.problem() == "ranks disagree on offset 1 of cu_seqlens");
        CHECK_MESSAGE(job::holds(told.got(), others + ')'), told.what());
        CHECK_MESSAGE(job::holds(told.got(), "(rank 1)"), told.what());

        std::vector<float> x(static_cast<std::size_t>(plan.source_rows * 4)),
            y(static_cast<std::size_t>(plan.target_rows * 4));
        auto const told_by_host =
            error_of([&] { cpx::exchange(plan, cpx::rows<float const>(x, 4), cpx::rows<float>(y, 4), m.host); });
        CHECK(told_by_host.problem() == told.problem());
        CHECK(told_by_host.got() == told.got());
        check_relayouts(lengths({12, 30, 6}), 4, m);
    }
}
