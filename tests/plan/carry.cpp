// SPDX-License-Identifier: Apache-2.0
#include <cpx/plan/carry.hpp>

#include <doctest/doctest.h>

#include <law.hpp>
#include <support/rejects.hpp>

namespace {

using namespace support;
using cpx::index_t;

using cpx::carry_link, cpx::scan, cpx::serial, cpx::side;

/// A state that remembers which tokens made it and in which order: S -> 31^count S + E, modulo 2^64.
using state = std::uint64_t;
constexpr state factor = 31;

/// Goes on from the state `s` over the tokens of a segment, or with `side::after` over them backwards.
state fold(state s, index_t first, index_t count, side from) {
    for (index_t i = 0; i < count; ++i)
        s = s * factor + static_cast<state>(from == side::before ? first + i : first + count - 1 - i) + 1;
    return s;
}
state power(index_t count) {
    state p = 1;
    while (count-- > 0) p *= factor;
    return p;
}

using states = std::vector<std::vector<state>>;
template <class How>
using carries = std::vector<cpx::carry_plan<How, any_tokens>>;

template <class How>
carries<How> carries_of(law::subject const& a) {
    carries<How> list;
    for (int r = 0; r < a.ranks; ++r) list.push_back(cpx::carry<How>(std::get<0>(a.sharding), r));
    return list;
}

state over(cpx::thd const& batch, cpx::segment const& s, state reaching, side from) {
    return fold(reaching, batch.offset(s.sequence) + s.token, s.count, from);
}

/// Returns the state that reaches every segment of every rank, from one pass over all tokens.
template <class How>
states brute(cpx::thd const& batch, carries<How> const& all, side from) {
    states list;
    for (auto const& c : all) {
        list.emplace_back();
        for (cpx::segment const& s : c.segments) {
            index_t const first = batch.offset(s.sequence), end = s.token + s.count;
            list.back().push_back(from == side::before ? fold(0, first, s.token, from)
                                                       : fold(0, first + end, batch.length(s.sequence) - end, from));
        }
    }
    return list;
}

/// Hands the states themselves on, one exchange after the other, and returns the state that reaches every segment.
states hand_on(cpx::thd const& batch, carries<serial> const& all, side from, std::string& problem) {
    states reaching;
    for (auto const& c : all) reaching.emplace_back(c.segments.size(), 0);
    for (index_t k = 0; k < all[0].steps; ++k) {
        index_t const lower = from == side::before ? k : all[0].steps - 1 - k;
        std::vector<cpx::plan> plans;
        states leaving(all.size());
        for (std::size_t r = 0; r < all.size(); ++r) {
            plans.push_back(all[r].step(lower, from));
            for (index_t const i : all[r].level(from == side::before ? lower : lower + 1)) {
                auto const at = static_cast<std::size_t>(i);
                leaving[r].push_back(over(batch, all[r].segments[at], reaching[r][at], from));
            }
            if (plans.back().source_rows != std::ssize(leaving[r])) problem = "wrong number of source rows";
        }
        if (problem.empty()) problem = disagreement(plans);
        if (!problem.empty()) return reaching;
        auto const next = execute(plans, leaving, 1, state{0} - 1);
        for (std::size_t r = 0; r < all.size(); ++r) {
            auto const members = all[r].level(from == side::before ? lower + 1 : lower);
            for (std::size_t m = 0; m < members.size(); ++m)
                reaching[r][static_cast<std::size_t>(members[m])] = next[r].at(m);
        }
    }
    return reaching;
}

/// What some segments do to the state.
struct affine {
    state map = 1, end = 0;
    affine after(affine const& first) const { return {map * first.map, map * first.end + end}; }
};

/// Joins steps, and returns the state that reaches every segment. A state is `wide` numbers, a map `map_wide`.
states join(cpx::thd const& batch, carries<scan> const& all, side from, index_t wide, index_t map_wide,
            std::string& problem) {
    std::vector<std::vector<affine>> own(all.size()), reaching(all.size());
    for (std::size_t r = 0; r < all.size(); ++r)
        for (cpx::segment const& s : all[r].segments) {
            own[r].push_back({power(s.count), over(batch, s, 0, from)});
            reaching[r].emplace_back();
        }
    for (index_t k = 0; k < all[0].steps; ++k) {
        index_t const reach = index_t{1} << k, row = all[0].row_width(wide, map_wide);
        std::vector<cpx::plan> plans;
        states given(all.size());
        for (std::size_t r = 0; r < all.size(); ++r) {
            plans.push_back(all[r].step(k, from, wide, map_wide));
            for (std::size_t i = 0; i < own[r].size(); ++i) {
                index_t const passed = all[r].links[i].beside(from);
                if (all[r].links[i].beside(cpx::opposite(from)) < reach) continue;
                affine const step = own[r][i].after(reaching[r][i]);
                given[r].insert(given[r].end(), static_cast<std::size_t>(wide), step.end);
                if (passed >= reach) given[r].insert(given[r].end(), static_cast<std::size_t>(map_wide), step.map);
            }
            if (plans.back().source_rows * row != std::ssize(given[r])) problem = "wrong number of source rows";
        }
        if (problem.empty()) problem = disagreement(plans);
        if (!problem.empty()) return {};
        auto const got = execute(plans, given, row, state{0} - 1);
        for (std::size_t r = 0; r < all.size(); ++r) {
            std::size_t at = 0;
            auto const take = [&](index_t count) {
                state const first = got[r].at(at);
                for (; count > 0; --count)
                    if (got[r].at(at++) != first) problem = "what has come as a state or a map is made of several";
                return first;
            };
            for (std::size_t i = 0; i < own[r].size(); ++i) {
                index_t const passed = all[r].links[i].beside(from);
                if (passed < reach) continue;
                affine before;
                before.end = take(wide);
                before.map = passed < 2 * reach ? 0 : take(map_wide); // 0: what came before does not reach it
                reaching[r][i] = reaching[r][i].after(before);
            }
        }
    }
    states list(all.size());
    for (std::size_t r = 0; r < all.size(); ++r)
        for (affine const& a : reaching[r]) list[r].push_back(a.end);
    return list;
}

/// Returns what is wrong with the links of all ranks, or "".
template <class How>
std::string problem_of_links(cpx::thd const& batch, carries<How> const& all) {
    index_t tokens = 0;
    for (auto const& c : all) {
        if (c.links.size() != c.segments.size()) return "not one link a segment";
        if (c.steps != all[0].steps) return "ranks have another number of exchanges";
        if (c.id != all[0].id) return "identities differ";
        index_t inner = 0;
        for (std::size_t i = 0; i < c.segments.size(); ++i) {
            cpx::segment const& s = c.segments[i];
            bool const has_before = c.links[i].beside(side::before) > 0, has_after = c.links[i].beside(side::after) > 0;
            tokens += s.count;
            if (has_before != (s.token > 0)) return "a first segment that is not of level 0";
            if (has_after != (s.token + s.count < batch.length(s.sequence))) return "a wrong successor";
            if (c.links[i].map_row != (has_before && has_after ? inner++ : -1)) return "a wrong row of a map";
        }
    }
    return tokens == batch.tokens() ? "" : "segments do not cover the batch";
}

/// Returns what is wrong with the exchanges that are said to stay within ranks, or "".
std::string problem_of_within(carries<scan> const& all) {
    for (index_t k = 0; k < all[0].steps; ++k) {
        bool stays = true;
        for (auto const& c : all) {
            if (c.within != all[0].within) return "ranks know of other exchanges that they stay within ranks";
            auto const own = [&](cpx::message const& m) { return m.peer == c.rank; };
            for (side const from : {side::before, side::after}) {
                auto const step = c.step(k, from, 1, 1);
                stays = stays && std::ranges::all_of(step.sends, own) && std::ranges::all_of(step.receives, own);
            }
        }
        if (stays != (all[0].within >> k & 1))
            return stays ? "nobody knows that an exchange stays" : "it does not stay";
    }
    return "";
}

/// Returns what is wrong with the carries of all ranks, or "".
std::string problem_of(cpx::thd const& batch, law::subject const& a) {
    auto const by_hand = carries_of<serial>(a);
    auto const joined = carries_of<scan>(a);
    if (auto const problem = problem_of_links(batch, by_hand); !problem.empty()) return problem;
    if (auto const problem = problem_of_links(batch, joined); !problem.empty()) return problem;
    if (auto const problem = problem_of_within(joined); !problem.empty()) return problem;
    if (by_hand[0].id == joined[0].id) return "serial and scan have one identity";
    bool const wider = batch.tokens() % 2 == 0; // 2 and 3 have rows of 1 number, 2 and 4 of 2
    for (side const from : {side::before, side::after}) {
        auto const want = brute(batch, by_hand, from);
        std::string problem;
        if (hand_on(batch, by_hand, from, problem) != want || !problem.empty()) return "serial: " + problem;
        if (join(batch, joined, from, 2, wider ? 4 : 3, problem) != want || !problem.empty()) return "scan: " + problem;
    }
    return "";
}

/// The states and the maps that others give a rank in all exchanges of a scan.
struct received {
    index_t states = 0, maps = 0;
    friend bool operator==(received, received) = default;
};

template <class S>
received received_by(S const& sharding, int rank, side from) {
    auto const c = cpx::carry<scan>(sharding, rank);
    received sum;
    for (index_t k = 0; k < c.steps; ++k) // of 1 and 1000 elements, and rows of 1
        for (cpx::message const& m : c.step(k, from, 1, 1000).receives)
            if (m.peer != rank) sum = {sum.states + cpx::total(m.rows) % 1000, sum.maps + cpx::total(m.rows) / 1000};
    return sum;
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
        auto const sharding = cpx::shard(lengths({16}), cpx::zigzag<4>{});
        auto const c = cpx::carry<serial>(sharding, 1);
        CHECK(c.steps == 6); // 7 segments: 0 1 2 3 2 1 0
        CHECK(c.holders == std::vector<int>{0, 1, 2, 3, 2, 1, 0});
        REQUIRE(c.links.size() == 2);
        CHECK(c.links[0].level == 1);
        CHECK(c.links[1].level == 5);
        CHECK(cpx::carry<scan>(sharding, 1).steps == 3);
    }

