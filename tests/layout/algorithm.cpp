// SPDX-License-Identifier: Apache-2.0
#include <cpx/layout/algorithm.hpp>

#include <doctest/doctest.h>

#include <support/spec.hpp>

namespace {

using namespace support;
using cpx::index_t;

static_assert(cpx::locate(cpx::zigzag<2>{}, 6, 8) == cpx::slot{0, 2});
static_assert(cpx::token(cpx::zigzag<2>{}, {0, 2}, 8) == 6);
static_assert(cpx::rows_of(cpx::zigzag<2>{}, 1, 8) == 4);
static_assert(cpx::tokens_of(cpx::zigzag<2>{}, 3, 8) == cpx::range{6, 8});
static_assert(cpx::chunk_of(cpx::zigzag<2>{}, 5, 8) == 2);
static_assert(cpx::token(cpx::zigzag<2>{}, {0, 4}, 8) == -1);

/// Compares what follows from a policy and a cut, for a run of `n` tokens, with the owners found by brute force.
template <class P, class Cut>
void check_run(P const& policy, Cut const& cut, spec const& s, index_t n) {
    std::vector<int> const owners = brute_owners(lengths({n}), s);
    std::vector<index_t> rows(static_cast<std::size_t>(s.ranks));
    std::string const what = text(s) + ", " + std::to_string(n) + " tokens";
    int const chunks = cpx::layout_at(policy, n).chunks();
    for (index_t t = 0; t < n; ++t) {
        int const owner = owners[static_cast<std::size_t>(t)];
        cpx::slot const place = cpx::locate(policy, t, n, cut);
        if (place != cpx::slot{owner, rows[static_cast<std::size_t>(owner)]++}) FAIL(what << ": slot of token " << t);
        if (cpx::token(policy, place, n, cut) != t) FAIL(what << ": token at the slot of token " << t);
        int const chunk = cpx::chunk_of(policy, t, n, cut);
        cpx::range const tokens = cpx::tokens_of(policy, chunk, n, cut);
        if (chunk < 0 || chunk >= chunks || t < tokens.first || t >= tokens.last)
            FAIL(what << ": chunk of token " << t);
    }
    index_t end = 0;
    for (int c = 0; c < chunks; ++c) {
        cpx::range const tokens = cpx::tokens_of(policy, c, n, cut);
        if (tokens.first != end) FAIL(what << ": chunk " << c << " does not follow its predecessor");
        end = tokens.last;
    }
    if (end != n) FAIL(what << ": chunks end at " << end);
    for (int r = 0; r < s.ranks; ++r) {
        index_t const held = rows[static_cast<std::size_t>(r)];
        if (cpx::rows_of(policy, r, n, cut) != held) FAIL(what << ": rows of rank " << r);
        if (cpx::token(policy, {r, held}, n, cut) != -1) FAIL(what << ": a row too many on rank " << r);
    }
    if (!cpx::is_partition(policy, n, cut)) FAIL(what << ": no partition");
}

/// Runs of few tokens in all lengths, then some of many.
template <class P, class Cut>
void check_policy(P const& policy, Cut const& cut, spec s, int unit) {
    s.unit = unit;
    for (index_t n = 0; n <= 24; ++n) check_run(policy, cut, s, n);
    for (index_t const n : {63, 64, 65, 97, 128, 191, 320}) check_run(policy, cut, s, n);
}

template <class P>
void check_cuts(P const& policy, spec const& s) {
    check_policy(policy, cpx::balanced{}, s, 0);
    check_policy(policy, cpx::aligned<1>{}, s, 1);
    check_policy(policy, cpx::aligned<3>{}, s, 3);
    check_policy(policy, cpx::aligned<64>{}, s, 64);
    check_policy(policy, cpx::aligned<cpx::dynamic>{5}, s, 5);
}

template <int W>
void check_static() {
    check_cuts(cpx::sequential<W>{}, {shape::sequential, cpx::scope::sequence, 0, W});
    check_cuts(cpx::zigzag<W>{}, {shape::zigzag, cpx::scope::sequence, 0, W});
    check_cuts(cpx::striped<W>{}, {shape::striped, cpx::scope::sequence, 0, W});
}

/// Hides what a layout lists, so that all chunks are walked.
template <cpx::layout L>
struct unlisted {
    L all;
    int ranks() const { return all.ranks(); }
    int chunks() const { return all.chunks(); }
    int owner(int chunk) const { return all.owner(chunk); }
};
static_assert(cpx::listed_layout<cpx::zigzag<>> && !cpx::listed_layout<unlisted<cpx::zigzag<>>>);

/// Hides what a cut tells of tokens, so that their chunk is searched for.
template <cpx::cut Cut>
struct searched {
    Cut cut;
    index_t begin(int c, int chunks, index_t n) const { return cut.begin(c, chunks, n); }
    index_t snap(index_t t, index_t n) const { return cut.snap(t, n); }
};

/// A layout lists the chunks that `owner` gives each rank, and slots, tokens and rows are those of a walk over all.
template <cpx::listed_layout L, class Cut = cpx::balanced>
void check_listed(L const& l, Cut const& cut = {}) {
    int const ranks = l.ranks();
    CAPTURE(ranks);
    std::vector<std::vector<int>> listed(static_cast<std::size_t>(ranks)), owned = listed;
    for (int r = 0; r < ranks; ++r)
        for (int i = 0; i < l.chunks(r); ++i) listed[static_cast<std::size_t>(r)].push_back(l.chunk(r, i));
    for (int c = 0; c < l.chunks(); ++c) owned[static_cast<std::size_t>(l.owner(c))].push_back(c);
    CHECK(listed == owned);
    unlisted<L> const walked{l};
    splitmix numbers(static_cast<std::uint64_t>(ranks));
    for (index_t const n : {index_t{1}, index_t{ranks}, index_t{5 * ranks + 3}, index_t{1000003}})
        for (int i = 0; i < 50; ++i) {
            index_t const t = numbers.between(0, n - 1);
            cpx::slot const place = cpx::locate(l, t, n, cut);
            if (place != cpx::locate(walked, t, n, searched<Cut>{cut})) FAIL("slot of token " << t << " of " << n);
            if (cpx::token(l, place, n, cut) != t) FAIL("token at the slot of token " << t << " of " << n);
            if (cpx::rows_of(l, place.rank, n, cut) != cpx::rows_of(walked, place.rank, n, cut))
                FAIL("rows of rank " << place.rank << " of " << n);
        }
}

TEST_SUITE("layout") {
    TEST_CASE("slots, tokens, chunks and rows are those of brute force, for 1 to 8 ranks and all cuts") {
        splitmix numbers(3);
        for (int w = 1; w <= 8; ++w) {
            check_cuts(cpx::sequential<>{w}, {shape::sequential, cpx::scope::sequence, 0, w});
            check_cuts(cpx::zigzag<>{w}, {shape::zigzag, cpx::scope::sequence, 0, w});
            check_cuts(cpx::striped<>{w}, {shape::striped, cpx::scope::sequence, 0, w});
            check_cuts(cpx::by_length{cpx::zigzag<>{w}, cpx::sequential<>{w}, &even},
                       {shape::by_length, cpx::scope::sequence, 0, w});
            auto const owners = random_owners(numbers, w, static_cast<int>(numbers.between(1, 20)));
            check_cuts(cpx::table(w, owners), {shape::table, cpx::scope::sequence, 0, w, owners});
        }
    }

    TEST_CASE("the same holds for layouts that know their ranks at compile time") {
        check_static<1>();
        check_static<2>();
        check_static<3>();
        check_static<4>();
        check_static<7>();
    }

    TEST_CASE("what layouts list of a rank is what they own, from 1 to 1024 ranks") {
        for (int const w : {1, 2, 3, 5, 8, 64, 513, 1024}) {
            check_listed(cpx::sequential<>{w});
            check_listed(cpx::zigzag<>{w});
            check_listed(cpx::striped<>{w});
            check_listed(cpx::striped<cpx::dynamic, 3>{w}, cpx::aligned<64>{});
            check_listed(cpx::zigzag<>{w}, cpx::aligned<64>{});
            for (index_t const n : {4, 5})
                check_listed(cpx::by_length{cpx::zigzag<>{w}, cpx::sequential<>{w}, &even}.at(n));
            check_listed(cpx::sequential<>{w}, cpx::aligned<cpx::dynamic>{7});
        }
        check_listed(cpx::zigzag<64>{});
        check_listed(cpx::sequential<64>{});
        check_listed(cpx::striped<64, 2>{});
    }

    TEST_CASE("runs of more than 2^40 tokens have exact slots") {
        index_t const n = (index_t{1} << 45) + 3;
        for (index_t const t : {index_t{0}, n / 3, n / 2, n - 1}) {
            cpx::slot const place = cpx::locate(cpx::zigzag<8>{}, t, n);
            CHECK(cpx::token(cpx::zigzag<8>{}, place, n) == t);
        }
        CHECK(cpx::rows_of(cpx::zigzag<8>{}, 0, n) - n / 8 <= 1);
    }

    TEST_CASE("the last begin at or before a place is found from any guess") {
        std::vector<index_t> const begins = {0, 0, 3, 3, 3, 8, 9};
        int const count = static_cast<int>(begins.size());
        for (index_t at = 0; at < 12; ++at)
            for (int guess = 0; guess < count; ++guess) {
                int want = 0;
                for (int c = 0; c < count; ++c)
                    if (begins[static_cast<std::size_t>(c)] <= at) want = c;
                CHECK(cpx::last_at_or_before(at, count, guess,
                                             [&](int c) { return begins[static_cast<std::size_t>(c)]; }) == want);
            }
    }
}

} // namespace
