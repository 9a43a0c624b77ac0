// SPDX-License-Identifier: Apache-2.0
// The laws and the shardings that they are checked for, compiled once for all floors and optimised: exhaustive tests
// spend most of their time here.
#include <law.hpp>

namespace support {

namespace {

template <cpx::scope Scope, class P>
any_tokens sharded(cpx::thd const& batch, P const& policy, int unit) {
    if (unit == 0) return cpx::shard<Scope>(batch, policy);
    if (unit == 2) return cpx::shard<Scope>(batch, policy, cpx::aligned<2>{});
    if (unit == 64) return cpx::shard<Scope>(batch, policy, cpx::aligned<64>{});
    return cpx::shard<Scope>(batch, policy, cpx::aligned<cpx::dynamic>{unit});
}

template <cpx::scope Scope>
any_tokens sharded(cpx::thd const& batch, spec const& s) {
    switch (s.layout) {
    case shape::sequential: return sharded<Scope>(batch, cpx::sequential<>{s.ranks}, s.unit);
    case shape::zigzag: return sharded<Scope>(batch, cpx::zigzag<>{s.ranks}, s.unit);
    case shape::striped: return sharded<Scope>(batch, cpx::striped<>{s.ranks}, s.unit);
    case shape::table: return sharded<Scope>(batch, cpx::table(s.ranks, s.owners), s.unit);
    default:
        return sharded<Scope>(batch, cpx::by_length{cpx::zigzag<>{s.ranks}, cpx::sequential<>{s.ranks}, &even}, s.unit);
    }
}

/// Returns the owners of the chunks of a run of `n` tokens.
std::vector<int> chunk_owners(spec const& s, cpx::index_t n) {
    std::vector<int> owners;
    int const w = s.ranks;
    bool const folded = s.layout == shape::zigzag || (s.layout == shape::by_length && even(n));
    if (s.layout == shape::table) return s.owners;
    owners.reserve(4 * static_cast<std::size_t>(w));
    if (s.layout == shape::striped)
        for (int deal = 0; deal < 4; ++deal)
            for (int r = 0; r < w; ++r) owners.push_back(r);
    else
        for (int r = 0; r < w; ++r) owners.push_back(r);
    if (folded)
        for (int r = w; r-- > 0;) owners.push_back(r);
    return owners;
}

/// Returns the nearest multiple of `unit`, the greater of two that are as near, but at most `n`.
cpx::index_t nearest_multiple(cpx::index_t t, cpx::index_t unit, cpx::index_t n) {
    cpx::index_t best = 0;
    while (best + unit <= t) best += unit;
    if ((t - best) * 2 >= unit) best += unit;
    return best < n ? best : n;
}

} // namespace

std::string text(spec const& s) {
    static constexpr char const* names[] = {"sequential", "zigzag", "striped", "table", "by_length"};
    std::string result = names[static_cast<int>(s.layout)];
    result += '<' + std::to_string(s.ranks) + (s.cuts == cpx::scope::sequence ? "> over sequence" : "> over batch");
    if (s.unit > 0) result += ", aligned<" + std::to_string(s.unit) + '>';
    return result;
}

any_tokens make(cpx::thd const& batch, spec const& s) {
    return s.cuts == cpx::scope::sequence ? sharded<cpx::scope::sequence>(batch, s)
                                          : sharded<cpx::scope::batch>(batch, s);
}

std::vector<int> brute_owners(cpx::thd const& batch, spec const& s) {
    std::vector<int> result;
    result.reserve(static_cast<std::size_t>(batch.tokens()));
    std::vector<cpx::index_t> cuts;
    auto const cut_run = [&](cpx::index_t first, cpx::index_t last) {
        std::vector<int> const owners = chunk_owners(s, last - first);
        cpx::index_t const chunks = static_cast<cpx::index_t>(owners.size());
        cuts.clear();
        for (cpx::index_t c = 1; c < chunks; ++c) {
            cpx::index_t at = first + (last - first) * c / chunks;
            if (s.unit > 0 && at < last) {
                cpx::index_t q = 0;
                while (batch.offset(q + 1) <= at) ++q;
                at = batch.offset(q) + nearest_multiple(at - batch.offset(q), s.unit, batch.length(q));
            }
            cuts.push_back(at);
        }
        for (cpx::index_t row = first; row < last; ++row) {
            std::size_t chunk = 0;
            for (cpx::index_t const at : cuts) chunk += at <= row;
            result.push_back(owners[chunk]);
        }
    };
    if (s.cuts == cpx::scope::batch)
        cut_run(0, batch.tokens());
    else
        for (cpx::index_t q = 0; q < batch.sequences(); ++q) cut_run(batch.offset(q), batch.offset(q + 1));
    return result;
}

std::vector<spec> all_specs(int ranks, std::vector<int> const& units, std::uint64_t seed) {
    splitmix numbers(seed * 1000 + static_cast<std::uint64_t>(ranks));
    std::vector<spec> list;
    for (shape const layout : {shape::sequential, shape::zigzag, shape::striped, shape::table, shape::by_length})
        for (cpx::scope const cuts : {cpx::scope::sequence, cpx::scope::batch})
            for (int const unit : units)
                list.push_back({layout, cuts, unit, ranks,
                                random_owners(numbers, ranks, static_cast<int>(numbers.between(1, 3 * ranks)))});
    return list;
}

} // namespace support

