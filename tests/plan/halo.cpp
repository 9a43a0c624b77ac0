// SPDX-License-Identifier: Apache-2.0
#include <cpx/plan/edges.hpp>

#include <doctest/doctest.h>

#include <law.hpp>
#include <support/rejects.hpp>

#include <limits>
#include <set>

namespace {

using namespace support;
using cpx::index_t;

char const* name(cpx::side where) { return where == cpx::side::before ? "before" : "after"; }

/// Returns what is wrong with the halos of all ranks, or "": every segment gets the rows beside it, each foreign row
/// comes once, nothing else comes, both ends agree, and the transpose adds every gradient where its row lives.
std::string problem_of(cpx::thd const& batch, law::subject const& a, index_t reach, cpx::side where) {
    auto const& sharding = std::get<0>(a.sharding);
    std::vector<cpx::halo_plan<any_tokens>> halos;
    std::vector<cpx::plan> plans;
    halos.reserve(a.rows.size());
    plans.reserve(a.rows.size());
    std::uint64_t common = 0;
    for (int r = 0; r < a.ranks; ++r) {
        halos.push_back(cpx::halo(sharding, r, reach, where));
        plans.push_back(halos.back());
        std::uint64_t const fingerprint = plans.back().fingerprint();
        if (r == 0) common = fingerprint;
        if (fingerprint != common) return "fingerprints differ";
    }
    if (std::string const problem = disagreement(plans); !problem.empty()) return problem;
    auto const arrived = execute(plans, a.rows, 1, index_t{-1});

    index_t received = 0;
    law::matrix gradients, expected(a.rows.size());
    for (std::size_t r = 0; r < a.rows.size(); ++r) expected[r].assign(a.rows[r].size(), 0);
    for (std::size_t r = 0; r < a.rows.size(); ++r) {
        auto const who = [&] { return "rank " + std::to_string(r); };
        auto const& halo = halos[r];
        std::set<index_t> foreign;
        if (halo.begin.size() != halo.segments.size() + 1) return who() + ": a beginning for each segment is missing";
        for (std::size_t i = 0; i < halo.segments.size(); ++i) {
            cpx::segment const& s = halo.segments[i];
            index_t const start = batch.offset(s.sequence) + s.token, end = start + s.count;
            bool const before = where == cpx::side::before;
            index_t const first = before ? std::max(batch.offset(s.sequence), start - reach) : end;
            index_t const last = before ? start : std::min(batch.offset(s.sequence + 1), end + reach);
            std::vector<index_t> want, got;
            for (index_t row = first; row < last; ++row) {
                want.push_back(row);
                if (a.owners[static_cast<std::size_t>(row)] != static_cast<int>(r)) foreign.insert(row);
            }
            for (std::size_t h = halo.begin[i]; h < halo.begin[i + 1]; ++h)
                for (index_t k = 0; k < halo.runs[h].count; ++k)
                    got.push_back((halo.runs[h].halo ? arrived[r] : a.rows[r])
                                      .at(static_cast<std::size_t>(halo.runs[h].first + k)));
            if (got != want) return who() + ", segment " + std::to_string(i) + " has the wrong rows beside it";
        }
        if (arrived[r] != std::vector<index_t>(foreign.begin(), foreign.end()))
            return who() + " receives a row twice, or in vain";
        if (halo.source_rows != static_cast<index_t>(a.rows[r].size())) return who() + ": wrong number of source rows";
        received += static_cast<index_t>(foreign.size());

        gradients.emplace_back();
        for (index_t const row : foreign) { // a gradient that tells its row and the rank that needed it
            index_t const value = (row + 1) * (1 + static_cast<index_t>(r));
            gradients.back().push_back(value);
            std::size_t const owner = static_cast<std::size_t>(a.owners[static_cast<std::size_t>(row)]);
            auto const at = std::ranges::find(a.rows[owner], row) - a.rows[owner].begin();
            expected[owner][static_cast<std::size_t>(at)] += value;
        }
    }
    index_t sent = 0;
    for (cpx::plan const& p : plans) sent += p.sent_rows();
    if (sent != received || sent != cpx::halo_lower_bound(sharding, reach, where))
        return "sends more rows than are needed";
    if (execute(transposed(plans), gradients, 1, index_t{-1}) != expected) return "the transpose loses a gradient";
    return "";
}

TEST_SUITE("plan") {
    TEST_CASE("every segment of all small packings gets the rows beside it, however many, under all shardings") {
        for (int ranks = 1; ranks <= 6; ++ranks)
            for (spec const& s : all_specs(ranks, {0, 2}))
                for (index_t tokens = 0; tokens <= 8 - fewer; ++tokens)
                    for_each_packing(tokens, [&](cpx::thd const& batch) {
                        auto const a = law::tokens(batch, s);
                        index_t longest = 0;
                        for (index_t q = 0; q < batch.sequences(); ++q) longest = std::max(longest, batch.length(q));
                        for (index_t reach = 0; reach <= longest + 1; ++reach) // no more rows are beside a segment
                            for (cpx::side const where : {cpx::side::before, cpx::side::after}) {
                                std::string const problem = problem_of(batch, a, reach, where);
                                if (!problem.empty())
                                    FAIL(a.name << ", " << reach << " rows " << name(where) << ", lengths "
                                                << text(batch) << ": " << problem);
                            }
                    });
    }

    TEST_CASE("halos of random packings reach over as many ranks as it takes") {
        splitmix numbers(11);
        for (int turn = 0; turn < 400; ++turn) {
            int const ranks = static_cast<int>(numbers.between(1, 16));
            std::vector<index_t> list;
            for (index_t n = numbers.between(0, 8); n-- > 0;)
                list.push_back(numbers.between(0, numbers.between(0, 1) ? 12 : 150));
            auto const specs = all_specs(ranks, {0, 1, 3, 64}, numbers.next() % 1000);
            auto const a = law::tokens(lengths(list), specs[numbers.next() % specs.size()]);
            index_t const reach = numbers.between(0, 9);
            cpx::side const where = numbers.next() % 2 ? cpx::side::before : cpx::side::after;
            std::string const problem = problem_of(lengths(list), a, reach, where);
            CHECK_MESSAGE(problem.empty(), a.name << ", " << reach << " rows " << name(where) << ", lengths "
                                                  << text(lengths(list)) << ": " << problem);
        }
    }

    // attention-gym's case for convolutions that reach over several ranks: lengths 1 and 9, a kernel of 8.
    TEST_CASE("a halo comes from several ranks where shards are shorter than it") {
        auto const sharding = cpx::shard<cpx::scope::batch>(lengths({1, 9}), cpx::sequential<5>{});
        auto const last = cpx::halo(sharding, 4, 7);
        CHECK(last.target_rows == 7);
        REQUIRE(last.receives.size() == 4);
        CHECK(cpx::total(last.receives[0].rows) == 1); // token 0 of the second sequence, row 1 of rank 0
        CHECK(cpx::total(last.receives[3].rows) == 2);
        CHECK(last.messages() == 0);
    }

    TEST_CASE("rows that the rank holds itself are named, not copied") {
        // The last rank of a zigzag holds the middle; rank 0 of 1 holds everything.
        auto const alone = cpx::halo(cpx::shard(lengths({16, 8}), cpx::zigzag<1>{}), 0, 3);
        CHECK(alone.target_rows == 0);
        CHECK(alone.segments.size() == 2);
        // A table that gives every second chunk of two tokens to rank 0: its halo reaches over the other's tokens.
        auto const p = cpx::halo(cpx::shard(lengths({8}), cpx::table(2, {0, 1, 0, 1})), 0, 3);
        CHECK(p.target_rows == 2); // tokens 2 and 3
        REQUIRE(p.runs.size() == 2);
        CHECK(p.runs[0] == cpx::halo_run{false, 1, 1}); // token 1, its own
        CHECK(p.runs[1] == cpx::halo_run{true, 0, 2});
    }

    TEST_CASE(
        "edge rows are those that segments need of others, each once, and stand where their plan looks for them") {
        auto const batch = lengths({9, 0, 14, 1, 30});
        for (int r = 0; r < 3; ++r) {
            auto const p = cpx::halo(cpx::shard(batch, cpx::zigzag<3>{}), r, 4, cpx::side::after);
            auto const edges = cpx::edges_of(p);
            CHECK(edges.exchange.source_rows == std::ssize(edges.rows));
            CHECK(std::ranges::is_sorted(edges.rows));
            REQUIRE(edges.exchange.sends.size() == p.sends.size());
            std::set<index_t> needed;
            for (std::size_t m = 0; m < p.sends.size(); ++m)
                for (std::size_t k = 0; k < p.sends[m].rows.size(); ++k)
                    for (index_t i = 0; i < p.sends[m].rows[k].count; ++i) {
                        index_t const row = p.sends[m].rows[k].first + i;
                        needed.insert(row);
                        CHECK(edges.rows[static_cast<std::size_t>(edges.exchange.sends[m].rows[k].first + i)] == row);
                    }
            CHECK(needed == std::set<index_t>(edges.rows.begin(), edges.rows.end()));
            CHECK(needed.size() == edges.rows.size());
            // beside a segment the rows follow one another, those of this rank as edge rows
            auto const own = cpx::rows_beside(p, [](index_t row, bool halo) { return halo ? -2 : row; });
            REQUIRE(own.size() == edges.beside.size());
            for (std::size_t i = 0; i < own.size(); ++i) {
                index_t const is = edges.beside[i], count = std::ssize(edges.rows);
                if (own[i] == -2)
                    CHECK(is >= count);
                else
                    CHECK((own[i] == -1 ? is == -1 : edges.rows[static_cast<std::size_t>(is)] == own[i]));
            }
        }
    }

    TEST_CASE("halos of shardings in which every rank holds every row are empty") {
        auto const p = cpx::halo(cpx::head_sharded<2>(lengths({8, 3}), {{2, 4}}), 1, 3);
        CHECK(p.sends.empty());
        CHECK(p.receives.empty());
        CHECK(p.source_rows == 11);
        CHECK(p.begin == std::vector<std::size_t>{0, 0, 0});
    }

    TEST_CASE("static equals dynamic for halos") {
        auto const batch = lengths({9, 0, 14, 1});
        for (int r = 0; r < 3; ++r) {
            auto const fixed = cpx::halo(cpx::shard(batch, cpx::zigzag<3>{}), r, 4);
            auto const loose = cpx::halo(cpx::shard(batch, cpx::zigzag<>{3}), r, 4);
            CHECK(fixed.sends == loose.sends);
            CHECK(fixed.receives == loose.receives);
            CHECK(fixed.runs == loose.runs);
        }
    }

    TEST_CASE("halo rejects a rank that does not exist and numbers of rows that are no size") {
        auto const sharding = cpx::shard(lengths({8}), cpx::zigzag<2>{});
        rejects({"halo: rank: expected 0 to 1, got 2", "halo.cpp"}, [&] { cpx::halo(sharding, 2, 1); });
        rejects({"halo: rank", "got -1"}, [&] { cpx::halo(sharding, -1, 1); });
        rejects({"halo: rows beside a segment: expected not negative, got -3"}, [&] { cpx::halo(sharding, 0, -3); });
        for (index_t const reach : {std::numeric_limits<index_t>::max(), index_t{1} << 62})
            for (cpx::side const where : {cpx::side::before, cpx::side::after})
                rejects({"halo.cpp", "rows beside a segment: expected less than 2^62, got " + std::to_string(reach)},
                        [&] { cpx::halo(sharding, 0, reach, where); });
        CHECK(cpx::halo(sharding, 0, (index_t{1} << 62) - 1, cpx::side::after).target_rows ==
              cpx::halo(sharding, 0, 8, cpx::side::after).target_rows);
    }

    TEST_CASE("halos of sequences of more than 2^33 tokens count right") {
        auto const sharding = cpx::shard(lengths({index_t{1} << 35, 5}), cpx::zigzag<4>{});
        auto const p = cpx::halo(sharding, 1, 3);
        CHECK(p.source_rows == (index_t{1} << 33) + 2); // of the five tokens it holds 0 and 3
        CHECK(p.target_rows <= 4 * 3);
        CHECK(p.receives[0].rows[0].count == 3);
    }
}

} // namespace
