// SPDX-License-Identifier: Apache-2.0
// A transport of one's own: ranks are processes that this one forks, with a socket between each two of them.
#include <cpx/cpx.hpp>
#include <cpx/testing/transport.hpp>

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>
#include <map>

using ends = std::map<std::pair<int, int>, int>; ///< of sockets: the rank that has it, and the rank at the other end

/// A message is the identity of its exchange, its length and its bytes.
struct header {
    cpx::identity id;
    cpx::index_t bytes = 0;
};

struct sockets {
    int my_rank, all_ranks;
    ends ends_of;
    std::unordered_set<std::uint64_t> fingerprints{};
    int rank() const { return my_rank; }
    int ranks() const { return all_ranks; }
    std::unordered_set<std::uint64_t>& agreed() { return fingerprints; }

    void transfer(cpx::identity const& id, std::span<cpx::outgoing const> sends,
                  std::span<cpx::incoming const> receives) {
        auto sending = std::async(std::launch::async, [&] { // a peer may wait for this rank to receive first
            for (cpx::outgoing const& parcel : sends) {
                header head{id, parcel.bytes()};
                std::vector<std::byte> bytes(static_cast<std::size_t>(head.bytes));
                cpx::pack(parcel, bytes.data());
                move(::send, parcel.peer, &head, sizeof head);
                move(::send, parcel.peer, bytes.data(), bytes.size());
            }
        });
        for (cpx::incoming const& parcel : receives) {
            header head;
            move(::recv, parcel.peer, &head, sizeof head);
            cpx::require_same_exchange("sockets", id, my_rank, head.id, parcel.peer);
            cpx::require(head.bytes == parcel.bytes(), "sockets", "bytes", parcel.bytes(), head.bytes);
            std::vector<std::byte> bytes(static_cast<std::size_t>(head.bytes));
            move(::recv, parcel.peer, bytes.data(), bytes.size());
            cpx::unpack(bytes.data(), parcel);
        }
        sending.get();
    }

    template <class Call>
    void move(Call call, int peer, void* data, std::size_t size) const {
        auto const moved = size > 0 ? call(ends_of.at({my_rank, peer}), data, size, MSG_WAITALL | MSG_NOSIGNAL) : 0;
        if (moved != static_cast<ssize_t>(size)) // a process that ends closes its sockets, whatever ends it
            throw cpx::error("sockets", "rank " + std::to_string(peer), "all of a message within the deadline",
                             moved < 0 ? std::strerror(errno) : "its end");
    }
};

/// Calls `program(comm)` in a process for each rank. Returns when all have ended; throws if some have failed.
template <class F>
void run(int ranks, F&& program, std::chrono::milliseconds deadline) {
    ends all;
    timeval const limit{deadline.count() / 1000, deadline.count() % 1000 * 1000};
    for (int a = 0, pair[2]; a < ranks; ++a)
        for (int b = 0; b < a; ++b) {
            cpx::require(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "run", "socketpair", 0, errno);
            for (int const i : {0, 1, 2, 3}) // no wait for a socket is without end
                ::setsockopt(pair[i / 2], SOL_SOCKET, i % 2 ? SO_RCVTIMEO : SO_SNDTIMEO, &limit, sizeof limit);
            all[{a, b}] = pair[0], all[{b, a}] = pair[1];
        }
    auto const close_but = [&](int rank) {
        std::erase_if(all, [&](auto const& e) { return e.first.first != rank && ::close(e.second) == 0; });
    };
    for (int rank = 0; rank < ranks; ++rank)
        if (::fork() == 0) try {
                close_but(rank);
                sockets comm{rank, ranks, all};
                program(comm);
                ::_exit(0);
            } catch (std::exception const&) {
                ::_exit(1);
            }
    close_but(-1);
    int failed = 0;
    for (int rank = 0, status = 1; rank < ranks; ++rank) failed += ::wait(&status) < 0 || status != 0;
    cpx::require(failed == 0, "run", "ranks that failed", 0, failed);
}

int main() {
    auto const on_three_ranks = [](auto const& program, auto deadline) { run(3, program, deadline); };
    auto const found = cpx::testing::check_transport(on_three_ranks);
    return std::fputs(found.text().c_str(), stdout) >= 0 && found.all_duties() ? 0 : 1;
}
