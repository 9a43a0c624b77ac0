// SPDX-License-Identifier: Apache-2.0
// The plans by which recurrent states are handed along the segments of a sequence.
#pragma once

#include <cpx/plan/message_list.hpp>
#include <cpx/plan/segments.hpp>

namespace cpx {

/// How states reach the segments of a sequence that is cut; a type, so that it shows which results are exact.
///
/// `serial` hands the state itself from segment to segment: the operations of one rank in the order of one rank, one
/// exchange a step. With cuts at multiples of the operator's chunk its results are bitwise those of one rank.
struct serial {};

/// `scan` folds every segment into its step S -> M S + E, exchanges E (and M where a segment has both a
/// predecessor and a successor) at once, and joins them on every rank that needs them. Equal to one rank within
/// rounding.
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

/// The place of one segment in the chain of its sequence's segments.
struct carry_link {
    index_t level = 0;          ///< how many segments come before it
    bool has_successor = false; ///< whether a segment comes after it
    index_t map_row = -1;       ///< its row among the rank's maps M; -1: its M is not needed
    index_t ends = 0, maps = 0; ///< the rows at which its sequence's gathered E and gathered M begin
};

/// What a recurrent operator needs of a sharding: the segments of a rank, their chain, and the plans between them.
///
/// The rows of the plans are states. `levels[l]` lists the rank's segments of level l; `steps[l]` hands their end
/// states to the start states of `levels[l + 1]`. `ends` gathers the E (source rows: segments) and `maps` the M
/// (source rows: `carry_link::map_row`) that come before a rank's last segment of a sequence, in level order from
/// `carry_link::ends` and `carry_link::maps` on.
template <any_sharding S>
struct carry_plan {
    S sharding;
    int rank = 0;
    std::vector<segment> segments;
    std::vector<carry_link> links;
    std::vector<std::vector<index_t>> levels;
    std::vector<plan> steps;
    plan ends, maps;
};

namespace detail {

/// A plan over states while it is made. States have no global order by which they could be merged into runs.
class state_plan {
public:
    explicit state_plan(int ranks) : sends_(ranks), receives_(ranks) {}

    void send(int peer, index_t row) { sends_.add(peer, row, apart()); }
    void receive(int peer) { receives_.add(peer, target_rows_++, apart()); }
    index_t target_rows() const { return target_rows_; }
    template <any_sharding S>
    plan finish(S const& sharding, int rank, index_t source_rows, identity const& id) {
        return {rank, source_rows,  target_rows_,    0, 0, sends_.finish(), receives_.finish(), flow::copies,
                id,   S::every_row, sharding.batch()};
    }

private:
    range apart() {
        count_ += 2;
        return {count_, count_ + 1};
    }
    message_list sends_, receives_;
    index_t target_rows_ = 0, count_ = 0;
};

/// Returns the ranks that hold the segments of `sequence`, in token order.
template <any_sharding S>
void find_chain(S const& sharding, int rank, index_t sequence, index_t& hint, std::vector<int>& chain) {
    chain.clear();
    range const tokens{sharding.batch().offset(sequence), sharding.batch().offset(sequence + 1)};
    if (tokens.empty()) return;
    if constexpr (S::every_row)
        chain.push_back(rank);
    else
        sharding.for_each_holder(tokens, hint, [&](int holder, range) {
            if (chain.empty() || chain.back() != holder) chain.push_back(holder);
        });
}

} // namespace detail

/// Returns the plans by which `rank` hands recurrent states on. Pure: no communication.
///
/// Works in place on any sharding: a rank may hold several segments of a sequence (zigzag: two).
/// Cost: O(chunks) for every sequence of the batch, because all ranks must know how many steps there are.
///
/// Throws `cpx::error` if `rank` is not one of the sharding's.
template <any_sharding S>
carry_plan<S> carry(S const& sharding, int rank, caller here = caller::here()) {
    int const ranks = sharding.ranks();
    detail::require_rank("carry", rank, ranks, here);
    carry_plan<S> c{sharding, rank, segments(sharding, rank), {}, {}, {}, {}, {}};

    std::vector<detail::state_plan> steps;
    detail::state_plan ends(ranks), maps(ranks);
    std::vector<int> chain, last_level(static_cast<std::size_t>(ranks), -1);
    index_t own_maps = 0, hint = 0;
    auto const at = [](auto& list, auto i) -> auto& { return list[static_cast<std::size_t>(i)]; };

    for (index_t s = 0; s < sharding.batch().sequences(); ++s) {
        detail::find_chain(sharding, rank, s, hint, chain);
        int const length = static_cast<int>(chain.size());
        while (static_cast<int>(steps.size()) + 1 < length) steps.emplace_back(ranks);
        while (static_cast<int>(c.levels.size()) < length) c.levels.emplace_back();
        for (int l = 0; l < length; ++l) at(last_level, at(chain, l)) = l;

        index_t const first_end = ends.target_rows(), first_map = maps.target_rows();
        for (int l = 0; l < length; ++l) {
            int const holder = at(chain, l);
            bool const has_successor = l + 1 < length, needs_map = l > 0 && has_successor;
            if (l < at(last_level, rank)) { // before this rank's last segment: its own E and M are gathered, too
                ends.receive(holder);
                if (l > 0) maps.receive(holder);
            }
            if (holder != rank) continue;
            index_t const mine = static_cast<index_t>(c.links.size());
            if (has_successor) at(steps, l).send(at(chain, l + 1), static_cast<index_t>(at(c.levels, l).size()));
            if (l > 0) at(steps, l - 1).receive(at(chain, l - 1));
            for (int r = 0; r < ranks; ++r) {
                if (at(last_level, r) <= l) continue;
                ends.send(r, mine);
                if (needs_map) maps.send(r, own_maps);
            }
            at(c.levels, l).push_back(mine);
            c.links.push_back({l, has_successor, needs_map ? own_maps++ : -1, first_end, first_map});
        }
        for (int const r : chain) at(last_level, r) = -1;
    }

    identity const id = detail::identify("carry", sharding, sharding);
    for (std::size_t l = 0; l < steps.size(); ++l)
        c.steps.push_back(steps[l].finish(sharding, rank, static_cast<index_t>(c.levels[l].size()), id));
    identity scanned = id; // another name, so that ranks find out if one of them hands states on serially
    identity::set(scanned.operation, "carry, scan");
    c.ends = ends.finish(sharding, rank, static_cast<index_t>(c.segments.size()), scanned);
    c.maps = maps.finish(sharding, rank, own_maps, scanned);
    return c;
}

} // namespace cpx
