// SPDX-License-Identifier: Apache-2.0
// Records of every rank, over any transport: for set-up and agreement, not for rows.
#pragma once

#include <cpx/core/overlap.hpp>
#include <cpx/transport/concept.hpp>

#include <cstring>
#include <string_view>
#include <vector>

namespace cpx {

namespace detail {

/// Moves messages; an error of the transport is thrown with the line of the caller, the rank's place in its program.
template <transport Comm>
void transfer(Comm& comm, identity const& id, std::span<outgoing const> sends, std::span<incoming const> receives,
              caller here) {
    try {
        comm.transfer(id, sends, receives);
    } catch (error const& e) {
        throw error(e.where(), e.problem(), e.expected(), e.got(), here);
    }
}

inline identity named(std::string_view operation, std::size_t bytes) {
    identity id;
    identity::set(id.operation, operation);
    id[identity::parameter] = bytes;
    return id;
}

/// Gathers of every rank its own number of bytes: those of rank r to `all + begins[r]`, up to `begins[r + 1]`.
template <transport Comm>
void gather(Comm& comm, identity const& id, void const* mine, void* all, std::vector<index_t> const& begins,
            caller here) {
    std::vector<outgoing> sends;
    std::vector<incoming> receives;
    auto* const places = static_cast<std::byte*>(all);
    auto const begin = [&](int rank) { return begins[static_cast<std::size_t>(rank)]; };
    auto const size = [&](int rank) { return begin(rank + 1) - begin(rank); };
    for (int peer = 0; peer < comm.ranks(); ++peer) {
        if (peer == comm.rank()) continue;
        sends.push_back(consecutive(peer, static_cast<std::byte const*>(mine), size(comm.rank())));
        receives.push_back(consecutive(peer, places + begin(peer), size(peer)));
    }
    if (size(comm.rank()) > 0)
        std::memmove(places + begin(comm.rank()), mine, static_cast<std::size_t>(size(comm.rank())));
    transfer(comm, id, sends, receives, here);
}

template <transport Comm>
void gather(Comm& comm, identity const& id, void const* mine, void* all, std::size_t bytes, caller here) {
    std::vector<index_t> begins;
    for (int rank = 0; rank <= comm.ranks(); ++rank) begins.push_back(rank * static_cast<index_t>(bytes));
    gather(comm, id, mine, all, begins, here);
}

/// Throws unless there is memory for the bytes of all ranks, which may hold a rank's own only where they will be.
inline void check_gather(void const* mine, void* all, std::size_t bytes, int rank, int ranks, caller here) {
    char const* const where = "gather";
    require(bytes < (std::size_t{1} << 62) / static_cast<std::size_t>(ranks), where, "bytes",
            "of all ranks together less than 2^62", bytes, here);
    require(bytes == 0 || (mine != nullptr && all != nullptr), where, "memory of mine and of all", "some", "none",
            here);
    auto const count = static_cast<index_t>(bytes);
    rows<std::byte const> const own(static_cast<std::byte const*>(mine), 1, count);
    rows<std::byte const> const whole(static_cast<std::byte const*>(all), 1, count * ranks);
    if (bytes > 0 && own.data() != whole.data() + rank * count)
        require_apart(where, {{"all", whole}}, {{"mine", own}}, here);
}

} // namespace detail

/// Gathers `bytes` of every rank into `all`, in rank order. Collective; equally many on all ranks. `mine` lies apart
/// from `all`, or in its own place there.
///
/// Cost: a message between each two ranks. Throws `cpx::error` on unfit memory, and what the transport throws.
template <transport Comm>
void gather(Comm& comm, void const* mine, void* all, std::size_t bytes, caller here = caller::here()) {
    detail::check_gather(mine, all, bytes, comm.rank(), comm.ranks(), here);
    detail::gather(comm, detail::named("gather", bytes), mine, all, bytes, here);
}
template <class X = detail::any>
detail::refused gather(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: gather(comm, mine, all, bytes) gathers bytes; rows of a tensor come by "
                                    "exchange(x, replicated<>(ranks, batch), comm)");
    return {};
}

/// Replaces `bytes` by those of rank 0. Collective; equally many on all ranks. Throws what the transport throws.
template <transport Comm>
void broadcast(Comm& comm, std::span<std::byte> bytes, caller here = caller::here()) {
    std::vector<outgoing> sends;
    std::vector<incoming> receives;
    if (comm.rank() > 0) receives.push_back(consecutive(0, bytes.data(), std::ssize(bytes)));
    for (int peer = 1; comm.rank() == 0 && peer < comm.ranks(); ++peer)
        sends.push_back(consecutive<std::byte const>(peer, bytes.data(), std::ssize(bytes)));
    detail::transfer(comm, detail::named("broadcast", bytes.size()), sends, receives, here);
}
template <class X = detail::any>
detail::refused broadcast(X const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: broadcast(comm, bytes) wants std::as_writable_bytes(std::span(values))");
    return {};
}

} // namespace cpx
