// SPDX-License-Identifier: Apache-2.0
#include <cpx/plan/carry.hpp>

#include <doctest/doctest.h>

#include <law.hpp>
#include <support/rejects.hpp>

namespace {

using namespace support;
using cpx::index_t;

/// A state that remembers which tokens made it and in which order: S -> 31^count S + E, modulo 2^64.
using state = std::uint64_t;
constexpr state factor = 31;

state advance(state s, index_t row) { return s * factor + static_cast<state>(row) + 1; }
state fold(state s, index_t first, index_t count) {
    for (index_t row = first; row < first + count; ++row) s = advance(s, row);
    return s;
}
state power(index_t count) {
    state p = 1;
    while (count-- > 0) p *= factor;
    return p;
}

using states = std::vector<std::vector<state>>;

std::vector<cpx::carry_plan<any_tokens>> carries(law::subject const& a) {
    std::vector<cpx::carry_plan<any_tokens>> list;
    for (int r = 0; r < a.ranks; ++r) list.push_back(cpx::carry(std::get<0>(a.sharding), r));
    return list;
}

/// Returns the state before every segment of every rank, from one pass over all tokens.
states brute_starts(cpx::thd const& batch, std::vector<cpx::carry_plan<any_tokens>> const& all) {
    states list;
    for (auto const& c : all) {
        list.emplace_back();
        for (cpx::segment const& s : c.segments) list.back().push_back(fold(0, batch.offset(s.sequence), s.token));
    }
    return list;
}

state end_of(cpx::thd const& batch, cpx::segment const& s, state start) {
    return fold(start, batch.offset(s.sequence) + s.token, s.count);
}

/// Hands the states themselves on, one step after the other, and returns the state before every segment.
states run_serial(cpx::thd const& batch, std::vector<cpx::carry_plan<any_tokens>> const& all, std::string& problem) {
    states starts(all.size());
    for (std::size_t r = 0; r < all.size(); ++r) {
        starts[r].assign(all[r].segments.size(), 0);
        if (all[r].steps.size() != all[0].steps.size()) problem = "ranks take another number of steps";
    }
    for (std::size_t l = 0; l < all[0].steps.size(); ++l) {
        std::vector<cpx::plan> plans;
        states ends(all.size());
        for (std::size_t r = 0; r < all.size(); ++r) {
            plans.push_back(all[r].steps[l]);
            if (l < all[r].levels.size())
                for (index_t const i : all[r].levels[l])
                    ends[r].push_back(end_of(batch, all[r].segments[static_cast<std::size_t>(i)],
                                             starts[r][static_cast<std::size_t>(i)]));
            if (plans.back().source_rows != static_cast<index_t>(ends[r].size()))
                problem = "step with a wrong number of source rows";
        }
        if (problem.empty()) problem = disagreement(plans);
        if (!problem.empty()) return starts;
        auto const next = execute(plans, ends, 1, state{0} - 1);
        for (std::size_t r = 0; r < all.size(); ++r) {
            if (next[r].empty()) continue;
            for (std::size_t k = 0; k < next[r].size(); ++k)
                starts[r][static_cast<std::size_t>(all[r].levels.at(l + 1).at(k))] = next[r][k];
        }
    }
    return starts;
}

/// Folds every segment, gathers E and M at once, joins them, and returns the state before every segment.
states run_scan(cpx::thd const& batch, std::vector<cpx::carry_plan<any_tokens>> const& all, std::string& problem) {
    std::vector<cpx::plan> end_plans, map_plans;
    states ends(all.size()), maps(all.size()), starts(all.size());
    for (std::size_t r = 0; r < all.size(); ++r) {
        auto const& c = all[r];
        end_plans.push_back(c.ends);
        map_plans.push_back(c.maps);
        for (std::size_t i = 0; i < c.segments.size(); ++i) {
            ends[r].push_back(end_of(batch, c.segments[i], 0));
            bool const inner = c.links[i].level > 0 && c.links[i].has_successor;
            if (inner != (c.links[i].map_row >= 0)) problem = "a map is kept that nobody needs, or the other way round";
            if (inner && c.links[i].map_row != static_cast<index_t>(maps[r].size())) problem = "maps are out of order";
            if (inner) maps[r].push_back(power(c.segments[i].count));
        }
        if (c.ends.source_rows != static_cast<index_t>(ends[r].size())) problem = "wrong number of ends";
        if (c.maps.source_rows != static_cast<index_t>(maps[r].size())) problem = "wrong number of maps";
    }
    if (problem.empty()) problem = disagreement(end_plans);
    if (problem.empty()) problem = disagreement(map_plans);
    if (!problem.empty()) return starts;
    auto const all_ends = execute(end_plans, ends, 1, state{0}), all_maps = execute(map_plans, maps, 1, state{0});
    for (std::size_t r = 0; r < all.size(); ++r)
        for (cpx::carry_link const& link : all[r].links) {
            state s = 0;
            for (index_t k = 0; k < link.level; ++k) {
                state const map = k > 0 ? all_maps[r].at(static_cast<std::size_t>(link.maps + k - 1)) : 0;
                s = map * s + all_ends[r].at(static_cast<std::size_t>(link.ends + k));
            }
            starts[r].push_back(s);
        }
    return starts;
}

/// Returns what is wrong with the carries of all ranks, or "".
std::string problem_of(cpx::thd const& batch, law::subject const& a) {
    auto const all = carries(a);
    auto const want = brute_starts(batch, all);
    std::string problem;
    std::size_t tokens = 0;
    for (auto const& c : all) {
        if (c.links.size() != c.segments.size()) return "not one link a segment";
        std::vector<index_t> level_of(c.segments.size(), -1);
        for (std::size_t l = 0; l < c.levels.size(); ++l)
            for (index_t const i : c.levels[l]) level_of.at(static_cast<std::size_t>(i)) = static_cast<index_t>(l);
        for (std::size_t i = 0; i < c.segments.size(); ++i) {
            cpx::segment const& s = c.segments[i];
            tokens += static_cast<std::size_t>(s.count);
            if (level_of[i] != c.links[i].level) return "levels and links disagree";
            if ((c.links[i].level == 0) != (s.token == 0)) return "a first segment that is not of level 0";
            if (c.links[i].has_successor != (s.token + s.count < batch.length(s.sequence))) return "a wrong successor";
        }
        for (cpx::plan const* p : {&c.ends, &c.maps})
            if (p->fingerprint() != all[0].ends.fingerprint()) return "fingerprints differ";
    }
    if (tokens != static_cast<std::size_t>(batch.tokens())) return "segments do not cover the batch";
    if (run_serial(batch, all, problem) != want || !problem.empty()) return "serial: " + problem;
    if (run_scan(batch, all, problem) != want || !problem.empty()) return "scan: " + problem;
    return "";
}

TEST_SUITE("plan") {
    TEST_CASE("states reach every segment of all small packings, handed on or joined, for all shardings") {
        for (int ranks = 1; ranks <= 6; ++ranks)
            for (spec const& s : all_specs(ranks, {0, 2}))
                for (index_t tokens = 0; tokens <= 9 - fewer; ++tokens)
                    for_each_packing(tokens, [&](cpx::thd const& batch) {
                        std::string const problem = problem_of(batch, law::tokens(batch, s));
                        if (!problem.empty()) FAIL(text(s) << ", lengths " << text(batch) << ": " << problem);
                    });
    }

    TEST_CASE("states reach every segment of random packings") {
        splitmix numbers(13);
        for (int turn = 0; turn < 300; ++turn) {
            int const ranks = static_cast<int>(numbers.between(1, 16));
            std::vector<index_t> list;
            for (index_t n = numbers.between(0, 12); n-- > 0;)
                list.push_back(numbers.between(0, numbers.between(0, 1) ? 9 : 300));
            auto const specs = all_specs(ranks, {0, 1, 3, 64}, numbers.next() % 1000);
            spec const& s = specs[numbers.next() % specs.size()];
            std::string const problem = problem_of(lengths(list), law::tokens(lengths(list), s));
            CHECK_MESSAGE(problem.empty(), text(s) << ", lengths " << text(lengths(list)) << ": " << problem);
        }
    }

    TEST_CASE("the chain of a zigzag visits every rank twice, and the last rank once") {
        auto const c = cpx::carry(cpx::shard(lengths({16}), cpx::zigzag<4>{}), 1);
        CHECK(c.steps.size() == 6); // 7 segments: 0 1 2 3 2 1 0
        REQUIRE(c.links.size() == 2);
        CHECK(c.links[0].level == 1);
        CHECK(c.links[1].level == 5);
        CHECK(c.ends.target_rows == 5);
        CHECK(c.maps.target_rows == 4); // the first segment of a sequence starts from zero
    }

    TEST_CASE("a chain of two segments needs no map, as in fla's context parallelism over two ranks") {
        for (int r = 0; r < 2; ++r) {
            auto const c = cpx::carry(cpx::shard<cpx::scope::batch>(lengths({300, 400, 324}), cpx::sequential<2>{}), r);
            CHECK(c.maps.source_rows == 0);
            CHECK(c.maps.target_rows == 0);
            CHECK(c.ends.messages() == (r == 0 ? 1 : 0));
            CHECK(c.ends.sent_rows() == (r == 0 ? 1 : 0)); // only the sequence that is cut, 300 .. 700
        }
    }

    TEST_CASE("sequences that are not cut hand nothing on") {
        auto const c = cpx::carry(cpx::shard<cpx::scope::batch>(lengths({512, 512}), cpx::sequential<2>{}), 0);
        CHECK(c.steps.empty());
        CHECK(c.ends.sends.empty());
        auto const h = cpx::carry(cpx::head_sharded<3>(lengths({8, 0, 3}), {{3, 1}}), 2);
        CHECK(h.steps.empty());
        CHECK(h.links.size() == 2);
        CHECK(h.ends.target_rows == 0);
        CHECK(cpx::carry(cpx::shard(cpx::thd(), cpx::zigzag<3>{}), 2).steps.empty());
    }

    TEST_CASE("the types tell where results are exact") {
        auto const batch = lengths({640});
        auto const aligned = cpx::shard(batch, cpx::zigzag<2>{}, cpx::aligned<64>{});
        CHECK(cpx::is_exact<cpx::serial>(aligned, 64));
        CHECK(cpx::is_exact<cpx::serial>(aligned, 32));
        CHECK_FALSE(cpx::is_exact<cpx::serial>(aligned, 128));
        CHECK_FALSE(cpx::is_exact<cpx::scan>(aligned, 64));
        CHECK_FALSE(cpx::is_exact<cpx::serial>(cpx::shard(batch, cpx::zigzag<2>{}), 64));
        CHECK(cpx::is_exact<cpx::scan>(cpx::head_sharded<2>(batch, {{2, 1}}), 64));
        CHECK(cpx::is_exact<cpx::serial>(cpx::shard(batch, cpx::zigzag<1>{}), 64));
    }

    TEST_CASE("static equals dynamic for carries, and other ranks are rejected") {
        auto const batch = lengths({9, 0, 14, 1});
        for (int r = 0; r < 3; ++r) {
            auto const fixed = cpx::carry(cpx::shard(batch, cpx::zigzag<3>{}), r);
            auto const loose = cpx::carry(cpx::shard(batch, cpx::zigzag<>{3}), r);
            CHECK(fixed.ends.sends == loose.ends.sends);
            CHECK(fixed.maps.receives == loose.maps.receives);
            CHECK(fixed.levels == loose.levels);
        }
        rejects({"carry: rank: expected 0 to 2, got 3", "carry.cpp"},
                [&] { cpx::carry(cpx::shard(batch, cpx::zigzag<3>{}), 3); });
    }
}

} // namespace
