// SPDX-License-Identifier: Apache-2.0
// What all batches that fit a capacity have in common: the exchanges of one kind of plan, and what they take at most.
#pragma once

#include <cpx/plan/carry.hpp>
#include <cpx/plan/halo.hpp>
#include <cpx/plan/relayout_lanes.hpp>

#include <algorithm>
#include <bit>
#include <concepts>
#include <span>
#include <tuple>
#include <vector>

namespace cpx {

/// The largest batch that a movement is prepared for: rows of a rank, and sequences.
struct capacity {
    index_t rows = 0, sequences = 0;
};

/// Elements of a state that is handed on, and of the map that goes with it where the carry is a `scan`.
struct carry_widths {
    index_t state = 0, map = 0;
    friend bool operator==(carry_widths, carry_widths) = default;
};

/// What exchanges of any batch take at most.
struct movement_room {
    index_t runs = 0;     ///< of rows, of all exchanges in one direction
    index_t elements = 0; ///< that leave a rank, or come, in one exchange
    index_t columns = 1;  ///< into how many runs of columns messages cut a row
    index_t exchanges = 1;
};

namespace detail {

/// Returns into how many runs of rows, over all ranks, a sharding cuts a sequence, at most. `rows`: of a rank.
template <any_sharding S>
index_t most_pieces(S const& s, capacity const& most) {
    if constexpr (requires { s.policy().chunks(); }) return s.policy().chunks();
    return S::every_row ? 1 : most.rows;
}
/// The same of so many sequences.
template <any_sharding S>
index_t most_runs(S const& s, capacity const& most, caller here) {
    return product("movement", "runs", {most.sequences + 1, most_pieces(s, most)}, here);
}

/// Returns how many segments a rank has of so many sequences, at most: the same on all ranks.
template <any_sharding S>
index_t most_segments(S const& s, capacity const& most, caller here) {
    index_t pieces = 1; // of a sequence, on one rank
    if constexpr (requires { s.policy().owner(0); }) {
        std::vector<index_t> chunks(static_cast<std::size_t>(s.ranks()));
        for (int c = 0; c < s.policy().chunks(); ++c) ++chunks[static_cast<std::size_t>(s.policy().owner(c))];
        pieces = *std::ranges::max_element(chunks);
    } else if constexpr (!S::every_row) { // of layouts that a rule chooses: a segment has at least a row
        return most.rows;
    }
    return product("movement", "segments", {most.sequences + 1, pieces}, here);
}

/// Returns how many rows a rank has, or a few more if these do not exceed `most`: where chunks are about equal, that
/// takes no look at sequences.
template <any_sharding S>
index_t about_rows(S const& s, int rank, index_t most) {
    if constexpr (in_lanes<S>) {
        index_t chunks = 0;
        for_each_chunk(s.policy(), rank, [&](int) { ++chunks; });
        index_t const rows = chunks * (s.batch().tokens() / s.policy().chunks() + 1 + s.batch().sequences());
        if (unit_of(s) == 1 && rows <= most) return rows; // a chunk has one row more than its share, at most
    }
    return s.rows(rank);
}

/// Returns how many rows beside segments a rank sends, or gets, at most. A row may go to several ranks, where segments
/// are shorter than `reach`.
template <any_sharding S>
index_t most_beside(S const& s, index_t reach, capacity const& most, caller here) {
    return product("movement", "rows of the halo", {most_segments(s, most, here), reach, (reach + 1) / 2 + 1}, here);
}

/// What tables of a plan take: rectangles, and bytes that leave, or come, by one exchange.
struct table_sizes {
    index_t rectangles = 0, staged = 0;
};

/// Returns what tables of any plans take at most that have `room`: a rectangle for each run of rows and columns, of
/// elements of so many bytes.
inline table_sizes most_tables(movement_room const& room, int ranks, std::size_t element, caller here) {
    index_t const bytes = product("exchange", "bytes", {room.elements, static_cast<index_t>(element)}, here);
    return {2 * room.columns * (room.runs + 2 * ranks), bytes + 256 * ranks}; // messages begin at multiples of 256
}

/// Returns how many of at most `rows` rows of a batch a rank has, at most, of so many sequences.
template <any_sharding S>
index_t most_held(S const& s, int rank, index_t rows, index_t sequences) {
    if constexpr (in_cells<S>) {
        index_t const runs = S::cuts == scope::batch ? 1 : sequences, unit = unit_of(s), chunks = s.policy().chunks();
        index_t own = 0, share = rows;
        for_each_chunk(s.policy(), rank, [&](int) { ++own; });
        if (runs < rows / unit)
            share = rows / chunks + 1 + runs * unit; // a chunk is a unit longer than its share, at most
        if (own == 0 || share <= rows / own) return own * share;
    }
    return rows;
}

/// Returns what relayouts of any batch take at most that lead from one sharding to another. `width`: elements of a row
/// that moves whole.
template <any_sharding From, any_sharding To>
movement_room relayout_room(From const& from, To const& to, int rank, index_t width, capacity const& most,
                            caller here) {
    auto const runs = [&](auto const& s) { return std::min(most.rows, most_runs(s, most, here)); };
    auto const sections = from.sections().empty() ? to.sections() : from.sections();
    movement_room room{.runs = runs(from) + runs(to), .columns = std::max<index_t>(1, std::ssize(sections))};
    if constexpr (!From::every_row && !To::every_row) {
        room.elements = product("movement", "elements", {from.ranks() > 1 ? most.rows : 0, width}, here);
        return room;
    }
    relayout_columns const columns(from, to, rank);
    auto const elements = [&](auto const& mine, auto const& other, bool out) {
        index_t widest = 0, all = 0; // of messages
        for (int peer = 0; peer < mine.ranks(); ++peer) {
            index_t const own = peer == rank ? 0 : total(columns.of(peer, out)),
                          shipped = sections.empty() ? own * width : own;
            widest = std::max(widest, shipped), all += shipped;
        }
        if (!other.every_row) return product("movement", "elements", {most.rows, widest}, here); // a row has one holder
        return product("movement", "elements", {most_held(mine, rank, most.rows, most.sequences), all}, here);
    };
    room.elements = std::max(elements(from, to, true), elements(to, from, false));
    return room;
}

/// What a movement knows of a kind of plan: what tells a batch from others, the plan of another one, its exchanges in
/// one direction, by their numbers, and whether those back are the same messages the other way; lanes that tell them of
/// every batch, if there are such; what all of them take at most, and the elements of a row of theirs.
template <class Plan>
struct moved;

/// Of a plan that is one exchange.
template <class Plan>
struct moved_at_once {
    using width = index_t;
    template <class F>
    static auto exchanges(plan const& p, index_t, bool back, F&& f) {
        if (!back) return f(std::span<plan const>(&p, 1)); // named: nvcc spells a deduced one as newer g++ refuse it
        plan const other = p.transposed();
        return f(std::span<plan const>(&other, 1));
    }
    static index_t row_width(index_t width) { return width; }
};

template <any_sharding From, any_sharding To>
struct moved<relayout_plan<From, To>> : moved_at_once<relayout_plan<From, To>> {
    using plan_type = relayout_plan<From, To>;
    using batch = std::tuple<From, To>;
    static batch batch_of(plan_type const& p) { return {p.from, p.to}; }
    static plan_type next(plan_type const& p, batch const& of, caller here) {
        return relayout(std::get<0>(of), std::get<1>(of), p.rank, here);
    }
    static bool mirrors(plan_type const& p) { return p.kind == flow::moves || p.kind == flow::selects; }
    static std::vector<lane_plan> lanes(plan_type const& p, index_t, bool back) {
        auto made = relayout_lanes(p.from, p.to, p);
        if (!made) return {};
        return {back ? made->transposed(p.plan::transposed().kind) : std::move(*made)};
    }
    static movement_room room(plan_type const& p, index_t width, capacity const& most, caller here) {
        return relayout_room(p.from, p.to, p.rank, width, most, here);
    }
};

template <any_sharding S>
struct moved<halo_plan<S>> : moved_at_once<halo_plan<S>> {
    using plan_type = halo_plan<S>;
    using batch = std::tuple<S>;
    static batch batch_of(plan_type const& p) { return {p.sharding}; }
    static plan_type next(plan_type const& p, batch const& of, caller here) {
        return halo(std::get<0>(of), p.rank, p.reach, p.where, here);
    }
    static bool mirrors(plan_type const&) { return false; }
    static std::vector<lane_plan> lanes(plan_type const& p, index_t, bool back) {
        std::vector<lane_plan> list;
        with_lanes(p.sharding, [&](auto const& layout, int unit) {
            list.push_back(halo_lanes(layout, unit, p.rank, p.reach, p.where == side::before));
            if (back) list.back() = list.back().transposed(flow::sums);
        });
        return list;
    }
    static movement_room room(plan_type const& p, index_t width, capacity const& most, caller here) {
        index_t const rows = most_beside(p.sharding, p.reach, most, here);
        return {2 * rows, product("movement", "elements", {rows, width}, here)};
    }
};

template <carry_kind How, any_sharding S>
struct moved<carry_plan<How, S>> {
    using plan_type = carry_plan<How, S>;
    using width = carry_widths;
    using batch = std::tuple<S>;
    static constexpr bool scans = std::same_as<How, scan>;
    static batch batch_of(plan_type const& p) { return {p.sharding}; }
    static plan_type next(plan_type const& p, batch const& of, caller here) {
        return carry<How>(std::get<0>(of), p.rank, here);
    }
    static bool mirrors(plan_type const&) { return !scans; } // maps are not the same from both sides
    static std::vector<lane_plan> lanes(plan_type const& p, carry_widths width, bool back) {
        std::vector<lane_plan> list;
        with_lanes(p.sharding, [&](auto const& layout, int unit) {
            if constexpr (scans) {
                index_t const row = row_width(width);
                list = scan_lanes(layout, unit, p.rank, bounded(width.state / row), bounded(width.map / row), back);
            } else {
                list = state_lanes(layout, unit, p.rank, back);
            }
        });
        return list;
    }
    template <class F>
    static auto exchanges(plan_type const& p, carry_widths width, bool back, F&& f) {
        std::vector<plan> list;
        side const from = back ? side::after : side::before;
        for (index_t k = 0; k < p.steps; ++k)
            if constexpr (scans)
                list.push_back(p.step(k, from, width.state, width.map));
            else
                list.push_back(p.step(k, from));
        return f(std::span<plan const>(list));
    }
    static index_t row_width(carry_widths width) {
        if constexpr (scans) return plan_type::row_width(width.state, width.map);
        return width.state;
    }
    static movement_room room(plan_type const& p, carry_widths width, capacity const& most, caller here) {
        index_t const runs = most_segments(p.sharding, most, here); // in each exchange of a scan, in one of a series
        auto const pieces = static_cast<std::size_t>(most_runs(p.sharding, most, here));
        index_t const times = scans ? static_cast<index_t>(std::bit_width(pieces)) : 1;
        index_t const elements = width.state + (scans ? width.map : 0);
        return {.runs = 2 * runs * times,
                .elements = product("movement", "elements of states", {runs, elements}, here),
                .exchanges = scans ? times : most_pieces(p.sharding, most)};
    }
};

} // namespace detail

} // namespace cpx
