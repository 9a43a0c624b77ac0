// SPDX-License-Identifier: Apache-2.0
// Ranks that MPI starts: processes of one host or many, in host memory.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/transport/concept.hpp>
#include <cpx/transport/deadline.hpp>

#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace cpx {

namespace detail {

/// Whether a transport of this process has failed, so that MPI_Finalize might wait for ranks that never come.
inline std::atomic<bool> mpi_failed = false;

} // namespace detail

/// MPI from its beginning to its end, for `main`. If MPI runs already, whoever began it ends it.
///
/// Does not end MPI when an exception passes or a transport has failed: MPI_Finalize would wait for ranks that never
/// come. Then `main` returns something other than 0 (or lets the exception go), and the launcher ends the other ranks.
/// Ranks that have all recovered may call MPI_Finalize themselves.
class mpi_environment {
public:
    /// Throws `cpx::error` if MPI does not give `level`, one of MPI_THREAD_SINGLE to MPI_THREAD_MULTIPLE.
    explicit mpi_environment(int level = MPI_THREAD_FUNNELED, caller here = caller::here()) {
        int running = 0, got = level, result = MPI_Initialized(&running);
        began_ = !running;
        if (result == MPI_SUCCESS) // until there is a communicator, errors end the process
            result = began_ ? MPI_Init_thread(nullptr, nullptr, level, &got) : MPI_Query_thread(&got);
        require(result == MPI_SUCCESS, "mpi_environment", "MPI_Init_thread", MPI_SUCCESS, result, here);
        require(got >= level, "mpi_environment", "level of threads", level, got, here);
    }
    mpi_environment(mpi_environment const&) = delete;
    mpi_environment& operator=(mpi_environment const&) = delete;
    ~mpi_environment() {
        int ended = 0;
        MPI_Finalized(&ended);
        if (began_ && !ended && !detail::mpi_failed && std::uncaught_exceptions() == 0) MPI_Finalize();
    }

private:
    bool began_ = false;
};

/// One rank of a communicator of its own, for one thread.
///
///     cpx::mpi_environment environment;
///     cpx::mpi::run([&](cpx::mpi& comm) { ... every rank's program ... });
///
/// A message is packed into one buffer, behind its plan's identity, and sent by one MPI_Isend; messages of two ranks
/// keep their order, so that a rank in another exchange is found by the identity. Of the caller's memory MPI sees
/// nothing, and an error leaves nobody writing into it.
/// A rank that throws ends the others: their next or present exchange throws an error that names it. No wait of an
/// exchange outlasts the deadline. After an error the transport is broken, and every later call throws at once.
class mpi {
public:
    static constexpr std::chrono::milliseconds default_deadline = std::chrono::minutes(10);

    /// Calls `program(comm)` on the ranks of `group`. If it throws, the other ranks are told why. Collective.
    template <class F>
    static void run(F&& program, std::chrono::milliseconds deadline = default_deadline,
                    MPI_Comm group = MPI_COMM_WORLD) {
        mpi comm(group, deadline);
        try {
            program(comm);
        } catch (std::exception const& e) {
            comm.fail(e.what());
            throw;
        } catch (...) {
            comm.fail("an exception that is not a std::exception");
            throw;
        }
    }

    /// Duplicates `group`, which is not needed afterwards. `deadline` is the longest that a rank waits for the others,
    /// here and in one exchange. Collective. Throws `cpx::error` on a deadline that is not positive, and if not all
    /// ranks come in time (MPI does not say who).
    explicit mpi(MPI_Comm group = MPI_COMM_WORLD, std::chrono::milliseconds deadline = default_deadline,
                 caller here = caller::here())
        : deadline_(detail::checked_deadline("mpi", deadline, here)) {
        require_group(group, here);
        MPI_Request request = MPI_REQUEST_NULL;
        check(MPI_Comm_idup(group, &comm_, &request), "MPI_Comm_idup", here);
        wait_for_all(request, here);
        prepare(here);
    }

    /// Returns a transport between the ranks of `group` that give the same `color`, such as a context-parallel group.
    /// They are numbered from 0, in the order that they have in `group`. Collective on `group`.
    static mpi split(int color, MPI_Comm group = MPI_COMM_WORLD, std::chrono::milliseconds deadline = default_deadline,
                     caller here = caller::here()) {
        return {color, group, deadline, here};
    }

