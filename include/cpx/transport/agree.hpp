// SPDX-License-Identifier: Apache-2.0
// Ranks compare what they are about to run, and say who has what where they differ.
#pragma once

#include <cpx/plan/difference.hpp>
#include <cpx/transport/gather.hpp>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace cpx {

namespace detail {

/// Finds the first of `count` numbers, none of which is negative, in which ranks differ, and throws what names it.
/// `gather` as below; each call of it brings some hundred numbers of every rank, until all have seen where they differ.
template <class Number, class Name, class Gather>
void compare_numbers(char const* where, index_t count, Number&& number, Name&& name, int ranks, Gather&& gather,
                     caller here) {
    static constexpr index_t none = -1;
    std::array<index_t, 256> mine;
    std::vector<decltype(mine)> all(static_cast<std::size_t>(ranks));
    for (std::size_t first = 0;; first += mine.size()) {
        for (std::size_t i = 0; i < mine.size(); ++i) {
            auto const n = static_cast<index_t>(first + i);
            mine[i] = n < count ? number(n) : none;
        }
        gather(mine.data(), all.data(), sizeof mine);
        for (std::size_t i = 0; i < mine.size(); ++i) {
            if (std::ranges::all_of(all, [&](auto const& theirs) { return theirs[i] == all[0][i]; })) continue;
            std::vector<std::string> values;
            for (auto const& theirs : all) values.push_back(theirs[i] == none ? "none" : std::to_string(theirs[i]));
            throw error(where, "ranks disagree on " + name(static_cast<index_t>(first + i)), "one value on all ranks",
                        who_has_what(values), here);
        }
        if (mine.back() == none) return; // on all ranks, for they are equal so far
    }
}

template <class Gather>
void compare_batches(char const* where, thd const& batch, int ranks, Gather&& gather, caller here) {
    compare_numbers(
        where, batch.sequences() + 1, [&](index_t i) { return batch.offset(i); },
        [](index_t i) { return "offset " + std::to_string(i) + " of cu_seqlens"; }, ranks, gather, here);
    compare_numbers(
        where, batch.sequences(), [&](index_t s) { return batch.valid(s); },
        [](index_t s) { return "the valid length of sequence " + std::to_string(s); }, ranks, gather, here);
}

template <class Gather>
void compare_settings(char const* where, char const* whose, settings const& of, int ranks, Gather&& gather,
                      caller here) {
    auto const read = [&](setting_list list) {
        if (of.from) of.from->read(list);
        return list;
    };
    auto const numbers = read({}).numbers;
    compare_numbers(
        where, std::ssize(numbers), [&](index_t i) { return numbers[static_cast<std::size_t>(i)]; },
        [&](index_t i) {
            return read({{}, i, "more settings than these"}).name + " of the " + whose + " sharding";
        },
        ranks, gather, here);
}

/// Throws unless all ranks have one identity. What it sums up, `batch` and the shardings' settings, they have at hand.
///
/// Collective: `gather(mine, all, bytes)` brings all ranks' records in rank order, so that all see, and do, the same.
template <class Gather>
void compare(char const* where, identity const& mine, thd const& batch, int ranks, Gather&& gather, caller here,
             settings const& source = {}, settings const& target = {}) {
    std::vector<identity> all(static_cast<std::size_t>(ranks));
    gather(&mine, all.data(), sizeof mine);
    if (std::ranges::count(all, mine) == ranks) return;
    for (int field = 0; field < identity::fields; ++field) {
        std::vector<std::string> values;
        for (identity const& theirs : all) values.push_back(theirs.value(field));
        if (std::ranges::count(values, values[0]) == ranks) continue;
        if (identity::of_batch(field)) compare_batches(where, batch, ranks, gather, here);
        if (std::ranges::any_of(values, identity::cut_short)) {
            bool const from = field == identity::texts + static_cast<int>(identity::source_hash);
            compare_settings(where, from ? "source" : "target", from ? source : target, ranks, gather, here);
        }
        throw error(where, "ranks disagree on " + mine.name(field), "one value on all ranks", who_has_what(values),
                    here);
    }
}

} // namespace detail

/// Lets all ranks compare what they are about to run, once for each fingerprint: `mine`, made from `of`. After
/// 1024 fingerprints all ranks forget them, and compare again what comes again.
///
/// Collective. Throws `cpx::error` on every rank, before anything moves, naming the first field in which the ranks
/// differ, of batches the first offset, of long tables the first owner, and who has which value. Cost, the first time:
/// one message of `sizeof(identity)` bytes between each two ranks. Errors begin with `by`.
template <transport Comm>
void agree(Comm& comm, identity const& mine, plan const& of, caller here = caller::here(),
           char const* by = "exchange") {
    detail::known_batches::note(of.batch);
    if (comm.agreed().contains(mine.fingerprint())) return;
    identity id = mine;
    id[identity::agreement] = 1;
    std::string where = by; // ranks are counted as `comm` counts them
    if constexpr (requires { comm.name(); }) where += " of " + comm.name();
    detail::compare(
        where.c_str(), mine, of.batch, comm.ranks(),
        [&](void const* own, void* all, std::size_t bytes) { detail::gather(comm, id, own, all, bytes, here); }, here,
        of.source_settings, of.target_settings);
    if (comm.agreed().size() >= 1024) comm.agreed().clear(); // on all ranks: they have agreed on the same
    comm.agreed().insert(mine.fingerprint());
}
template <class X = detail::any>
detail::refused agree(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: agree(comm, mine, of) wants a cpx::transport, the identity of a plan, plan.id, and the plan");
    return {};
}

} // namespace cpx