namespace law {

subject tokens(cpx::thd const& batch, support::spec const& s) {
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

namespace {

matrix every_row(cpx::thd const& batch, int ranks) {
    std::vector<index_t> all;
    for (index_t row = 0; row < batch.tokens(); ++row) all.push_back(row);
    return matrix(static_cast<std::size_t>(ranks), all);
}

} // namespace

subject replicated(cpx::thd const& batch, int ranks) {
    return {"replicated", support::any_rows(cpx::replicated<>(ranks, batch)), {}, {}, ranks, every_row(batch, ranks)};
}

subject heads(cpx::thd const& batch, int ranks, std::vector<cpx::section> const& sections) {
    std::string name = "heads";
    for (cpx::section const& s : sections) name += ' ' + std::to_string(s.heads) + 'x' + std::to_string(s.width);
    return {name,  support::any_rows(cpx::head_sharded<>(ranks, batch, sections)),
            {},    sections,
            ranks, every_row(batch, ranks)};
}

bool holds_head(int rank, int ranks, index_t h, index_t heads, index_t groups) {
    index_t const first = groups * rank / ranks, end = groups * (rank + 1) / ranks;
    for (index_t g = first; g < std::max(end, first + 1); ++g)
        if (g / (groups / heads) == h) return true;
    return false;
}

std::vector<index_t> columns(subject const& a, int rank, std::vector<cpx::section> const& sections) {
    std::vector<index_t> held;
    index_t column = 0, groups = 1;
    for (cpx::section const& s : sections) groups = std::max(groups, s.heads);
    for (cpx::section const& s : sections)
        for (index_t h = 0; h < s.heads; ++h)
            for (index_t k = 0; k < s.width; ++k, ++column)
                if (a.sections.empty() || holds_head(rank, a.ranks, h, s.heads, groups)) held.push_back(column);
    return held;
}

matrix tagged(subject const& a, std::vector<cpx::section> const& sections) {
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

std::vector<cpx::plan> plans(subject const& a, subject const& b) {
    std::vector<cpx::plan> list;
    list.reserve(static_cast<std::size_t>(a.ranks));
    for (int r = 0; r < a.ranks; ++r)
        list.push_back(
            std::visit([&](auto const& from, auto const& to) -> cpx::plan { return cpx::relayout(from, to, r); },
                       a.sharding, b.sharding));
    return list;
}

std::vector<cpx::section> sections_of(subject const& a, subject const& b) {
    if (!a.sections.empty()) return a.sections;
    if (!b.sections.empty()) return b.sections;
    return {{1, 1}};
}

namespace {

/// Rank i's sends to j are rank j's receives from i, and every rank has the rows that the definitions give it.
std::string agreement(subject const& a, subject const& b, std::vector<cpx::plan> const& plans) {
    std::uint64_t const fingerprint = plans[0].fingerprint(); // which equal identities share
    for (cpx::plan const& p : plans) {
        std::size_t const r = static_cast<std::size_t>(p.rank);
        if (p.source_rows != static_cast<index_t>(a.rows[r].size())) return "wrong number of source rows";
        if (p.target_rows != static_cast<index_t>(b.rows[r].size())) return "wrong number of target rows";
        if (p.id != plans[0].id && p.fingerprint() != fingerprint) return "fingerprints differ between ranks";
    }
    return support::disagreement(plans);
}

/// Partition, conservation and correctness in one: every place of every target holds the element that belongs there.
std::string arrival(subject const& a, subject const& b, std::vector<cpx::plan> const& plans) {
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
std::string least_traffic(subject const& a, subject const& b, std::vector<cpx::plan> const& plans) {
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
std::string pair(subject const& a, subject const& b, std::vector<cpx::plan> const& plans) {
    for (auto* one : {&agreement, &arrival, &least_traffic})
        if (std::string const problem = one(a, b, plans); !problem.empty())
            return a.name + " -> " + b.name + ": " + problem;
    return "";
}

} // namespace

std::string all_pairs(std::vector<subject> const& subjects) {
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
