// SPDX-License-Identifier: Apache-2.0
// What moves of every sequence, whatever its length: plans and tables on devices scale it.
#pragma once

#include <cpx/plan/plan.hpp>
#include <cpx/plan/route.hpp>

#include <algorithm>
#include <concepts>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace cpx {

/// Rows of every sequence that go to `peer`, or come from it; -1: they stay. From `from` rows after cell `first` begins
/// to `to` rows after cell `last` begins; where negative, before.
struct lane {
    static constexpr int everyone = -2; ///< a peer: every rank that has columns of them, this one among them

    int peer = -1;
    int first = 0, last = 0;
    int from = 0, to = 0;
    int unused = 0;

    CPX_HOST_DEVICE constexpr bool is_of(int rank) const { return peer == rank || peer == everyone; }
};

/// What lanes are of: each sequence, a state of each that has tokens, or the whole batch as one run of rows.
enum class cut_runs : int { sequences, states, batch };

/// Into what lanes cut a sequence, or the batch.
struct lane_cells {
    int count = 1, unit = 1; ///< as balanced chunks, which begin at multiples of `unit` tokens
    cut_runs of = cut_runs::sequences;
    int least = 0; ///< tokens of a sequence that has any, with which the lanes tell what moves

    /// Returns what says where a cell of a sequence of `length` tokens begins.
    CPX_HOST_DEVICE constexpr auto begins(detail::balanced_begins const& all, index_t length) const {
        index_t const n = of == cut_runs::states && length > 0 ? 1 : length;
        return [at = all.of(n), n, cells = count, multiple = index_t{unit}](int cell) -> index_t {
            if (cell == cells) return n;
            index_t const place = at(cell);
            if (multiple == 1) return place;
            index_t const nearest = (place + multiple / 2) / multiple * multiple;
            return nearest < n ? nearest : n;
        };
    }
    /// Returns how many runs of rows are cut of a batch of so many sequences.
    CPX_HOST_DEVICE constexpr int runs(int sequences) const { return of == cut_runs::batch ? 1 : sequences; }
    /// Returns the rows of such a run, from cu_seqlens of as many sequences.
    CPX_HOST_DEVICE constexpr range run(index_t const* offsets, int sequences, int i) const {
        return of == cut_runs::batch ? range{offsets[0], offsets[sequences]} : range{offsets[i], offsets[i + 1]};
    }
};

/// Returns the rows of a lane, in a sequence that has tokens.
template <class Begins>
CPX_HOST_DEVICE constexpr range rows_in(lane const& l, Begins const& begins) {
    return {begins(l.first) + l.from, begins(l.last) + l.to};
}

/// What messages have of the rows at one end of an exchange.
struct lane_columns {
    index_t width = 0;                     ///< elements of a local row, or 0: rows of any width, which move whole
    std::vector<std::vector<run>> of = {}; ///< of every peer, those without any get nothing; empty: all columns
};

/// One exchange of one rank, of every batch: lanes tile its rows at either end, in their order, sequence by sequence.
struct lane_plan {
    int rank = 0;
    flow kind = flow::moves;
    lane_cells cells = {};
    std::vector<lane> sends = {}, receives = {};
    lane_columns source = {}, target = {};

    lane_plan transposed(flow back) const { return {rank, back, cells, receives, sends, target, source}; }
};

