// SPDX-License-Identifier: Apache-2.0
// The plans by which recurrent states are handed along the segments of a sequence.
#pragma once

#include <cpx/plan/chains.hpp>
#include <cpx/plan/plan.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace cpx {

/// How states reach the segments of a sequence that is cut; a type, so that it shows which results are exact.
///
/// `serial` hands the state itself from segment to segment: the operations of one rank in the order of one rank, one
/// exchange a level. With cuts at multiples of the operator's chunk its results are bitwise those of one rank.
struct serial {};

/// `scan` folds every segment into its step S -> M S + E and joins the steps of neighbours, of twice as many segments
/// with every exchange. Equal to one rank within rounding, in an order that sharding and heads decide.
struct scan {};

template <class How>
concept carry_kind = std::same_as<How, serial> || std::same_as<How, scan>;

/// Returns whether an operator that works in chunks of `chunk` tokens gives bitwise the results of one rank. It does on
/// one rank, where every rank holds every row, and with `serial` if sequences are cut at multiples of the chunk only.
/// With `scan` on several ranks it does not.
template <carry_kind How, any_sharding S>
constexpr bool is_exact(S const& sharding, index_t chunk) {
    if constexpr (S::every_row)
        return true;
    else if constexpr (std::same_as<How, serial> && requires { sharding.cut().unit(); })
        return sharding.ranks() == 1 || sharding.cut().unit() % chunk == 0;
    else
        return sharding.ranks() == 1;
}

namespace detail {

/// What one rank sends, or receives, in an exchange of states: rows of a buffer, added in the order of its segments, on
/// which both ends of a message agree.
class state_rows {
public:
    void add(int peer, index_t count) {
        if (count > 0) runs_.push_back({peer, {rows_, count}});
        rows_ += count;
    }
    void skip(index_t count) { rows_ += count; }
    index_t rows() const { return rows_; }

    std::vector<message> messages() {
        auto const peer_of = &std::pair<int, run>::first;
        if (!std::ranges::is_sorted(runs_, {}, peer_of)) std::ranges::stable_sort(runs_, {}, peer_of);
        std::vector<message> list;
        for (auto const& [peer, rows] : runs_) {
            if (list.empty() || list.back().peer != peer) list.push_back({peer, {}, {}});
            list.back().rows.own().push_back(rows);
        }
        return list;
    }

private:
    std::vector<std::pair<int, run>> runs_;
    index_t rows_ = 0;
};

} // namespace detail

/// What a recurrent operator needs to know of a sharding: a rank's segments, their places in their sequences' chains,
/// and how many exchanges there are.
struct carry_steps {
    int rank = 0;
    thd batch;
    bool every_row = false; ///< as the sharding says
    std::vector<segment> segments = {};
    std::vector<carry_link> links = {}; ///< one a segment
    std::vector<int> holders = {};      ///< the ranks of the chains, see `carry_link::holders`
    index_t steps = 0;                  ///< exchanges, the same on all ranks
    identity id = {};
    detail::settings settings = {}; ///< of the sharding

    /// Returns the rank that holds what lies `onward` levels after segment `i`.
    int holder(index_t i, index_t onward) const {
        carry_link const& l = links[static_cast<std::size_t>(i)];
        return holders[static_cast<std::size_t>(l.holders + l.level + onward)];
    }
    /// Returns the plan of one exchange; `from`: whether states come from the segments before or after.
    plan between(detail::state_rows& source, detail::state_rows& target, side from) const {
        return {.rank = rank,
                .source_rows = source.rows(),
                .target_rows = target.rows(),
                .sends = source.messages(),
                .receives = target.messages(),
                .kind = flow::copies,
                .id = from == side::before ? id : id.transposed(false),
                .local = every_row,
                .batch = batch,
                .source_settings = settings,
                .target_settings = settings};
    }
};

/// The exchanges by which states are handed along chains, see `serial` and `scan`.
template <carry_kind How>
struct carry_exchanges;

template <>
struct carry_exchanges<serial> : carry_steps {
    std::vector<index_t> by_level = {}, level_begin = {};

    /// Returns the segments of level `l`, 0 to `steps`, ascending.
    std::span<index_t const> level(index_t l) const {
        auto const begin = level_begin.begin() + l;
        return {by_level.begin() + begin[0], by_level.begin() + begin[1]};
    }

    /// Returns the plan of the exchange between levels `l` and `l + 1`: from the former to the latter, or back. Rows
    /// are states, one a segment of `level(l)` and of `level(l + 1)`.
    plan step(index_t l, side from) const {
        detail::state_rows lower, upper;
        for (index_t const i : level(l))
            if (links[static_cast<std::size_t>(i)].beside(side::after) > 0)
                lower.add(holder(i, 1), 1);
            else
                lower.skip(1);
        for (index_t const i : level(l + 1)) upper.add(holder(i, -1), 1);
        return from == side::before ? between(lower, upper, from) : between(upper, lower, from);
    }
};

template <>
struct carry_exchanges<scan> : carry_steps {
    /// The exchanges of which every rank knows that they move nothing between ranks, a bit each: two segments of a rank
    /// that lie around all others', say, as `zigzag<2>` has them.
    std::uint64_t within = 0;

