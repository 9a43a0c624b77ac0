// SPDX-License-Identifier: Apache-2.0
// Messages that NCCL sends and receives, from and into memory where they are packed.
#pragma once

#include <cpx/cuda/exchange_tables.hpp>
#include <cpx/cuda/runtime.hpp>
#include <cpx/transport/nccl.hpp>

#include <utility>
#include <vector>

namespace cpx::cuda::detail {

/// What a rank sends and receives: with the first message to a rank, after plans were set, a word that stands for them.
class message_wires {
    using wire = cpx::detail::wire;

public:
    message_wires(nccl& comm, index_t bytes, caller here) : comm_(comm), out_(bytes, here), in_(bytes, here) {}

    char* out() const { return out_.data(); }
    char* in() const { return in_.data(); }
    index_t bytes() const { return out_.size(); }

    /// Words go again with the next messages, unless they are `compared`.
    void begin(bool compared) {
        told_.assign(static_cast<std::size_t>(comm_.ranks()), compared);
        heard_ = told_;
    }
    /// Gives all messages to the stream; `place`: returns where one is and its bytes. `words`: this rank's, then those
    /// of all. Returns whether words come.
    template <class Place>
    bool operator()(std::vector<wire> const& sends, std::vector<wire> const& receives, std::uint64_t* words,
                    Place&& place, cudaStream_t stream, caller here) {
        if (sends.empty() && receives.empty()) return false;
        bool compares = false;
        auto const each = [&](auto operation, std::vector<wire> const& messages, std::vector<char>& known,
                              auto&& word_of) {
            auto const give = [&](void* data, index_t size, int peer) { // the group's end reports failures
                static_cast<void>(operation(data, static_cast<std::size_t>(size), ncclInt8, peer, comm_.get(), stream));
            };
            for (wire const& w : messages) {
                if (!std::exchange(known[static_cast<std::size_t>(w.peer)], 1)) {
                    give(word_of(w.peer), sizeof(std::uint64_t), w.peer);
                    compares = true;
                }
                auto const [data, size] = place(w);
                give(data, size, w.peer);
            }
        };
        comm_.call(
            "ncclSend and ncclRecv",
            [&] {
                static_cast<void>(ncclGroupStart());
                each(ncclSend, sends, told_, [&](int) { return words; });
                each(ncclRecv, receives, heard_, [&](int peer) { return words + 1 + peer; });
                return ncclGroupEnd();
            },
            here);
        return compares;
    }
    /// Sends a byte for every message, or to and from `all` ranks, and waits: NCCL connects two ranks when they first
    /// meet, which waits for both on the host.
    void connect(std::vector<ready_plan> const& plans, bool all, caller here) {
        std::vector<wire> sends, receives;
        for (int peer = 0; all && peer < comm_.ranks(); ++peer)
            if (peer != comm_.rank()) sends.push_back({.peer = peer, .bytes = 1});
        if (all) receives = sends;
        for (std::size_t i = 0; !all && i < plans.size(); ++i) {
            auto const& t = plans[i].tables;
            sends.insert(sends.end(), t.sends.begin(), t.sends.end());
            receives.insert(receives.end(), t.receives.begin(), t.receives.end());
        }
        comm_.begin_call(here);
        begin(true);
        buffer<char> const bytes(std::ssize(sends) + std::ssize(receives), here);
        char* next = bytes.data();
        stream const own;
        (*this)(
            sends, receives, nullptr, [&](wire const&) { return std::pair(next++, index_t{1}); }, own, here);
        settle(comm_, own, here);
    }
    /// Waits for a stream of this object's own. What has been found of other ranks is left for the caller's wait.
    static void settle(nccl& comm, cudaStream_t own, caller here) {
        event end;
        end.record(own, here);
        comm.wait(end, here);
    }

private:
    nccl& comm_;
    std::vector<char> told_, heard_; ///< of every rank: whether its word has gone there, or come, since plans were set
    buffer<char> out_, in_;
};

} // namespace cpx::cuda::detail
