// SPDX-License-Identifier: Apache-2.0
// Ranks compare what they are about to run, and say who has what where they differ.
#pragma once

#include <cpx/transport/gather.hpp>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace cpx {

namespace detail {

/// Finds the first offset, or else the first valid length, in which the ranks' batches differ, and throws. `gather` as
/// below; each call of it brings some hundred numbers of every rank, until all have seen where they differ.
template <class Gather>
void compare_batches(char const* where, thd const& batch, int ranks, Gather&& gather, caller here) {
    static constexpr index_t none = -1;
    std::array<index_t, 256> mine;
    std::vector<decltype(mine)> all(static_cast<std::size_t>(ranks));
    for (bool const valid : {false, true}) {
        index_t const count = batch.sequences() + (valid ? 0 : 1);
        for (std::size_t first = 0;; first += mine.size()) {
            for (std::size_t i = 0; i < mine.size(); ++i) {
                auto const n = static_cast<index_t>(first + i);
                mine[i] = n >= count ? none : valid ? batch.valid(n) : batch.offset(n);
            }
            gather(mine.data(), all.data(), sizeof mine);
            for (std::size_t i = 0; i < mine.size(); ++i) {
                if (std::ranges::all_of(all, [&](auto const& theirs) { return theirs[i] == mine[i]; })) continue;
                std::vector<std::string> values;
                for (auto const& theirs : all) values.push_back(theirs[i] == none ? "none" : std::to_string(theirs[i]));
                std::string const place = std::to_string(first + i);
                throw error(where,
                            "ranks disagree on " + (valid ? "the valid length of sequence " + place
                                                          : "offset " + place + " of cu_seqlens"),
                            "one value on all ranks", who_has_what(values), here);
            }
            if (mine.back() == none) break; // on all ranks, for they are equal so far
        }
    }
}

/// Throws unless all ranks have one identity, in which the batch that they have at hand is summed up.
///
/// Collective: `gather(mine, all, bytes)` brings records of all ranks in rank order, so that all of them see the same
/// and go on in the same way.
template <class Gather>
void compare(char const* where, identity const& mine, thd const& batch, int ranks, Gather&& gather, caller here) {
    std::vector<identity> all(static_cast<std::size_t>(ranks));
    gather(&mine, all.data(), sizeof mine);
    if (std::ranges::count(all, mine) == ranks) return;
    for (int field = 0; field < identity::fields; ++field) {
        std::vector<std::string> values;
        for (identity const& theirs : all) values.push_back(theirs.value(field));
        if (std::ranges::count(values, values[0]) == ranks) continue;
        if (identity::of_batch(field)) compare_batches(where, batch, ranks, gather, here);
        throw error(where, "ranks disagree on " + identity::name(field), "one value on all ranks", who_has_what(values),
                    here);
    }
}

} // namespace detail

/// Lets all ranks compare what they are about to run, once for each fingerprint; `batch` is what it is run on.
///
/// Collective. Throws `cpx::error` on every rank, before anything moves, naming the first field in which the ranks
/// differ, of batches the first offset, and who has which value. Cost, the first time: one message of
/// `sizeof(identity)` bytes between each two ranks.
template <transport Comm>
void agree(Comm& comm, identity const& mine, thd const& batch, caller here = caller::here()) {
    if (comm.agreed().contains(mine.fingerprint())) return;
    identity id = mine;
    id[identity::agreement] = 1;
    detail::compare(
        "exchange", mine, batch, comm.ranks(),
        [&](void const* my_part, void* all, std::size_t bytes) { detail::gather(comm, id, my_part, all, bytes, here); },
        here);
    comm.agreed().insert(mine.fingerprint());
}

} // namespace cpx
