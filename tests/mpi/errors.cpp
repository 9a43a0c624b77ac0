// SPDX-License-Identifier: Apache-2.0
// What goes wrong on one rank is an error on every rank that names it, within the deadline; then all go on to the next.
#include <cpx/transport/mpi.hpp>

#include <cpx/cpx.hpp>
#include <cpx/testing/transport.hpp>

#include <mpi/job.hpp>
#include <support/packings.hpp>

#include <array>
#include <cmath>
#include <limits>

namespace {

using namespace std::chrono_literals;
using cpx::index_t;
using job::error, job::holds;
using support::lengths, support::rejects;

cpx::thd const batch = lengths({12, 30, 6});

cpx::plan relayout(cpx::thd const& of, int rank) {
    int const ranks = job::ranks();
    return cpx::relayout(cpx::shard(of, cpx::zigzag<>{ranks}), cpx::shard(of, cpx::sequential<>{ranks}), rank);
}

/// Runs a plan of rows of four into NaNs. If it throws, nothing has been written.
void run(cpx::plan const& p, cpx::mpi& comm) {
    std::vector<double> const from(static_cast<std::size_t>(p.source_rows * 4), 1.0);
    std::vector<double> to(static_cast<std::size_t>(p.target_rows * 4), std::numeric_limits<double>::quiet_NaN());
    try {
        cpx::exchange(p, cpx::rows<double const>(from, 4), cpx::rows<double>(to, 4), comm);
    } catch (cpx::error const&) {
        CHECK(std::ranges::all_of(to, [](double x) { return std::isnan(x); }));
        throw;
    }
    CHECK(std::ranges::all_of(to, [](double x) { return x == 1; }));
}

/// Sends `mine` to all ranks in exchange `operation`, and receives `expected` numbers from each.
void send_all(cpx::mpi& comm, std::span<int const> mine, char const* operation = "test", std::size_t expected = 1) {
    cpx::identity id;
    cpx::identity::set(id.operation, operation);
    std::vector<std::vector<int>> got(static_cast<std::size_t>(comm.ranks()), std::vector<int>(expected, -1));
    std::vector<cpx::outgoing> sends;
    std::vector<cpx::incoming> receives;
    for (int peer = 0; peer < comm.ranks(); ++peer) {
        if (peer == comm.rank()) continue;
        auto& slot = got[static_cast<std::size_t>(peer)];
        sends.push_back(cpx::consecutive(peer, std::as_bytes(mine).data(), static_cast<index_t>(mine.size_bytes())));
        receives.push_back(
            cpx::consecutive(peer, std::as_writable_bytes(std::span(slot)).data(), static_cast<index_t>(4 * expected)));
    }
    comm.transfer(id, sends, receives);
}

void send_all(cpx::mpi& comm) { send_all(comm, std::array{1}); }

void check_passages(std::string const& text, std::vector<std::string> const& passages) {
    for (std::string const& passage : passages)
        CHECK_MESSAGE(holds(text, passage), "\"" << passage << "\" is not in: " << text);
}

/// Rank 1 has a plan of its own: every rank says on which field the ranks differ and who has what.
template <class Odd>
void rank_1_disagrees(std::string const& field, Odd&& odd) {
    int const ranks = job::ranks();
    std::string others = ranks > 2 ? "(ranks 0" : "(rank 0";
    for (int rank = 2; rank < ranks; ++rank) others += ' ' + std::to_string(rank);
    auto const text = error(
        20s, [&](cpx::mpi& comm) { run(comm.rank() == 1 ? odd(comm.rank()) : relayout(batch, comm.rank()), comm); });
    check_passages(text, {"errors.cpp", "exchange: ranks disagree on " + field + ':', others + ')', "(rank 1)"});
}

int world_rank() {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

bool alone() { return job::ranks() == 1; }

} // namespace

TEST_SUITE("mpi") {
    using cpx::index_t;

    TEST_CASE("what a late rank once waited for is not taken for what it waits for") {
        auto const told = error(10s, [](cpx::mpi& comm) {
            std::vector<std::byte> data(1 << 22); // too long to be taken before it is received
            cpx::identity id;
            auto const move = [&](int from, std::size_t bytes) { // between ranks 0 and 1
                auto const own = std::span(data).first(bytes);
                auto const send = cpx::consecutive<std::byte const>(1 - from, own.data(), std::ssize(own));
                auto const receive = cpx::consecutive(from, own.data(), std::ssize(own));
                if (comm.rank() == from)
                    comm.transfer(id, {&send, 1}, {});
                else
                    comm.transfer(id, {}, {&receive, 1});
            };
            if (comm.rank() > 1 || comm.ranks() == 1) return;
            if (comm.rank() == 0) std::this_thread::sleep_for(400ms); // rank 1 asks it what it waits for
            move(0, data.size());
            move(0, 8);
            if (comm.rank() == 0) std::this_thread::sleep_for(100ms);
            move(1, data.size());
        });
        CHECK(told == "");
    }

    TEST_CASE("MPI does all that a transport owes, and its courtesies") {
        job::ranks();
        auto const run = [](auto const& program, auto deadline) {
            try {
                cpx::mpi::run(program, deadline);
            } catch (cpx::error const&) { // the program has said so
            }
            job::meet();
        };
        auto const found = cpx::testing::check_transport(run, 400ms);
        CHECK_MESSAGE((found.all_duties() && found.all_courtesies()), found.text());
    }

    TEST_CASE("ranks whose plans differ get an error that names the ranks and the field, and nothing moves") {
        if (alone()) return;
        rank_1_disagrees("offset 1 of cu_seqlens", [](int r) { return relayout(lengths({13, 29, 6}), r); });
        rank_1_disagrees("offset 3 of cu_seqlens", [](int r) { return relayout(lengths({12, 30, 7}), r); });
        rank_1_disagrees("operation",
                         [](int r) { return cpx::halo(cpx::shard(batch, cpx::zigzag<>(job::ranks())), r, 3); });
    }

    TEST_CASE("a rank that throws ends the others, and the error names it, whatever it throws") {
        auto const with = [](auto const& thrown) {
            auto const started = std::chrono::steady_clock::now();
            std::string text = "nothing";
            try {
                text = error(60s, [&](cpx::mpi& comm) {
                    if (comm.rank() == comm.ranks() - 1) throw thrown;
                    run(relayout(batch, comm.rank()), comm);
                });
            } catch (...) { // not a cpx::error: this is the rank that throws
                CHECK(world_rank() == job::ranks() - 1);
                job::meet();
                text = "rank " + std::to_string(world_rank()) + " failed: no data left, not a std::exception";
            }
            CHECK(std::chrono::steady_clock::now() - started < 20s);
            return text;
        };
        std::string const who = "rank " + std::to_string(job::ranks() - 1) + " failed: ";
        check_passages(with(std::runtime_error("no data left")), {who, "no data left"});
        check_passages(with(7), {who, "not a std::exception"});
    }

    TEST_CASE("a transport that an exception destroys tells the others") {
        if (alone()) return;
        job::ranks();
        std::string text;
        try {
            cpx::mpi comm(MPI_COMM_WORLD, 60s);
            if (comm.rank() == 0) throw std::runtime_error("gone");
            run(relayout(batch, comm.rank()), comm);
        } catch (std::exception const& e) {
            text = e.what();
        }
        job::meet();
        CHECK_MESSAGE(holds(text, world_rank() == 0 ? "gone" : "rank 0 failed: an exception"), text);
    }

    TEST_CASE("a rank that does not come within the deadline is named by the others, and later by itself") {
        if (alone()) return;
        int const last = job::ranks() - 1;
        std::string const name = std::to_string(last);
        auto const started = std::chrono::steady_clock::now();
        auto const text = error(200ms, [&](cpx::mpi& comm) {
            if (comm.rank() == last) std::this_thread::sleep_for(1s);
            send_all(comm);
        });
        CHECK(std::chrono::steady_clock::now() - started < 20s);
        if (world_rank() == last) // the others' messages are there, but so is the news
            CHECK((text.empty() || holds(text, " failed: ")));
        else
            check_passages(
                text, {"waited in test for messages of rank", "an end within 200 ms, got nothing from rank " + name});
    }

    TEST_CASE("a long message that nobody takes is an error within the deadline, too") {
        if (alone()) return;
        std::vector<int> const many(100'000, 1);
        auto const text = error(200ms, [&](cpx::mpi& comm) {
            if (comm.rank() == 1) std::this_thread::sleep_for(1s);
            send_all(comm, many, "test", many.size());
        });
        if (world_rank() != 1) check_passages(text, {"rank 1 to take theirs", "got nothing from rank 1"});
    }

    TEST_CASE("whoever keeps the others waiting is named at the deadline, and not who waits for it, too") {
        if (alone()) return;
        int const last = job::ranks() - 1;
        // Long enough for ranks that share few cores to hear from each other.
        auto const text = error(1200ms, [&](cpx::mpi& comm) { // 0 waits for 1, 1 for 2, and so on
            if (comm.rank() == last) return std::this_thread::sleep_for(1800ms);
            std::this_thread::sleep_for(10ms * comm.rank()); // 0's deadline passes first
            int got = 0;
            auto const receive = cpx::consecutive(comm.rank() + 1, reinterpret_cast<std::byte*>(&got), sizeof got);
            comm.transfer({}, {}, {&receive, 1});
        });
        check_passages(text, {"got nothing from rank " + std::to_string(last)});
    }

    TEST_CASE("ranks of which each waits for another are told so at once, with who is in which exchange") {
        if (job::ranks() < 3) return;
        auto const started = std::chrono::steady_clock::now();
        for (bool const in_one : {true, false}) {
            auto const text = error(60s, [&](cpx::mpi& comm) { // all receive, nobody sends
                cpx::identity id;
                cpx::identity::set(id.operation, in_one || comm.rank() != 1 ? "relayout" : "halo");
                int got = 0;
                auto const receive =
                    cpx::consecutive((comm.rank() + 1) % comm.ranks(), reinterpret_cast<std::byte*>(&got), sizeof got);
                comm.transfer(id, {}, {&receive, 1});
            });
            check_passages(text, {in_one ? "got ranks that wait for each other" : "halo in halo (rank 1)"});
            if (!in_one) check_passages(text, {"different exchanges: operation", "relayout in relayout (ranks 0 2"});
        }
        CHECK(std::chrono::steady_clock::now() - started < 20s);
    }

    TEST_CASE("a rank that returns early is told to the others at once, whether they wait for it or only send") {
        if (alone()) return;
        auto const started = std::chrono::steady_clock::now();
        auto const waits = error(60s, [](cpx::mpi& comm) {
            if (comm.rank() != 1) send_all(comm);
        });
        check_passages(waits, {" waits in test for rank 1: expected rank 1 to take part, got its return"});
        auto const sends = error(60s, [](cpx::mpi& comm) {
            int const value = 1;
            auto const send = cpx::consecutive(1, reinterpret_cast<std::byte const*>(&value), sizeof value);
            cpx::identity id;
            cpx::identity::set(id.operation, "halo");
            if (comm.rank() == 0) comm.transfer(id, {&send, 1}, {});
        });
        if (world_rank() == 1)
            check_passages(sends, {"rank 0 waits in halo for rank 1: expected rank 1 to take part, got its return"});
        CHECK(std::chrono::steady_clock::now() - started < 20s);
    }

    TEST_CASE("who waits for ranks that have returned is told where the batch of their last exchange is another") {
        if (alone()) return;
        auto const started = std::chrono::steady_clock::now();
        struct {
            cpx::thd of_rank_1;
            std::string what, usual, its;
        } const cases[] = {{cpx::thd::uniform(11, 1), "offset 11 of cu_seqlens", "none", "11"},
                           {cpx::thd(cpx::thd::uniform(10, 1).offsets(), {1, 1, 1, 1, 1, 1, 1, 1, 1, 0}),
                            "the valid length of sequence 9", "1", "0"}};
        for (auto const& c : cases) {
            auto const text = error(60s, [&](cpx::mpi& comm) {
                auto const step = [&](cpx::thd const& of) { // in which no rank has rows for another
                    auto const x = cpx::make_tensor<float>(cpx::shard(of, cpx::sequential<>(comm.ranks())), comm, 1);
                    auto const p = cpx::halo(x.sharding(), comm.rank(), 1);
                    std::vector<float> to(static_cast<std::size_t>(p.target_rows));
                    cpx::exchange(p, x.data(), cpx::rows<float>(to, 1), comm);
                };
                step(cpx::thd::uniform(10, 1));
                step(comm.rank() == 1 ? c.of_rank_1 : cpx::thd::uniform(10, 1));
            });
            check_passages(text, {"rank 1 waits in agreement on halo ", " to take part, got its return after halo ",
                                  " (" + c.what + ": " + c.usual + " on rank ", ", " + c.its + " on rank 1)"});
        }
        CHECK(std::chrono::steady_clock::now() - started < 20s);
    }

    TEST_CASE("a rank that has returned is told at once what fails between others, of which one has returned, too") {
        if (job::ranks() < 3) return;
        auto const started = std::chrono::steady_clock::now();
        for (int turn = 0; turn < 10; ++turn) {
            auto const text = error(60s, [](cpx::mpi& comm) {
                if (comm.rank() != 1) return;
                std::this_thread::sleep_for(50ms); // rank 2 knows by now that rank 0 has left
                int value = 1;
                auto const send = cpx::consecutive(2, reinterpret_cast<std::byte const*>(&value), sizeof value);
                auto const receive = cpx::consecutive(0, reinterpret_cast<std::byte*>(&value), sizeof value);
                comm.transfer({}, {&send, 1}, {});
                comm.transfer({}, {}, {&receive, 1});
            });
            check_passages(text, {"rank 1 waits in "});
        }
        CHECK(std::chrono::steady_clock::now() - started < 20s);
    }

    TEST_CASE("a rank that runs a new plan while the others run one they have agreed on is named at once, by both") {
        if (job::ranks() < 3) return;
        auto const started = std::chrono::steady_clock::now();
        auto const text = error(60s, [](cpx::mpi& comm) {
            auto const zigzag = cpx::shard(batch, cpx::zigzag<>{comm.ranks()});
            auto const x = cpx::make_tensor<float>(zigzag, comm.rank(), 2);
            auto const old = cpx::relayout(zigzag, cpx::shard(batch, cpx::sequential<>{comm.ranks()}), comm.rank());
            cpx::exchange(old, x, comm);
            if (comm.rank() == 1)
                cpx::exchange(cpx::relayout(zigzag, cpx::shard(batch, cpx::striped<>{comm.ranks()}), 1), x, comm);
            cpx::exchange(old, x, comm);
        });
        CHECK(std::chrono::steady_clock::now() - started < 20s);
        check_passages(text, {"rank 1", "agreement on relayout zigzag<> over sequence, balanced -> striped<> "});
        if (job::ranks() == 3)
            check_passages(text,
                           {"ranks are in different exchanges: target layout: expected ",
                            " (relayout zigzag<> over sequence, balanced -> sequential<> over sequence, balanced)"});
    }

    TEST_CASE("ranks that have not seen the batch of another are told the first offset or valid length that differs") {
        if (alone()) return;
        auto const padded = [](index_t tenth) {
            std::vector<index_t> valid(12, 100);
            valid[9] = tenth;
            return cpx::thd(cpx::thd::uniform(12, 100).offsets(), valid);
        };
        auto const cut = [](index_t tenth, index_t twelfth = 1) {
            return lengths({1, 1, 1, 1, 1, 1, 1, 1, 1, tenth, 100 - tenth, twelfth});
        };
        auto const step = [](cpx::thd const& of, cpx::mpi& comm) { // each two ranks have rows for each other
            auto const x = cpx::make_tensor<float>(cpx::shard(of, cpx::zigzag<>{comm.ranks()}), comm, comm.ranks());
            cpx::exchange(x, cpx::head_sharded<>(comm.ranks(), of, {{comm.ranks(), 1}}), comm);
        };
        auto const started = std::chrono::steady_clock::now();
        for (int turn = 0; turn < 6; ++turn) {
            auto const n = [turn](int number) { return std::to_string(number + turn); }; // other batches every turn
            struct {
                cpx::thd usual, of_rank_1;
                std::string what, usual_value, its_value;
            } const cases[] = {{padded(90), padded(3 + turn), "the valid length of sequence 9", "90", n(3)},
                               {cut(50), cut(3 + turn), "offset 10 of cu_seqlens", "59", n(12)},
                               {cut(50), cut(50, 2 + turn), "offset 12 of cu_seqlens", "110", n(111)},
                               {lengths({40}), lengths({40, 3 + turn}), "offset 2 of cu_seqlens", "none", n(43)}};
            for (auto const& c : cases) {
                auto const text = error(60s, [&](cpx::mpi& comm) {
                    step(c.usual, comm);
                    for (int i = 0; turn == 0 && i < 130; ++i) // more than a process remembers
                        step(lengths({1, 1000 + i}), comm);
                    step(comm.rank() == 1 ? c.of_rank_1 : c.usual, comm);
                });
                std::string const problem = "different exchanges: " + c.what + ": expected ";
                bool const rank_1_told = holds(text, problem + c.its_value + " as on rank 1 (") &&
                                         holds(text, ", got " + c.usual_value + " on rank ");
                bool const another_told = holds(text, problem + c.usual_value + " as on rank ") &&
                                          holds(text, ", got " + c.its_value + " on rank 1 (");
                CHECK_MESSAGE((rank_1_told || another_told), c.what << ": " << text);
            }
        }
        CHECK(std::chrono::steady_clock::now() - started < 60s);
    }

    TEST_CASE("who waits to hear in what another's batch differs waits no longer than the deadline") {
        if (alone()) return;
        auto const started = std::chrono::steady_clock::now();
        auto const text = error(400ms, [](cpx::mpi& comm) {
            cpx::identity id;
            id.set_batch(comm.rank() == 1 ? cpx::thd({0, 8, 18}, {8, 7}) : cpx::thd({0, 8, 18}, {8, 6}));
            int value = 1;
            auto const send = cpx::consecutive<std::byte const>(0, reinterpret_cast<std::byte*>(&value), sizeof value);
            auto const receive = cpx::consecutive(1, reinterpret_cast<std::byte*>(&value), sizeof value);
            if (comm.rank() == 0) comm.transfer(id, {}, {&receive, 1});
            if (comm.rank() != 1) return;
            comm.transfer(id, {&send, 1}, {});
            std::this_thread::sleep_for(1s); // and says nothing
        });
        CHECK(std::chrono::steady_clock::now() - started < 20s);
        if (world_rank() == 0)
            check_passages(text,
                           {"ranks are in different exchanges: an offset of cu_seqlens after the eighth, or a valid "
                            "length: expected one batch as on rank 0",
                            "another on rank 1"});
    }

    TEST_CASE("a rank that leaves its transport alone for longer than the deadline breaks nothing by itself") {
        auto const text = error(300ms, [&](cpx::mpi& comm) {
            send_all(comm);
            std::this_thread::sleep_for(500ms);
            send_all(comm);
        });
        CHECK(text == "");
    }

    TEST_CASE("ranks in different exchanges are told so, with both named") {
        if (alone()) return;
        auto const text =
            error(20s, [](cpx::mpi& comm) { send_all(comm, std::array{1}, comm.rank() == 0 ? "relayout" : "halo"); });
        check_passages(text, {"ranks are in different exchanges: operation", "relayout", "halo", "rank 0"});
    }

    TEST_CASE("plans on which all ranks have agreed, run in another order on one rank, are found while they run") {
        if (alone()) return;
        auto const text = error(20s, [](cpx::mpi& comm) {
            cpx::head_sharded<> const heads(comm.ranks(), batch, {{comm.ranks(), 4}});
            auto const call = [&](bool first) {
                auto const to_heads = [&](auto const& from) -> cpx::plan {
                    return cpx::relayout(from, heads, comm.rank());
                };
                auto const p = first ? to_heads(cpx::shard(batch, cpx::zigzag<>{comm.ranks()}))
                                     : to_heads(cpx::shard(batch, cpx::sequential<>{comm.ranks()}));
                std::vector<double> const from(static_cast<std::size_t>(p.source_rows * p.source_width));
                std::vector<double> to(static_cast<std::size_t>(p.target_rows * p.target_width));
                cpx::exchange(p, cpx::rows<double const>(from, p.source_width), cpx::rows<double>(to, p.target_width),
                              comm);
            };
            call(true);
            call(false);
            call(comm.rank() != 1);
            call(comm.rank() == 1);
        });
        check_passages(text, {"ranks are in different exchanges: source layout", "rank 1", "zigzag", "sequential"});
    }

    TEST_CASE("a message of another size is an error, longer or shorter") {
        if (alone()) return;
        for (std::size_t const size : {2u, 100'000u}) {
            std::vector<int> const values(size, 3);
            auto const got = std::to_string(4 * size);
            auto const long_one = error(20s, [&](cpx::mpi& comm) {
                send_all(comm, comm.rank() == 0 ? std::span(values) : std::span(values).first(1));
                send_all(comm); // rank 0 itself got what it wanted
            });
            check_passages(long_one, {"bytes of a message: expected 4, got " + got});
            auto const short_one = error(20s, [&](cpx::mpi& comm) {
                send_all(comm, comm.rank() == 0 ? std::span(values).first(1) : std::span(values), "test", size);
                send_all(comm);
            });
            check_passages(short_one, {"bytes of a message: expected " + got + ", got 4"});
        }
    }

    TEST_CASE("after an error every later call throws at once, and a new transport works") {
        if (alone()) return;
        error(20s, [&](cpx::mpi& comm) {
            auto const first = support::message([&] { send_all(comm, std::array{1}, comm.rank() == 0 ? "a" : "b"); });
            CHECK(first != "");
            auto const started = std::chrono::steady_clock::now();
            rejects({"mpi: communicator: expected one that has not failed, got rank", " failed: "},
                    [&] { send_all(comm); });
            std::array<std::byte, 4> blob{};
            rejects({"expected one that has not failed"}, [&] { cpx::broadcast(comm, blob); });
            rejects({"expected one that has not failed"}, [&] { run(relayout(batch, comm.rank()), comm); });
            CHECK(std::chrono::steady_clock::now() - started < 5s);
        });
        CHECK(error(20s, [&](cpx::mpi& comm) { run(relayout(batch, comm.rank()), comm); }) == "");
    }

    TEST_CASE("sizes of broadcasts and of records that differ are found") {
        if (alone()) return;
        std::array<std::byte, 16> memory{};
        std::vector<std::byte> all(memory.size() * static_cast<std::size_t>(job::ranks()));
        auto const broadcast = error(20s, [&](cpx::mpi& comm) {
            cpx::broadcast(comm, std::span(memory).first(comm.rank() == 1 ? 5 : 4));
            send_all(comm); // only rank 1 has seen that it is wrong
        });
        check_passages(broadcast, {"ranks are in different exchanges: bytes", "5", "4"});
        auto const gather =
            error(20s, [&](cpx::mpi& comm) { cpx::gather(comm, memory.data(), all.data(), comm.rank() == 1 ? 5 : 4); });
        check_passages(gather, {"ranks are in different exchanges: bytes", "5", "4"});
    }

    TEST_CASE("an error of MPI is thrown with the call and what MPI says") {
        auto const text = error(20s, [](cpx::mpi& comm) {
            int const value = 1;
            auto const send = cpx::consecutive(comm.ranks(), reinterpret_cast<std::byte const*>(&value), 4);
            comm.transfer({}, {&send, 1}, {});
        });
        check_passages(text, {"mpi: MPI_Isend: expected success, got MPI_ERR_RANK"});
    }

    TEST_CASE("communicators and groups that cannot be are rejected") {
        job::ranks();
        rejects({"mpi: communicator: expected one of which this process is a rank, got MPI_COMM_NULL", "errors.cpp"},
                [] { cpx::mpi comm(MPI_COMM_NULL); });
        rejects({"mpi::split: color: expected not negative, got -1"}, [] { static_cast<void>(cpx::mpi::split(-1)); });
        rejects({"mpi_environment: level of threads: expected " + std::to_string(MPI_THREAD_MULTIPLE), "errors.cpp"},
                [] { cpx::mpi_environment environment(MPI_THREAD_MULTIPLE); });
        { cpx::mpi_environment second; } // does not end what it did not begin
        CHECK(job::ranks() > 0);
    }

    TEST_CASE("a deadline that is not positive is refused, and one without end waits") {
        job::ranks();
        for (auto const deadline : {0ms, -1ms, std::chrono::milliseconds::min()}) {
            auto const text = ": deadline, ms: expected more than 0, got " + std::to_string(deadline.count());
            rejects({" mpi" + text, "errors.cpp"}, [&] { cpx::mpi comm(MPI_COMM_WORLD, deadline); });
            rejects({" mpi::split" + text, "errors.cpp"},
                    [&] { static_cast<void>(cpx::mpi::split(0, MPI_COMM_WORLD, deadline)); });
            rejects({" mpi::run" + text, "errors.cpp"}, [&] { cpx::mpi::run([](cpx::mpi&) {}, deadline); });
        }
        constexpr auto never = std::chrono::milliseconds::max();
        auto const late = [] { // the others must wait
            if (world_rank() == 0) std::this_thread::sleep_for(100ms);
        };
        auto const text = support::message([&] {
            late();
            cpx::mpi comm(MPI_COMM_WORLD, never);
            late();
            cpx::mpi const group = cpx::mpi::split(0, MPI_COMM_WORLD, never);
            late();
            run(relayout(batch, comm.rank()), comm);
        });
        CHECK(text == "");
        job::meet();
    }

    TEST_CASE("ranks that do not come to a new transport are an error within the deadline") {
        if (alone()) return;
        auto const until = [](auto&& make) {
            std::string text;
            if (world_rank() == 0) std::this_thread::sleep_for(600ms);
            text = support::message([&] { make(); });
            MPI_Barrier(MPI_COMM_WORLD); // not meet(): ranks have left a collective that does not wait
            return text;
        };
        auto const text = until([] { cpx::mpi comm(MPI_COMM_WORLD, 100ms); });
        if (world_rank() != 0)
            check_passages(text, {"mpi: ranks of the communicator: expected all of them within 100 ms, got fewer"});
    }
}