    TEST_CASE("all ranks know of an exchange that stays within ranks, where sequences fill their chunks") {
        for (int w = 2; w <= 9; ++w)
            for (int r = 0; r < w; ++r) {
                CAPTURE(w);
                bool const last = std::has_single_bit(static_cast<unsigned>(2 * w - 2)); // 0 gives itself its own
                auto const whole = cpx::carry<scan>(cpx::shard(lengths({99, 0, 64}), cpx::zigzag<>{w}), r);
                CHECK((whole.within % (1U << whole.steps)) == (last ? 1U << (whole.steps - 1) : 0));
                auto const some = cpx::carry<scan>(cpx::shard(lengths({99, 1}), cpx::zigzag<>{w}), r);
                CHECK(some.within == 0); // of the short sequence not every rank has a segment
            }
    }

    TEST_CASE("a scan gives a segment one state for each binary digit of its level, and one map fewer") {
        for (int w = 1; w <= 64; ++w) {
            CAPTURE(w);
            auto const batch = lengths({1000});
            auto const sequential = cpx::shard(batch, cpx::sequential<>{w});
            auto const zigzag = cpx::shard(batch, cpx::zigzag<>{w});
            CHECK(cpx::carry<scan>(sequential, 0).steps == std::bit_width(static_cast<unsigned>(w - 1)));
            CHECK(cpx::carry<scan>(zigzag, 0).steps == std::bit_width(static_cast<unsigned>(2 * w - 2)));
            auto const of_level = [](int level) {
                index_t const digits = std::bit_width(static_cast<unsigned>(level));
                return received{digits, std::max<index_t>(0, digits - 1)};
            };
            for (int r = 0; r < w; ++r) {
                CHECK(received_by(sequential, r, side::before) == of_level(r));
                CHECK(received_by(sequential, r, side::after) == of_level(w - 1 - r));
                received want = of_level(r), second = of_level(2 * w - 2 - r);
                if (r + 1 < w) {
                    want = {want.states + second.states, want.maps + second.maps};
                    unsigned const apart = static_cast<unsigned>(2 * (w - 1 - r)); // of its two segments
                    if (std::has_single_bit(apart)) {                              // what it gives itself is not sent
                        --want.states;
                        want.maps -= r >= static_cast<int>(apart);
                    }
                }
                CHECK(received_by(zigzag, r, side::before) == want);
            }
        }
    }

