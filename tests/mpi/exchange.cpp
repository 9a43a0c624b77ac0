// SPDX-License-Identifier: Apache-2.0
// Plans run on processes: every rank compares its own rows with those of all ranks run on one thread, bit by bit.
#include <cpx/transport/mpi.hpp>

#include <cpx/mesh/mesh.hpp>
#include <cpx/testing/counted.hpp>

#include <law.hpp>
#include <mpi/job.hpp>

#include <cstring>

namespace {

using namespace support;
using cpx::index_t;
using std::size_t;

/// Every bit pattern, NaNs among them.
template <class T>
std::vector<T> noise(splitmix& numbers, index_t count) {
    std::vector<T> values(static_cast<size_t>(count));
    for (T& value : values) {
        std::uint64_t const bits = numbers.next();
        std::memcpy(&value, &bits, sizeof value);
    }
    return values;
}

/// Numbers for which the order of additions matters.
std::vector<float> uneven(splitmix& numbers, index_t count) {
    std::vector<float> values;
    for (index_t i = 0; i < count; ++i)
        values.push_back(static_cast<float>(numbers.between(-1000, 1000)) * (numbers.between(0, 1) ? 1e8f : 1e-3f));
    return values;
}

/// Runs `plans` from `sources` in wider rows, into poison, and returns what is wrong on this rank, or "".
template <class T>
std::string problem_of(std::vector<cpx::plan> const& plans, std::vector<std::vector<T>> const& sources, index_t width,
                       splitmix& numbers, cpx::mpi& comm) {
    size_t const r = static_cast<size_t>(comm.rank());
    cpx::plan const& p = plans[r];
    index_t const from_width = p.source_width ? p.source_width : width,
                  to_width = p.target_width ? p.target_width : width;
    index_t const margin = numbers.between(0, 2), from_stride = from_width + margin, to_stride = to_width + margin;
    T poison;
    std::memset(&poison, 0xff, sizeof poison);
    std::vector<T> source(static_cast<size_t>(p.source_rows * from_stride) + 1, poison);
    std::vector<T> target(static_cast<size_t>(p.target_rows * to_stride) + 1, poison), want = target;
    auto const place = [](std::vector<T>& wide, index_t stride, std::vector<T> const& rows, index_t columns) {
        for (size_t i = 0; i < rows.size(); ++i) {
            index_t const row = static_cast<index_t>(i) / columns, column = static_cast<index_t>(i) % columns;
            wide[static_cast<size_t>(row * stride + column)] = rows[i];
        }
    };
    place(source, from_stride, sources[r], from_width);
    place(want, to_stride, execute(plans, sources, width, poison)[r], to_width);
    auto const before = source;
    cpx::exchange(p, cpx::rows<T>(source.data(), p.source_rows, from_width, from_stride),
                  cpx::rows<T>(target.data(), p.target_rows, to_width, to_stride), comm);
    auto const same = [](auto const& a, auto const& b) {
        return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
    };
    return !same(target, want) ? "another target" : !same(source, before) ? "another source" : "";
}

std::vector<law::subject> subjects(cpx::thd const& batch, int ranks, std::uint64_t seed) {
    std::vector<law::subject> list;
    for (spec const& s : all_specs(ranks, {0, 3}, seed)) list.push_back(law::tokens(batch, s));
    list.push_back(law::heads(batch, ranks, {{8, 2}, {4, 3}}));
    list.push_back(law::heads(batch, ranks, {{5, 1}, {1, 4}}));
    list.push_back(law::replicated(batch, ranks));
    return list;
}

std::vector<cpx::thd> const batches = {
    lengths({}), lengths({1}), lengths({2}), lengths({8, 12}), lengths({7, 0, 1, 23, 2}), lengths({64, 65, 1, 30})};

/// Random pairs of shardings in random widths, every other one that moves rows transposed.
template <class T>
void check_pairs(std::uint64_t seed, index_t widest) {
    cpx::mpi comm(MPI_COMM_WORLD, std::chrono::seconds(60));
    for (cpx::thd const& batch : batches) {
        splitmix numbers(++seed);
        auto const all = subjects(batch, comm.ranks(), seed);
        for (int turn = 0; turn < 40; ++turn) {
            law::subject const& a = all[numbers.next() % all.size()];
            law::subject const& b = all[numbers.next() % all.size()];
            if (!a.sections.empty() && !b.sections.empty() && a.sections != b.sections) continue;
            auto plans = law::plans(a, b);
            if (plans[0].kind == cpx::flow::moves && turn % 2) plans = transposed(plans);
            index_t const width = law::sections_of(a, b).size() > 1 || plans[0].source_width || plans[0].target_width
                                      ? std::max(plans[0].source_width, plans[0].target_width)
                                      : numbers.between(1, widest);
            std::vector<std::vector<T>> sources;
            for (cpx::plan const& p : plans)
                sources.push_back(noise<T>(numbers, p.source_rows * (p.source_width ? p.source_width : width)));
            std::string const problem = problem_of(plans, sources, width, numbers, comm);
            CHECK_MESSAGE(problem.empty(), a.name << " -> " << b.name << ": " << problem << ", " << text(batch));
        }
    }
}

} // namespace

