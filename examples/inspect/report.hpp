// SPDX-License-Identifier: Apache-2.0
// What inspect found out about a sharding and a plan, as plain numbers that text, JSON and picture show alike.
#pragma once

#include "media.hpp"

#include <cstdio>
#include <optional>

namespace inspect {

/// Stands for a source rank where more ranks than can be shown hold a row's heads.
inline constexpr int several = -1;
inline constexpr std::size_t most_bands = 32;

/// Some heads of some global rows, and the rank that holds them before the exchange.
struct block {
    range rows, heads;
    int source = 0;
};

/// What one rank holds, in local order. Blocks are maximal: neighbours differ in heads or source, or leave a gap.
struct lane {
    range heads; ///< that the rank holds of every row
    std::vector<block> blocks;
    std::vector<index_t> cu_seqlens; ///< where the segments begin in local rows, and the number of rows
    index_t received = 0;            ///< rows of which at least one head comes from another rank

    index_t rows() const { return cu_seqlens.back(); }
    void add(block next) {
        bool const extends = !blocks.empty() && blocks.back().rows.last == next.rows.first &&
                             blocks.back().heads == next.heads && blocks.back().source == next.source;
        if (extends)
            blocks.back().rows.last = next.rows.last;
        else
            blocks.push_back(next);
    }
};

/// Who sends how many rows to whom.
struct movement {
    std::vector<lane> after;                        ///< one a rank
    std::vector<std::vector<index_t>> rows;         ///< rows[i][j]: held by rank i, needed by rank j
    std::vector<std::vector<index_t>> elements;     ///< of these
    cpx::volume bound;                              ///< what no exchange can do without
    index_t needed = 0, sent = 0, messages = 0;     ///< needed: all of `rows`; sent: without the rows that stay
    index_t needed_elements = 0, sent_elements = 0; ///< likewise
};

/// What is shown. An element is a byte if the width of a row is known, else a head.
struct report {
    cpx::thd batch;
    int ranks = 1;
    index_t heads = 1;         ///< of a row
    bool by_heads = false;     ///< whether ranks share them out
    bool everywhere = false;   ///< whether every rank has every row before the exchange
    index_t width = 0;         ///< bytes of a row; 0: not known
    std::string from, to = {}; ///< the shardings in words
    std::optional<media_batch> media = {};
    std::vector<lane> before = {}; ///< one a rank
    std::optional<movement> plan = {};

