// SPDX-License-Identifier: Apache-2.0
#include <cpx/transport/threads.hpp>

#include <cpx/plan/halo.hpp>
#include <cpx/testing/transport.hpp>
#include <cpx/transport/transport_ref.hpp>

#include <doctest/doctest.h>

#include <support/rejects.hpp>

#include <array>
#include <atomic>

namespace {

using support::message;
using support::rejects;
using namespace std::chrono_literals;

/// Sends one int to every other rank and returns what came from each.
std::vector<int> all_to_all(cpx::threads& comm, int value, char const* operation = "test") {
    cpx::identity id;
    cpx::identity::set(id.operation, operation);
    std::vector<int> got(static_cast<std::size_t>(comm.ranks()), -1);
    std::vector<cpx::outgoing> sends;
    std::vector<cpx::incoming> receives;
    for (int peer = 0; peer < comm.ranks(); ++peer) {
        if (peer == comm.rank()) continue;
        sends.push_back(cpx::consecutive(peer, reinterpret_cast<std::byte const*>(&value), sizeof value));
        receives.push_back(
            cpx::consecutive(peer, reinterpret_cast<std::byte*>(&got[static_cast<std::size_t>(peer)]), sizeof value));
    }
    comm.transfer(id, sends, receives);
    return got;
}

/// Runs `program` on `ranks` threads and returns every rank's error. Every rank fails as its program does.
template <class F>
std::vector<std::string> errors(int ranks, std::chrono::milliseconds deadline, F&& program) {
    std::vector<std::string> texts(static_cast<std::size_t>(ranks));
    message([&] {
        cpx::threads::run(
            ranks,
            [&](cpx::threads& comm) {
                try {
                    program(comm);
                } catch (cpx::error const& e) {
                    texts[static_cast<std::size_t>(comm.rank())] = e.what();
                    throw;
                }
            },
            deadline);
    });
    return texts;
}

bool holds(std::string const& text, std::string const& passage) { return text.find(passage) != std::string::npos; }

enum class fault { deadline, no_ids, ids_of_agreements, byte, forgets, one_forgets, outlives, overtakes };

/// Threads that wait too long, hide the ids of exchanges or which are agreements, change a byte of what arrives, whose
/// `agreed()` is forgotten in calls, by all ranks or by one, or outlives the group, or whose long messages the short
/// ones of the next call overtake.
struct faulty_threads {
    cpx::threads& comm;
    fault what;
    std::vector<std::byte> kept = {};