    mpi(mpi const&) = delete;
    mpi& operator=(mpi const&) = delete;
    ~mpi() {
        if (std::uncaught_exceptions() > exceptions_) fail("an exception");
        int ended = 0;
        MPI_Finalized(&ended);
        if (!ended && broken_.empty()) {
            MPI_Type_free(&block_);
            MPI_Comm_free(&comm_);
        }
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
        } catch (std::exception const& e) {
            static_cast<void>(shipments.release()); // MPI may still read or fill the buffers
            fail(e.what());
            throw;
        }
    }

    /// Tells the other ranks that this one does not go on: their next or present exchange throws an error that names it
    /// and says why. Breaks the transport.
    void fail(std::string const& why) {
        if (!broken_.empty()) return;
        detail::mpi_failed = true;
        broken_ = "rank " + std::to_string(rank_) + " failed: " + why.substr(0, longest_note);
        auto const* const note = new std::string(broken_); // MPI may read it until the process ends
        std::vector<MPI_Request> requests;
        for (int peer = 0; peer < ranks_; ++peer)
            if (peer != rank_)
                MPI_Isend(note->data(), static_cast<int>(note->size()), MPI_BYTE, peer, note_tag, comm_,
                          &requests.emplace_back(MPI_REQUEST_NULL));
        auto const end = clock::now() + std::chrono::milliseconds(200); // who does not listen now never will
        for (int sent = 0; !sent && clock::now() < end; std::this_thread::yield())
            MPI_Testall(static_cast<int>(requests.size()), requests.data(), &sent, MPI_STATUSES_IGNORE);
    }

