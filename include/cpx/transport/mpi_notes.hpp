// SPDX-License-Identifier: Apache-2.0
// What the ranks of a communicator tell each other beside the messages of exchanges.
#pragma once

#include <cpx/transport/mpi_environment.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace cpx::detail {

/// Notes from rank to rank, read while a rank waits: that one fails; and, when another asks, for whom it waits.
class mpi_notes {
public:
    static constexpr std::size_t longest = 3000; ///< any MPI takes so much without a receiver

    /// `tag`: of notes; `last`: of the last words to a rank, which come in the order of the messages of that tag.
    mpi_notes(MPI_Comm comm, int tag, int last, int rank, int ranks)
        : comm_(comm), tag_(tag), last_(last), rank_(rank), written_(static_cast<std::size_t>(ranks)),
          read_(written_.size()), others_(written_.size()) {}
    mpi_notes(mpi_notes const&) = delete;
    mpi_notes& operator=(mpi_notes const&) = delete;
    ~mpi_notes() {
        for (auto& [text, request] : unsent_) static_cast<void>(text.release()); // MPI may still read them
    }

    /// Tells all others that have not left what has failed.
    void tell_failure(std::string const& what) {
        for (int peer = 0; peer < ranks(); ++peer)
            if (peer != rank_ && !others_[static_cast<std::size_t>(peer)].has_left)
                write(peer, "failed " + what.substr(0, longest));
    }

    /// Tells all others that this rank writes no more, and how many notes each is to read.
    void tell_end() {
        for (int peer = 0; peer < ranks(); ++peer)
            if (peer != rank_) send(peer, last_, std::to_string(written_[static_cast<std::size_t>(peer)]));
    }
    /// Reads the last words of a rank. Returns how many notes there are to read of it.
    std::uint64_t read_end(int peer, std::string const& words) {
        others_[static_cast<std::size_t>(peer)].has_left = true;
        return std::stoull(words);
    }

    /// Asks ranks for whom they wait; those that they name in turn, as their answers are read.
    void ask(std::vector<int> const& peers) {
        ++question_;
        for (other& o : others_) o = {false, false, o.has_left, {}};
        ask_again(peers);
    }

    /// Reads what has come, and answers who asks, unless `awaited` is null. Returns what has failed on another rank, or
    /// "".
    std::string read(std::vector<int> const* awaited) {
        for (;;) {
            int come = 0, size = 0;
            MPI_Status status;
            mpi_check(MPI_Iprobe(MPI_ANY_SOURCE, tag_, comm_, &come, &status), "MPI_Iprobe");
            if (!come) return "";
            mpi_check(MPI_Get_count(&status, MPI_BYTE, &size), "MPI_Get_count");
            std::string text(static_cast<std::size_t>(size), '\0');
            int const from = status.MPI_SOURCE;
            mpi_check(MPI_Recv(text.data(), size, MPI_BYTE, from, tag_, comm_, MPI_STATUS_IGNORE), "MPI_Recv");
            ++read_[static_cast<std::size_t>(from)];
            std::istringstream words(text);
            std::string kind;
            std::uint64_t question = 0;
            words >> kind;
            if (kind == "failed") return text.substr(kind.size() + 1);
            words >> question;
            if (kind == "ask" && awaited) {
                std::string reply = "answer " + std::to_string(question);
                for (int const peer : *awaited) reply += ' ' + std::to_string(peer);
                write(from, reply);
            } else if (kind == "answer" && question == question_) {
                other& o = others_[static_cast<std::size_t>(from)];
                o.has_answered = true;
                for (int peer = 0; words >> peer;) o.awaited.push_back(peer);
                ask_again(o.awaited);
            }
        }
    }

    /// Returns those of `awaited`, and of the ranks for whom these wait, that have not answered.
    std::vector<int> silent(std::vector<int> awaited) const {
        std::vector<int> seen{rank_}, found;
        for (std::size_t i = 0; i < awaited.size(); ++i) {
            if (std::ranges::find(seen, awaited[i]) != seen.end()) continue;
            seen.push_back(awaited[i]);
            other const& o = others_[static_cast<std::size_t>(awaited[i])];
            if (!o.has_answered) found.push_back(awaited[i]);
            awaited.insert(awaited.end(), o.awaited.begin(), o.awaited.end());
        }
        std::ranges::sort(found);
        return found;
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
    /// What is known of another rank.
    struct other {
        bool asked = false, has_answered = false, has_left = false;
        std::vector<int> awaited;
    };

    int ranks() const { return static_cast<int>(others_.size()); }
    void write(int peer, std::string text) {
        ++written_[static_cast<std::size_t>(peer)];
        send(peer, tag_, std::move(text));
    }
    void send(int peer, int tag, std::string text) {
        sent(); // forgets those that are
        auto& [note, request] = unsent_.emplace_back(std::make_unique<std::string>(std::move(text)), MPI_REQUEST_NULL);
        mpi_check(MPI_Isend(note->data(), static_cast<int>(note->size()), MPI_BYTE, peer, tag, comm_, &request),
                  "MPI_Isend");
    }
    void ask_again(std::vector<int> const& peers) {
        for (int const peer : peers) {
            if (peer == rank_ || std::exchange(others_[static_cast<std::size_t>(peer)].asked, true)) continue;
            write(peer, "ask " + std::to_string(question_));
        }
    }

    MPI_Comm comm_;
    int tag_, last_, rank_;
    std::vector<std::uint64_t> written_, read_;
    std::uint64_t question_ = 0;
    std::vector<other> others_;
    std::vector<std::pair<std::unique_ptr<std::string>, MPI_Request>> unsent_;
};

} // namespace cpx::detail
