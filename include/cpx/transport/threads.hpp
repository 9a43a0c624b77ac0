// SPDX-License-Identifier: Apache-2.0
// W ranks as threads of one process: the whole of cpx without a GPU or a launcher.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/transport/concept.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace cpx {

/// One rank of a group of threads. Messages are copied once, from the sender's rows to the receiver's.
///
///     cpx::threads::run(4, [&](cpx::threads& comm) { ... every rank's program ... });
///
/// A rank that throws ends the others: their next or present exchange throws an error that names it. No wait outlasts
/// the deadline.
class threads {
public:
    /// Calls `program(comm)` on `ranks` threads and waits for them all. `deadline` is the longest that a rank waits for
    /// the others in one exchange; at most a year.
    ///
    /// If ranks throw, throws a `cpx::error` that names the first of them, with its exception nested in it.
    template <class F>
    static void run(int ranks, F&& program, std::chrono::milliseconds deadline = std::chrono::minutes(10)) {
        require(ranks > 0, "threads::run", "ranks", "at least 1", ranks);
        world shared(ranks, deadline);
        std::vector<std::thread> members;
        try {
            for (int rank = 0; rank < ranks; ++rank)
                members.emplace_back([&shared, &program, rank] { run_rank(shared, program, rank); });
        } catch (std::exception const& e) { // the system has no more threads: end those that run
            shared.fail(static_cast<int>(members.size()), e.what());
        }
        for (auto& member : members) member.join();
        shared.rethrow();
    }

    int rank() const { return rank_; }
    int ranks() const { return static_cast<int>(world_.members.size()); }
    std::unordered_set<std::uint64_t>& agreed() { return agreed_; }

    /// See `transport`. Also throws if a peer is in an exchange of another plan, naming both and what differs.
    void transfer(identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        std::unique_lock lock(world_.mutex);
        auto const deadline = std::chrono::steady_clock::now() + world_.deadline;
        try {
            check_failure();
            for (outgoing const& parcel : sends) {
                world_.at(rank_, parcel.peer) = {post::ready, &parcel, &id};
                world_.member_at(parcel.peer).wake.notify_one();
            }
            for (incoming const& parcel : receives) receive(lock, deadline, id, parcel);
            for (outgoing const& parcel : sends)
                wait(lock, deadline, parcel.peer, "to take a message",
                     [&] { return world_.at(rank_, parcel.peer).state == post::empty; });
        } catch (...) {
            withdraw(lock, sends);
            throw;
        }
    }

private:
    struct world;

    template <class F>
    static void run_rank(world& shared, F& program, int rank) {
        try {
            threads comm(shared, rank);
            program(comm);
            shared.leave(rank);
        } catch (std::exception const& e) {
            shared.fail(rank, e.what());
        } catch (...) {
            shared.fail(rank, "an exception that is not a std::exception");
        }
    }

    struct post {
        enum { empty, ready, copying } state = empty;
        outgoing const* parcel = nullptr;
        identity const* id = nullptr;
    };

    struct member {
        std::condition_variable wake;
        bool left = false;
    };

    struct world {
        world(int ranks, std::chrono::milliseconds longest_wait)
            : deadline(std::min<std::chrono::milliseconds>(longest_wait, std::chrono::hours(24 * 365))),
              members(static_cast<std::size_t>(ranks)),
              posts(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks)) {}

        post& at(int from, int to) {
            return posts[static_cast<std::size_t>(from) * members.size() + static_cast<std::size_t>(to)];
        }
        member& member_at(int rank) { return members[static_cast<std::size_t>(rank)]; }

        void leave(int rank) {
            std::lock_guard lock(mutex);
            member_at(rank).left = true;
            for (member& m : members) m.wake.notify_all();
        }
        void fail(int rank, std::string why) {
            std::lock_guard lock(mutex);
            if (failed < 0) {
                failed = rank;
                reason = std::move(why);
                exception = std::current_exception();
            }
            for (member& m : members) m.wake.notify_all();
        }
        void rethrow() {
            if (failed < 0) return;
            try {
                std::rethrow_exception(exception);
            } catch (...) {
                std::throw_with_nested(error("threads::run", "rank " + std::to_string(failed) + " failed: " + reason));
            }
        }

        std::chrono::milliseconds deadline;
        std::mutex mutex;
        std::vector<member> members;
        std::vector<post> posts;
        int failed = -1;
        std::string reason;
        std::exception_ptr exception;
    };

    threads(world& shared, int rank) : world_(shared), rank_(rank) {}

    void receive(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::time_point deadline, identity const& id,
                 incoming const& parcel) {
        post& from = world_.at(parcel.peer, rank_);
        wait(lock, deadline, parcel.peer, "to send a message", [&] { return from.state == post::ready; });
        require_same_exchange("threads", id, rank_, *from.id, parcel.peer);
        require(from.parcel->bytes() == parcel.bytes(), "threads", "bytes of a message", parcel.bytes(),
                from.parcel->bytes());
        from.state = post::copying;
        lock.unlock();
        copy(*from.parcel, parcel);
        lock.lock();
        from.state = post::empty;
        world_.member_at(parcel.peer).wake.notify_one();
    }

    template <class Done>
    void wait(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::time_point deadline, int peer,
              char const* what, Done done) {
        auto& me = world_.member_at(rank_);
        auto const over = [&] { return done() || world_.failed >= 0 || world_.member_at(peer).left; };
        bool const in_time = me.wake.wait_until(lock, deadline, over);
        if (done()) return;
        check_failure();
        std::string const who = "rank " + std::to_string(peer);
        if (!in_time)
            throw error("threads", "rank " + std::to_string(rank_) + " waited for " + who + ' ' + what,
                        "within " + std::to_string(world_.deadline.count()) + " ms", "nothing");
        throw error("threads", "rank " + std::to_string(rank_) + " waits for " + who + ' ' + what,
                    who + " to take part", "its return");
    }

    void check_failure() const {
        if (world_.failed >= 0)
            throw error("threads", "rank " + std::to_string(world_.failed) + " failed: " + world_.reason);
    }

    /// Takes back what nobody has taken yet, because the caller is about to free it.
    void withdraw(std::unique_lock<std::mutex>& lock, std::span<outgoing const> sends) {
        for (outgoing const& parcel : sends) {
            post& own = world_.at(rank_, parcel.peer);
            world_.member_at(rank_).wake.wait(lock, [&] { return own.state != post::copying; });
            own.state = post::empty;
        }
    }

    world& world_;
    int rank_;
    std::unordered_set<std::uint64_t> agreed_;
};

static_assert(transport<threads>);

} // namespace cpx