    /// Returns the plan of exchange `k`: every segment that has one 2^k further on gives it the step that the last 2^k
    /// segments, itself included, make together.
    ///
    /// A step is E, then M, which is left out where no segment comes before those joined. Source: the steps that
    /// segments give; target: those that segments get, both in the order of the segments. Rows are of `row_width`.
    plan step(index_t k, side from, index_t state_width, index_t map_width) const {
        index_t const reach = index_t{1} << k, onward = from == side::before ? reach : -reach;
        index_t const width = row_width(state_width, map_width);
        detail::state_rows given, got;
        for (index_t i = 0; i < std::ssize(links); ++i) {
            carry_link const& l = links[static_cast<std::size_t>(i)];
            index_t const passed = l.beside(from);
            auto const rows = [&](bool has_map) { return (state_width + (has_map ? map_width : 0)) / width; };
            if (l.beside(opposite(from)) >= reach) given.add(holder(i, onward), rows(passed >= reach));
            if (passed >= reach) got.add(holder(i, -onward), rows(passed >= 2 * reach));
        }
        plan p = between(given, got, from);
        p.id[identity::target_width] = static_cast<std::uint64_t>(state_width);
        p.id[identity::parameter] = static_cast<std::uint64_t>(map_width);
        return p;
    }

    /// Returns the elements of a row that fit a state and a map, of `state_width` and `map_width` elements.
    static index_t row_width(index_t state_width, index_t map_width) {
        return std::max<index_t>(1, std::gcd(state_width, map_width));
    }
};

/// The exchanges for tensors that are sharded as `S` says.
template <class How, class S>
struct carry_plan : carry_exchanges<How> {
    S sharding;
};
template <class How, class S>
    requires(!carry_kind<How> || !any_sharding<S>)
struct carry_plan<How, S> {
    static_assert(detail::never<How>,
                  "cpx: a carry_plan is what carry<scan>(sharding, rank), or carry<serial>, returns");
    template <class... X>
    carry_plan(X const&...) {}
};
template <class X = detail::any>
carry_plan(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) -> carry_plan<detail::any, detail::any>;

/// Returns the plan by which `rank` hands recurrent states on: `carry<scan>(sharding, rank)`. Pure: no communication.
///
/// Works in place on any sharding: a rank may hold several segments of a sequence (zigzag: two). Cost: O(segments of
/// the rank) where sequences are cut one by one and fill all chunks of a layout, whatever the number of ranks; else
/// O(pieces of all ranks), because all must know how many exchanges there are.
///
/// Throws `cpx::error` if `rank` is not one of the sharding's.
template <carry_kind How, any_sharding S>
carry_plan<How, S> carry(S const& sharding, int rank, caller here = caller::here()) {
    detail::require_rank("carry", rank, sharding.ranks(), here);
    carry_plan<How, S> c{{}, sharding};
    c.rank = rank;
    c.batch = sharding.batch();
    c.every_row = S::every_row;
    c.segments = segments(sharding, rank, here);
    c.links.reserve(c.segments.size());
    detail::chain_finder<S> chains(sharding, rank, c.holders);
    index_t longest = 1, maps = 0;
    for (index_t s = 0; s < sharding.batch().sequences(); ++s) {
        bool const own = c.links.size() < c.segments.size() && c.segments[c.links.size()].sequence == s;
        detail::chain const* const chain = chains.find(s, own);
        if (!chain) continue;
        longest = std::max(longest, chain->length);
        for (index_t const level : chain->own) {
            bool const inner = level > 0 && level + 1 < chain->length;
            c.links.push_back({level, chain->length, chain->holders, inner ? maps++ : -1});
        }
    }
    require(c.links.size() == c.segments.size(), "carry", "segments of the rank, each token on one rank",
            c.segments.size(), c.links.size(), here);
    auto const end = detail::end_of(sharding);
    c.id = detail::identify(std::same_as<How, scan> ? "carry, scan" : "carry", end, end, sharding.ranks(),
                            sharding.batch());
    c.settings = end.all;
    if constexpr (std::same_as<How, scan>) {
        c.within = chains.within();
        c.steps = static_cast<index_t>(std::bit_width(static_cast<std::size_t>(longest - 1)));
    } else {
        c.steps = longest - 1;
        c.level_begin.resize(static_cast<std::size_t>(longest) + 1); // a counting sort
        auto const begin = c.level_begin.begin();
        for (carry_link const& l : c.links) ++begin[l.level + 1];
        std::partial_sum(begin, c.level_begin.end(), begin);
        auto next = c.level_begin;
        c.by_level.resize(c.links.size());
        for (index_t i = 0; i < std::ssize(c.links); ++i) {
            index_t& place = next[static_cast<std::size_t>(c.links[static_cast<std::size_t>(i)].level)];
            c.by_level[static_cast<std::size_t>(place++)] = i;
        }
    }
    return c;
}
template <class = void, class X>
detail::refused carry(X const&, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: carry<scan>(sharding, rank), or carry<serial>, wants a sharding, such as "
                                    "shard(batch, zigzag<4>{}) returns, and this rank");
    return {};
}

} // namespace cpx
