// SPDX-License-Identifier: Apache-2.0
// What the ranks of a communicator tell each other beside the messages of exchanges.
#pragma once

#include <cpx/transport/concept.hpp>
#include <cpx/transport/mpi_environment.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace cpx::detail {

/// What a rank waits for in an exchange.
struct mpi_wait : waits {
    identity id;
};

/// Notes from rank to rank, read while a rank waits: that one fails; when another asks, what it waits for, or which
/// exchange was its last; and the batch of one that does not know in what another's differs.
class mpi_notes {
public:
    static constexpr std::size_t longest = 3000; ///< any MPI takes so much without a receiver

    /// `tag`: of notes; `last`: of the last words to a rank, which come in the order of the messages of that tag.
    mpi_notes(MPI_Comm comm, int tag, int last, int rank, int ranks)
        : comm_(comm), tag_(tag), last_(last), rank_(rank), written_(static_cast<std::size_t>(ranks)),
          read_(written_.size()), known_(written_.size()) {
        for (rank_state& r : known_) r.sent = r.received = read_;
    }
    mpi_notes(mpi_notes const&) = delete;
    mpi_notes& operator=(mpi_notes const&) = delete;
    ~mpi_notes() {
        for (auto& [text, request] : unsent_) static_cast<void>(text.release()); // MPI may still read them
    }

    /// Counts a message of an exchange to, or from, another rank.
    void count_sent(int peer) { ++at(me().sent, peer); }
    void count_received(int peer) { ++at(me().received, peer); }

    /// Tells all others what has failed. Once this rank has said that it writes no more, only those that have not left,
    /// for the others may be gone; if not, they wait for a rank in an exchange, which tells them.
    void tell_failure(std::string const& what) {
        for (int peer = 0; peer < ranks(); ++peer)
            if (peer != rank_ && !at(known_, peer).has_left)
                write(peer, (ended_ ? "tell " : "failed ") + what.substr(0, longest));
    }

    /// Counts an exchange that has come to its end, the last one so far.
    void count_exchange(identity const& id) { ran_ = id; }
    /// Returns that, or null.
    identity const* ran() const { return ran_ ? &*ran_ : nullptr; }

    /// Asks a rank that has left which exchange was its last, as this one waits for it in `id`; `read` throws then.
    void ask_last(int peer, identity const& id) {
        write(peer, "return " + std::string(reinterpret_cast<char const*>(&id), sizeof id));
    }
    /// Answers that. Also to a rank that has sent a message of exchange `theirs`, after the last of this one.
    void tell_last(int peer, identity const& theirs) { tell_batch(peer, ran_.value_or(identity()), theirs, "last "); }

    /// Tells `peer`, which has sent a message of exchange `theirs`, of which batch `mine` is, so that it can say in
    /// what the two differ, and fails.
    void tell_batch(int peer, identity const& mine, identity const& theirs, std::string text = "batch ") {
        auto const batch = known_batches::find(mine.numbers[identity::cu_seqlens]).value_or(thd());
        text += std::to_string(batch.sequences());
        for (index_t const offset : batch.offsets()) text += ' ' + std::to_string(offset);
        for (index_t s = 0; s < batch.sequences(); ++s) text += ' ' + std::to_string(batch.valid(s));
        text += ' ';
        for (identity const* id : {&mine, &theirs}) text.append(reinterpret_cast<char const*>(id), sizeof *id);
        write(peer, std::move(text));
    }

    /// Tells all others that this rank writes no more, if all goes well, and how many notes each is to read.
    void tell_end() {
        ended_ = true;
        for (int peer = 0; peer < ranks(); ++peer)
            if (peer != rank_) send(peer, last_, std::to_string(at(written_, peer)));
    }
    /// Reads the last words of a rank. Returns how many notes there are to read of it.
    std::uint64_t read_end(int peer, std::string const& words) {
        at(known_, peer).has_left = true;
        return std::stoull(words);
    }

    /// Asks those for whom this rank waits what they wait for; those that they name in turn, as answers are read.
    void ask(mpi_wait const& mine) {
        ++question_;
        for (rank_state& r : known_) r.asked = false, r.waits.reset();
        me().waits = mine;
        ask_on(mine);
    }

