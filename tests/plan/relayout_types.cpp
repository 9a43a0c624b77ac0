// SPDX-License-Identifier: Apache-2.0
// Relayout between the real types: static equals dynamic, and what is rejected.
#include <cpx/plan/relayout.hpp>

#include <doctest/doctest.h>

#include <support/erased.hpp>
#include <support/packings.hpp>
#include <support/rejects.hpp>

#include <cpx/cpx.hpp>

#include <array>
#include <thread>

namespace {

using namespace support;
using cpx::index_t;
using cpx::scope;

/// Whether two plans move the same, whatever the names of their shardings.
bool same_moves(cpx::plan const& a, cpx::plan const& b) {
    return a.rank == b.rank && a.source_rows == b.source_rows && a.target_rows == b.target_rows &&
           a.source_width == b.source_width && a.target_width == b.target_width && a.sends == b.sends &&
           a.receives == b.receives && a.kind == b.kind;
}

std::vector<cpx::section> const sections = {{6, 2}, {3, 1}};

/// Compares plans between shardings whose ranks are in the type with plans between those that have them as values.
template <int W>
void static_equals_dynamic(cpx::thd const& batch) {
    std::vector<int> owners;
    for (int c = 0; c < 2 * W; ++c) owners.push_back(cpx::zigzag<W>{}.owner(c));
    auto const each = [&](auto const& fixed_from, auto const& from, auto const& fixed_to, auto const& to) {
        for (int r = 0; r < W; ++r) {
            CHECK(same_moves(cpx::relayout(fixed_from, fixed_to, r), cpx::relayout(from, to, r)));
            CHECK(same_moves(cpx::relayout(fixed_to, fixed_from, r), cpx::relayout(to, from, r)));
            CHECK(same_moves(cpx::relayout(fixed_from, to, r), cpx::relayout(from, fixed_to, r)));
        }
    };
    auto const fixed = cpx::shard(batch, cpx::zigzag<W>{});
    auto const loose = cpx::shard(batch, cpx::zigzag<>{W});
    each(fixed, loose, cpx::shard(batch, cpx::sequential<W>{}), cpx::shard(batch, cpx::sequential<>{W}));
    each(fixed, cpx::shard(batch, cpx::table(W, owners)), cpx::shard<scope::batch>(batch, cpx::striped<W>{}),
         cpx::shard<scope::batch>(batch, cpx::striped<>{W}));
    each(fixed, loose, cpx::shard<scope::batch>(batch, cpx::sequential<W>{}, cpx::aligned<2>{}),
         cpx::shard<scope::batch>(batch, cpx::sequential<>{W}, cpx::aligned<cpx::dynamic>{2}));
    each(fixed, loose, cpx::head_sharded<W>(batch, sections), cpx::head_sharded<>(W, batch, sections));
    each(fixed, loose, cpx::replicated<W>(batch), cpx::replicated<>(W, batch));
}

/// A cut that leaves the first token of a run to nobody.
struct late {
    index_t begin(int c, int chunks, index_t n) const { return cpx::balanced{}.begin(c, chunks, n); }
    index_t snap(index_t t, index_t n) const { return t == 0 && n > 1 ? 1 : t; }
};

/// A cut that does not ascend: it gives some tokens to two ranks.
struct backwards {
    index_t begin(int c, int chunks, index_t n) const {
        return n * (c % 2 == 0 || c + 1 == chunks ? c : c - 1) / chunks;
    }
    index_t snap(index_t t, index_t n) const { return t > 0 && t < n / 2 ? n - t : t; }
};

TEST_SUITE("plan") {
    TEST_CASE("static equals dynamic") {
        for (auto const& list : std::vector<std::vector<index_t>>{{}, {1}, {8, 12}, {7, 0, 1, 23, 2}, {100, 3, 64}}) {
            static_equals_dynamic<1>(lengths(list));
            static_equals_dynamic<3>(lengths(list));
        }
    }

    TEST_CASE("what a plan scales or lists late is what it finds of shardings of which it knows only the rows") {
        auto const each = []<class A, class B>(A const& from, B const& to) {
            erased<A::every_row> const any_from = from;
            erased<B::every_row> const any_to = to;
            for (int r = 0; r < from.ranks(); ++r) {
                auto const there = cpx::relayout(from, to, r);
                auto const back = cpx::relayout(to, from, r);
                CHECK(same_moves(there, cpx::relayout(any_from, any_to, r)));
                CHECK(same_moves(back, cpx::relayout(any_to, any_from, r)));
                CHECK(same_moves(there.transposed().transposed(), there));
            }
        };
        for (auto const& list : std::vector<std::vector<index_t>>{{}, {1, 0, 2}, {40, 0, 1, 23}, {3, 100, 64}})
            for (int const w : {1, 3, 4}) {
                auto const batch = lengths(list);
                auto const folded = cpx::shard(batch, cpx::zigzag<>(w), cpx::aligned<cpx::dynamic>(4));
                auto const owners = cpx::shard(batch, cpx::table(w, {0, w / 2, w / 2, 0, 0})); // some have none
                each(folded, cpx::head_sharded<>(w, batch, sections));
                each(owners, cpx::head_sharded<>(w, batch, sections));
                each(owners, cpx::replicated<>(w, batch));
                each(folded, cpx::shard(batch, cpx::striped<>(w), cpx::aligned<cpx::dynamic>(4)));
                each(folded, cpx::shard(batch, cpx::striped<>(w), cpx::aligned<cpx::dynamic>(5))); // another cut
                each(owners, cpx::shard(batch, cpx::zigzag<>(w)));
                each(cpx::shard(batch, cpx::table(w, std::vector<int>(10923, w / 2))), owners);
            }
    }

    TEST_CASE("threads that read one plan's rows for the first time find the same") {
        auto const batch = lengths(std::vector<index_t>(200, 37));
        auto const p = cpx::relayout(cpx::shard(batch, cpx::zigzag<>(8)), cpx::head_sharded<>(8, batch, {{8, 1}}), 0);
        std::array<cpx::plan, 4> const copies{p, p, p, p};
        std::array<index_t, 4> sums{};
        std::vector<std::thread> threads;
        for (std::size_t t = 0; t < sums.size(); ++t)
            threads.emplace_back([&, t] {
                for (cpx::message const& m : copies[t].receives)
                    for (cpx::run const r : m.rows) sums[t] += r.first * r.count;
            });
        for (std::thread& t : threads) t.join();
        for (index_t const sum : sums) CHECK(sum == sums[0]);
        auto changed = p;
        changed.receives[1].rows.own()[0].first = 7; // of this copy alone
        CHECK(changed.receives[1].rows[0].first == 7);
        CHECK(p.receives[1].rows[0].first != 7);
    }

    TEST_CASE("a table of a layout's owners moves as the layout does") {
        auto const batch = lengths({9, 30, 2});
        for (int r = 0; r < 3; ++r)
            CHECK(same_moves(
                cpx::relayout(cpx::shard(batch, cpx::table(cpx::zigzag<3>{})), cpx::shard(batch, cpx::sequential<3>{}),
                              r),
                cpx::relayout(cpx::shard(batch, cpx::zigzag<3>{}), cpx::shard(batch, cpx::sequential<3>{}), r)));
    }

    TEST_CASE("a plan knows its shardings and its transpose swaps them") {
        auto const batch = lengths({8, 12});
        auto const a = cpx::shard(batch, cpx::zigzag<2>{});
        auto const b = cpx::shard<scope::batch>(batch, cpx::sequential<2>{});
        auto const p = cpx::relayout(a, b, 1);
        CHECK(p.from == a);
        CHECK(p.to == b);
        auto const back = p.transposed();
        static_assert(std::same_as<std::remove_cvref_t<decltype(back.from)>, std::remove_cvref_t<decltype(b)>>);
        CHECK(back.from == b);
        CHECK(static_cast<cpx::plan const&>(back) == cpx::relayout(b, a, 1));
        CHECK(static_cast<cpx::plan const&>(back.transposed()) == static_cast<cpx::plan const&>(p));
    }

    TEST_CASE("relayout rejects other ranks, batches and sections before it plans anything") {
        auto const batch = lengths({8, 12});
        auto const a = cpx::shard(batch, cpx::zigzag<>{2});
        rejects({"relayout: ranks of the target", "expected 2", "got 3", "relayout_types.cpp"},
                [&] { cpx::relayout(a, cpx::shard(batch, cpx::sequential<>{3}), 0); });
        for (int const rank : {-1, 2})
            rejects({"relayout: rank: expected 0 to 1", "got " + std::to_string(rank)},
                    [&] { cpx::relayout(a, cpx::shard(batch, cpx::sequential<>{2}), rank); });
        rejects({"relayout: batch of the target: expected the source's, offset 1: 8, got 12"}, [&] {
            cpx::relayout(a, cpx::shard(lengths({12, 8}), cpx::sequential<>{2}), 0);
        });
        rejects({"relayout: batch of the target: expected the source's, valid length 0: 8, got 7"}, [&] {
            cpx::relayout(a, cpx::shard(cpx::thd({0, 8, 20}, {7, 12}), cpx::sequential<>{2}), 0);
        });
        rejects({"relayout: sections of the target"}, [&] {
            cpx::relayout(cpx::head_sharded<2>(batch, {{4, 2}}), cpx::head_sharded<2>(batch, {{4, 3}}), 0);
        });
    }

    TEST_CASE("equal batches need not be the same object") {
        CHECK_NOTHROW(cpx::relayout(cpx::shard(lengths({8, 12}), cpx::zigzag<2>{}),
                                    cpx::shard(lengths({8, 12}), cpx::sequential<2>{}), 0));
    }

    TEST_CASE("a user's cut that loses tokens or gives them twice is rejected when it is bound to a batch") {
        auto const batch = lengths({16, 24});
        rejects({"relayout_types.cpp", "sharding: cut, at chunk 0 of 8", "ascend from the first row, 0", "got 1 to 2"},
                [&] { cpx::shard(batch, cpx::zigzag<4>{}, late{}); });
        rejects({"sharding: cut, at chunk 3 of 8", "got 12 to 8"},
                [&] { cpx::shard(batch, cpx::zigzag<4>{}, backwards{}); });
    }
}

} // namespace
