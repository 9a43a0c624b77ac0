// SPDX-License-Identifier: Apache-2.0
// Ranks that MPI starts: processes of one host or many, in host memory.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/refused.hpp>
#include <cpx/transport/concept.hpp>
#include <cpx/transport/mpi_environment.hpp>
#include <cpx/transport/mpi_notes.hpp>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cpx {

/// One rank of a communicator of its own, for one thread.
///
///     cpx::mpi_environment environment;
///     cpx::mpi::run([&](cpx::mpi& comm) { ... every rank's program ... });
///
/// A message is packed into one buffer, behind its plan's identity, and sent by one MPI_Isend; messages of two ranks
/// keep their order, so that a rank in another exchange is found by the identity. Of the caller's memory MPI sees
/// nothing, and an error leaves nobody writing into it.
/// A rank that throws ends the others: their next or present exchange throws an error that names it. So does one that
/// leaves early. No wait of an exchange outlasts the deadline; shortly before, ranks ask each other for whom they wait,
/// so that the error names who keeps them all waiting. After an error the transport is broken, and every later call
/// throws at once.
class mpi {
public:
    static constexpr std::chrono::milliseconds default_deadline = std::chrono::minutes(10);

private:
    template <class... X> // what may follow the program of `run`
    static constexpr bool fits = detail::takes<void(), X...> || detail::takes<void(std::chrono::milliseconds), X...> ||
                                 detail::takes<void(std::chrono::milliseconds, MPI_Comm), X...>;

public:
    /// Calls `program(comm)` on the ranks of `group`, and leaves. If it throws, the others are told why. Collective.
    template <
        class F> // no concept: of a mistake within the program, clang++ would tell at length how it satisfies that
    static auto run(F&& program, std::chrono::milliseconds deadline = default_deadline, MPI_Comm group = MPI_COMM_WORLD,
                    caller here = caller::here()) -> decltype(static_cast<void>(program(std::declval<mpi&>()))) {
        mpi comm("mpi::run", std::nullopt, group, deadline, here);
        try {
            program(comm);
            comm.leave(here);
        } catch (std::exception const& e) {
            comm.fail(e.what());
            throw;
        } catch (...) {
            comm.fail("an exception that is not a std::exception");
            throw;
        }
    }

    template <class X = detail::any, class... More>
        requires(!std::invocable<X&, mpi&> || !fits<More...>)
    static detail::refused run(X const& = {}, More const&...) {
        static_assert(
            detail::never<X>,
            "cpx: mpi::run(program, deadline, group) wants a program that takes its rank, [&](cpx::mpi& comm) "
            "{ ... }, and then perhaps milliseconds and an MPI_Comm; MPI starts the ranks");
        return {};
    }

    /// Duplicates `group`, which is not needed afterwards. `deadline` is the longest that a rank waits for the others,
    /// here and in one exchange. Collective. Throws `cpx::error` on a deadline that is not positive, and if not all
    /// ranks come in time (MPI does not say who).
    explicit mpi(MPI_Comm group = MPI_COMM_WORLD, std::chrono::milliseconds deadline = default_deadline,
                 caller here = caller::here())
        : mpi("mpi", std::nullopt, group, deadline, here) {}

    /// Returns a transport between the ranks of `group` that give the same `color`, such as a context-parallel group.
    /// They are numbered from 0, in the order that they have in `group`. Collective on `group`.
    static mpi split(int color, MPI_Comm group = MPI_COMM_WORLD, std::chrono::milliseconds deadline = default_deadline,
                     caller here = caller::here()) {
        return {"mpi::split", color, group, deadline, here};
    }
    template <class X = detail::any, class... More>
        requires(!detail::takes<void(int), X, More...> && !detail::takes<void(int, MPI_Comm), X, More...> &&
                 !detail::takes<void(int, MPI_Comm, std::chrono::milliseconds), X, More...>)
    static mpi split(X const& = {}, More const&...) {
        static_assert(detail::never<X>, "cpx: mpi::split(color, group, deadline) wants a number, and then perhaps an "
                                        "MPI_Comm and milliseconds, in this order");
        throw;
    }

    mpi(mpi const&) = delete;
    mpi& operator=(mpi const&) = delete;
    /// Leaves, if all goes well.
    ~mpi() {
        if (std::uncaught_exceptions() > exceptions_) fail("an exception");
        int ended = 0;
        MPI_Finalized(&ended);
        if (ended) return;
        try {
            leave();
        } catch (std::exception const&) { // and has told the others
        }
        if (!left_) return;
        MPI_Type_free(&block_);
        MPI_Comm_free(&comm_);
    }

