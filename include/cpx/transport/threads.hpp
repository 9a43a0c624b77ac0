// SPDX-License-Identifier: Apache-2.0
// W ranks as threads of one process: the whole of cpx without a GPU or a launcher.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/function_ref.hpp>
#include <cpx/transport/concept.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

namespace cpx {

class threads;

namespace detail {

template <class X>
threads&& unstarted_threads() {
    static_assert(never<X>, "cpx: threads of one process are started together, threads::run(ranks, program) "
                            "with [&](cpx::threads& comm) { ... }, or are ranks of a threads::group");
    throw;
}

} // namespace detail

/// One rank of a group of threads. Messages are copied once, from the sender's rows to the receiver's.
///
///     cpx::threads::run(4, [&](cpx::threads& comm) { ... every rank's program ... });
///
/// A rank that throws ends the others: their next or present exchange throws an error that names it. So do one that
/// returns and one that runs another plan. No wait outlasts the deadline; then who keeps the others waiting is named.
class threads {
public:
    /// The most ranks of a group: each two of them take 24 bytes.
    static constexpr int most_ranks = 1 << 13;

    /// Calls `program(comm)` on `ranks` threads and waits for them all. `deadline` is the longest that a rank waits for
    /// the others in one exchange; at most a year.
    ///
    /// If ranks throw, throws a `cpx::error` that names the first of them, with its exception nested in it. Where the
    /// system starts fewer threads, throws one that says how many.
    template <
        class F> // no concept: of a mistake within the program, clang++ would tell at length how it satisfies that
    static auto run(int ranks, F&& program, std::chrono::milliseconds deadline = std::chrono::minutes(10),
                    caller here = caller::here()) -> decltype(static_cast<void>(program(std::declval<threads&>()))) {
        run_all(ranks, program, deadline, here);
    }
    template <class X = detail::any>
    static detail::refused run(X const& = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: threads::run(ranks, program) wants a program that takes its rank: "
                                        "[&](cpx::threads& comm) { ... }");
        return {};
    }

    class group;

    threads(threads&&) = default;
    threads(threads const&) = delete; // a copy would not know what its rank has agreed on afterwards
    threads& operator=(threads const&) = delete;
    template <class X = detail::any>
    explicit threads(X const& = {}, detail::any = {}, detail::any = {})
        : threads(detail::unstarted_threads<detail::whatever<X>>()) {}

    int rank() const { return rank_; }
    int ranks() const { return static_cast<int>(world_.members.size()); }
    std::unordered_set<std::uint64_t>& agreed() { return agreed_; }

    /// See `transport`. Also throws if a rank that this one waits for runs another plan, or if all wait for each other.
    void transfer(identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        turn mine(world_);
        member& me = world_.member_at(rank_);
        auto const end = std::chrono::steady_clock::now() + world_.deadline;
        try {
            world_.require_none_failed();
            me.in = &id;
            for (outgoing const& parcel : sends) world_.at(rank_, parcel.peer).from = &parcel;
            for (incoming const& parcel : receives) world_.at(parcel.peer, rank_).to = &parcel;
            for (;;) {
                bool copied = false;
                for (outgoing const& parcel : sends) copied |= deliver(mine, rank_, parcel.peer);
                for (incoming const& parcel : receives) copied |= deliver(mine, parcel.peer, rank_);
                if (copied) continue; // meanwhile others may have come
                me.waits.silent.clear(), me.waits.deaf.clear();
                for (incoming const& parcel : receives)
                    if (world_.at(parcel.peer, rank_).to) me.waits.silent.push_back(parcel.peer);
                for (outgoing const& parcel : sends)
                    if (world_.at(rank_, parcel.peer).from) me.waits.deaf.push_back(parcel.peer);
                if (me.waits.none()) break;
                wait(mine, end, id);
            }
        } catch (std::exception const& e) {
            me.asleep = false;
            me.waits = {};
            for (outgoing const& parcel : sends) still(mine, world_.at(rank_, parcel.peer)).from = nullptr;
            for (incoming const& parcel : receives) still(mine, world_.at(parcel.peer, rank_)).to = nullptr;
            me.in = nullptr;
            world_.fail(mine, rank_, detail::reason(e));
            throw;
        }
        me.last = id;
        me.in = nullptr;
    }

private:
    struct world;
    class turn;

    /// As `run`, compiled once for all programs.
    static void run_all(int ranks, detail::function_ref<void(threads&)> program, std::chrono::milliseconds deadline,
                        caller here) {
        require_ranks("threads::run", ranks, here);
        world shared(ranks, detail::checked_deadline("threads::run", deadline, here), here);
        std::vector<std::thread> members;
        std::string refusal;
        try {
            for (int rank = 0; rank < ranks; ++rank)
                members.emplace_back([&shared, &program, rank] { run_rank(shared, program, rank); });
        } catch (std::exception const& e) { // the system has no more threads: end those that run
            refusal = e.what();
            shared.end(static_cast<int>(members.size()), refusal);
        }
        for (auto& member : members) member.join();
        require(refusal.empty(), "threads::run", "threads that the system starts (its limits: ulimit -u, ulimit -v)",
                std::to_string(ranks) + ", one a rank", std::to_string(members.size()) + ", then: " + refusal, here);
        shared.rethrow(here);
    }