    int rank() const { return comm.rank(); }
    int ranks() const { return comm.ranks(); }
    std::unordered_set<std::uint64_t>& agreed() {
        static std::array<std::unordered_set<std::uint64_t>, 3> of_process;
        if (what == fault::outlives) return of_process.at(static_cast<std::size_t>(rank()));
        return comm.agreed();
    }
    void transfer(cpx::identity id, std::span<cpx::outgoing const> sends, std::span<cpx::incoming const> receives) {
        if (what == fault::forgets || (what == fault::one_forgets && rank() == 0)) comm.agreed().clear();
        if (what == fault::no_ids) id = {};
        if (what == fault::ids_of_agreements) id[cpx::identity::agreement] = 0;
        bool const only_sends = sends.size() == 1 && receives.empty();
        if (what == fault::overtakes && only_sends && sends[0].bytes() == 1 << 17) {
            kept.resize(1 << 17);
            cpx::pack(sends[0], kept.data());
            return;
        }
        comm.transfer(id, sends, receives);
        if (!kept.empty() && only_sends) {
            std::byte const* const bytes = kept.data();
            cpx::outgoing const late = cpx::consecutive(sends[0].peer, bytes, std::ssize(kept));
            comm.transfer(id, std::span(&late, 1), {});
            kept.clear();
        }
        if (what == fault::byte && !receives.empty())
            cpx::for_each_run(receives.back(), [](std::byte* bytes, std::size_t) { *bytes ^= std::byte{1}; });
    }
};

TEST_SUITE("transport") {
    TEST_CASE("a program runs once on every rank") {
        for (int ranks : {1, 2, 5, 16}) {
            std::vector<std::atomic<int>> calls(static_cast<std::size_t>(ranks));
            cpx::threads::run(ranks, [&](cpx::threads& comm) {
                cpx::require(comm.ranks() == ranks, "test", "ranks", ranks, comm.ranks());
                ++calls[static_cast<std::size_t>(comm.rank())];
            });
            for (auto const& count : calls) CHECK(count == 1);
        }
    }

    TEST_CASE("messages arrive, again and again, on 1 to 8 ranks") {
        for (int ranks = 1; ranks <= 8; ++ranks)
            cpx::threads::run(ranks, [&](cpx::threads& comm) {
                for (int turn = 0; turn < 50; ++turn) {
                    auto const got = all_to_all(comm, turn * 100 + comm.rank());
                    for (int peer = 0; peer < ranks; ++peer) {
                        int const want = peer == comm.rank() ? -1 : turn * 100 + peer;
                        cpx::require(got[static_cast<std::size_t>(peer)] == want, "test", "value", want,
                                     got[static_cast<std::size_t>(peer)]);
                    }
                }
            });
    }

    TEST_CASE("rectangles are copied row by row and run by run") {
        std::array<char, 12> const source = {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j', 'k', 'l'};
        std::array<char, 12> target;
        target.fill('.');
        std::array<cpx::run, 2> const from_rows = {{{0, 1}, {2, 1}}}, to_rows = {{{1, 1}, {0, 1}}};
        std::array<cpx::run, 2> const from_columns = {{{3, 1}, {0, 2}}}, to_columns = {{{0, 1}, {4, 2}}};
        cpx::outgoing const from{0, reinterpret_cast<std::byte const*>(source.data()), 4, 1, from_rows, from_columns};
        cpx::incoming const to{0, reinterpret_cast<std::byte*>(target.data()), 6, 1, to_rows, to_columns};
        CHECK(from.bytes() == 6);
        CHECK(from.bytes() == to.bytes());
        cpx::copy(from, to);
        CHECK(std::string(target.begin(), target.end()) == "l...ijd...ab");
    }

    TEST_CASE("a rank that throws ends the others, and the error names it") {
        auto const texts = errors(4, 10s, [](cpx::threads& comm) {
            if (comm.rank() == 2) throw cpx::error("trainer", "out of luck");
            all_to_all(comm, 1);
        });
        for (int r : {0, 1, 3}) {
            CHECK(holds(texts[static_cast<std::size_t>(r)], "rank 2 failed"));
            CHECK(holds(texts[static_cast<std::size_t>(r)], "out of luck"));
        }
    }

    TEST_CASE("run throws an error that names the first rank that failed, with its exception nested in it") {
        try {
            cpx::threads::run(3, [](cpx::threads& comm) {
                if (comm.rank() == 1) throw std::out_of_range("beyond the end");
                all_to_all(comm, 1);
            });
            FAIL("nothing thrown");
        } catch (cpx::error const& e) {
            CHECK(holds(e.what(), "threads::run: rank 1 failed: beyond the end"));
            CHECK_THROWS_AS(std::rethrow_if_nested(e), std::out_of_range);
        }
        rejects({"rank 0 failed: an exception that is not a std::exception"},
                [] { cpx::threads::run(1, [](cpx::threads&) { throw 7; }); });
        auto const nothing = [](cpx::threads&) {};
        rejects({"threads.cpp", "threads::run: ranks: expected at least 1, got 0"},
                [&] { cpx::threads::run(0, nothing); });
        rejects({"threads.cpp", "threads::run: ranks: expected at most 8192, one thread each, got 1000000"},
                [&] { cpx::threads::run(1'000'000, nothing); });
    }

    TEST_CASE("a rank that returns before an exchange is named by the others") {
        auto const texts = errors(3, 10s, [](cpx::threads& comm) {
            if (comm.rank() != 1) all_to_all(comm, 1);
        });
        CHECK(texts[1].empty());
        for (std::size_t r : {0u, 2u}) CHECK(holds(texts[r], "rank 1"));
        CHECK((holds(texts[0], "its return") || holds(texts[2], "its return")));
    }

    TEST_CASE("who waits for a rank that has returned is told the batch of its last exchange, where that is another") {
        auto const texts = errors(2, 10s, [](cpx::threads& comm) { // at last, rank 0 sends nothing
            cpx::thd const usual({0, 9}), longer({0, 10});
            auto const step = [&](cpx::thd const& batch) {
                auto const x = cpx::make_tensor<float>(cpx::shard(batch, cpx::sequential<>(2)), comm, 1);
                auto const p = cpx::halo(x.sharding(), comm.rank(), 1);
                std::vector<float> rows(static_cast<std::size_t>(p.target_rows));
                cpx::exchange(p, x.data(), cpx::rows<float>(rows, 1), comm);
            };
            step(longer);
            step(usual);
            if (comm.rank() == 1) step(longer);
        });
        CHECK(texts[0].empty());
        CHECK_MESSAGE(holds(texts[1], "got its return after halo sequential<> over sequence, balanced -> "
                                      "sequential<> over sequence, balanced (offset 1 of cu_seqlens: 9 on rank 0, 10 "
                                      "on rank 1)"),
                      texts[1]);
    }

    TEST_CASE("a rank that does not come within the deadline is named by the others") {
        auto const texts = errors(3, 50ms, [](cpx::threads& comm) {
            if (comm.rank() == 2)
                std::this_thread::sleep_for(400ms);
            else
                all_to_all(comm, 1);
        });
        for (std::size_t r : {0u, 1u}) {
            CHECK(holds(texts[r], "waited in test for messages of rank 2 and for rank 2 to take theirs"));
            CHECK(holds(texts[r], "an end within 50 ms, got nothing from rank 2"));
        }
    }

    TEST_CASE("ranks in different exchanges are told so, with both named") {
        for (int const last : {0, 1}) {
            auto const texts = errors(2, 10s, [&](cpx::threads& comm) {
                if (comm.rank() == last) std::this_thread::sleep_for(20ms);
                all_to_all(comm, 1, comm.rank() == 0 ? "relayout" : "halo");
            });
            for (std::string const& text : texts) {
                CHECK(holds(text, "ranks are in different exchanges: operation"));
                CHECK(holds(text, "relayout"));
                CHECK(holds(text, "halo"));
                CHECK(holds(text, "rank 0"));
                CHECK(holds(text, "rank 1"));
            }
        }
    }

    TEST_CASE("whoever keeps the others waiting is named at the deadline, and not who waits for it, too") {
        auto const texts = errors(4, 100ms, [](cpx::threads& comm) { // 0 waits for 1, 1 for 2, 2 for 3
            if (comm.rank() == 3) return std::this_thread::sleep_for(400ms);
            std::this_thread::sleep_for(10ms * comm.rank()); // 0's deadline passes first
            int got = 0;
            auto const receive = cpx::consecutive(comm.rank() + 1, reinterpret_cast<std::byte*>(&got), sizeof got);
            comm.transfer({}, {}, {&receive, 1});
        });
        for (std::size_t r : {0u, 1u, 2u}) CHECK_MESSAGE(holds(texts[r], "got nothing from rank 3"), texts[r]);
    }

    TEST_CASE("ranks of which each waits for another are told so at once") {
        for (bool const in_one : {true, false}) {
            auto const texts = errors(3, 60s, [&](cpx::threads& comm) { // all receive, nobody sends
                cpx::identity id;
                cpx::identity::set(id.operation, in_one || comm.rank() != 1 ? "relayout" : "halo");
                int got = 0;
                auto const receive =
                    cpx::consecutive((comm.rank() + 1) % 3, reinterpret_cast<std::byte*>(&got), sizeof got);
                comm.transfer(id, {}, {&receive, 1});
            });
            for (auto const& text : texts)
                CHECK_MESSAGE(holds(text, in_one ? "got ranks that wait for each other"
                                                 : "got relayout in relayout (ranks 0 2), halo in halo (rank 1)"),
                              text);
        }
    }

    TEST_CASE("a deadline that is not positive is refused") {
        for (auto const deadline : {0ms, std::chrono::milliseconds::min()})
            rejects({"threads.cpp",
                     "threads::run: deadline, ms: expected more than 0, got " + std::to_string(deadline.count())},
                    [&] {
                        cpx::threads::run(
                            1, [](cpx::threads&) {}, deadline);
                    });
    }

    TEST_CASE("a message of another size is an error, and nothing is written") {
        for (int const last : {0, 1}) {
            int target = 7;
            auto const texts = errors(2, 10s, [&](cpx::threads& comm) {
                if (comm.rank() == last) std::this_thread::sleep_for(20ms);
                cpx::identity const id;
                std::array<int, 2> const source = {1, 2};
                auto const send = cpx::consecutive(1, reinterpret_cast<std::byte const*>(source.data()), 8);
                auto const receive = cpx::consecutive(0, reinterpret_cast<std::byte*>(&target), 4);
                if (comm.rank() == 0)
                    comm.transfer(id, {&send, 1}, {});
                else
                    comm.transfer(id, {}, {&receive, 1});
            });
            CHECK(target == 7);
            CHECK(holds(texts[1], "bytes of a message: expected 4, got 8"));
            CHECK(holds(texts[0], "rank 1 failed"));
        }
    }

    TEST_CASE("no error leaves a call while its message is copied") {
        for (int const last : {0, 1}) {                                                  // which copies
            std::array<cpx::run, 1> const rows = {{{0, 1 << 22}}}, columns = {{{0, 1}}}; // byte by byte: not at once
            std::string source(std::size_t{1} << 23, 1), target(source.size(), 0), seen;
            auto const texts = errors(3, 6ms, [&](cpx::threads& comm) {
                if (comm.rank() == 2) return std::this_thread::sleep_for(30ms);
                if (comm.rank() == last) std::this_thread::sleep_for(3ms);
                char got = 0;
                cpx::outgoing const send{1, reinterpret_cast<std::byte const*>(source.data()), 2, 1, rows, columns};
                std::array<cpx::incoming, 2> const receives{
                    {{0, reinterpret_cast<std::byte*>(target.data()), 2, 1, rows, columns},
                     cpx::consecutive(2, reinterpret_cast<std::byte*>(&got), 1)}};
                try {
                    if (comm.rank() == 0)
                        comm.transfer({}, {&send, 1}, {&receives[1], 1});
                    else
                        comm.transfer({}, {}, receives);
                } catch (cpx::error const&) {
                    if (comm.rank() == 0)
                        std::ranges::fill(source, char{9});
                    else
                        seen = target;
                    throw;
                }
            });
            CHECK((!texts[0].empty() && !texts[1].empty()));
            CHECK((seen == target)); // too long to be told
            CHECK(std::ranges::count(target, char{9}) == 0);
        }
    }

    TEST_CASE("threads do all that a transport owes, and its courtesies") {
        for (int const ranks : {1, 4}) {
            auto const found = cpx::testing::check_transport(
                [&](auto const& program, auto deadline) { cpx::threads::run(ranks, program, deadline); }, 200ms);
            CHECK_MESSAGE((found.all_duties() && found.all_courtesies()), ranks << " ranks\n" << found.text());
        }
    }

    TEST_CASE("any transport behind one type does what it did") {
        auto const found = cpx::testing::check_transport(
            [](auto const& program, auto deadline) {
                cpx::threads::run(
                    3,
                    [&](cpx::threads& comm) {
                        cpx::transport_ref some(comm);
                        program(some);
                    },
                    deadline);
            },
            200ms);
        CHECK_MESSAGE((found.all_duties() && found.all_courtesies()), found.text());
    }

    TEST_CASE("the test of transports finds what is wrong with one") {
        auto const wrong_with = [](fault what) {
            auto const run = [&](auto const& program, auto deadline) {
                cpx::threads::run(
                    3,
                    [&](cpx::threads& comm) {
                        faulty_threads faulty{comm, what};
                        program(faulty);
                    },
                    what == fault::deadline ? 10s : deadline);
            };
            std::string list;
            for (auto const& f : cpx::testing::check_transport(run, 200ms).findings)
                if (!f.problem.empty()) list += (list.empty() ? "" : "; ") + f.property;
            return list;
        };
        CHECK(wrong_with(fault::no_ids) == "ranks in different exchanges are told so");
        CHECK(wrong_with(fault::ids_of_agreements) == "ranks whose plans differ can compare them");
        std::string const kept = "agreed() is empty at first, is this rank's own, and keeps what is put there",
                          anew = "agreed() is empty again in the next group";
        CHECK(wrong_with(fault::forgets) == kept + "; " + anew);
        CHECK(wrong_with(fault::one_forgets) == kept + "; " + anew + "; plans run there and back, and once more; " +
                                                    "a movement runs there and back, for one batch after the other");
        CHECK(wrong_with(fault::outlives) == anew);
        CHECK(wrong_with(fault::deadline) ==
              "a rank that does not come is an error within the deadline; which names it");
        CHECK(wrong_with(fault::overtakes) == "messages arrive in the order of the calls, short ones behind long ones");
        CHECK(wrong_with(fault::byte)
                  .find("messages of any rows, columns and strides arrive, and nothing else is written; "
                        "messages without bytes") != std::string::npos);
    }

    TEST_CASE("the test of transports says so where no rank has run") {
        auto const found =
            cpx::testing::check_transport([](auto const&, auto) { throw std::runtime_error("out of sockets"); });
        CHECK(!found.all_duties());
        CHECK(
            holds(found.text(), "duty      NO   a rank that throws ends the others: no rank has run: out of sockets"));
        CHECK(!holds(found.text(), " yes "));
    }

    TEST_CASE("the test of transports takes no courtesy for seen where a rank has thrown something else") {
        struct of_another_library {
            cpx::threads& comm;
            int rank() const { return comm.rank(); }
            int ranks() const { return comm.ranks(); }
            std::unordered_set<std::uint64_t>& agreed() { return comm.agreed(); }
            void transfer(cpx::identity const&, std::span<cpx::outgoing const>, std::span<cpx::incoming const>) {
                throw std::runtime_error("no socket");
            }
        };
        auto const found = cpx::testing::check_transport(
            [](auto const& program, auto deadline) {
                cpx::threads::run(
                    2,
                    [&](cpx::threads& comm) {
                        of_another_library other{comm};
                        program(other);
                    },
                    deadline);
            },
            200ms);
        CHECK(!found.all_courtesies());
        CHECK_MESSAGE(!holds(found.text(), "courtesy  yes"), found.text());
    }

    TEST_CASE("the test of transports takes what is told when the deadline has passed for no courtesy") {
        struct late_threads {
            cpx::threads& comm;
            std::chrono::milliseconds deadline;
            int rank() const { return comm.rank(); }
            int ranks() const { return comm.ranks(); }
            std::unordered_set<std::uint64_t>& agreed() { return comm.agreed(); }
            void transfer(cpx::identity const& id, std::span<cpx::outgoing const> sends,
                          std::span<cpx::incoming const> receives) {
                auto const end = std::chrono::steady_clock::now() + deadline;
                try {
                    comm.transfer(id, sends, receives);
                } catch (cpx::error const&) {
                    if (deadline < 1min) std::this_thread::sleep_until(end);
                    throw;
                }
            }
        };
        auto const found = cpx::testing::check_transport(
            [](auto const& program, std::chrono::milliseconds deadline) {
                cpx::threads::run(
                    2,
                    [&](cpx::threads& comm) {
                        late_threads late{comm, deadline};
                        program(late);
                    },
                    deadline);
            },
            50ms);
        auto const told_at_once = [](auto const& f) { return f.property.starts_with("they are told at once"); };
        CHECK(std::ranges::count_if(found.findings, told_at_once) == 2);
        for (auto const& f : found.findings)
            CHECK_MESSAGE((!told_at_once(f) || holds(f.problem, "ms only")), found.text());
    }

    TEST_CASE("a group whose threads the caller starts does what run does") {
        auto const run = [](auto const& program, std::chrono::milliseconds deadline) {
            cpx::threads::group ranks(3, deadline);
            std::vector<std::thread> members;
            for (int rank = 0; rank < 3; ++rank)
                members.emplace_back([&, rank] {
                    try {
                        program(ranks.at(rank));
                    } catch (std::exception const& e) {
                        ranks.fail(rank, e.what());
                    }
                    ranks.leave(rank);
                });
            for (auto& member : members) member.join();
        };
        auto const found = cpx::testing::check_transport(run, 200ms);
        CHECK_MESSAGE(found.all_duties(), found.text());
    }

    TEST_CASE("a group whose threads the caller starts names ranks that are none") {
        cpx::threads::group ranks(2);
        rejects({"threads::group::at: rank", "0 to 1", "got 2"}, [&] { ranks.at(2); });
        rejects({"threads::group::leave: rank", "got -1"}, [&] { ranks.leave(-1); });
        rejects({"threads::group::fail: rank", "got 7"}, [&] { ranks.fail(7, "why"); });
        rejects({"threads::group: ranks", "at least 1"}, [] { cpx::threads::group none(0); });
        rejects({"threads::group: ranks", "at most 8192", "got 8193"}, [] { cpx::threads::group many(8193); });
        rejects({"threads::group: deadline, ms", "got 0"}, [] { cpx::threads::group hasty(2, 0ms); });
    }

    TEST_CASE("a group can be used after another has failed") {
        CHECK(message([] { cpx::threads::run(2, [](cpx::threads&) { throw std::runtime_error("no"); }); }) != "");
        CHECK_NOTHROW(cpx::threads::run(2, [](cpx::threads& comm) { all_to_all(comm, 1); }));
    }
}

} // namespace