    int rank() const { return rank_; }
    int ranks() const { return ranks_; }
    MPI_Comm get() const { return comm_; }
    std::unordered_set<std::uint64_t>& agreed() { return agreed_; }

    /// See `transport`. Also throws if a peer is in an exchange of another plan, naming both and what differs; nothing
    /// of its message is written then.
    void transfer(identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        require(broken_.empty(), "mpi", "communicator", "one that has not failed", broken_);
        auto shipments = std::make_unique<std::vector<shipment>>();
        try {
            complete(id, sends, receives, *shipments);
            notes_->count_exchange(id);
        } catch (std::exception const& e) {
            static_cast<void>(shipments.release()); // MPI may still read or fill the buffers
            fail(detail::reason(e));
            throw;
        }
    }

    /// Breaks the transport: the next or present exchange of the other ranks throws that this one has failed, and why.
    void fail(std::string const& why) {
        if (!broken_.empty()) return;
        detail::mpi_failed = true;
        broken_ = "rank " + std::to_string(rank_) + " failed: " + why;
        try {
            notes_->tell_failure(broken_);
            auto const end = clock::now() + std::chrono::milliseconds(200); // who does not listen now never will
            while (!notes_->sent() && clock::now() < end) std::this_thread::yield();
        } catch (error const&) { // MPI itself has failed
        }
    }

    /// Says that this rank is done, and waits until all are, or for the deadline. Afterwards every call throws.
    ///
    /// Collective, as MPI_Comm_free is. A rank that waits for a message of one that has left is told so. Throws if
    /// another rank fails, or sends this one a message.
    void leave(caller here = caller::here()) {
        if (!broken_.empty()) return;
        notes_->tell_end(); // what nobody receives might reach a later communicator
        auto farewells = std::make_unique<std::vector<shipment>>();
        for (int peer = 0; peer < ranks_; ++peer)
            if (peer != rank_) farewells->push_back({peer});
        std::vector<std::uint64_t> to_read(static_cast<std::size_t>(ranks_));
        try {
            auto const end = clock::now() + deadline_;
            for (int round = 0; !left_ && clock::now() < end; ++round) {
                std::erase_if(*farewells,
                              [&](shipment& t) { return see_off(t, to_read[static_cast<std::size_t>(t.peer)]); });
                read_notes(nullptr);
                left_ = farewells->empty() && notes_->sent() && to_read == notes_->have_been_read();
                if (!left_) detail::mpi_pause(round);
            }
        } catch (std::exception const& e) {
            static_cast<void>(farewells.release()); // MPI may still fill the buffers
            fail(detail::reason(e));
            auto const* const own = dynamic_cast<error const*>(&e);
            if (own) throw error(own->where(), own->problem(), own->expected(), own->got(), here);
            throw;
        }
        if (!left_) static_cast<void>(farewells.release());
        broken_ = "rank " + std::to_string(rank_) + " has left";
    }

private:
    using clock = std::chrono::steady_clock;
    enum tag { message_tag = 1, note_tag };
    static constexpr index_t block_bytes = 4096, blocks_from = 65536;
    static constexpr std::chrono::seconds answer_time{1}; ///< for a rank that has left, but waits for the others

    /// What stands in front of the bytes of a message.
    struct header {
        identity id;
        index_t bytes = 0;
    };
    static_assert(std::is_trivially_copyable_v<header>);
    static constexpr index_t header_bytes = sizeof(header); // the last words of a rank are fewer

    /// A message on its way. It begins with its header; `target` is where a received one is to go.
    struct shipment {
        int peer = 0;
        incoming const* target = nullptr;
        std::unique_ptr<std::byte[]> data{};
        index_t size = 0;
        MPI_Request request = MPI_REQUEST_NULL;
    };