    static void require_ranks(char const* where, int ranks, caller here) {
        detail::require_ranks(where, "ranks", std::min(ranks, most_ranks), here);
        require(ranks <= most_ranks, where, "ranks", detail::in_words("at most ", most_ranks, ", one thread each"),
                ranks, here);
    }

    static void run_rank(world& shared, detail::function_ref<void(threads&)> program, int rank) {
        try {
            threads comm(shared, rank);
            program(comm);
            shared.leave(rank);
        } catch (std::exception const& e) {
            shared.end(rank, e.what());
        } catch (...) {
            shared.end(rank, "an exception that is not a std::exception");
        }
    }

    /// A message from one rank to another. Who comes last copies it, so that nobody is woken to do that.
    struct post {
        outgoing const* from = nullptr; ///< what the sender has, until it has been taken
        incoming const* to = nullptr;   ///< the place that the receiver has for it, until it has arrived
        bool copying = false;
    };

    struct member {
        std::condition_variable wake;
        bool asleep = false;          ///< it waits, and nobody has told it anything since
        bool left = false;            ///< its program has returned
        identity const* in = nullptr; ///< its present exchange
        std::optional<identity> last; ///< its last one
        detail::waits waits;
    };

    struct world {
        world(int ranks, std::chrono::milliseconds longest_wait, caller here)
            : deadline(longest_wait), members(static_cast<std::size_t>(ranks)),
              posts(detail::zeros<post>("threads::run", {ranks, ranks}, here)) {}

        post& at(int from, int to) {
            return posts[static_cast<std::size_t>(from) * members.size() + static_cast<std::size_t>(to)];
        }
        member& member_at(int rank) { return members[static_cast<std::size_t>(rank)]; }

        void require_none_failed() const {
            if (failed >= 0) throw error("threads", "rank " + std::to_string(failed) + " failed: " + reason);
        }
        void leave(int rank) {
            turn now(*this);
            member_at(rank).left = true;
            now.tell_all();
        }
        /// Tells all ranks that this one fails, unless another has before.
        void fail(turn& now, int rank, std::string why) {
            if (failed >= 0 && failed != rank) return;
            failed = rank;
            reason = std::move(why);
            now.tell_all();
        }
        /// Keeps the exception that ends a program: the first, or that of the rank that failed first.
        void end(int rank, std::string why) {
            turn now(*this);
            fail(now, rank, why);
            if (exception && rank != failed) return;
            exception = std::current_exception();
            ended = "rank " + std::to_string(rank) + " failed: " + why;
        }
        void rethrow(caller here) {
            if (!exception) return;
            try {
                std::rethrow_exception(exception);
            } catch (...) {
                std::throw_with_nested(error("threads::run", ended, "", "", here));
            }
        }

        std::chrono::milliseconds deadline;
        std::mutex mutex;
        std::vector<member> members;
        std::vector<post> posts;
        int failed = -1;
        std::string reason, ended;
        std::exception_ptr exception;
    };

    /// The mutex of a world. Whoever is told something is woken when it has been released, not to wait for it.
    class turn {
    public:
        explicit turn(world& shared) : world_(shared), lock_(shared.mutex) {}
        turn(turn const&) = delete;
        turn& operator=(turn const&) = delete;
        ~turn() { unlock(); }

        void lock() { lock_.lock(); }
        void unlock() {
            lock_.unlock();
            while (count_ > 0) told_[--count_]->wake.notify_one();
        }
        void tell(int rank) {
            member& m = world_.member_at(rank);
            m.asleep = false;
            if (count_ < told_.size())
                told_[count_++] = &m;
            else // a list of any length could need memory that there is none of, and then nobody would wake it
                m.wake.notify_one();
        }
        void tell_all() {
            for (int rank = 0; rank < static_cast<int>(world_.members.size()); ++rank) tell(rank);
        }
        /// Wakes whoever was told something, and returns the lock, to wait with.
        std::unique_lock<std::mutex>& pass() {
            unlock();
            lock();
            return lock_;
        }

    private:
        world& world_;
        std::unique_lock<std::mutex> lock_;
        std::array<member*, 16> told_;
        std::size_t count_ = 0;
    };

    threads(world& shared, int rank) : world_(shared), rank_(rank) {}

    /// Copies a message if both its ends are there. Returns whether it has, and so has released the mutex.
    bool deliver(turn& mine, int from, int to) {
        post& message = world_.at(from, to);
        if (!message.from || !message.to || message.copying) return false;
        int const peer = from == rank_ ? to : from;
        identity const& id = *world_.member_at(rank_).in;
        auto const sent = message.from->bytes(), due = message.to->bytes();
        if (to == rank_) {
            check_exchange(id, peer);
            require(sent == due, "threads", "bytes of a message", due, sent);
        } else if (sent != due || !id.same_exchange(*world_.member_at(to).in)) { // it is the receiver's error
            mine.tell(to);
            return false;
        }
        message.copying = true;
        mine.unlock();
        copy(*message.from, *message.to);
        mine.lock();
        message = {};
        detail::waits& theirs = world_.member_at(peer).waits;
        std::erase(from == rank_ ? theirs.silent : theirs.deaf, rank_);
        if (theirs.none()) mine.tell(peer);
        return true;
    }