namespace detail {

/// Cells of which a reciprocal tells exactly where they begin, see `balanced_begins`.
inline constexpr int most_cells = (1 << 16) - 1;

/// Shardings that cut each sequence by a layout, and by a cut of cpx's, or the batch where no sequence moves the cut:
/// lanes tell what moves between them.
template <class S>
inline constexpr bool in_cells = false;
template <layout P, scope Scope, cut Cut>
inline constexpr bool in_cells<sharding<P, Scope, Cut>> =
    Scope == scope::sequence ? ascends<Cut> : std::same_as<Cut, balanced>;
/// Those of which lanes also tell what is beside segments: they cut each sequence.
template <class S>
inline constexpr bool in_lanes = false;
template <layout P, cut Cut>
inline constexpr bool in_lanes<sharding<P, scope::sequence, Cut>> = ascends<Cut>;

template <class S>
int unit_of(S const& s) {
    if constexpr (requires { s.cut().unit(); }) return s.cut().unit();
    return 1;
}
/// Calls `f(layout, unit)` if lanes tell what is beside the segments of a sharding; one that stands for another, whose
/// type does not say so, has a member of this name.
template <class S, class F>
void with_lanes(S const& s, F&& f) {
    if constexpr (in_lanes<S>)
        f(s.policy(), unit_of(s));
    else if constexpr (requires { s.with_lanes(f); })
        s.with_lanes(f);
}
/// Returns whether two shardings cut alike, or share alike, whatever their batches; of those that stand for others by a
/// member of this name.
template <class S>
bool cut_alike(S const& a, S const& b) {
    if constexpr (S::every_row) {
        if (a.ranks() != b.ranks() || !std::ranges::equal(a.sections(), b.sections())) return false;
        for (section const& s : a.sections())
            for (int r = 0; r < a.ranks(); ++r)
                if (!(a.heads(r, s.heads) == b.heads(r, s.heads))) return false;
        return true;
    } else if constexpr (in_cells<S>) {
        if constexpr (std::equality_comparable<typename S::layout_type>)
            return a.policy() == b.policy() && a.cut() == b.cut();
    } else if constexpr (requires { a.cut_alike(b); }) {
        return a.cut_alike(b);
    }
    return false;
}

/// The same of those of a plan, which also have one batch.
template <class... S>
bool cut_alike(std::tuple<S...> const& a, std::tuple<S...> const& b) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
        return ((cut_alike(std::get<I>(a), std::get<I>(b)) && std::get<I>(a).batch() == std::get<0>(a).batch()) && ...);
    }(std::index_sequence_for<S...>());
}

/// Returns what `rank` has of every sequence under `mine`, to or from where it is under `other`.
template <layout P, layout Q>
std::vector<lane> routed_lanes(P const& mine, int rank, Q const& other) {
    std::vector<lane> list;
    for_each_chunk(mine, rank, [&](int chunk) {
        for_each_route(mine, other, chunk, [&](route r) { list.push_back({r.to, r.first, r.last}); });
    });
    return list;
}

constexpr int bounded(index_t number) {
    return static_cast<int>(std::min<index_t>(number, std::numeric_limits<int>::max()));
}

/// Returns the lanes by which `reach` rows beside the segments of a rank come, where every chunk has so many.
template <layout P>
lane_plan halo_lanes(P const& layout, int unit, int rank, index_t reach, bool before) {
    lane_plan p{.rank = rank, .kind = flow::copies, .cells = {.count = layout.chunks(), .unit = unit}};
    p.cells.least = bounded((bounded(reach) + index_t{unit}) * layout.chunks());
    int const rows = bounded(reach);
    auto const owner = [&](int chunk) { return chunk < 0 || chunk == layout.chunks() ? rank : layout.owner(chunk); };
    for_each_chunk(layout, rank, [&](int c) {
        int const lower = owner(c - 1), upper = owner(c + 1);
        if (before && upper != rank) {
            p.sends.push_back({-1, c, c + 1, 0, -rows});
            p.sends.push_back({upper, c + 1, c + 1, -rows, 0});
        } else if (!before && lower != rank) {
            p.sends.push_back({lower, c, c, 0, rows});
            p.sends.push_back({-1, c, c + 1, rows, 0});
        } else {
            p.sends.push_back({-1, c, c + 1});
        }
        if (before && lower != rank) p.receives.push_back({lower, c, c, -rows, 0});
        if (!before && upper != rank) p.receives.push_back({upper, c + 1, c + 1, 0, rows});
    });
    return p;
}

/// Returns the lanes of the exchanges by which states are handed from each segment of a sequence to the next, where
/// every chunk has rows.
template <layout P>
std::vector<lane_plan> state_lanes(P const& layout, int unit, int rank, bool back) {
    std::vector<lane_plan> list;
    int const least = bounded((index_t{unit} + 1) * layout.chunks());
    for (int c = 1; c < layout.chunks(); ++c) {
        int const lower = layout.owner(c - 1), upper = layout.owner(c);
        if (lower == upper) continue;
        lane_plan p{.rank = rank, .kind = flow::copies, .cells = {.of = cut_runs::states, .least = least}};
        if (lower == rank) p.sends.push_back({upper, 0, 1});
        if (upper == rank) p.receives.push_back({lower, 0, 1});
        list.push_back(back ? p.transposed(p.kind) : p);
    }
    return list;
}

