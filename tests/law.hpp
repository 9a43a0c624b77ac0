// SPDX-License-Identifier: Apache-2.0
// The laws of relayout plans, each checked against brute force over tokens. A law returns "" if it holds.
#pragma once

#include <support/serial.hpp>
#include <support/spec.hpp>

#include <variant>

namespace law {

using cpx::index_t;
using matrix = std::vector<std::vector<index_t>>;

/// A sharding: as cpx sees it, and what each rank holds according to the definitions.
struct subject {
    std::string name;
    std::variant<support::any_tokens, support::any_rows> sharding;
    std::vector<int> owners;            ///< of every global row; empty: every rank holds every row
    std::vector<cpx::section> sections; ///< of head shardings
    int ranks;
    matrix rows; ///< global rows of each rank, in local order

    bool every_row() const { return sharding.index() == 1; }
};

inline subject tokens(cpx::thd const& batch, support::spec const& s) {
    subject a{text(s),
              support::make(batch, s),
              support::brute_owners(batch, s),
              {},
              s.ranks,
              matrix(static_cast<std::size_t>(s.ranks))};
    for (std::size_t row = 0; row < a.owners.size(); ++row)
        a.rows[static_cast<std::size_t>(a.owners[row])].push_back(static_cast<index_t>(row));
    return a;
}

inline matrix every_row(cpx::thd const& batch, int ranks) {
    std::vector<index_t> all;
    for (index_t row = 0; row < batch.tokens(); ++row) all.push_back(row);
    return matrix(static_cast<std::size_t>(ranks), all);
}

inline subject replicated(cpx::thd const& batch, int ranks) {
    return {"replicated", support::any_rows(cpx::replicated<>(ranks, batch)), {}, {}, ranks, every_row(batch, ranks)};
}

inline subject heads(cpx::thd const& batch, int ranks, std::vector<cpx::section> const& sections) {
    std::string name = "heads";
    for (cpx::section const& s : sections) name += ' ' + std::to_string(s.heads) + 'x' + std::to_string(s.width);
    return {name,  support::any_rows(cpx::head_sharded<>(ranks, batch, sections)),
            {},    sections,
            ranks, every_row(batch, ranks)};
}

/// Returns whether `rank` of `ranks` holds head `h` of a section, where the largest section has `groups` heads.
inline bool holds_head(int rank, int ranks, index_t h, index_t heads, index_t groups) {
    index_t const first = groups * rank / ranks, end = groups * (rank + 1) / ranks;
    for (index_t g = first; g < std::max(end, first + 1); ++g)
        if (g / (groups / heads) == h) return true;
    return false;
}

/// Returns the columns of whole rows that `rank` holds, in local order, of rows made of `sections`.
inline std::vector<index_t> columns(subject const& a, int rank, std::vector<cpx::section> const& sections) {
    std::vector<index_t> held;
    index_t column = 0, groups = 1;
    for (cpx::section const& s : sections) groups = std::max(groups, s.heads);
    for (cpx::section const& s : sections)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t k = 0; k < s.width; ++k, ++column)
                if (a.sections.empty() || holds_head(rank, a.ranks, h, s.heads, groups)) held.push_back(column);
    return held;
}

/// Returns what each rank's buffer holds if every element is its global row * 1000 + its column.
inline matrix tagged(subject const& a, std::vector<cpx::section> const& sections) {
    matrix buffers;
    buffers.reserve(a.rows.size());
    for (int r = 0; r < a.ranks; ++r) {
        auto const held = columns(a, r, sections);
        auto const& rows = a.rows[static_cast<std::size_t>(r)];
        buffers.emplace_back().reserve(rows.size() * held.size());
        for (index_t const row : rows)
            for (index_t const column : held) buffers.back().push_back(row * 1000 + column);
    }
    return buffers;
}

inline std::vector<cpx::plan> plans(subject const& a, subject const& b) {
    std::vector<cpx::plan> list;
    list.reserve(static_cast<std::size_t>(a.ranks));
    for (int r = 0; r < a.ranks; ++r)
        list.push_back(
            std::visit([&](auto const& from, auto const& to) -> cpx::plan { return cpx::relayout(from, to, r); },
                       a.sharding, b.sharding));
    return list;
}

/// The sections of the rows that move between two shardings: one element a row if neither has any.
inline std::vector<cpx::section> sections_of(subject const& a, subject const& b) {
    if (!a.sections.empty()) return a.sections;
    if (!b.sections.empty()) return b.sections;
    return {{1, 1}};
}