    /// Reads what has come, and answers who asks with `mine`, unless that is null. Returns what has failed on another
    /// rank, or "". Throws if one is in an exchange of another batch, or has left that for which this one waits.
    std::string read(mpi_wait const* mine) {
        for (;;) {
            int come = 0, size = 0;
            MPI_Status status;
            mpi_check(MPI_Iprobe(MPI_ANY_SOURCE, tag_, comm_, &come, &status), "MPI_Iprobe");
            if (!come) return "";
            mpi_check(MPI_Get_count(&status, MPI_BYTE, &size), "MPI_Get_count");
            std::string text(static_cast<std::size_t>(size), '\0');
            int const from = status.MPI_SOURCE;
            mpi_check(MPI_Recv(text.data(), size, MPI_BYTE, from, tag_, comm_, MPI_STATUS_IGNORE), "MPI_Recv");
            ++at(read_, from);
            std::istringstream words(text);
            std::string kind;
            std::uint64_t question = 0;
            words >> kind;
            if (kind == "tell" && !ended_) tell_failure(text.substr(kind.size() + 1));
            if (kind == "tell" || kind == "failed") return text.substr(kind.size() + 1);
            if (kind == "batch" || kind == "last") compare_with(from, words, text, kind == "last");
            if (kind == "return") {
                identity theirs;
                std::memcpy(&theirs, text.data() + text.size() - sizeof theirs, sizeof theirs);
                tell_last(from, theirs);
            }
            words >> question;
            if (kind == "ask" && mine)
                write(from, "answer " + std::to_string(question) + state(*mine));
            else if (kind == "answer" && question == question_)
                learn(from, words, text);
        }
    }

    /// Returns the ranks that keep this one waiting, itself or by others, and have not answered.
    std::vector<int> missing() const {
        return detail::missing(rank_, [&](int rank) -> waits const* {
            auto const& of = at(known_, rank).waits;
            return of ? &*of : nullptr;
        });
    }

    /// Returns the exchanges of ranks that wait for each other and for nothing that is on its way, null for others; or
    /// nothing, if this rank may yet be helped. `mine`: what it waits for now.
    ///
    /// A rank sends all messages of an exchange before it waits. So it waits for ever if its message is not on its way
    /// and the sender waits in the same way, whenever the two have answered.
    std::vector<identity const*> locked(mpi_wait const& mine) {
        me().waits = mine;
        std::vector<bool> stuck(known_.size());
        for (std::size_t r = 0; r < known_.size(); ++r) stuck[r] = known_[r].waits.has_value();
        auto const helpless = [&](int r) { // whether something that it waits for never comes
            auto const& waits = *at(known_, r).waits;
            return std::ranges::any_of(waits.silent, [&](int p) { return at(stuck, p) && none_from(p, r); }) ||
                   std::ranges::any_of(waits.deaf, [&](int p) { return at(stuck, p) && ignored_by(p, r); });
        };
        for (bool again = true; again;) {
            again = false;
            for (int r = 0; r < ranks(); ++r)
                if (at(stuck, r) && !helpless(r)) at(stuck, r) = false, again = true;
        }
        std::vector<identity const*> in;
        if (!at(stuck, rank_)) return in;
        for (int r = 0; r < ranks(); ++r) in.push_back(at(stuck, r) ? &at(known_, r).waits->id : nullptr);
        return in;
    }

    /// Returns whether MPI is done with all that was written.
    bool sent() {
        std::erase_if(unsent_, [](auto& note) {
            int done = 0;
            mpi_check(MPI_Test(&note.second, &done, MPI_STATUS_IGNORE), "MPI_Test");
            return done != 0;
        });
        return unsent_.empty();
    }

    /// Returns how many notes of each rank have been read.
    std::vector<std::uint64_t> const& have_been_read() const { return read_; }

private:
    /// What is known of a rank.
    struct rank_state {
        bool asked = false, has_left = false;
        std::optional<mpi_wait> waits;             ///< as it has answered
        std::vector<std::uint64_t> sent, received; ///< messages of exchanges, to and from each other rank
    };

