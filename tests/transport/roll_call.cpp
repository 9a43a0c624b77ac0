// SPDX-License-Identifier: Apache-2.0
// Ranks of one host that have died, left, given up or fallen behind are told from each other.
#include <cpx/transport/roll_call.hpp>

#include <doctest/doctest.h>

#include <support/skipped.hpp>

#include <sys/ptrace.h>
#include <sys/wait.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <vector>

namespace {

/// Errors call rank r 10 + r.
std::vector<int> numbers(int ranks) {
    std::vector<int> list(static_cast<std::size_t>(ranks));
    std::iota(list.begin(), list.end(), 10);
    return list;
}

/// Ranks 1 to `last` of `ranks` as processes: each comes, runs `f(call, rank)` and waits to be killed.
struct others {
    std::atomic<int>* here;
    std::vector<pid_t> processes;

    template <class F>
    others(std::string const& name, int ranks, int last, F&& f)
        : here(static_cast<std::atomic<int>*>(
              ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
        here->store(0);
        for (int rank = 1; rank <= last; ++rank) {
            pid_t const child = ::fork();
            if (child == 0) {
                {
                    cpx::roll_call call(name, rank, numbers(ranks));
                    here->fetch_add(1);
                    while (here->load() < last) ::usleep(100); // nobody leaves before all have come
                    if (f(call, rank)) {
                        here->fetch_add(1);
                        for (;;) ::pause();
                    }
                } // leaves in good order
                here->fetch_add(1);
                ::_exit(0);
            }
            processes.push_back(child);
        }
        while (here->load() < 2 * last) ::usleep(100);
    }
    void kill(int rank) const {
        ::kill(processes[static_cast<std::size_t>(rank) - 1], SIGKILL);
        siginfo_t info; // nobody asks for it yet: it stays as a zombie
        ::waitid(P_PID, static_cast<id_t>(processes[static_cast<std::size_t>(rank) - 1]), &info, WEXITED | WNOWAIT);
    }
    /// Ends a rank and holds it on its way out, where those linger that give back gigabytes. Returns false if this
    /// process may not.
    bool hold_at_exit(int rank) const {
        pid_t const process = processes[static_cast<std::size_t>(rank) - 1];
        if (::ptrace(PTRACE_SEIZE, process, nullptr, PTRACE_O_TRACEEXIT) != 0) return false;
        ::kill(process, SIGUSR1); // of which doctest makes nothing
        for (int status = 0; ::waitpid(process, &status, 0) == process && WIFSTOPPED(status);) {
            if (status >> 8 == (SIGTRAP | (PTRACE_EVENT_EXIT << 8))) return true;
            ::ptrace(PTRACE_CONT, process, nullptr, WSTOPSIG(status));
        }
        return false;
    }
    ~others() {
        for (pid_t const child : processes) {
            ::kill(child, SIGKILL);
            ::waitpid(child, nullptr, 0);
        }
        ::munmap(here, sizeof(std::atomic<int>));
    }
};

std::string page() { return "cpx.test." + std::to_string(::getpid()); }

} // namespace

TEST_SUITE("transport") {
    TEST_CASE("a rank that was killed is named before those that are behind, by the number that errors use") {
        cpx::roll_call call(page(), 0, numbers(4));
        others const ranks(page(), 4, 3, [](cpx::roll_call& mine, int rank) {
            if (rank != 3) mine.begin_call();
            return true;
        });
        call.everyone_is_here();
        CHECK(call.missing() == "");
        CHECK(call.dead() == "");
        call.begin_call();
        CHECK(call.missing() == " 13");
        call.begin_call();
        CHECK(call.missing() == " 11 12 13");
        ranks.kill(2);
        CHECK(!call.alive(2));
        CHECK(call.alive(1));
        CHECK(call.dead() == " 12");
        CHECK(call.missing() == " 12");
    }

    TEST_CASE("a rank that was killed when all had come is named, though nobody had noticed that they had") {
        cpx::roll_call call(page(), 0, numbers(3));
        others const ranks(page(), 3, 2, [](cpx::roll_call&, int) { return true; });
        ranks.kill(1); // at once: it may not have met them, either
        call.everyone_is_here();
        CHECK(call.missing() == " 11");
    }

    TEST_CASE("a rank that is on its way out is named, though it is not dead yet") {
        cpx::roll_call call(page(), 0, numbers(2));
        others const ranks(page(), 2, 1, [](cpx::roll_call&, int) { return true; });
        call.everyone_is_here();
        CHECK(call.alive(1));
        if (!support::enough(1, ranks.hold_at_exit(1), "processes that may be traced")) return;
        CHECK(!call.alive(1));
        CHECK(call.missing() == " 11");
        ::ptrace(PTRACE_DETACH, ranks.processes[0], nullptr, 0);
    }

    TEST_CASE("those who gave up because of others are not named, unless nobody else is at fault") {
        cpx::roll_call call(page(), 0, numbers(4));
        {
            others const ranks(page(), 4, 3, [](cpx::roll_call& mine, int rank) {
                if (rank == 1) mine.give_up();
                return rank == 3; // 1 and 2 leave
            });
            call.everyone_is_here();
            CHECK(call.dead() == " 12");
            ranks.kill(3);
            CHECK(call.dead() == " 12 13");
        }
    }

    TEST_CASE("a rank that is behind is named, and not those that gave up because of it") {
        cpx::roll_call call(page(), 0, numbers(4));
        others const ranks(page(), 4, 3, [](cpx::roll_call& mine, int rank) {
            if (rank == 1) return true; // never begins a call
            mine.begin_call();
            mine.give_up();
            return rank == 3; // 2 leaves
        });
        call.everyone_is_here();
        call.begin_call();
        CHECK(call.missing() == " 11");
        call.begin_call(); // 13 is behind, too
        CHECK(call.missing() == " 11");
        ranks.kill(1);
        CHECK(call.missing() == " 11");
    }

    TEST_CASE("a rank that failed by itself is named while it lives, and before those that are behind") {
        cpx::roll_call call(page(), 0, numbers(4));
        others const ranks(page(), 4, 3, [](cpx::roll_call& mine, int rank) {
            if (rank == 2) {
                mine.fail();
                mine.give_up(); // says no more
            }
            return true;
        });
        call.everyone_is_here();
        CHECK(call.alive(2));
        CHECK(call.dead() == " 12");
        call.begin_call();
        CHECK(call.missing() == " 12");
    }

    TEST_CASE("a rank that left when all was done is not named for one that is behind") {
        cpx::roll_call call(page(), 0, numbers(3));
        others const ranks(page(), 3, 2, [](cpx::roll_call& mine, int rank) {
            if (rank == 1) mine.begin_call();
            return rank == 2;
        });
        call.everyone_is_here();
        call.begin_call();
        CHECK(call.missing() == " 12");
        call.begin_call(); // for which 11 did not stay
        CHECK(call.missing() == " 11");
    }

    TEST_CASE("a rank that gave up and lives is named if there is nobody else") {
        cpx::roll_call call(page(), 0, numbers(3));
        others const ranks(page(), 3, 2, [](cpx::roll_call& mine, int rank) {
            mine.begin_call();
            if (rank == 1) mine.give_up();
            return true;
        });
        call.everyone_is_here();
        call.begin_call();
        CHECK(call.missing() == " 11");
    }

    TEST_CASE("an error after others have left is not this rank's own") {
        cpx::roll_call call(page(), 0, numbers(3));
        others const ranks(page(), 3, 2, [](cpx::roll_call& mine, int rank) {
            if (rank == 2) mine.give_up();
            return true;
        });
        call.everyone_is_here();
        call.fail();
        call.begin_call();
        CHECK(call.missing() == " 11");
    }

    TEST_CASE("who gave up before all had come is not named with whom it waited for") {
        cpx::roll_call call(page(), 0, numbers(3));
        others const ranks(page(), 3, 1, [](cpx::roll_call& mine, int) {
            mine.give_up();
            return false;
        });
        CHECK(call.missing() == " 12");
    }

    TEST_CASE("a rank that alone has given up and left is named") {
        cpx::roll_call call(page(), 0, numbers(2));
        others const ranks(page(), 2, 1, [](cpx::roll_call& mine, int) {
            mine.give_up();
            return false;
        });
        call.everyone_is_here();
        CHECK(call.dead() == " 11");
        CHECK(call.missing() == " 11");
    }

    TEST_CASE("ranks whose plans differ are told in what, and who gave up because of that is not missing") {
        cpx::roll_call first(page(), 0, numbers(3)), second(page(), 1, numbers(3));
        first.everyone_is_here();
        second.everyone_is_here();
        cpx::identity plan;
        plan[cpx::identity::tokens] = 24;
        first.runs(plan);
        CHECK(first.differences() == ""); // the other has none
        plan[cpx::identity::tokens] = 30;
        second.runs(plan);
        CHECK(first.differences() == ": tokens 24 on rank 10, 30 on rank 11");
        CHECK(second.differences() == first.differences());
        second.give_up();
        CHECK(first.missing() == "");
        first.runs(plan);
        CHECK(first.differences() == "");
        CHECK(first.missing() == " 11");
    }

    TEST_CASE("plans that differed in a call are told, though later ones do not, until a wait is over") {
        cpx::roll_call first(page(), 0, numbers(2)), second(page(), 1, numbers(2));
        auto const run = [](cpx::roll_call& call, std::uint64_t tokens) {
            cpx::identity plan;
            plan[cpx::identity::tokens] = tokens;
            call.runs(plan);
            call.begin_call();
        };
        std::string const told = ": tokens 30 on rank 10, 36 on rank 11";
        run(first, 24), run(second, 24);
        CHECK(first.differences() == "");
        run(first, 30), run(second, 36);
        run(first, 48), run(second, 48);
        CHECK(first.differences() == told);
        CHECK(second.differences() == told);
        first.waited();
        CHECK(first.differences() == "");
        CHECK(second.differences() == told); // which has not waited

        run(first, 60);
        CHECK(first.differences() == ""); // the other has not come so far
        second.begin_call();              // and goes on by the plan before, which it need not set
        CHECK(first.differences() == ": tokens 60 on rank 10, 48 on rank 11");
        first.waited();
        CHECK(first.differences() == ": tokens 60 on rank 10, 48 on rank 11"); // of the next call
        for (int i = 0; i < 20; ++i) run(first, 72), run(second, 72);          // more than a page keeps
        CHECK(first.differences() == "");
    }

    TEST_CASE("who has not come is missing until everyone is here; then it is on another host") {
        cpx::roll_call call(page(), 0, numbers(3));
        CHECK(call.missing() == " 11 12");
        others const ranks(page(), 3, 1, [](cpx::roll_call&, int) { return true; });
        CHECK(call.missing() == " 12");
        call.everyone_is_here();
        CHECK(call.missing() == "");
        CHECK(!call.alive(2));
    }

    TEST_CASE("what a group that never was complete leaves behind accuses nobody of a later one") {
        { // nobody of this one lives on
            cpx::roll_call call(page(), 0, numbers(3));
            others const ranks(page(), 3, 2, [](cpx::roll_call& mine, int rank) {
                if (rank == 2) mine.give_up();
                return true;
            });
            ranks.kill(1);
            ranks.kill(2);
        }
        cpx::roll_call again(page(), 0, numbers(3));
        CHECK(again.missing() == " 11 12"); // not come, by a page of their own
        again.everyone_is_here();           // from other hosts
        CHECK(again.missing() == "");
        CHECK(again.dead() == "");
    }

    TEST_CASE("a page with the processes of a group that was killed accuses nobody of a later one") {
        std::string const name = page();
        pid_t const killed = ::fork();
        if (killed == 0) {
            auto* const call = new cpx::roll_call(name, 1, numbers(2)); // leaves the page behind
            static_cast<void>(call);
            ::_exit(0);
        }
        ::waitpid(killed, nullptr, 0);
        cpx::roll_call call(name, 0, numbers(2));
        CHECK(call.missing() == " 11");
        call.everyone_is_here();
        CHECK(call.missing() == "");
    }
}
