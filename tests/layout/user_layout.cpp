// SPDX-License-Identifier: Apache-2.0
// A layout that a user writes is a full citizen.
#include <cpx/layout/concept.hpp>

#include <doctest/doctest.h>

#include <law.hpp>
#include <support/rejects.hpp>

namespace my {

/// Three passes over the ranks, there, back and there again.
template <int W = cpx::dynamic>
struct snake : private cpx::extent<W> {
    constexpr snake() = default;
    constexpr explicit snake(int ranks)
        requires(W == cpx::dynamic)
        : cpx::extent<W>(ranks) {}

    constexpr int ranks() const { return this->get(); }
    constexpr int chunks() const { return 3 * ranks(); }
    constexpr int owner(int chunk) const {
        int const step = chunk % ranks();
        return chunk / ranks() == 1 ? ranks() - 1 - step : step;
    }
    friend constexpr bool operator==(snake const&, snake const&) = default;
};

static_assert(cpx::static_layout<snake<4>> && cpx::layout<snake<>> && cpx::static_ranks<snake<4>> == 4);
static_assert(cpx::is_partition(snake<4>{}, 64) && cpx::is_partition(snake<3>{}, 5));
static_assert(cpx::locate(snake<2>{}, 5, 6) == cpx::slot{1, 2});
// owners 0 1 1 0 0 1 and 0 0 0 1 1 1, in 6 cells
static_assert(cpx::routes<snake<2>, cpx::sequential<2>>().size() == 4);
static_assert(cpx::routes<snake<3>, snake<3>>().empty());

/// Forgets that its last chunk has an owner who exists.
struct one_too_far {
    int ranks() const { return 3; }
    int chunks() const { return 6; }
    int owner(int chunk) const { return chunk == 5 ? 3 : chunk % 3; }
};

/// Two chunks a rank, of which it lists others than it gives away.
struct mislisted {
    int of_rank_1 = 2, listed = 2;
    int ranks() const { return 2; }
    int chunks() const { return 4; }
    int owner(int chunk) const { return chunk / 2; }
    int chunks(int) const { return listed; }
    int chunk(int rank, int i) const { return rank == 0 ? i : of_rank_1 + i; }
};

/// A sharding of the user's own: first half of the batch on rank 0, second half on rank 1.
struct halves {
    static constexpr bool every_row = false;
    cpx::thd all;
    int ranks() const { return 2; }
    cpx::thd const& batch() const { return all; }
    cpx::index_t rows(int rank) const { return rank == 0 ? all.tokens() / 2 : all.tokens() - all.tokens() / 2; }
    std::span<cpx::section const> sections() const { return {}; }
    cpx::range heads(int, cpx::index_t heads) const { return {0, heads}; }
    template <class F>
    void for_each_piece(int rank, F&& f) const {
        cpx::index_t const middle = all.tokens() / 2;
        cpx::range const own = rank == 0 ? cpx::range{0, middle} : cpx::range{middle, all.tokens()};
        if (!own.empty()) f(own);
    }
    template <class F>
    void for_each_holder(cpx::range rows, cpx::index_t&, F&& f) const {
        for (int rank : {0, 1})
            for_each_piece(rank, [&](cpx::range own) {
                if (cpx::range const common = cpx::intersect(own, rows); !common.empty()) f(rank, common);
            });
    }
};
static_assert(cpx::any_sharding<halves>);

} // namespace my

namespace {

using namespace support;
using cpx::index_t;
using cpx::scope;

/// The snake as cpx sees it, beside a table of its owners, which brute force knows.
template <scope Scope>
law::subject snake(cpx::thd const& batch, int ranks) {
    std::vector<int> owners;
    for (int r = 0; r < ranks; ++r) owners.push_back(r);
    for (int r = ranks; r-- > 0;) owners.push_back(r);
    for (int r = 0; r < ranks; ++r) owners.push_back(r);
    auto subject = law::tokens(batch, {shape::table, Scope, 0, ranks, owners});
    subject.name = "snake";
    subject.sharding = any_tokens(cpx::shard<Scope>(batch, my::snake<>{ranks}));
    return subject;
}

TEST_SUITE("layout") {
    TEST_CASE("all laws hold between a user's layout and all others") {
        for (int ranks = 1; ranks <= 5; ++ranks)
            for (auto const& list : std::vector<std::vector<index_t>>{{}, {1}, {5, 0, 7}, {60, 31}, {2, 2, 2, 2}}) {
                cpx::thd const batch = lengths(list);
                std::vector<law::subject> subjects = {
                    snake<scope::sequence>(batch, ranks), snake<scope::batch>(batch, ranks),
                    law::heads(batch, ranks, {{6, 1}, {2, 2}}), law::replicated(batch, ranks)};
                for (spec const& s : all_specs(ranks, {0, 2})) subjects.push_back(law::tokens(batch, s));
                std::string const problem = law::all_pairs(subjects);
                CHECK_MESSAGE(problem.empty(), problem << " of lengths " << text(batch));
            }
    }

    TEST_CASE("a user's layout has halos and carries, static and dynamic alike") {
        cpx::thd const batch = lengths({9, 0, 30});
        for (int r = 0; r < 3; ++r) {
            auto const fixed = cpx::shard(batch, my::snake<3>{});
            auto const loose = cpx::shard(batch, my::snake<>{3});
            CHECK(cpx::halo(fixed, r, 3).runs == cpx::halo(loose, r, 3).runs);
            CHECK(cpx::carry<cpx::scan>(fixed, r).links == cpx::carry<cpx::scan>(loose, r).links);
            CHECK(cpx::halo(fixed, r, 3).sends == cpx::halo(loose, r, 3).sends);
        }
    }

    TEST_CASE("a user's layout that names a rank too many is rejected when it is bound to a batch") {
        rejects({"sharding: owner of chunk 5: expected a rank from 0 to 2, got 3"},
                [] { cpx::shard(lengths({60}), my::one_too_far{}); });
    }

    TEST_CASE("a user's layout whose lists are not of the chunks that it gives away is rejected, too") {
        auto const bind = [](my::mislisted const& layout) { return [=] { cpx::shard(lengths({60}), layout); }; };
        CHECK_NOTHROW(bind({})());
        rejects({"sharding: chunk 0 in the layout's list of rank 1: expected one of the rank's after -1, got 1"},
                bind({1}));
        rejects({"sharding: chunk 1 in the layout's list of rank 1: expected one of the rank's after 3, got 4"},
                bind({3}));
        rejects({"sharding: chunks in the layout's lists: expected 4, got 2"}, bind({2, 1}));
    }

    TEST_CASE("a user's sharding is as good as one of cpx's") {
        for (auto const& list : std::vector<std::vector<index_t>>{{8, 12}, {5}, {1}, {}}) {
            cpx::thd const batch = lengths(list);
            auto twin = law::tokens(batch, {shape::sequential, scope::batch, 0, 2});
            twin.sharding = any_tokens(my::halves{batch});
            auto const problem = law::all_pairs(
                {twin, law::tokens(batch, {shape::zigzag, scope::sequence, 0, 2}), law::replicated(batch, 2)});
            CHECK_MESSAGE(problem.empty(), problem);
            CHECK_NOTHROW(cpx::relayout(my::halves{batch}, cpx::shard(batch, cpx::zigzag<2>{}), 1));
            CHECK_NOTHROW(cpx::halo(my::halves{batch}, 1, 3));
            CHECK_NOTHROW(cpx::carry<cpx::serial>(my::halves{batch}, 1));
        }
    }
}

} // namespace
