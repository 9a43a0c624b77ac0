// SPDX-License-Identifier: Apache-2.0
// The chain of a sequence: its segments in token order, and the ranks that hold them.
#pragma once

#include <cpx/plan/segments.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cpx {

/// The place of one segment in the chain of its sequence's segments.
struct carry_link {
    index_t level = 0;    ///< how many segments come before it
    index_t length = 1;   ///< of the chain
    index_t holders = 0;  ///< where `carry_plan::holders` begins to list the chain's ranks
    index_t map_row = -1; ///< its row among the rank's segments that lie between two others, -1: it does not

    /// Returns how many segments of the chain lie on one side of it.
    index_t beside(side where) const { return where == side::before ? level : length - 1 - level; }
    friend constexpr bool operator==(carry_link, carry_link) = default;
};

namespace detail {

/// A chain as one rank sees it: how long it is, where its ranks are listed, and the levels that are the rank's own.
struct chain {
    index_t length = 0, holders = 0;
    std::vector<index_t> own;
};

/// Finds the chains of a batch. Chains of sequences with rows in every chunk are the layout's, found once; others are
/// walked along.
template <any_sharding S>
class chain_finder {
public:
    /// Adds to `holders`, which lives longer.
    chain_finder(S const& sharding, int rank, std::vector<int>& holders)
        : sharding_(sharding), rank_(rank), holders_(holders) {
        if constexpr (follows)
            for (index_t s = 0; s < sharding.batch().sequences() && whole_.length == 0; ++s)
                if (sharding.fills(s)) {
                    auto const& layout = sharding.policy();
                    for (int c = 0; c < layout.chunks(); ++c) add(whole_, layout.owner(c));
                    note_crossings(whole_);
                }
    }

    /// Returns the chain of `sequence`, of which the rank has segments or not, until the next call; or null if the rank
    /// has none and the chain is not longer than others.
    chain const* find(index_t sequence, bool has_segments) {
        range const tokens{sharding_.batch().offset(sequence), sharding_.batch().offset(sequence + 1)};
        if constexpr (follows)
            if (whole_.length > 0) {
                if (sharding_.fills(sequence)) return &whole_;
                if (!tokens.empty()) all_known_ = false;
                if (!has_segments) return nullptr; // to leave out chunks makes no chain longer
            }
        index_t const before = std::ssize(holders_);
        walked_.length = 0;
        walked_.own.clear();
        if (S::every_row && !tokens.empty()) add(walked_, rank_);
        if (!S::every_row && !tokens.empty())
            sharding_.for_each_holder(tokens, hint_, [&](int holder, range) { add(walked_, holder); });
        note_crossings(walked_);
        if (!has_segments) holders_.resize(static_cast<std::size_t>(before));
        return &walked_;
    }

    /// Returns the k of which no segment, of the chains found so far, has one of another rank 2^k further on, a bit
    /// each; none where some rank, though not all, would have to walk along a chain for that.
    std::uint64_t within() const { return all_known_ ? ~crossing_ : 0; }

private:
    static constexpr bool follows = requires(S const& s, index_t i) { s.fills(i); };

    /// Adds a piece of `holder`.
    void add(chain& c, int holder) {
        if (c.length == 0)
            c.holders = std::ssize(holders_);
        else if (holders_.back() == holder)
            return;
        if (holder == rank_) c.own.push_back(c.length);
        holders_.push_back(holder);
        ++c.length;
    }

    void note_crossings(chain const& c) {
        auto const holder = holders_.begin() + c.holders;
        for (index_t k = 0; index_t{1} << k < c.length; ++k) {
            index_t const reach = index_t{1} << k;
            if (crossing_ >> k & 1) continue;
            if (!std::equal(holder + reach, holder + c.length, holder)) crossing_ |= std::uint64_t{1} << k;
        }
    }

    S const& sharding_;
    int rank_;
    std::vector<int>& holders_;
    chain whole_, walked_;
    index_t hint_ = 0;
    std::uint64_t crossing_ = 0;
    bool all_known_ = true; ///< whether every rank has found every chain
};

} // namespace detail

} // namespace cpx