    TEST_CASE("a chain of two segments needs no map, as in fla's context parallelism over two ranks") {
        for (int r = 0; r < 2; ++r) {
            auto const c =
                cpx::carry<scan>(cpx::shard<cpx::scope::batch>(lengths({300, 400, 324}), cpx::sequential<2>{}), r);
            REQUIRE(c.steps == 1);
            auto const step = c.step(0, side::before, 1, 1000);
            CHECK(step.messages() == (r == 0 ? 1 : 0));
            CHECK(step.sent_rows() == (r == 0 ? 1 : 0)); // only the sequence that is cut, 300 .. 700
        }
    }

    TEST_CASE("sequences that are not cut hand nothing on") {
        CHECK(cpx::carry<scan>(cpx::shard<cpx::scope::batch>(lengths({512, 512}), cpx::sequential<2>{}), 0).steps == 0);
        auto const h = cpx::carry<serial>(cpx::head_sharded<3>(lengths({8, 0, 3}), {{3, 1}}), 2);
        CHECK(h.steps == 0);
        CHECK(h.links.size() == 2);
        CHECK(h.level(0).size() == 2);
        CHECK(cpx::carry<scan>(cpx::shard(cpx::thd(), cpx::zigzag<3>{}), 2).steps == 0);
    }

    TEST_CASE("what follows from the layout is what a walk over all pieces finds") {
        splitmix numbers(29);
        for (int turn = 0; turn < 40; ++turn) {
            int const ranks = static_cast<int>(numbers.between(1, 70));
            std::vector<index_t> list; // some shorter than the chunks, some not
            for (index_t n = numbers.between(0, 6); n-- > 0;) list.push_back(numbers.between(0, 6 * ranks));
            auto const check = [&](auto const& sharding) {
                any_tokens const walked(sharding); // says nothing of its layout
                int const rank = static_cast<int>(numbers.between(0, ranks - 1));
                auto const a = cpx::carry<serial>(sharding, rank);
                auto const b = cpx::carry<serial>(walked, rank);
                CHECK(a.steps == b.steps);
                REQUIRE(a.links.size() == b.links.size());
                for (std::size_t i = 0; i < a.links.size(); ++i) {
                    carry_link one = a.links[i], other = b.links[i];
                    auto const ranks_of = [](auto const& c, carry_link const& l) {
                        return std::vector(c.holders.begin() + l.holders, c.holders.begin() + l.holders + l.length);
                    };
                    CHECK(ranks_of(a, one) == ranks_of(b, other));
                    one.holders = other.holders = 0;
                    CHECK(one == other);
                }
                auto const known = [&](int r) { return cpx::carry<scan>(sharding, r).within; };
                auto const all = std::uint64_t{1} << cpx::carry<scan>(sharding, rank).steps, within = known(rank) % all;
                CHECK(within == known(static_cast<int>(numbers.between(0, ranks - 1))) % all);
                CHECK((within & ~cpx::carry<scan>(walked, rank).within) == 0); // what some would have to walk for: none
            };
            check(cpx::shard(lengths(list), cpx::zigzag<>{ranks}));
            check(cpx::shard(lengths(list), cpx::sequential<>{ranks}, cpx::aligned<2>{}));
            check(cpx::shard(lengths(list), cpx::striped<>{ranks}));
            check(cpx::shard(lengths(list), cpx::table(ranks, random_owners(numbers, ranks, 2 * ranks))));
        }
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
            auto const fixed = cpx::carry<scan>(cpx::shard(batch, cpx::zigzag<3>{}), r);
            auto const loose = cpx::carry<scan>(cpx::shard(batch, cpx::zigzag<>{3}), r);
            CHECK(fixed.links == loose.links);
            CHECK(fixed.holders == loose.holders);
        }
        rejects({"carry: rank: expected 0 to 2, got 3", "carry.cpp"},
                [&] { cpx::carry<scan>(cpx::shard(batch, cpx::zigzag<3>{}), 3); });
    }
}

} // namespace