TEST_SUITE("mpi") {
    using cpx::index_t;
    using std::size_t;

    TEST_CASE("rows arrive where they belong with all their bits, in any width and stride") {
        job::ranks();
        check_pairs<double>(100, 33);
        check_pairs<std::uint16_t>(200, 33);
        check_pairs<char>(300, 33);
    }

    TEST_CASE("long messages, which travel in blocks, arrive as short ones do") { // up to some hundred KiB
        job::ranks();
        check_pairs<double>(400, 2000);
        check_pairs<char>(500, 9000);
    }

    TEST_CASE("sums have the same bits whatever the timing: those of adding in rank order") {
        job::ranks();
        cpx::mpi comm;
        splitmix numbers(21), delays(static_cast<std::uint64_t>(comm.rank()));
        for (cpx::thd const& batch : batches)
            for (auto const& target :
                 {law::replicated(batch, comm.ranks()), law::heads(batch, comm.ranks(), {{3, 1}, {1, 2}})}) {
                auto const tokens = law::tokens(batch, {shape::zigzag, cpx::scope::sequence, 0, comm.ranks()});
                auto const plans = transposed(law::plans(tokens, target));
                index_t const width = target.sections.empty() ? 4 : 5;
                std::vector<std::vector<float>> gradients;
                for (cpx::plan const& p : plans)
                    gradients.push_back(uneven(numbers, p.source_rows * (p.source_width ? p.source_width : width)));
                for (int turn = 0; turn < 5; ++turn) {
                    std::this_thread::sleep_for(std::chrono::microseconds(delays.between(0, 2000)));
                    std::string const problem = problem_of(plans, gradients, width, numbers, comm);
                    CHECK_MESSAGE(problem.empty(), target.name << ": " << problem << ", " << text(batch));
                }
            }
    }

    TEST_CASE("halos bring the rows beside segments, and their transposes add the gradients") {
        job::ranks();
        cpx::mpi comm(MPI_COMM_WORLD, std::chrono::seconds(60));
        splitmix numbers(31);
        for (cpx::thd const& batch : batches)
            for (spec const& s : all_specs(comm.ranks(), {0, 3}))
                for (index_t const reach : {1, 3, 9}) {
                    std::vector<cpx::plan> halos;
                    for (int r = 0; r < comm.ranks(); ++r) halos.push_back(cpx::halo(make(batch, s), r, reach));
                    for (auto const& plans : {halos, transposed(halos)}) {
                        std::vector<std::vector<float>> sources;
                        for (cpx::plan const& p : plans) sources.push_back(uneven(numbers, p.source_rows * 3));
                        std::string const problem = problem_of(plans, sources, 3, numbers, comm);
                        CHECK_MESSAGE(problem.empty(), text(s) << ": " << problem << ", " << text(batch));
                    }
                }
    }

    TEST_CASE("a hundred exchanges there and back with random delays neither hang nor mix their rows") {
        job::ranks();
        cpx::mpi comm(MPI_COMM_WORLD, std::chrono::seconds(60));
        auto const batch = lengths({17, 40, 0, 6});
        auto const a = law::tokens(batch, {shape::zigzag, cpx::scope::sequence, 0, comm.ranks()}),
                   b = law::tokens(batch, {shape::sequential, cpx::scope::batch, 0, comm.ranks()});
        auto const there = law::plans(a, b), back = law::plans(b, a);
        size_t const r = static_cast<size_t>(comm.rank());
        splitmix delays(r), numbers(7);
        for (int turn = 0; turn < 100; ++turn) {
            std::vector<double> const x = noise<double>(numbers, there[r].source_rows * 10);
            std::vector<double> y(static_cast<size_t>(there[r].target_rows * 10)), z(x.size());
            std::this_thread::sleep_for(std::chrono::microseconds(delays.between(0, 300)));
            cpx::exchange(there[r], cpx::rows<double const>(x, 10), cpx::rows<double>(y, 10), comm);
            std::this_thread::sleep_for(std::chrono::microseconds(delays.between(0, 300)));
            cpx::exchange(back[r], cpx::rows<double const>(y, 10), cpx::rows<double>(z, 10), comm);
            CHECK(std::memcmp(x.data(), z.data(), x.size() * sizeof(double)) == 0);
        }
    }

    TEST_CASE("a plan sends one message a peer and its lower bound of rows") {
        job::ranks();
        cpx::mpi plain;
        cpx::counted comm(plain);
        auto const batch = lengths({17, 40, 0, 6});
        auto const a = law::tokens(batch, {shape::zigzag, cpx::scope::sequence, 0, comm.ranks()}),
                   b = law::tokens(batch, {shape::sequential, cpx::scope::batch, 0, comm.ranks()});
        auto const plan = law::plans(a, b)[static_cast<size_t>(comm.rank())];
        std::vector<float> const from(static_cast<size_t>(plan.source_rows * 3));
        std::vector<float> to(static_cast<size_t>(plan.target_rows * 3));
        cpx::exchange(plan, cpx::rows<float const>(from, 3), cpx::rows<float>(to, 3), comm);
        CHECK(comm.sent("relayout").messages == plan.messages());
        CHECK(comm.sent("relayout").rows == plan.sent_rows());
        CHECK(comm.sent("relayout").bytes == plan.sent_elements(3) * 4);
    }

    TEST_CASE("bytes of rank 0 are broadcast, and records of all ranks are gathered in rank order") {
        int const ranks = job::ranks();
        cpx::mpi comm;
        for (size_t const size : {0u, 1u, 128u, 65000u, 65536u, 200001u}) {
            splitmix numbers(size);
            auto const blob = noise<std::byte>(numbers, static_cast<index_t>(size));
            auto got = comm.rank() == 0 ? blob : std::vector<std::byte>(size, std::byte{0xff});
            cpx::broadcast(comm, got);
            CHECK(got == blob);

            std::vector<std::byte> want, all(size * static_cast<size_t>(ranks), std::byte{0xff});
            for (int rank = 0; rank < ranks; ++rank)
                for (std::byte const b : blob) want.push_back(b ^ static_cast<std::byte>(rank));
            cpx::gather(comm, want.data() + static_cast<size_t>(comm.rank()) * size, all.data(), size);
            CHECK(all == want);
        }
    }

    TEST_CASE("the world splits into groups with ranks of their own") {
        int const ranks = job::ranks();
        int world = 0;
        MPI_Comm_rank(MPI_COMM_WORLD, &world);
        for (int groups = 1; groups <= ranks; ++groups) {
            cpx::mpi comm = cpx::mpi::split(world % groups);
            CHECK(comm.ranks() == (ranks - world % groups + groups - 1) / groups);
            CHECK(comm.rank() == world / groups);
            std::vector<int> all(static_cast<size_t>(comm.ranks()), -1);
            cpx::gather(comm, &world, all.data(), sizeof world);
            for (int rank = 0; rank < comm.ranks(); ++rank)
                CHECK(all[static_cast<size_t>(rank)] == world % groups + rank * groups);
            int size = 0;
            MPI_Comm_size(comm.get(), &size);
            CHECK(size == comm.ranks());
            cpx::mpi again(comm.get()); // a group of a group
            CHECK(again.rank() == comm.rank());
        }
    }

    TEST_CASE("the context-parallel and the experts' groups of a mesh relayout, each for itself") {
        using cpx::axis;
        int const ranks = job::ranks(), tp = ranks % 2 == 0 && ranks > 2 ? 2 : 1; // of 6, a group of cp is every other
        cpx::mesh const all({.world = ranks, .tp = tp, .cp = ranks / tp, .ep = ranks / tp, .etp = 1});
        int world = 0;
        MPI_Comm_rank(MPI_COMM_WORLD, &world);
        for (axis const set : {axis::cp, axis::ep}) {
            cpx::mpi comm = cpx::mpi::split(all.color(set, world));
            REQUIRE(comm.ranks() == all.size(set));
            CHECK(comm.rank() == all.coordinate(set, world));
            auto const batch = lengths({5 + all.color(set, world), 40, 0, 7}); // every group has its own
            auto const zigzag = cpx::shard(batch, cpx::zigzag<>(comm.ranks()));
            auto const sequential = cpx::shard(batch, cpx::sequential<>(comm.ranks()));
            auto x = cpx::make_tensor<float>(zigzag, comm.rank(), 3);
            splitmix numbers(static_cast<std::uint64_t>(world));
            for (float& value : x.elements()) value = static_cast<float>(numbers.between(-99, 99));
            auto const y = cpx::exchange(x, sequential, comm);
            auto const z = cpx::exchange(y, zigzag, comm);
            CHECK(std::ranges::equal(z.elements(), x.elements()));
        }
    }
}