    mpi(char const* where, std::optional<int> color, MPI_Comm group, std::chrono::milliseconds deadline, caller here)
        : deadline_(detail::checked_deadline(where, deadline, here)) {
        int running = 0;
        MPI_Initialized(&running);
        require(running != 0, where, "MPI", "initialised, by an mpi_environment", "not initialised", here);
        require(group != MPI_COMM_NULL, where, "communicator", "one of which this process is a rank", "MPI_COMM_NULL",
                here);
        if (color) require(*color >= 0, where, "color", "not negative", *color, here);
        MPI_Request request = MPI_REQUEST_NULL;
        if (color) // MPI_Comm_split itself knows no deadline
            detail::mpi_check(MPI_Ibarrier(group, &request), "MPI_Ibarrier", here);
        else
            detail::mpi_check(MPI_Comm_idup(group, &comm_, &request), "MPI_Comm_idup", here);
        detail::mpi_wait_for_all(where, request, deadline_, here);
        if (color) detail::mpi_check(MPI_Comm_split(group, *color, 0, &comm_), "MPI_Comm_split", here);
        detail::mpi_check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", here);
        detail::mpi_check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank", here);
        detail::mpi_check(MPI_Comm_size(comm_, &ranks_), "MPI_Comm_size", here);
        detail::mpi_check(MPI_Type_contiguous(static_cast<int>(block_bytes), MPI_BYTE, &block_), "MPI_Type_contiguous",
                          here);
        detail::mpi_check(MPI_Type_commit(&block_), "MPI_Type_commit", here);
        notes_.emplace(comm_, note_tag, message_tag, rank_, ranks_);
    }

    /// MPI counts in int: a long message is a number of blocks, its last one filled up.
    static index_t padded(index_t bytes) {
        return bytes < blocks_from ? bytes : (bytes + block_bytes - 1) / block_bytes * block_bytes;
    }
    int count(index_t size) const { return static_cast<int>(size < blocks_from ? size : size / block_bytes); }
    MPI_Datatype type(index_t size) const { return size < blocks_from ? MPI_BYTE : block_; }

    void complete(identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives,
                  std::vector<shipment>& shipments) {
        shipments.reserve(sends.size() + receives.size());
        for (outgoing const& parcel : sends) send(shipments.emplace_back(shipment{parcel.peer}), id, parcel);
        for (incoming const& parcel : receives) shipments.push_back({parcel.peer, &parcel});
        std::vector<shipment*> open;
        for (shipment& t : shipments) open.push_back(&t);
        auto const start = clock::now(), end = start + deadline_;
        auto const last_ask = end - std::min<clock::duration>(deadline_ / 4, std::chrono::seconds(1));
        auto next_ask = start + std::min<clock::duration>(deadline_ / 4, std::chrono::milliseconds(200));
        auto next_look = start; // at notes: on cores that others use, too, a pause between two rounds can be long
        for (int round = 0;; ++round) {
            if (std::erase_if(open, [&](shipment* t) { return advance(*t, id, end); }) > 0) round = 0;
            if (open.empty()) return;
            auto const now = clock::now();
            if (round % 16 == 0 || now > next_look || now > end) {
                next_look = now + std::chrono::milliseconds(1);
                detail::mpi_wait mine{{}, id};
                for (shipment const* t : open) (t->target ? mine.silent : mine.deaf).push_back(t->peer);
                read_notes(&mine);
                if (auto const in = notes_->locked(mine); !in.empty()) throw stuck(mine, in, end);
                if (now > end) throw detail::late("mpi", rank_, id, mine, notes_->missing(), deadline_);
                if (now > next_ask) {
                    notes_->ask(mine);
                    next_ask = now < last_ask ? std::min(last_ask, now + (now - start)) : end;
                }
            }
            bool const idle = std::ranges::all_of(open, [](shipment* t) { return t->target && !t->data; });
            detail::mpi_pause(idle ? round : 0); // long messages advance only while MPI is called
        }
    }

    error stuck(detail::mpi_wait const& mine, std::vector<identity const*> const& in, clock::time_point end) {
        auto const other =
            std::ranges::find_if(in, [&](identity const* id) { return id && !mine.id.same_exchange(*id); });
        if (other == in.end()) return detail::late("mpi", rank_, mine.id, mine, {}, deadline_);
        find_difference(mine.id, **other, static_cast<int>(other - in.begin()), end);
        return detail::apart("mpi", mine.id, **other, in);
    }

    /// Returns at once if this rank can say in what two exchanges differ. Else they are of batches of which it knows
    /// one: it tells that to the rank of the other, waits for its error and throws that, or returns if none comes.
    void find_difference(identity const& mine, identity const& theirs, int peer, clock::time_point end) {
        if (mine.same_exchange(theirs) || detail::difference(mine, theirs).exact()) return;
        notes_->tell_batch(peer, mine, theirs);
        wait_for_error(mine, peer, end);
    }
    void wait_for_error(identity const& mine, int peer, clock::time_point end) {
        detail::mpi_wait const waiting{{{peer}, {}}, mine};
        for (int round = 0; clock::now() < end; detail::mpi_pause(round++)) read_notes(&waiting);
    }

