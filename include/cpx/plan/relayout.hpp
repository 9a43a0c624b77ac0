// SPDX-License-Identifier: Apache-2.0
// The plan from any sharding to any other.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/plan/lanes.hpp>
#include <cpx/plan/message_list.hpp>

#include <optional>

namespace cpx {

/// A plan that knows from which sharding to which it leads, so that tensors of others do not compile.
template <any_sharding From, any_sharding To>
struct relayout_plan : plan {
    From from;
    To to;

    relayout_plan<To, From> transposed() const { return {plan::transposed(), to, from}; }
};

namespace detail {

/// Returns the heads of a section that rank `i` ships to rank `j`: those that `j` needs and `i` holds, unless `j` has
/// them already or another rank is to send them. Where several ranks hold a head, the lowest of them sends it (shares
/// ascend with ranks).
template <any_sharding From, any_sharding To>
range shipped_heads(From const& from, To const& to, int i, int j, index_t heads) {
    range const held = from.heads(i, heads);
    range const needed = intersect(held, to.heads(j, heads));
    if (i == j || !From::every_row) return needed;
    index_t const lower = i > 0 ? from.heads(i - 1, heads).last : 0;
    range const own = from.heads(j, heads);
    range shipped{std::max(needed.first, lower), needed.last};
    if (j < i)
        shipped.first = std::max(shipped.first, own.last);
    else
        shipped.last = std::min(shipped.last, own.first);
    return shipped;
}

/// Returns the columns that rank `i` ships to rank `j`, as places in a local row of `holder` on `rank`.
template <any_sharding From, any_sharding To, any_sharding Holder>
std::vector<run> shipped_columns(From const& from, To const& to, int i, int j, std::span<section const> sections,
                                 Holder const& holder, int rank) {
    std::vector<run> columns;
    columns.reserve(sections.size());
    index_t first = 0;
    for (section const& s : sections) {
        range const share = holder.heads(rank, s.heads);
        range const heads = shipped_heads(from, to, i, j, s.heads);
        if (!heads.empty()) {
            run const shipped{first + (heads.first - share.first) * s.width, heads.size() * s.width};
            columns.push_back(shipped);
        }
        first += share.size() * s.width;
    }
    return columns;
}

/// Lists which rows of `rank` under `mine` lie where under `other`. Returns the rows of `rank`.
template <any_sharding Mine, any_sharding Other>
index_t list_common(Mine const& mine, int rank, Other const& other, message_list& messages, caller here) {
    index_t row = 0, hint = 0;
    mine.for_each_piece(rank, [&](range piece) {
        index_t next = piece.first;
        other.for_each_holder(piece, hint, [&](int peer, range common) {
            if (!Other::every_row && common.first != next)
                throw error("relayout", "layout gives a token to no rank or to two", "row " + std::to_string(next),
                            "row " + std::to_string(common.first), here);
            messages.add(peer, row + common.first - piece.first, common);
            next = common.last;
        });
        row += piece.size();
    });
    return row;
}

/// A sharding of which `holders` tells who has rows. Its pieces are known to give each row to one rank.
template <class S>
concept known_holders = requires(S const s) { s.holders(); };

/// Lists the runs of the rows that `rank` holds: as local rows, or as those of a rank that holds every row.
template <any_sharding S>
std::vector<run> held_runs(S const& sharding, int rank, bool local) {
    joined_rows rows;
    index_t row = 0;
    sharding.for_each_piece(rank, [&](range piece) {
        rows.add(local ? row : piece.first, piece);
        row += piece.size();
    });
    return std::move(rows.runs);
}

/// The messages of a rank on one side of an exchange, and its rows there.
struct common_messages {
    index_t rows = 0;
    std::vector<message> messages;
    bool known = false; ///< whether each row is sure to be in one message a peer
};

/// Shardings between which lanes tell what moves: of each sequence, by one cut.
template <class Mine, class Other>
inline constexpr bool routed = false;
template <any_sharding Mine, any_sharding Other>
    requires in_lanes<Mine> && in_lanes<Other>
inline constexpr bool routed<Mine, Other> = std::same_as<typename Mine::cut_type, typename Other::cut_type>;

/// Returns into what both shardings cut a sequence, unless these are too many cells.
template <any_sharding A, any_sharding B>
    requires routed<A, B>
std::optional<lane_cells> common_cells(A const& a, B const& b) {
    index_t const all = cells(a.policy(), b.policy());
    if (!(a.cut() == b.cut()) || all > most_cells) return {};
    return lane_cells{static_cast<int>(all), unit_of(a)};
}

/// Finds the messages of one end of an exchange by its lanes: each is scaled by the length of every sequence.
inline common_messages scale_lanes(std::vector<lane> const& lanes, lane_cells const& cells, thd const& batch) {
    std::vector<int> peers;
    for (lane const& l : lanes) peers.push_back(l.peer);
    std::ranges::sort(peers);
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    std::vector<joined_rows> rows(peers.size());
    std::vector<index_t> most(peers.size()); // runs of a message
    std::vector<std::size_t> message_of;
    for (lane const& l : lanes) {
        auto const m = static_cast<std::size_t>(std::ranges::lower_bound(peers, l.peer) - peers.begin());
        message_of.push_back(m);
        most[m] += batch.sequences();
    }
    for (std::size_t i = 0; i < rows.size(); ++i)
        rows[i].runs.reserve(static_cast<std::size_t>(std::min(most[i], batch.tokens())));

    balanced_begins const all(cells.count);
    common_messages found;
    found.known = true;
    for (index_t s = 0; s < batch.sequences(); ++s) {
        index_t const offset = batch.offset(s);
        auto const begins = cells.begins(all, batch.length(s));
        for (std::size_t i = 0; i < lanes.size(); ++i)
            if (range const common = rows_in(lanes[i], begins); !common.empty()) {
                rows[message_of[i]].add(found.rows, {offset + common.first, offset + common.last});
                found.rows += common.size();
            }
    }
    for (std::size_t i = 0; i < rows.size(); ++i)
        if (!rows[i].runs.empty()) found.messages.push_back({peers[i], std::move(rows[i].runs), {}});
    return found;
}

/// Finds the messages of `rank`, whose rows are `mine`, with all ranks where their rows are `other`; `columns(peer)`
/// gives their columns, of which a rank that holds every row may know that all peers have the same.
template <any_sharding Mine, any_sharding Other, class Columns>
common_messages find_common(Mine const& mine, int rank, Other const& other, bool whole_rows, bool same_columns,
                            Columns&& columns, caller here) {
    int const ranks = mine.ranks();
    common_messages found;
    if (Mine::every_row || Other::every_row) found.messages.reserve(static_cast<std::size_t>(ranks));
    auto const add = [&](int peer, run_list rows, std::vector<run> its_columns) {
        if (whole_rows || !its_columns.empty())
            found.messages.push_back({peer, std::move(rows), std::move(its_columns)});
    };
    if constexpr (Other::every_row && !Mine::every_row) { // with all ranks the same rows
        found.rows = mine.rows(rank);
        found.known = known_holders<Mine>;
        auto const late = std::make_shared<late_runs>(1, [mine, rank](int) { return held_runs(mine, rank, true); });
        for (int peer = 0; peer < ranks && found.rows > 0; ++peer)
            add(peer, {late, 0}, whole_rows ? std::vector<run>() : columns(peer));
        return found;
    } else if constexpr (Mine::every_row && known_holders<Other>) {
        if (auto const holders = other.holders(); !holders.empty()) {
            found.rows = mine.rows(rank);
            found.known = true;
            auto const late = std::make_shared<late_runs>(ranks, [other](int r) { return held_runs(other, r, false); });
            auto const own = whole_rows ? std::vector<run>() : columns(rank);
            for (int peer = 0; peer < ranks; ++peer)
                if (holders[static_cast<std::size_t>(peer)])
                    add(peer, {late, peer}, same_columns || whole_rows ? own : columns(peer));
            return found;
        }
    }
    if constexpr (routed<Mine, Other>)
        if (auto const all = whole_rows ? common_cells(mine, other) : std::nullopt)
            return scale_lanes(routed_lanes(mine.policy(), rank, other.policy()), *all, mine.batch());
    message_list list(ranks);
    found.rows = list_common(mine, rank, other, list, here);
    found.messages = list.finish(whole_rows, columns);
    return found;
}

/// Returns the elements of a local row, or 0 if there are no sections: rows of any width.
template <any_sharding S>
index_t local_width(S const& s, int rank, std::span<section const> sections) {
    index_t width = 0;
    for (section const& group : sections) width += s.heads(rank, group.heads).size() * group.width;
    return width;
}

inline index_t brought(std::vector<message> const& messages) {
    index_t rows = 0;
    for (message const& m : messages) rows += total(m.rows);
    return rows;
}

/// Returns the rows of the message of `rank` to itself.
inline index_t kept(std::vector<message> const& messages, int rank) {
    for (message const& m : messages)
        if (m.peer == rank) return total(m.rows);
    return 0;
}

/// Returns whether some rows or heads stand on several ranks.
template <any_sharding S>
bool has_replicas([[maybe_unused]] S const& s, [[maybe_unused]] std::span<section const> sections) {
    if constexpr (S::every_row)
        for (section const& group : sections) {
            index_t everywhere = 0;
            for (int rank = 0; rank < s.ranks(); ++rank) everywhere += s.heads(rank, group.heads).size();
            if (everywhere > group.heads) return true;
        }
    return false;
}

/// Throws unless both shardings are of one batch over as many ranks.
template <any_sharding From, any_sharding To>
void require_same_group(char const* where, From const& from, To const& to, caller here) {
    require(from.ranks() == to.ranks(), where, "ranks of the target", from.ranks(), to.ranks(), here);
    require_batch(where, "batch of the target", "the source's", from.batch(), to.batch(), here);
}

} // namespace detail

/// Returns the plan by which `rank` and all others move a tensor from one sharding to another, in one exchange.
///
/// Any pair: tokens to tokens, tokens to heads and back, anything to replicated. Each rank sends exactly the rows and
/// columns that their new holder does not have, in at most one message a peer.
/// Pure: no communication; every rank makes its own. Cost: O(runs that meet), about 0.1 us each; between layouts that
/// cut each sequence with one cut, 10 ns each: `routes`, scaled by every length. Between tokens and heads, or all rows,
/// O(runs of the rank + ranks): there the rows of messages are listed when they are first read.
///
/// Throws `cpx::error` if the shardings differ in ranks or batch, if their sections differ, or if a layout does not
/// give every token to exactly one rank.
template <any_sharding From, any_sharding To>
relayout_plan<From, To> relayout(From const& from, To const& to, int rank, caller here = caller::here()) {
    constexpr int a = static_ranks<From>, b = static_ranks<To>;
    static_assert(a == dynamic || b == dynamic || a == b,
                  "cpx: relayout between shardings over different numbers of ranks; shard both over the same ranks");
    detail::require_same_group("relayout", from, to, here);
    detail::require_rank("relayout", rank, from.ranks(), here);
    std::span<section const> sections = from.sections().empty() ? to.sections() : from.sections();
    require(to.sections().empty() || std::ranges::equal(sections, to.sections()), "relayout", "sections of the target",
            "those of the source", "others", here);
    constexpr section whole_row; // stands for the sections where rows move whole
    bool const whole_rows = sections.empty();
    auto const groups = whole_rows ? std::span(&whole_row, 1) : sections;
    bool const by_columns = !whole_rows || From::every_row;

    relayout_plan<From, To> p{{}, from, to};
    p.rank = rank;
    p.batch = from.batch();
    p.id = detail::identify("relayout", from, to);
    p.source_settings = detail::settings_of(from, p.id.source_settings.data());
    p.target_settings = detail::settings_of(to, p.id.target_settings.data());
    p.source_width = detail::local_width(from, rank, sections);
    p.target_width = detail::local_width(to, rank, sections);
    for (section const& s : sections) p.id[identity::source_width] += static_cast<std::uint64_t>(s.heads * s.width);
    p.id[identity::target_width] = p.id[identity::source_width];

    bool const replicas = detail::has_replicas(from, groups); // of a head: the lowest rank sends it
    auto out = detail::find_common(
        from, rank, to, !by_columns, !replicas,
        [&](int peer) { return detail::shipped_columns(from, to, rank, peer, groups, from, rank); }, here);
    auto in = detail::find_common(
        to, rank, from, !by_columns, !From::every_row,
        [&](int peer) { return detail::shipped_columns(from, to, peer, rank, groups, to, rank); }, here);
    p.source_rows = out.rows, p.sends = std::move(out.messages);
    p.target_rows = in.rows, p.receives = std::move(in.messages);
    if (whole_rows)
        for (auto* messages : {&p.sends, &p.receives})
            for (message& m : *messages) m.columns.clear();
    if (replicas) p.kind = flow::selects;
    if (detail::has_replicas(to, groups)) p.kind = flow::copies;
    if (out.known && in.known) return p;
    require(p.covers_target(), "relayout", "rows of the target that messages bring, each place once", p.target_rows,
            detail::brought(p.receives), here);
    // Rows that stay are found twice: among those that leave and among those that arrive.
    require(detail::kept(p.sends, rank) == detail::kept(p.receives, rank), "relayout",
            "rows that leave this rank for itself", detail::kept(p.receives, rank), detail::kept(p.sends, rank), here);
    return p;
}
template <class X>
detail::refused relayout(X const&, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(
        detail::never<X>,
        "cpx: relayout(from, to, rank) wants two shardings, such as shard(batch, zigzag<4>{}) returns, and this rank");
    return {};
}

} // namespace cpx