/// Returns the lanes of the exchanges of a scan, of which a state has `state_rows` rows and its map `map_rows`, where
/// every chunk has rows: `back`, from the segments after.
template <layout P>
std::vector<lane_plan> scan_lanes(P const& layout, int unit, int rank, int state_rows, int map_rows, bool back) {
    std::vector<int> holders; // of the segments of a sequence, the first on the states' way first
    for (int c = 0; c < layout.chunks(); ++c) {
        int const owner = layout.owner(back ? layout.chunks() - 1 - c : c);
        if (holders.empty() || holders.back() != owner) holders.push_back(owner);
    }
    int const length = static_cast<int>(holders.size()), least = bounded((index_t{unit} + 1) * layout.chunks());
    std::vector<lane_plan> list;
    for (int reach = 1; reach < length; reach *= 2) {
        lane_plan p{.rank = rank, .kind = flow::copies, .cells = {.of = cut_runs::states, .least = least}};
        auto const lane_of = [&](int other, bool has_map) {
            return lane{.peer = holders[static_cast<std::size_t>(other)], .to = state_rows + (has_map ? map_rows : 0)};
        };
        for (int i = 0; i < length; ++i) {
            int const level = back ? length - 1 - i : i; // a rank's segments are in token order
            if (holders[static_cast<std::size_t>(level)] != rank) continue;
            if (level + reach < length) p.sends.push_back(lane_of(level + reach, level >= reach));
            if (level >= reach) p.receives.push_back(lane_of(level - reach, level >= 2 * reach));
        }
        list.push_back(std::move(p));
    }
    return list;
}

/// Rows of a message, or of a lane, in a batch.
struct lane_rows {
    int peer = -1;
    index_t count = 0, first = 0, runs = 0; ///< how many, the first of them, and in how many runs they lie
    index_t end = 0;
};

/// How many rows the lanes of one end have in a batch.
struct lane_counts {
    index_t rows = 0;
    std::vector<lane_rows> messages; ///< ascending by peer
    std::vector<index_t> slices;     ///< of a lane, of `slice` rows at most
};

/// Counts the rows of lanes in a batch; nothing if they do not tell what moves of it.
inline std::optional<lane_counts> count_lanes(std::vector<lane> const& lanes, lane_cells const& cells, thd const& batch,
                                              index_t slice) {
    lane_counts c{0, {}, std::vector<index_t>(lanes.size())};
    for (lane const& l : lanes)
        if (l.peer != -1) c.messages.push_back({l.peer});
    std::ranges::sort(c.messages, {}, &lane_rows::peer);
    auto const same = [](lane_rows const& a, lane_rows const& b) { return a.peer == b.peer; };
    c.messages.erase(std::unique(c.messages.begin(), c.messages.end(), same), c.messages.end());
    std::vector<lane_rows*> to(lanes.size());
    for (std::size_t i = 0; i < lanes.size(); ++i)
        if (lanes[i].peer != -1) to[i] = &*std::ranges::find(c.messages, lanes[i].peer, &lane_rows::peer);

    balanced_begins const all(cells.count);
    auto const sequences = static_cast<int>(batch.sequences());
    for (int s = 0; s < cells.runs(sequences); ++s) {
        index_t const n = cells.run(batch.offsets().data(), sequences, s).size();
        if (n == 0) continue;
        if (n < cells.least) return {};
        auto const begins = cells.begins(all, n);
        for (std::size_t i = 0; i < lanes.size(); ++i) {
            index_t const count = rows_in(lanes[i], begins).size();
            if (lane_rows* const m = to[i]; m && count > 0) {
                if (m->runs == 0) m->first = c.rows;
                m->runs += m->runs == 0 || m->end != c.rows;
                m->count += count;
                m->end = c.rows + count;
                c.slices[i] += (count + slice - 1) / slice;
            }
            c.rows += count;
        }
    }
    std::erase_if(c.messages, [](lane_rows const& m) { return m.count == 0; });
    return c;
}

} // namespace detail

} // namespace cpx