private:
    using clock = std::chrono::steady_clock;
    enum tag { message_tag = 1, note_tag };
    static constexpr std::size_t longest_note = 3000; // any transport of MPI takes so much without a receiver
    static constexpr index_t block_bytes = 4096, blocks_from = 65536;

    /// What stands in front of the bytes of a message.
    struct header {
        identity id;
        index_t bytes = 0;
    };
    static_assert(std::is_trivially_copyable_v<header>);

    /// A message on its way. It begins with its header; `target` is where a received one is to go.
    struct shipment {
        int peer = 0;
        incoming const* target = nullptr;
        std::unique_ptr<std::byte[]> data{};
        index_t size = 0;
        MPI_Request request = MPI_REQUEST_NULL;
    };

    mpi(int color, MPI_Comm group, std::chrono::milliseconds deadline, caller here)
        : deadline_(detail::checked_deadline("mpi", deadline, here)) {
        require_group(group, here);
        require(color >= 0, "mpi::split", "color", "not negative", color, here);
        MPI_Request request = MPI_REQUEST_NULL;
        check(MPI_Ibarrier(group, &request), "MPI_Ibarrier", here); // MPI_Comm_split itself knows no deadline
        wait_for_all(request, here);
        check(MPI_Comm_split(group, color, 0, &comm_), "MPI_Comm_split", here);
        prepare(here);
    }

    static void require_group(MPI_Comm group, caller here) {
        int running = 0;
        MPI_Initialized(&running);
        require(running != 0, "mpi", "MPI", "initialised, by an mpi_environment", "not initialised", here);
        require(group != MPI_COMM_NULL, "mpi", "communicator", "one of which this process is a rank", "MPI_COMM_NULL",
                here);
    }
    static void check(int result, char const* call, caller here = caller::here()) {
        if (result == MPI_SUCCESS) return;
        std::string text(MPI_MAX_ERROR_STRING, '\0');
        int length = 0;
        MPI_Error_string(result, text.data(), &length);
        throw error("mpi", call, "success", text.substr(0, static_cast<std::size_t>(length)), here);
    }
    void wait_for_all(MPI_Request request, caller here) const {
        auto const end = clock::now() + deadline_;
        for (int round = 0, come = 0;; ++round) {
            check(MPI_Test(&request, &come, MPI_STATUS_IGNORE), "MPI_Test", here);
            if (come) return;
            if (clock::now() > end) {
                detail::mpi_failed = true;
                throw error("mpi", "ranks of the communicator", "all of them within " + in_ms(deadline_), "fewer",
                            here);
            }
            pause(round);
        }
    }
    void prepare(caller here) {
        check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", here);
        check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank", here);
        check(MPI_Comm_size(comm_, &ranks_), "MPI_Comm_size", here);
        check(MPI_Type_contiguous(static_cast<int>(block_bytes), MPI_BYTE, &block_), "MPI_Type_contiguous", here);
        check(MPI_Type_commit(&block_), "MPI_Type_commit", here);
    }

    static std::string in_ms(std::chrono::milliseconds time) { return std::to_string(time.count()) + " ms"; }
    static void pause(int round) {
        if (round < 1000)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(50));
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
        auto const end = clock::now() + deadline_;
        for (int round = 0;; ++round) {
            if (std::erase_if(open, [&](shipment* t) { return advance(*t, id); }) > 0) round = 0;
            if (open.empty()) return;
            if (round % 16 == 0) listen();
            if (clock::now() > end) late(id, open);
            bool const idle = std::ranges::all_of(open, [](shipment* t) { return t->target && !t->data; });
            pause(idle ? round : 0); // long messages advance only while MPI is called
        }
    }

    void send(shipment& t, identity const& id, outgoing const& parcel) {
        header const head{id, parcel.bytes()};
        t.size = padded(static_cast<index_t>(sizeof head) + head.bytes);
        t.data = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(t.size));
        std::memcpy(t.data.get(), &head, sizeof head);
        pack(parcel, t.data.get() + sizeof head);
        check(MPI_Isend(t.data.get(), count(t.size), type(t.size), t.peer, message_tag, comm_, &t.request),
              "MPI_Isend");
    }

    /// Returns whether a message has been taken, or has arrived and been delivered.
    bool advance(shipment& t, identity const& id) {
        int done = 0;
        if (t.target && !t.data) { // of any length, because a wrong message must be received for its sender to be named
            MPI_Message message;
            MPI_Status status;
            check(MPI_Improbe(t.peer, message_tag, comm_, &done, &message, &status), "MPI_Improbe");
            if (!done) return false;
            MPI_Count size = 0;
            check(MPI_Get_elements_x(&status, MPI_BYTE, &size), "MPI_Get_elements_x");
            t.size = static_cast<index_t>(size);
            t.data = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(t.size));
            check(MPI_Imrecv(t.data.get(), count(t.size), type(t.size), &message, &t.request), "MPI_Imrecv");
        }
        check(MPI_Test(&t.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
        if (done && t.target) deliver(t, id);
        if (done) t.data.reset();
        return done != 0;
    }

    void deliver(shipment const& t, identity const& id) const {
        header head;
        std::memcpy(&head, t.data.get(), sizeof head);
        require_same_exchange("mpi", id, rank_, head.id, t.peer);
        require(head.bytes == t.target->bytes(), "mpi", "bytes of a message", t.target->bytes(), head.bytes);
        unpack(t.data.get() + sizeof head, *t.target);
    }

    /// Throws if another rank has said that it fails.
    void listen() {
        int come = 0;
        MPI_Status status;
        check(MPI_Iprobe(MPI_ANY_SOURCE, note_tag, comm_, &come, &status), "MPI_Iprobe");
        if (!come) return;
        int size = 0;
        check(MPI_Get_count(&status, MPI_BYTE, &size), "MPI_Get_count");
        std::string note(static_cast<std::size_t>(size), '\0');
        check(MPI_Recv(note.data(), size, MPI_BYTE, status.MPI_SOURCE, note_tag, comm_, MPI_STATUS_IGNORE), "MPI_Recv");
        detail::mpi_failed = true;
        broken_ = note; // whoever wrote it has told all ranks
        throw error("mpi", note);
    }

    [[noreturn]] void late(identity const& id, std::vector<shipment*> const& open) {
        listen();
        std::string silent, deaf;
        for (shipment const* t : open) (t->target ? silent : deaf) += ' ' + std::to_string(t->peer);
        throw error("mpi",
                    "rank " + std::to_string(rank_) + " waited in " + id.text() +
                        (silent.empty() ? "" : " for messages of ranks" + silent) +
                        (silent.empty() || deaf.empty() ? "" : " and") +
                        (deaf.empty() ? "" : " for ranks" + deaf + " to take theirs"),
                    "an end within " + in_ms(deadline_), "nothing");
    }

    MPI_Comm comm_ = MPI_COMM_NULL;
    MPI_Datatype block_ = MPI_DATATYPE_NULL;
    int rank_ = 0, ranks_ = 1, exceptions_ = std::uncaught_exceptions();
    std::chrono::milliseconds deadline_;
    std::unordered_set<std::uint64_t> agreed_;
    std::string broken_;
};

static_assert(transport<mpi>);

} // namespace cpx
