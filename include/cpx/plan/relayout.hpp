// SPDX-License-Identifier: Apache-2.0
// The plan from any sharding to any other.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/plan/global_rows.hpp>
#include <cpx/plan/lanes.hpp>
#include <cpx/plan/message_list.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace cpx {

/// A plan that knows from which sharding to which it leads, so that tensors of others do not compile.
template <class From, class To>
struct relayout_plan : plan {
    From from;
    To to;

    relayout_plan<To, From> transposed() const { return {plan::transposed(), to, from}; }
};
template <class From, class To>
    requires(!any_sharding<From> || !any_sharding<To>)
struct relayout_plan<From, To> {
    static_assert(detail::never<From>, "cpx: a relayout_plan is what relayout(from, to, rank) returns");
    template <class... X>
    relayout_plan(X const&...) {}
};
template <class X = detail::any>
relayout_plan(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> relayout_plan<detail::any, detail::any>;

namespace detail {

/// Which heads of every section each rank holds.
class head_shares {
public:
    template <any_sharding S>
    head_shares(S const& s, std::span<section const> of) : every_row(S::every_row), ranks(s.ranks()), sections(of) {
        shares_.reserve(sections.size() * static_cast<std::size_t>(ranks));
        for (section const& each : sections)
            for (int rank = 0; rank < ranks; ++rank) shares_.push_back(s.heads(rank, each.heads));
    }
    range held(int rank, std::size_t section) const {
        return shares_[section * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(rank)];
    }

    bool const every_row; ///< as the sharding says
    int const ranks;
    std::span<section const> const sections;

private:
    std::vector<range> shares_;
};

/// Returns the heads of a section that rank `i` ships to rank `j`: those that `j` needs and `i` holds, unless `j` has
/// them already or another rank is to send them. Where several ranks hold a head, the lowest of them sends it (shares
/// ascend with ranks).
inline range shipped_heads(head_shares const& from, head_shares const& to, int i, int j, std::size_t section) {
    range const needed = intersect(from.held(i, section), to.held(j, section));
    if (i == j || !from.every_row) return needed;
    index_t const lower = i > 0 ? from.held(i - 1, section).last : 0;
    range const own = from.held(j, section);
    range shipped{std::max(needed.first, lower), needed.last};
    if (j < i)
        shipped.first = std::max(shipped.first, own.last);
    else
        shipped.last = std::min(shipped.last, own.first);
    return shipped;
}

/// Returns the columns that rank `i` ships to rank `j`, as places in a local row of `holder` on `rank`.
inline std::vector<run> shipped_columns(head_shares const& from, head_shares const& to, int i, int j,
                                        head_shares const& holder, int rank) {
    std::vector<run> columns;
    columns.reserve(holder.sections.size());
    index_t first = 0;
    for (std::size_t group = 0; group < holder.sections.size(); ++group) {
        section const& s = holder.sections[group];
        range const share = holder.held(rank, group), heads = shipped_heads(from, to, i, j, group);
        if (!heads.empty()) {
            run const shipped{first + (heads.first - share.first) * s.width, heads.size() * s.width};
            columns.push_back(shipped);
        }
        first += share.size() * s.width;
    }
    return columns;
}

/// Returns whether some rows or heads stand on several ranks.
inline bool has_replicas(head_shares const& shares) {
    for (std::size_t s = 0; s < shares.sections.size() && shares.every_row; ++s) {
        index_t everywhere = 0;
        for (int rank = 0; rank < shares.ranks; ++rank) everywhere += shares.held(rank, s).size();
        if (everywhere > shares.sections[s].heads) return true;
    }
    return false;
}

/// The columns of the messages that a rank sends, or receives.
struct message_columns {
    head_shares const &from, &to;
    int rank;
    bool sends;
    bool whole_rows; ///< messages have no columns

    std::vector<run> of(int peer) const {
        return sends ? shipped_columns(from, to, rank, peer, from, rank)
                     : shipped_columns(from, to, peer, rank, to, rank);
    }
    /// Gives messages their columns, `same`: to all peers one list, and drops those that have none.
    void give(std::vector<message>& messages, bool same) const {
        if (whole_rows) return;
        std::vector<run> const own = same ? of(rank) : std::vector<run>();
        for (message& m : messages) m.columns = same ? own : of(m.peer);
        std::erase_if(messages, [](message const& m) { return m.columns.empty(); });
    }
};

/// A sharding of which `holders` tells who has rows. Its pieces are known to give each row to one rank.
template <class S>
concept known_holders = requires(S const s) { s.holders(); };

/// Lists the runs of the rows that `rank` holds: as local rows, or as those of a rank that holds every row.
template <any_sharding S>
std::vector<run> held_runs(S const& sharding, int rank, bool local) {
    joined_rows rows;
    index_t row = 0;
    for (range const piece : pieces(sharding, rank)) {
        rows.add(local ? row : piece.first, piece);
        row += piece.size();
    }
    return std::move(rows.runs);
}

/// Lists the rows of `count` ranks, `first` and those after it, when they are first read.
template <any_sharding S>
std::shared_ptr<late_runs const> late_rows(S const& sharding, int first, int count, bool local) {
    std::function<std::vector<run>(int)> list = [sharding, first, local](int i) {
        return held_runs(sharding, first + i, local);
    };
    return std::make_shared<late_runs>(count, std::move(list));
}

/// The messages of a rank on one side of an exchange, and its rows there.
struct common_messages {
    index_t rows = 0;
    std::vector<message> messages;
    bool known = false; ///< whether each row is sure to be in one message a peer
};

/// Shardings between which lanes tell what moves: of each sequence or of the batch, by one cut.
template <class Mine, class Other>
inline constexpr bool routed = false;
template <any_sharding Mine, any_sharding Other>
    requires in_cells<Mine> && in_cells<Other>
inline constexpr bool routed<Mine, Other> =
    Mine::cuts == Other::cuts && std::same_as<typename Mine::cut_type, typename Other::cut_type>;

/// Returns what a sharding cuts into so many cells, unless these are too many.
template <any_sharding S>
    requires in_cells<S>
std::optional<lane_cells> cells_of(S const& s, index_t count) {
    if (count > most_cells) return {};
    return lane_cells{static_cast<int>(count), unit_of(s),
                      S::cuts == scope::batch ? cut_runs::batch : cut_runs::sequences};
}
/// The same of what two shardings cut.
template <any_sharding A, any_sharding B>
    requires routed<A, B>
std::optional<lane_cells> common_cells(A const& a, B const& b) {
    if (!(a.cut() == b.cut())) return {};
    return cells_of(a, cells(a.policy(), b.policy()));
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
    auto const sequences = static_cast<int>(batch.sequences());
    for (lane const& l : lanes) {
        auto const m = static_cast<std::size_t>(std::ranges::lower_bound(peers, l.peer) - peers.begin());
        message_of.push_back(m);
        most[m] += cells.runs(sequences);
    }
    for (std::size_t i = 0; i < rows.size(); ++i)
        rows[i].runs.reserve(static_cast<std::size_t>(std::min(most[i], batch.tokens())));

    balanced_begins const all(cells.count);
    common_messages found;
    found.known = true;
    for (int s = 0; s < cells.runs(sequences); ++s) {
        range const cut = cells.run(batch.offsets().data(), sequences, s);
        auto const begins = cells.begins(all, cut.size());
        for (std::size_t i = 0; i < lanes.size(); ++i)
            if (range const common = rows_in(lanes[i], begins); !common.empty()) {
                rows[message_of[i]].add(found.rows, {cut.first + common.first, cut.first + common.last});
                found.rows += common.size();
            }
    }
    for (std::size_t i = 0; i < rows.size(); ++i)
        if (!rows[i].runs.empty()) found.messages.push_back({peers[i], std::move(rows[i].runs), {}});
    return found;
}

/// Finds the messages of a rank that has rows of `mine` with ranks that have them all: with each the same rows.
template <any_sharding Mine>
common_messages rows_for_all(Mine const& mine, message_columns const& columns) {
    common_messages found{mine.rows(columns.rank), {}, known_holders<Mine>};
    auto const late = late_rows(mine, columns.rank, 1, true);
    found.messages.reserve(static_cast<std::size_t>(mine.ranks()));
    for (int peer = 0; peer < mine.ranks() && found.rows > 0; ++peer) found.messages.push_back({peer, {late, 0}, {}});
    columns.give(found.messages, false);
    return found;
}

/// Finds the messages of a rank that has all `rows` with the ranks among which `other` divides them, `holders`.
/// `same_columns`: it has the same for all of them.
template <any_sharding Other>
common_messages rows_of_holders(index_t rows, Other const& other, std::vector<bool> const& holders,
                                message_columns const& columns, bool same_columns) {
    common_messages found{rows, {}, true};
    auto const late = late_rows(other, 0, other.ranks(), false);
    found.messages.reserve(static_cast<std::size_t>(std::ranges::count(holders, true)));
    for (int peer = 0; peer < other.ranks(); ++peer)
        if (holders[static_cast<std::size_t>(peer)]) found.messages.push_back({peer, {late, peer}, {}});
    columns.give(found.messages, same_columns);
    return found;
}

/// Finds which of `pieces`, a rank's rows in local order, lie where under `other`.
template <any_sharding Other>
common_messages list_common(std::vector<range> const& pieces, Other const& other, message_columns const& columns,
                            caller here) {
    message_list messages(other.ranks());
    index_t row = 0, hint = 0;
    for (range const piece : pieces) {
        index_t next = piece.first;
        other.for_each_holder(piece, hint, [&](int peer, range common) {
            if (!Other::every_row && common.first != next)
                throw error("relayout", "layout gives a token to no rank or to two", "row " + std::to_string(next),
                            "row " + std::to_string(common.first), here);
            messages.add(peer, row + common.first - piece.first, common);
            next = common.last;
        });
        row += piece.size();
    }
    common_messages found{row, messages.finish()};
    columns.give(found.messages, false);
    return found;
}

/// Finds the messages of a rank, whose rows are `mine`, with all ranks where their rows are `other`. `same_columns`: if
/// it holds every row, it has the same columns for all peers.
template <any_sharding Mine, any_sharding Other>
common_messages find_common(Mine const& mine, Other const& other, message_columns const& columns, bool same_columns,
                            caller here) {
    if constexpr (Other::every_row && !Mine::every_row) {
        return rows_for_all(mine, columns);
    } else {
        if constexpr (Mine::every_row && known_holders<Other>)
            if (auto const holders = other.holders(); !holders.empty())
                return rows_of_holders(mine.rows(columns.rank), other, holders, columns, same_columns);
        if constexpr (routed<Mine, Other>)
            if (auto const all = columns.whole_rows ? common_cells(mine, other) : std::nullopt)
                return scale_lanes(routed_lanes(mine.policy(), columns.rank, other.policy()), *all, mine.batch());
        return list_common(pieces(mine, columns.rank), other, columns, here);
    }
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

/// Throws unless both shardings are of one batch over as many ranks.
template <any_sharding From, any_sharding To>
void require_same_group(char const* where, From const& from, To const& to, caller here) {
    require(from.ranks() == to.ranks(), where, "ranks of the target", from.ranks(), to.ranks(), here);
    require_batch(where, "batch of the target", "the source's", from.batch(), to.batch(), here);
}

/// Returns the sections of what is moved, none: whole rows. Throws unless both shardings have the same or one has none.
inline std::span<section const> common_sections(std::span<section const> from, std::span<section const> to,
                                                caller here) {
    require(from.empty() || to.empty() || std::ranges::equal(from, to), "relayout", "sections of the target",
            "those of the source", "others", here);
    return from.empty() ? to : from;
}

/// Makes the plan of a relayout of what its two ends are. `sections`: of what is moved.
inline plan finish_relayout(int rank, thd const& batch, std::span<section const> sections, head_shares const& held,
                            head_shares const& needed, identity_end const& from, identity_end const& to,
                            common_messages out, common_messages in, caller here) {
    plan p{.rank = rank,
           .source_rows = out.rows,
           .target_rows = in.rows,
           .sends = std::move(out.messages),
           .receives = std::move(in.messages),
           .id = identify("relayout", from, to, held.ranks, batch),
           .batch = batch,
           .source_settings = from.all,
           .target_settings = to.all};
    for (std::size_t s = 0; s < sections.size(); ++s) {
        p.source_width += held.held(rank, s).size() * sections[s].width;
        p.target_width += needed.held(rank, s).size() * sections[s].width;
        p.id[identity::source_width] += static_cast<std::uint64_t>(sections[s].heads * sections[s].width);
    }
    p.id[identity::target_width] = p.id[identity::source_width];
    if (sections.empty())
        for (auto* messages : {&p.sends, &p.receives})
            for (message& m : *messages) m.columns.clear();
    if (has_replicas(held)) p.kind = flow::selects;
    if (has_replicas(needed)) p.kind = flow::copies;
    if (out.known && in.known) return p;
    require(p.covers_target(), "relayout", "rows of the target that messages bring, each place once", p.target_rows,
            brought(p.receives), here);
    // Rows that stay are found twice: among those that leave and among those that arrive.
    require(kept(p.sends, rank) == kept(p.receives, rank), "relayout", "rows that leave this rank for itself",
            kept(p.receives, rank), kept(p.sends, rank), here);
    return p;
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
    auto const sections = detail::common_sections(from.sections(), to.sections(), here);
    constexpr section whole_row; // stands for the sections where rows move whole
    auto const groups = sections.empty() ? std::span(&whole_row, 1) : sections;
    bool const whole_rows = sections.empty() && !From::every_row;
    detail::head_shares const held(from, groups), needed(to, groups);
    bool const replicas = detail::has_replicas(held); // of a head: the lowest rank sends it
    auto out = detail::find_common(from, to, {held, needed, rank, true, whole_rows}, !replicas, here);
    auto in = detail::find_common(to, from, {held, needed, rank, false, whole_rows}, !From::every_row, here);
    return {detail::finish_relayout(rank, from.batch(), sections, held, needed, detail::end_of(from),
                                    detail::end_of(to), std::move(out), std::move(in), here),
            from, to};
}
template <class X = detail::any, class Y = detail::any>
detail::refused relayout(X const& = {}, Y const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(
        detail::never<X, Y>,
        "cpx: relayout(from, to, rank) wants two shardings, such as shard(batch, zigzag<4>{}) returns, and this rank");
    return {};
}

} // namespace cpx
