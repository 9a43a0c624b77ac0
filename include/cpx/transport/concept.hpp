// SPDX-License-Identifier: Apache-2.0
// What a transport is: it knows its rank and moves rectangles of bytes between ranks.
#pragma once

#include <cpx/core/row_buffer.hpp>
#include <cpx/layout/tensor.hpp>
#include <cpx/plan/difference.hpp>
#include <cpx/plan/parcel.hpp>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace cpx {

/// One rank's end of a group of ranks 0 .. ranks() - 1, by which `exchange` moves messages between them.
///
/// `transfer(id, sends, receives)` moves one rank's messages of one exchange. Its caller keeps to this:
///
/// - It has at most one message to and one from each peer, in ascending order of peers, and none to itself. Either list
///   may be empty, or both. A message may have no bytes; both ends know that.
/// - A call is no barrier: a rank may be any number of calls ahead of one that it has no messages with. Two ranks make
///   the calls in which they have messages for each other in the same order.
/// - The id, the lists and what they point to live until the call returns, and no longer. One thread calls at a time.
///
/// A transport owes it this:
///
/// - The call returns when its sends have been taken, so that their memory may be written, and its receives have
///   arrived (on a device: when that is enqueued). Messages from one rank to another arrive in the order of the calls;
///   any size arrives, in both directions at once. Nothing beside the places of the receives is written.
/// - No wait is without end: the call throws `cpx::error` when a rank that it waits for has failed, has left the group,
///   or does not come within a deadline. A rank whose program fails therefore tells the others, or is seen to be gone.
///   After an error targets hold anything, and the transport may stay broken: then every later call throws.
/// - `agreed()`, in which cpx keeps the fingerprints of plans that all ranks have compared, is each rank's own. It is
///   empty in every new group, lives as long as that, and keeps between calls what is put there.
///
/// These are courtesies: to name the rank at fault in the error, at once, and to check the id. The ranks of one call
/// have the same id, or all compare their plans (see `identity::agreement`). A transport that sends the id along and
/// gives it to `require_same_exchange` finds ranks in different exchanges; another one mixes their rows.
///
/// `testing::check_transport` tests all of this.
template <class T>
concept transport =
    requires(T& t, identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives) {
        { t.rank() } -> std::same_as<int>;
        { t.ranks() } -> std::same_as<int>;
        { t.agreed() } -> std::same_as<std::unordered_set<std::uint64_t>&>;
        t.transfer(id, sends, receives);
    };

/// A transport whose ranks have memory of their own kind, such as devices. What is asked of it is enqueued in a stream,
/// that of `memory()`; it runs plans itself, after the checks that all transports share, and agrees on them as they do.
///
/// `rows` that it is given are in that memory. Any elements that a plan can move, not float alone. All ranks make each
/// call, which is no barrier either. `wait` returns when the stream has come to what was asked last; it throws
/// `cpx::error` for what was found meanwhile, such as ranks that move rows of another batch, and when a rank has
/// failed, has left the group or does not come within a deadline. `T::prepared<T, Plan>` is what a `movement` prepares.
///
/// `testing::check_transport` tests this, too.
template <class T>
concept device_transport =
    requires(T& t, plan const& p, rows<float const> const& from, rows<float> const& to, caller here) {
        { t.rank() } -> std::same_as<int>;
        { t.ranks() } -> std::same_as<int>;
        requires any_memory<typename T::memory_type>;
        { t.memory() } -> std::convertible_to<typename T::memory_type>;
        t.exchange(p, from, to, here);
        t.wait(here);
    };

template <class T>
concept any_transport = transport<T> || device_transport<T>;

/// Returns the memory that the ranks of a transport have.
template <any_transport Comm>
auto rank_memory(Comm const& comm) {
    if constexpr (device_transport<Comm>)
        return typename Comm::memory_type(comm.memory());
    else
        return host_memory();
}
template <any_transport Comm>
using rank_memory_of = decltype(rank_memory(std::declval<Comm const&>()));

namespace detail {

/// What a class on a transport deduces where none fits; its constructor says so.
struct no_transport {
    int rank() const;
    int ranks() const;
    std::unordered_set<std::uint64_t>& agreed();
    void transfer(identity const&, std::span<outgoing const>, std::span<incoming const>);
};

/// Returns this rank. Throws `cpx::error` if the sharding is not of as many ranks as the transport.
template <any_sharding S, any_transport Comm>
int rank_in(char const* where, S const& sharding, Comm const& comm, caller here) {
    require(sharding.ranks() == comm.ranks(), where, "ranks of the sharding", comm.ranks(), sharding.ranks(), here);
    return comm.rank();
}

} // namespace detail

/// Returns a tensor of zeros for this rank of a transport, in its memory: `make_tensor<float>(sharding, comm, width)`.
template <class T, any_sharding S, any_transport Comm>
tensor<T, S, rank_memory_of<Comm>> make_tensor(S const& sharding, Comm const& comm, index_t width,
                                               caller here = caller::here()) {
    return {sharding, detail::rank_in("make_tensor", sharding, comm, here), width, rank_memory(comm), here};
}