    template <class List>
    static auto at(List& list, int rank) -> decltype(list[0]) {
        return list[static_cast<std::size_t>(rank)];
    }
    rank_state& me() { return at(known_, rank_); }
    int ranks() const { return static_cast<int>(known_.size()); }

    /// Returns whether all messages of `peer` to `rank` have arrived.
    bool none_from(int peer, int rank) const {
        return at(at(known_, peer).sent, rank) == at(at(known_, rank).received, peer);
    }
    /// Returns whether `peer` does not take what `rank` sends.
    bool ignored_by(int peer, int rank) const {
        auto const& silent = at(known_, peer).waits->silent;
        // Less, not other: a peer that has answered later may have taken more than this rank had sent when it answered.
        return std::ranges::find(silent, rank) == silent.end() &&
               at(at(known_, peer).received, rank) < at(at(known_, rank).sent, peer);
    }

    /// Returns what this rank waits for as text that `learn` reads.
    std::string state(mpi_wait const& mine) {
        std::string text;
        for (auto const* list : {&mine.silent, &mine.deaf}) {
            text += ' ' + std::to_string(list->size());
            for (int const peer : *list) text += ' ' + std::to_string(peer);
        }
        for (auto const* counts : {&me().sent, &me().received})
            for (std::uint64_t const count : *counts) text += ' ' + std::to_string(count);
        return text + ' ' + std::string(reinterpret_cast<char const*>(&mine.id), sizeof mine.id);
    }
    void learn(int from, std::istringstream& words, std::string const& text) {
        rank_state& r = at(known_, from);
        r.waits.emplace();
        for (auto* list : {&r.waits->silent, &r.waits->deaf}) {
            std::size_t size = 0;
            words >> size;
            list->resize(size);
            for (int& peer : *list) words >> peer;
        }
        for (auto* counts : {&r.sent, &r.received})
            for (std::uint64_t& count : *counts) words >> count;
        std::memcpy(&r.waits->id, text.data() + text.size() - sizeof(identity), sizeof(identity));
        ask_on(*r.waits);
    }

    /// Throws in what an exchange of this rank differs from that of a rank that has told its batch. `last`: after which
    /// that one has left.
    void compare_with(int from, std::istringstream& words, std::string const& text, bool last) const {
        index_t sequences = 0;
        words >> sequences;
        std::vector<index_t> offsets(static_cast<std::size_t>(sequences) + 1), valid(offsets.size() - 1);
        for (auto* list : {&offsets, &valid})
            for (index_t& number : *list) words >> number;
        known_batches::note(thd(std::move(offsets), std::move(valid)));
        std::array<identity, 2> of; // the other rank's, and this one's
        std::memcpy(of.data(), text.data() + text.size() - sizeof of, sizeof of);
        if (last) throw gone("mpi", rank_, of[1], from, of[0] == identity() ? nullptr : &of[0]);
        require_same_exchange("mpi", of[1], rank_, of[0], from);
    }

    void write(int peer, std::string text) {
        ++at(written_, peer);
        send(peer, tag_, std::move(text));
    }
    void send(int peer, int tag, std::string text) {
        sent(); // forgets those that are
        auto& [note, request] = unsent_.emplace_back(std::make_unique<std::string>(std::move(text)), MPI_REQUEST_NULL);
        mpi_check(MPI_Isend(note->data(), static_cast<int>(note->size()), MPI_BYTE, peer, tag, comm_, &request),
                  "MPI_Isend");
    }
    void ask_on(mpi_wait const& waits) {
        waits.each([&](int peer) {
            if (peer != rank_ && !std::exchange(at(known_, peer).asked, true))
                write(peer, "ask " + std::to_string(question_));
        });
    }

    MPI_Comm comm_;
    int tag_, last_, rank_;
    std::vector<std::uint64_t> written_, read_;
    std::uint64_t question_ = 0;
    std::optional<identity> ran_;
    bool ended_ = false;
    std::vector<rank_state> known_;
    std::vector<std::pair<std::unique_ptr<std::string>, MPI_Request>> unsent_;
};

} // namespace cpx::detail
