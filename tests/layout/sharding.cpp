// SPDX-License-Identifier: Apache-2.0
#include <cpx/layout/sharding.hpp>

#include <doctest/doctest.h>

#include <law.hpp>
#include <support/rejects.hpp>

namespace {

using namespace support;
using cpx::index_t;
using cpx::range;
using cpx::scope;
using list = std::vector<index_t>;

// A sharding takes no more room than its batch where its layout and its cut are known at compile time.
static_assert(sizeof(cpx::sharding<cpx::zigzag<4>>) == sizeof(cpx::thd));
static_assert(sizeof(cpx::sharding<cpx::zigzag<4>, scope::batch, cpx::aligned<64>>) == sizeof(cpx::thd));
static_assert(cpx::any_sharding<cpx::sharding<cpx::zigzag<4>>> &&
              cpx::any_sharding<cpx::sharding<cpx::table, scope::batch>>);
static_assert(cpx::static_ranks<cpx::sharding<cpx::zigzag<4>>> == 4);
static_assert(cpx::static_ranks<cpx::sharding<cpx::zigzag<>>> == cpx::dynamic);
static_assert(!cpx::any_sharding<cpx::zigzag<4>> && !cpx::any_sharding<int>);
static_assert(std::is_same_v<decltype(cpx::shard(cpx::thd(), cpx::zigzag<4>{})), cpx::sharding<cpx::zigzag<4>>>);
static_assert(!std::is_same_v<cpx::sharding<cpx::zigzag<4>>, cpx::sharding<cpx::zigzag<4>, scope::batch>>);
static_assert(
    !std::is_same_v<cpx::sharding<cpx::zigzag<4>>, cpx::sharding<cpx::zigzag<4>, scope::sequence, cpx::aligned<64>>>);

/// Returns what is wrong with the pieces and the holders of a sharding, or "".
std::string problem_of(cpx::thd const& batch, law::subject const& a) {
    auto const& sharding = std::get<0>(a.sharding);
    index_t total = 0;
    for (int r = 0; r < a.ranks; ++r) {
        std::vector<index_t> rows;
        sharding.for_each_piece(r, [&](range piece) {
            if (piece.empty()) rows.push_back(-1);
            for (index_t row = piece.first; row < piece.last; ++row) rows.push_back(row);
        });
        if (rows != a.rows[static_cast<std::size_t>(r)]) return "pieces of rank " + std::to_string(r);
        if (sharding.rows(r) != static_cast<index_t>(rows.size())) return "rows of rank " + std::to_string(r);
        total += sharding.rows(r);
    }
    if (total != batch.tokens()) return "ranks hold more or fewer rows than there are";
    index_t hint = 0; // goes up and down with the ranges, as in plans
    for (index_t first = 0; first < batch.tokens(); ++first)
        for (index_t last : {first + 1, std::min(first + 4, batch.tokens()), batch.tokens()}) {
            index_t next = first;
            bool right = true;
            sharding.for_each_holder({first, last}, hint, [&](int holder, range common) {
                right = right && common.first == next && !common.empty();
                for (index_t row = common.first; row < common.last; ++row)
                    right = right && a.owners[static_cast<std::size_t>(row)] == holder;
                next = common.last;
            });
            if (!right || next != last)
                return "holders of rows " + std::to_string(first) + " to " + std::to_string(last);
        }
    return "";
}

/// A rule of the user's that gives a chunk to a rank that does not exist, for runs of one length only.
struct wrong_for_five {
    struct layout {
        int last;
        int ranks() const { return 2; }
        int chunks() const { return 2; }
        int owner(int chunk) const { return chunk * last; }
    };
    int ranks() const { return 2; }
    layout at(index_t n) const { return {n == 5 ? 2 : 1}; }
};
static_assert(cpx::length_rule<wrong_for_five>);

/// A cut that begins too late in runs of nine tokens.
struct late {
    index_t begin(int c, int chunks, index_t n) const { return n * c / chunks + (n == 9); }
    index_t snap(index_t t, index_t) const { return t; }
};
static_assert(cpx::cut<late>);

struct layout_of {
    int w, c, o;
    int ranks() const { return w; }
    int chunks() const { return c; }
    int owner(int) const { return o; }
};

TEST_SUITE("layout") {
    TEST_CASE("pieces and holders are those of brute force, for all small packings and all shardings") {
        for (int ranks = 1; ranks <= 6; ++ranks)
            for (spec const& s : all_specs(ranks, {0, 2, 3}))
                for (index_t tokens = 0; tokens <= 8 - fewer; ++tokens)
                    for_each_packing(tokens, [&](cpx::thd const& batch) {
                        std::string const problem = problem_of(batch, law::tokens(batch, s));
                        if (!problem.empty()) FAIL(text(s) << ", lengths " << text(batch) << ": " << problem);
                    });
    }

    TEST_CASE("pieces and holders are those of brute force for random packings") {
        splitmix numbers(5);
        for (int turn = 0; turn < 200; ++turn) {
            std::vector<index_t> list;
            for (index_t n = numbers.between(0, 9); n-- > 0;)
                list.push_back(numbers.between(0, numbers.between(0, 1) ? 5 : 200));
            auto const specs =
                all_specs(static_cast<int>(numbers.between(1, 16)), {0, 1, 5, 64}, numbers.next() % 1000);
            spec const& s = specs[numbers.next() % specs.size()];
            std::string const problem = problem_of(lengths(list), law::tokens(lengths(list), s));
            CHECK_MESSAGE(problem.empty(), text(s) << ", lengths " << text(lengths(list)) << ": " << problem);
        }
    }

    TEST_CASE("aligned cuts of a batch lie at multiples inside the sequence that is cut, or at its ends") {
        splitmix numbers(9);
        for (int turn = 0; turn < 200; ++turn) {
            std::vector<index_t> list;
            for (index_t n = numbers.between(1, 6); n-- > 0;) list.push_back(numbers.between(0, 500));
            cpx::thd const batch = lengths(list);
            auto const sharding = cpx::shard<scope::batch>(
                batch, cpx::zigzag<>{static_cast<int>(numbers.between(1, 8))}, cpx::aligned<64>{});
            for (int r = 0; r < sharding.ranks(); ++r)
                sharding.for_each_piece(r, [&](range piece) {
                    for (index_t const at : {piece.first, piece.last}) {
                        if (at == batch.tokens()) continue;
                        index_t const token = at - batch.offset(batch.sequence(at));
                        CHECK_MESSAGE(token % 64 == 0, "cut at token " << token << ", lengths " << text(batch));
                    }
                });
        }
    }

    TEST_CASE("an aligned cut of a batch, by hand") {
        // Balanced cuts of 300 rows for 4 ranks: 75, 150, 225. Sequences begin at 0, 100, 230; multiples of 64 tokens
        // are rows 64, 100, 164, 228 and 230. 75 is token 75 of the first: 64. 150 is token 50 of the second: row 164.
        // 225 is token 125 of the second: 128, row 228.
        auto const sharding =
            cpx::shard<scope::batch>(lengths({100, 130, 70}), cpx::sequential<4>{}, cpx::aligned<64>{});
        std::vector<index_t> rows;
        for (int r = 0; r < 4; ++r) rows.push_back(sharding.rows(r));
        CHECK(rows == std::vector<index_t>{64, 100, 64, 72});
    }

    TEST_CASE("scopes differ for several sequences and agree for one") {
        auto const rows = [](auto const& sharding, int rank) {
            std::vector<range> list;
            sharding.for_each_piece(rank, [&](range piece) { list.push_back(piece); });
            return list;
        };
        auto const one = lengths({40}), two = lengths({16, 24});
        for (int r = 0; r < 4; ++r) {
            CHECK(rows(cpx::shard(one, cpx::zigzag<4>{}), r) ==
                  rows(cpx::shard<scope::batch>(one, cpx::zigzag<4>{}), r));
            CHECK(rows(cpx::shard(two, cpx::zigzag<4>{}), r) !=
                  rows(cpx::shard<scope::batch>(two, cpx::zigzag<4>{}), r));
        }
    }

    TEST_CASE("a sharding knows its batch, policy, cut and runs") {
        auto const batch = lengths({8, 0, 12});
        auto const s = cpx::shard(batch, cpx::zigzag<>{3}, cpx::aligned<cpx::dynamic>{4});
        CHECK(s.ranks() == 3);
        CHECK(s.batch() == batch);
        CHECK(s.policy() == cpx::zigzag<>{3});
        CHECK(s.cut().unit() == 4);
        CHECK(s.runs() == 3);
        CHECK(s.run(2) == range{8, 20});
        CHECK(s.sections().empty());
        CHECK(s.heads(1, 16) == range{0, 16});
        auto const b = cpx::shard<scope::batch>(batch, cpx::zigzag<>{3});
        CHECK(b.runs() == 1);
        CHECK(b.run(0) == range{0, 20});
        CHECK(cpx::sharding<cpx::zigzag<4>>(batch) == cpx::shard(batch, cpx::zigzag<4>{}));
    }

    TEST_CASE("shardings are equal if their batches, layouts and cuts are") {
        auto const batch = lengths({8, 12});
        CHECK(cpx::shard(batch, cpx::zigzag<>{2}) == cpx::shard(lengths({8, 12}), cpx::zigzag<>{2}));
        CHECK_FALSE(cpx::shard(batch, cpx::zigzag<>{2}) == cpx::shard(batch, cpx::zigzag<>{3}));
        CHECK_FALSE(cpx::shard(batch, cpx::zigzag<2>{}) == cpx::shard(lengths({12, 8}), cpx::zigzag<2>{}));
        CHECK_FALSE(cpx::shard(batch, cpx::table(2, {0, 1})) == cpx::shard(batch, cpx::table(2, {1, 0})));
        using unit = cpx::aligned<cpx::dynamic>;
        CHECK_FALSE(cpx::shard(batch, cpx::zigzag<2>{}, unit{2}) == cpx::shard(batch, cpx::zigzag<2>{}, unit{4}));
    }

    TEST_CASE("a sharding rejects layouts without ranks or chunks, and owners that are no ranks") {
        auto const batch = lengths({8, 5});
        rejects({"sharding.cpp", "sharding: ranks of the layout: expected at least 1, got 0"},
                [&] { cpx::shard(batch, cpx::zigzag<>{}); });
        rejects({"sharding.cpp", "sharding: unit of the cut: expected at least 1, got 0"},
                [&] { cpx::shard(batch, cpx::zigzag<4>{}, cpx::aligned<cpx::dynamic>{}); });
        rejects({"sharding.cpp", "zigzag: ranks: expected at least 1, got 0"}, [] { cpx::zigzag<>{0}; });
        rejects({"sharding.cpp", "zigzag: ranks: expected at least 1, got -1"}, [] { cpx::zigzag<>{-1}; });
        rejects({"sharding.cpp", "sequential: ranks: expected at least 1, got -2"}, [] { cpx::sequential<>{-2}; });
        rejects({"sharding.cpp", "striped: ranks: expected at least 1, got 0"}, [] { cpx::striped<>{0}; });
        rejects({"sharding: chunks of the layout: expected at least 1, got 0"}, [&] {
            cpx::shard(batch, layout_of{2, 0, 0});
        });
        rejects({"sharding: owner of chunk 0: expected a rank from 0 to 1, got 2"}, [&] {
            cpx::shard(batch, layout_of{2, 3, 2});
        });
        rejects({"sharding: owner of chunk 0", "got -1"}, [&] { cpx::shard(batch, layout_of{2, 3, -1}); });
        rejects({"sharding: tokens times chunks: expected less than 2^62"},
                [&] { cpx::shard(lengths({index_t{1} << 60}), cpx::zigzag<>{2}); });
        CHECK_NOTHROW(cpx::shard(lengths({(index_t{1} << 60) - 1}), cpx::zigzag<>{2}));
    }

    TEST_CASE("a rule and a cut of the user's are checked for every run of the batch") {
        rejects({"sharding.cpp", "sharding: owner of chunk 1: expected a rank from 0 to 1, got 2"}, [&] {
            cpx::shard(lengths({8, 5}), wrong_for_five{});
        });
        CHECK_NOTHROW(cpx::shard(lengths({8, 6}), wrong_for_five{}).rows(0));
        auto const cut = [&](auto list) { return [=] { cpx::shard(lengths(list), cpx::sequential<>{2}, late{}); }; };
        rejects({"sharding.cpp", "cut, at chunk 0 of 2: expected chunks that ascend", "8, got 9 to 13"},
                cut(list{8, 9}));
        CHECK_NOTHROW(cut(list{8, 8})());
    }

    TEST_CASE("ranks that are not there have no rows, and layouts of too many ranks are rejected") {
        auto const sharding = cpx::shard(lengths({8, 5}), cpx::zigzag<2>{});
        cpx::replicated<2> const everything(sharding.batch());
        for (int const rank : {-1, 2}) {
            std::string const got = "rank: expected 0 to 1, got " + std::to_string(rank);
            rejects({"sharding.cpp", "sharding::rows: " + got}, [&] { sharding.rows(rank); });
            rejects({"sharding.cpp", "sharding::rows: " + got}, [&] { everything.rows(rank); });
            rejects({"sharding.cpp", "segments: " + got}, [&] { cpx::segments(sharding, rank); });
            rejects({"sharding.cpp", "halo: " + got}, [&] { cpx::halo(sharding, rank, 1); });
            rejects({"sharding.cpp", "carry: " + got}, [&] { cpx::carry<cpx::scan>(sharding, rank); });
            rejects({"sharding.cpp", "relayout: " + got}, [&] { cpx::relayout(sharding, everything, rank); });
        }
        int const many = 1 << 30;
        rejects({"sharding.cpp", "zigzag: ranks: expected at most 1073741823, got 1073741824"},
                [] { cpx::zigzag<>{many}; });
        rejects({"striped: ranks: expected at most 536870911, got 1073741824"}, [] { cpx::striped<>{many}; });
        rejects({"sharding: ranks of the layout: expected at most 2^20, got 1073741824"},
                [&] { cpx::shard(sharding.batch(), cpx::sequential<>{many}); });
        rejects({"replicated: ranks: expected at most 2^20"}, [&] { cpx::replicated<>(many, sharding.batch()); });
    }
}

} // namespace