/// Returns rows of zeros for this rank that are no batch's, such as a weight: `make_rows<float>(comm, channels, taps)`.
template <class T, any_transport Comm>
row_buffer<T, rank_memory_of<Comm>> make_rows(Comm const& comm, index_t count, index_t width,
                                              caller here = caller::here()) {
    return {rank_memory(comm), count, width, here};
}
template <class T = void, class X = detail::any>
detail::refused make_rows(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: make_rows<T>(comm, count, width) wants a cpx::transport and how many rows of which width");
    return {};
}

namespace detail {

inline std::string names(std::vector<int> const& ranks) {
    std::string text = ranks.size() == 1 ? "rank" : "ranks";
    for (int const rank : ranks) text += ' ' + std::to_string(rank);
    return text;
}

/// Returns what a transport tells other ranks of its own error, whose line would be one of the library.
inline std::string reason(std::exception const& e) {
    auto const* const own = dynamic_cast<error const*>(&e);
    return own ? own->message() : e.what();
}

/// Returns `deadline`, or a year if it is longer. Throws `cpx::error` if it is not positive.
inline std::chrono::milliseconds checked_deadline(char const* where, std::chrono::milliseconds deadline, caller here) {
    require(deadline.count() > 0, where, "deadline, ms", "more than 0", deadline.count(), here);
    return std::min<std::chrono::milliseconds>(deadline, std::chrono::hours(24 * 365));
}

/// The error of `rank`, which waits in an exchange for a rank that has left the group. `last`: the last exchange of
/// that one, or null. Where ranks have no rows for each other, nothing before this shows that their batches differ.
inline error gone(char const* where, int rank, identity id, int peer, identity const* last) {
    std::string const me = "rank " + std::to_string(rank), who = "rank " + std::to_string(peer);
    std::string const problem = me + " waits in " + id.text() + " for " + who;
    std::string got = "its return";
    if (last) {
        got += " after " + last->text();
        identity other = *last;
        id[identity::agreement] = other[identity::agreement] = 0;
        difference const first(other, id);
        if (!first.exact())
            got += ", of another batch";
        else if (!first.empty())
            got += " (" + first.name() + ": " + first.value(other) + " on " + who + ", " + first.value(id) + " on " +
                   me + ')';
    }
    return {where, problem, who + " to take part", got};
}

/// The error of ranks that wait for each other in exchanges of which two are `mine` and `theirs`. `in`: the exchange of
/// every rank, null for those that are in none or wait for others.
inline error apart(char const* where, identity const& mine, identity const& theirs,
                   std::vector<identity const*> const& in) {
    difference const first(mine, theirs);
    std::vector<std::string> values;
    for (identity const* id : in) values.push_back(id ? first.value(*id) + " in " + id->text() : "none");
    return {where, "ranks are in different exchanges: " + first.name(), "one on all ranks", who_has_what(values)};
}

/// The ranks that one waits for in an exchange: for their messages, and for them to take its own.
struct waits {
    std::vector<int> silent, deaf;

    bool none() const { return silent.empty() && deaf.empty(); }
    template <class F>
    void each(F&& f) const {
        for (auto const* peers : {&silent, &deaf})
            for (int const peer : *peers) f(peer);
    }
};

/// Returns the ranks that keep `rank` waiting, itself or by others, and do not wait themselves, as far as is known.
/// `waits_of(rank)`: the waits of a rank, or null.
template <class F>
std::vector<int> missing(int rank, F&& waits_of) {
    std::vector<int> seen{rank}, found;
    for (std::size_t i = 0; i < seen.size(); ++i) {
        waits const* const of = waits_of(seen[i]);
        if (!of) found.push_back(seen[i]);
        if (!of) continue;
        of->each([&](int peer) {
            if (std::ranges::find(seen, peer) == seen.end()) seen.push_back(peer);
        });
    }
    std::ranges::sort(found);
    return found;
}

/// The error of `rank`, which has waited in an exchange. `missing`: see above.
inline error late(char const* where, int rank, identity const& id, waits const& of, std::vector<int> const& missing,
                  std::chrono::milliseconds deadline) {
    auto const& [silent, deaf] = of;
    return {where,
            "rank " + std::to_string(rank) + " waited in " + id.text() +
                (silent.empty() ? "" : " for messages of " + names(silent)) +
                (silent.empty() || deaf.empty() ? "" : " and") +
                (deaf.empty() ? "" : " for " + names(deaf) + " to take theirs"),
            "an end within " + std::to_string(deadline.count()) + " ms",
            missing.empty() ? "ranks that wait for each other" : "nothing from " + names(missing)};
}

} // namespace detail

/// Throws `cpx::error`, which names both ranks and the first field in which their plans differ, unless the exchange
/// `mine`, which `rank` is in, is that of a message from `peer`. `where` is the transport's name. Of batches it names
/// the first offset, or valid length, if this process has exchanged rows of both.
inline void require_same_exchange(char const* where, identity const& mine, int rank, identity const& theirs, int peer) {
    if (mine.same_exchange(theirs)) return;
    detail::difference const first(mine, theirs);
    auto const place = [&](identity const& id, char const* on, int r) {
        return first.value(id) + on + std::to_string(r) + " (" + id.text() + ")";
    };
    throw error(where, "ranks are in different exchanges: " + first.name(), place(mine, " as on rank ", rank),
                place(theirs, " on rank ", peer));
}

} // namespace cpx