    void send(shipment& t, identity const& id, outgoing const& parcel) {
        header const head{id, parcel.bytes()};
        t.size = padded(header_bytes + head.bytes);
        t.data = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(t.size));
        std::memcpy(t.data.get(), &head, sizeof head);
        pack(parcel, t.data.get() + header_bytes);
        detail::mpi_check(MPI_Isend(t.data.get(), count(t.size), type(t.size), t.peer, message_tag, comm_, &t.request),
                          "MPI_Isend");
        notes_->count_sent(t.peer);
    }

    /// Returns whether a message has been taken, or has arrived and been delivered.
    bool advance(shipment& t, identity const& id, clock::time_point end) {
        if (!t.target) return is_done(t);
        if (!has_arrived(t)) return false;
        if (t.size < header_bytes) { // its last words; who has left still answers
            notes_->ask_last(t.peer, id);
            wait_for_error(id, t.peer, std::min(end, clock::now() + answer_time));
            throw detail::gone("mpi", rank_, id, t.peer, nullptr);
        }
        notes_->count_received(t.peer);
        deliver(t, id, end);
        t.data.reset();
        return true;
    }

    /// Returns whether all of a message has come; of any length, for a wrong one must be received to name its sender.
    bool has_arrived(shipment& t) {
        if (!t.data) {
            int come = 0;
            MPI_Message message;
            MPI_Status status;
            detail::mpi_check(MPI_Improbe(t.peer, message_tag, comm_, &come, &message, &status), "MPI_Improbe");
            if (!come) return false;
            MPI_Count size = 0;
            detail::mpi_check(MPI_Get_elements_x(&status, MPI_BYTE, &size), "MPI_Get_elements_x");
            t.size = static_cast<index_t>(size);
            t.data = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(t.size));
            detail::mpi_check(MPI_Imrecv(t.data.get(), count(t.size), type(t.size), &message, &t.request),
                              "MPI_Imrecv");
        }
        return is_done(t);
    }
    bool is_done(shipment& t) {
        int done = 0;
        detail::mpi_check(MPI_Test(&t.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
        return done != 0;
    }

    static header header_of(shipment const& t) {
        header head;
        std::memcpy(&head, t.data.get(), sizeof head);
        return head;
    }
    void deliver(shipment const& t, identity const& id, clock::time_point end) {
        header const head = header_of(t);
        find_difference(id, head.id, t.peer, end);
        require_same_exchange("mpi", id, rank_, head.id, t.peer);
        require(head.bytes == t.target->bytes(), "mpi", "bytes of a message", t.target->bytes(), head.bytes);
        unpack(t.data.get() + header_bytes, *t.target);
    }

    /// Reads what other ranks have written, see `mpi_notes::read`. Throws if one says that it fails.
    void read_notes(detail::mpi_wait const* mine) {
        auto const failure = notes_->read(mine);
        if (failure.empty()) return;
        detail::mpi_failed = true;
        broken_ = failure; // which all ranks are told
        throw error("mpi", failure);
    }

    /// Returns whether a rank has left; then `notes` is how many there are to read of it. Throws if it sends a message.
    bool see_off(shipment& t, std::uint64_t& notes) {
        if (!has_arrived(t)) return false;
        if (t.size >= header_bytes) {
            auto const theirs = header_of(t).id;
            auto const* const last = notes_->ran();
            if (last && !detail::difference(*last, theirs).exact()) { // who has both batches says more
                notes_->tell_last(t.peer, theirs);
                wait_for_error(theirs, t.peer, clock::now() + answer_time);
            }
            throw detail::gone("mpi", t.peer, theirs, rank_, last);
        }
        auto const* const words = reinterpret_cast<char const*>(t.data.get());
        notes = notes_->read_end(t.peer, std::string(words, words + t.size));
        return true;
    }

    MPI_Comm comm_ = MPI_COMM_NULL;
    MPI_Datatype block_ = MPI_DATATYPE_NULL;
    int rank_ = 0, ranks_ = 1, exceptions_ = std::uncaught_exceptions();
    std::chrono::milliseconds deadline_;
    std::unordered_set<std::uint64_t> agreed_;
    std::optional<detail::mpi_notes> notes_;
    std::string broken_;
    bool left_ = false;
};

static_assert(transport<mpi>);

} // namespace cpx