/// Rank i's sends to j are rank j's receives from i, and every rank has the rows that the definitions give it.
inline std::string agreement(subject const& a, subject const& b, std::vector<cpx::plan> const& plans) {
    std::uint64_t const fingerprint = plans[0].fingerprint();
    for (cpx::plan const& p : plans) {
        std::size_t const r = static_cast<std::size_t>(p.rank);
        if (p.source_rows != static_cast<index_t>(a.rows[r].size())) return "wrong number of source rows";
        if (p.target_rows != static_cast<index_t>(b.rows[r].size())) return "wrong number of target rows";
        if (p.fingerprint() != fingerprint) return "fingerprints differ between ranks";
    }
    return support::disagreement(plans);
}

/// Partition, conservation and correctness in one: every place of every target holds the element that belongs there.
inline std::string arrival(subject const& a, subject const& b, std::vector<cpx::plan> const& plans) {
    auto const sections = sections_of(a, b);
    index_t width = 0;
    for (cpx::section const& s : sections) width += s.heads * s.width;
    auto const got = support::execute(plans, tagged(a, sections), width, index_t{-1});
    auto const want = tagged(b, sections);
    for (std::size_t r = 0; r < want.size(); ++r) {
        if (got[r].size() != want[r].size()) return "rank " + std::to_string(r) + " has a target of another size";
        for (std::size_t i = 0; i < want[r].size(); ++i)
            if (got[r][i] != want[r][i])
                return "rank " + std::to_string(r) + ", element " + std::to_string(i) + ": expected row " +
                       std::to_string(want[r][i] / 1000) + " column " + std::to_string(want[r][i] % 1000) + ", got " +
                       std::to_string(got[r][i]);
    }
    return "";
}

/// What leaves ranks is what its new holders do not have, counted cell by cell, and for rows by `cpx::lower_bound`.
inline std::string least_traffic(subject const& a, subject const& b, std::vector<cpx::plan> const& plans) {
    auto const sections = sections_of(a, b);
    index_t sent_rows = 0, sent_cells = 0, missing = 0, width = 0;
    for (cpx::section const& s : sections) width += s.heads * s.width;
    for (cpx::plan const& p : plans) {
        sent_rows += p.sent_rows();
        sent_cells += p.sent_elements(width);
    }
    for (int r = 0; r < b.ranks; ++r) {
        auto const needed = columns(b, r, sections), held = columns(a, r, sections);
        index_t lacking = 0;
        for (index_t const column : needed) lacking += !std::ranges::binary_search(held, column);
        for (index_t const row : b.rows[static_cast<std::size_t>(r)])
            missing += a.every_row() || a.owners[static_cast<std::size_t>(row)] == r
                           ? lacking
                           : static_cast<index_t>(needed.size());
    }
    if (sent_cells != missing)
        return "sent " + std::to_string(sent_cells) + " elements where " + std::to_string(missing) + " are missing";
    cpx::volume const bound = std::visit(
        [&](auto const& from, auto const& to) { return cpx::lower_bound(from, to, width); }, a.sharding, b.sharding);
    if (sent_rows != bound.rows)
        return "sent " + std::to_string(sent_rows) + " rows, bound " + std::to_string(bound.rows);
    if (sent_cells != bound.elements)
        return "sent " + std::to_string(sent_cells) + " elements, bound " + std::to_string(bound.elements);
    return "";
}

/// Returns the first law that a pair breaks, with the pair's name.
inline std::string pair(subject const& a, subject const& b, std::vector<cpx::plan> const& plans) {
    for (auto* one : {&agreement, &arrival, &least_traffic})
        if (std::string const problem = one(a, b, plans); !problem.empty())
            return a.name + " -> " + b.name + ": " + problem;
    return "";
}

/// Every ordered pair of shardings of one batch: the laws of a pair, and that there and back are each other's
/// transpose.
///
/// Skips pairs of head shardings with different sections.
inline std::string all_pairs(std::vector<subject> const& subjects) {
    std::size_t const n = subjects.size();
    std::vector<std::vector<cpx::plan>> made(n * n);
    for (std::size_t i = 0; i < n; ++i)
        for (std::size_t k = 0; k < n; ++k) {
            subject const &a = subjects[i], &b = subjects[k];
            if (!a.sections.empty() && !b.sections.empty() && a.sections != b.sections) continue;
            made[i * n + k] = plans(a, b);
            if (std::string problem = pair(a, b, made[i * n + k]); !problem.empty()) return problem;
            if (k <= i && !a.every_row() && !b.every_row() &&
                (support::transposed(made[i * n + k]) != made[k * n + i] ||
                 support::transposed(made[k * n + i]) != made[i * n + k]))
                return a.name + " -> " + b.name + ": not the transpose of the way back";
        }
    return "";
}

} // namespace law