    index_t elements() const { return width > 0 ? width : heads; } ///< of a row
    /// Returns the bytes that a rank holds.
    index_t bytes(lane const& held) const { return held.rows() * (width / heads * held.heads.size()); }
};

template <cpx::any_sharding From>
std::vector<lane> lanes_before(From const& from, index_t heads) {
    std::vector<lane> lanes;
    for (int rank = 0; rank < from.ranks(); ++rank) {
        lane held{from.heads(rank, heads), {}, cpx::offsets(cpx::segments(from, rank))};
        from.for_each_piece(rank, [&](range rows) { held.add({rows, held.heads, rank}); });
        lanes.push_back(std::move(held));
    }
    return lanes;
}

/// Returns where `rank` has the heads from that it needs, if every rank holds every row: itself, else the lowest that
/// holds them.
template <cpx::any_sharding From>
std::vector<block> bands(From const& from, int rank, range needed, index_t heads) {
    range const own = from.heads(rank, heads);
    std::vector<block> list;
    int lowest = 0;
    for (index_t head = needed.first; head < needed.last; ++head) {
        while (from.heads(lowest, heads).last <= head) ++lowest;
        int const source = own.first <= head && head < own.last ? rank : lowest;
        if (list.empty() || list.back().source != source) list.push_back({{}, {head, head}, source});
        list.back().heads.last = head + 1;
    }
    if (list.size() > most_bands) return {{{}, needed, several}};
    return list;
}

template <cpx::any_sharding From, cpx::any_sharding To>
std::vector<lane> lanes_after(From const& from, To const& to, index_t heads) {
    std::vector<lane> lanes;
    for (int rank = 0; rank < to.ranks(); ++rank) {
        lane held{to.heads(rank, heads), {}, cpx::offsets(cpx::segments(to, rank))};
        std::vector<block> const shares =
            From::every_row ? bands(from, rank, held.heads, heads) : std::vector<block>(1, {{}, held.heads, rank});
        index_t hint = 0;
        to.for_each_piece(rank, [&](range rows) {
            if constexpr (From::every_row) {
                for (block const& share : shares) held.add({rows, share.heads, share.source});
                held.received += shares.size() > 1 || shares[0].source != rank ? rows.size() : 0;
            } else
                from.for_each_holder(rows, hint, [&](int holder, range common) {
                    held.add({common, held.heads, holder});
                    held.received += holder != rank ? common.size() : 0;
                });
        });
        lanes.push_back(std::move(held));
    }
    return lanes;
}

template <cpx::any_sharding From, cpx::any_sharding To>
movement make_movement(From const& from, To const& to, report const& r) {
    std::vector const none(static_cast<std::size_t>(from.ranks()),
                           std::vector<index_t>(static_cast<std::size_t>(from.ranks())));
    movement m{lanes_after(from, to, r.heads), none, none, cpx::lower_bound(from, to, r.elements())};
    for (int rank = 0; rank < from.ranks(); ++rank)
        for (cpx::message const& sent : cpx::relayout(from, to, rank).sends) {
            auto const& held = m.after[static_cast<std::size_t>(sent.peer)];
            index_t const rows = From::every_row ? held.rows() : total(sent.rows); // all of a peer, without a list
            index_t const elements = rows * (sent.columns.empty() ? r.elements() : total(sent.columns));
            m.rows[static_cast<std::size_t>(rank)][static_cast<std::size_t>(sent.peer)] += rows;
            m.elements[static_cast<std::size_t>(rank)][static_cast<std::size_t>(sent.peer)] += elements;
            bool const leaves = sent.peer != rank;
            m.needed += rows;
            m.needed_elements += elements;
            m.messages += leaves && rows > 0;
            m.sent += leaves ? rows : 0;
            m.sent_elements += leaves ? elements : 0;
        }
    return m;
}

/// Fills `r` in, whose batch, ranks, heads and width are known. Pure arithmetic: nothing moves.
inline report make_report(report r, examples::cut_spec cut, examples::sharding_spec const& from,
                          std::optional<examples::sharding_spec> const& to) {
    r.everywhere = from.every_row();
    r.from = examples::describe(from);
    if (to) r.to = examples::describe(*to);
    examples::with_sharding(r.batch, from, cut, r.ranks, [&](auto const& source) {
        r.before = lanes_before(source, r.heads);
        if (!to) return;
        examples::with_sharding(r.batch, *to, cut, r.ranks,
                                [&](auto const& target) { r.plan = make_movement(source, target, r); });
    });
    return r;
}

/// Returns "3 rows", "1 row".
inline std::string count(index_t n, std::string const& noun) {
    return std::to_string(n) + ' ' + noun + (n == 1 ? "" : "s");
}

/// Returns "12 bytes", "1.5 KiB".
inline std::string bytes(index_t n) {
    if (n < 1024) return count(n, "byte");
    double scaled = static_cast<double>(n);
    std::size_t unit = 0;
    for (; scaled >= 1023.95 && unit < 6; ++unit) scaled /= 1024;
    char text[32];
    std::snprintf(text, sizeof text, "%.1f %ciB", scaled, " KMGTPE"[unit]);
    return text;
}

/// Returns "head 3", "heads 4-7".
inline std::string heads_in_words(range heads) {
    std::string const first = std::to_string(heads.first);
    return heads.size() == 1 ? "head " + first : "heads " + first + '-' + std::to_string(heads.last - 1);
}

/// Returns what a rank holds: "10 rows of heads 4-7, 5 received, 20.0 KiB; placeholders: 4 of images".
inline std::string note(report const& r, lane const& held, bool after) {
    std::string text = count(held.rows(), "row");
    if (held.heads.size() < r.heads) text += " of " + heads_in_words(held.heads);
    if (after) text += ", " + std::to_string(held.received) + " received";
    if (r.width > 0) text += ", " + bytes(r.bytes(held));
    if (!r.media) return text;
    index_t placeholders = 0;
    for (block const& b : held.blocks)
        if (b.heads.first == held.blocks.front().heads.first) // each row once
            for (auto m = std::ranges::upper_bound(r.media->media, b.rows.first, {},
                                                   [](medium const& each) { return each.rows.last; });
                 m != r.media->media.end() && m->rows.first < b.rows.last; ++m)
                placeholders += cpx::intersect(m->rows, b.rows).size();
    return text + ", " + count(placeholders, "placeholder");
}

/// Returns "zigzag over sequence ARROW sequential over batch".
inline std::string title(report const& r, std::string const& arrow) {
    return r.from + (r.plan ? ' ' + arrow + ' ' + r.to : "");
}

/// Returns "2 ranks, 20 rows in 2 sequences; sent 10 of 20 rows in 2 messages, lower bound 10", of heads which, and
/// bytes.
inline std::string summary(report const& r) {
    std::string text = count(r.ranks, "rank") + ", " + count(r.batch.tokens(), "row") + " in " +
                       count(r.batch.sequences(), "sequence");
    if (!r.plan) return text;
    movement const& m = *r.plan;
    text += "; sent " + std::to_string(m.sent) + " of " + count(m.needed, "row") + " in " +
            count(m.messages, "message") + ", lower bound " + std::to_string(m.bound.rows);
    if (r.by_heads) {
        index_t least = r.heads, most = 0;
        for (std::size_t i = 0; i < m.rows.size(); ++i)
            for (std::size_t j = 0; j < m.rows.size(); ++j) {
                if (i == j || m.rows[i][j] == 0) continue;
                index_t const heads = m.elements[i][j] / m.rows[i][j] * r.heads / r.elements();
                least = std::min(least, heads), most = std::max(most, heads);
            }
        if (most > 0)
            text += ", each with " + (least < most ? std::to_string(least) + " to " : "") + std::to_string(most) +
                    " of " + count(r.heads, "head");
    }
    if (r.width > 0)
        text += "; " + bytes(m.sent_elements) + " of " + bytes(m.needed_elements) + ", lower bound " +
                bytes(m.bound.elements);
    return text;
}

/// Returns "3 images, 2 frames of videos: 14 placeholders. To compute positions, ranks exchange 2 int32 a segment".
inline std::string media_summary(report const& r) {
    auto const& items = r.media->items;
    index_t const images = items.rows(media_kind::image), videos = items.rows(media_kind::video);
    index_t const frames = std::ssize(items.items(media_kind::video)), pictures = std::ssize(r.media->media) - frames;
    int const kinds = (images > 0) + (videos > 0);
    std::string text = images > 0 ? count(pictures, "image") : kinds == 0 ? "no images or videos" : "";
    if (videos > 0) text += (images > 0 ? ", " : "") + count(frames, "frame") + " of videos";
    return text + ": " + count(images + videos, "placeholder") + ". To compute positions, ranks exchange " +
           (kinds == 0 || r.everywhere ? "nothing" : std::to_string(kinds) + " int32 a segment");
}

} // namespace inspect