    /// Waits until a rank tells this one something. Throws if none can, or none does in time.
    void wait(turn& mine, std::chrono::steady_clock::time_point end, identity const& id) {
        world_.require_none_failed();
        member& me = world_.member_at(rank_);
        me.waits.each([&](int peer) {
            check_exchange(id, peer);
            member const& other = world_.member_at(peer);
            if (other.left) throw detail::gone("threads", rank_, id, peer, other.last ? &*other.last : nullptr);
        });
        auto const late = [&](std::vector<int> const& missing) {
            return detail::late("threads", rank_, id, me.waits, missing, world_.deadline);
        };
        me.asleep = true;
        if (std::ranges::all_of(world_.members, [](member const& m) { return m.left || m.asleep; })) {
            check_exchanges(id); // nobody is left to wake another
            throw late({});
        }
        if (me.wake.wait_until(mine.pass(), end, [&] { return !me.asleep; })) return;
        throw late(detail::missing(rank_, [&](int rank) {
            member const& m = world_.member_at(rank);
            return rank == rank_ || m.asleep ? &m.waits : nullptr;
        }));
    }

    /// Throws if `peer`, with whom a message is due, sends one of another exchange: it will not come to this one.
    void check_exchange(identity const& id, int peer) const {
        post const& from = world_.at(peer, rank_);
        if (from.from) require_same_exchange("threads", id, rank_, *world_.member_at(peer).in, peer);
    }

    /// Throws what lists who is in which exchange, if ranks that all wait are in different ones.
    void check_exchanges(identity const& id) const {
        std::vector<identity const*> in;
        for (member const& m : world_.members) in.push_back(m.in);
        for (identity const* other : in)
            if (other && !id.same_exchange(*other)) throw detail::apart("threads", id, *other, in);
    }

    /// Waits until nobody copies a message, and returns it, for its caller to take its own end back.
    post& still(turn& mine, post& message) {
        if (message.copying) world_.member_at(rank_).wake.wait(mine.pass(), [&] { return !message.copying; });
        return message;
    }

    world& world_;
    int rank_;
    std::unordered_set<std::uint64_t> agreed_;
};

static_assert(transport<threads>);

/// As if nobody had started them: of threads that a call makes for itself no more is said.
template <class Plan, class X>
detail::refused exchange(Plan const&, X const&, threads&&) {
    detail::unstarted_threads<detail::any>();
    return {};
}
template <class Plan, class X, class Y>
detail::refused exchange(Plan const&, X const&, Y const&, threads&&) {
    detail::unstarted_threads<detail::any>();
    return {};
}

/// The same ranks on threads that the caller starts: those of another language, or of a pool.
///
///     cpx::threads::group ranks(4);
///     ... on the thread of rank r: program(ranks.at(r)); ranks.leave(r);
///
/// Outlives the calls of its ranks. Whose program throws calls `fail`, so that the others end at once, and not when the
/// deadline has passed. A group of which one rank has failed stays broken.
class threads::group {
public:
    /// `deadline` as of `run`. Throws `cpx::error` if there are no ranks, or too many.
    explicit group(int ranks, std::chrono::milliseconds deadline = std::chrono::minutes(10),
                   caller here = caller::here())
        : world_((require_ranks("threads::group", ranks, here), ranks),
                 detail::checked_deadline("threads::group", deadline, here), here) {
        for (int rank = 0; rank < ranks; ++rank) members_.push_back(threads(world_, rank));
    }
    template <class X = void>
    explicit group(detail::any = {}, detail::any = {}, detail::any = {}) : group(1) {
        static_assert(detail::never<X>, "cpx: threads::group(ranks, deadline) wants a number of ranks");
    }
    group(group const&) = delete;
    group& operator=(group const&) = delete;

    int ranks() const { return static_cast<int>(members_.size()); }
    /// Returns the communicator of a rank, which one thread at a time calls. Throws `cpx::error` if there is none.
    threads& at(int rank, caller here = caller::here()) {
        detail::require_rank("threads::group::at", rank, ranks(), here);
        return members_[static_cast<std::size_t>(rank)];
    }
    /// Says that a rank calls no more: who waits for it throws. Throws `cpx::error` if there is no such rank.
    void leave(int rank, caller here = caller::here()) {
        detail::require_rank("threads::group::leave", rank, ranks(), here);
        world_.leave(rank);
    }
    /// Says that the program of a rank has thrown, and why: the next or present exchange of the others throws an error
    /// that names it. Throws `cpx::error` if there is no such rank.
    void fail(int rank, std::string why, caller here = caller::here()) {
        detail::require_rank("threads::group::fail", rank, ranks(), here);
        turn now(world_);
        world_.fail(now, rank, std::move(why));
    }

private:
    world world_;
    std::vector<threads> members_;
};

} // namespace cpx
