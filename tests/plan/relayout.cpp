// SPDX-License-Identifier: Apache-2.0
#include <cpx/plan/relayout.hpp>

#include <doctest/doctest.h>

#include <cstdlib>

#include <law.hpp>

namespace {

using namespace support;
using cpx::index_t;
using cpx::scope;

std::vector<law::subject> by_tokens(cpx::thd const& batch, std::vector<spec> const& specs) {
    std::vector<law::subject> list;
    for (spec const& s : specs) list.push_back(law::tokens(batch, s));
    return list;
}

/// By tokens, by heads (even, grouped, uneven, fewer than ranks), and replicated.
std::vector<law::subject> by_all(cpx::thd const& batch, std::vector<spec> const& specs) {
    auto list = by_tokens(batch, specs);
    int const ranks = specs.front().ranks;
    list.push_back(law::replicated(batch, ranks));
    list.push_back(law::heads(batch, ranks, {{12, 1}, {6, 2}}));
    list.push_back(law::heads(batch, ranks, {{5, 1}, {1, 3}}));
    list.push_back(law::heads(batch, ranks, {{2, 2}, {2, 1}}));
    return list;
}

/// Moves tokens a -> b -> c and a -> c, and back, for all a, b and c of `subjects`. Returns what went wrong, or "".
std::string compositions(std::vector<law::subject> const& subjects) {
    std::size_t const n = subjects.size();
    std::vector<std::vector<cpx::plan>> made;
    for (auto const& a : subjects)
        for (auto const& b : subjects) made.push_back(law::plans(a, b));
    auto const move = [](std::vector<cpx::plan> const& plans, law::matrix const& data) {
        return execute(plans, data, 1, index_t{-1});
    };
    for (std::size_t a = 0; a < n; ++a) {
        auto const start = law::tagged(subjects[a], {{1, 1}});
        std::vector<law::matrix> direct;
        for (std::size_t b = 0; b < n; ++b) direct.push_back(move(made[a * n + b], start));
        for (std::size_t b = 0; b < n; ++b) {
            std::string const there = subjects[a].name + " -> " + subjects[b].name;
            if (move(made[b * n + a], direct[b]) != start) return there + " and back";
            if (move(transposed(made[a * n + b]), direct[b]) != start) return "transpose of " + there;
            for (std::size_t c = 0; c < n; ++c)
                if (move(made[b * n + c], direct[b]) != direct[c]) return there + " -> " + subjects[c].name;
        }
    }
    return "";
}

TEST_SUITE("plan") {
    TEST_CASE("all laws hold for all packings of up to 7 tokens, up to 6 ranks and all pairs of shardings") {
        for (int ranks = 1; ranks <= 6; ++ranks) {
            auto const specs = all_specs(ranks, {0, 2});
            for (index_t tokens = 0; tokens <= 7 - fewer; ++tokens)
                for_each_packing(tokens, [&](cpx::thd const& batch) {
                    std::string const problem = law::all_pairs(by_all(batch, specs));
                    REQUIRE_MESSAGE(problem.empty(), problem << " of lengths " << text(batch));
                });
        }
    }

    // With CPX_EXHAUSTIVE=1 in the environment all shardings: some minutes, for whoever changes plans.
    TEST_CASE("all laws hold for all packings of 8 to 12 tokens, up to 6 ranks and the main shardings") {
        bool const all = std::getenv("CPX_EXHAUSTIVE") != nullptr;
        for (int ranks = 1; ranks <= 6; ++ranks) {
            std::vector<spec> const main_specs = {{shape::sequential, scope::sequence, 0, ranks},
                                                  {shape::zigzag, scope::sequence, 0, ranks},
                                                  {shape::zigzag, scope::batch, 0, ranks},
                                                  {shape::sequential, scope::batch, 2, ranks}};
            for (index_t tokens = 8; tokens <= 12 - fewer; ++tokens)
                for_each_composition(tokens, [&](cpx::thd const& batch) {
                    auto subjects = all ? by_all(batch, all_specs(ranks, {0, 2})) : by_tokens(batch, main_specs);
                    if (!all && batch.sequences() % 4 == 0)
                        subjects.push_back(law::heads(batch, ranks, {{4, 1}, {2, 1}}));
                    std::string const problem = law::all_pairs(subjects);
                    REQUIRE_MESSAGE(problem.empty(), problem << " of lengths " << text(batch));
                });
        }
    }

    TEST_CASE("all laws hold with cuts at multiples of 64 tokens") {
        for (int ranks : {1, 2, 3, 4, 8})
            for (auto const& list :
                 std::vector<std::vector<index_t>>{{64}, {63, 65, 1}, {128, 0, 300}, {31, 32, 33}, {640, 7}}) {
                std::string const problem = law::all_pairs(by_all(lengths(list), all_specs(ranks, {64, 3})));
                REQUIRE_MESSAGE(problem.empty(), problem << " of lengths " << text(lengths(list)));
            }
    }

    TEST_CASE("plans compose, and the way back and the transpose both undo a plan") {
        for (int ranks : {1, 2, 3, 5})
            for (auto const& list :
                 std::vector<std::vector<index_t>>{{8, 12}, {5, 0, 1, 17}, {2}, {1, 1, 1, 1, 1, 1, 1}}) {
                std::string const problem = compositions(by_tokens(lengths(list), all_specs(ranks, {0, 2})));
                REQUIRE_MESSAGE(problem.empty(), problem << " of lengths " << text(lengths(list)));
            }
    }

    TEST_CASE("the transpose of a replication sums over the ranks, that of a selection leaves zeros") {
        cpx::thd const batch = lengths({3, 2});
        auto const zigzag = law::tokens(batch, {shape::zigzag, scope::sequence, 0, 2});
        auto const everywhere = law::replicated(batch, 2);
        auto const sums = transposed(law::plans(zigzag, everywhere));
        CHECK(sums[0].kind == cpx::flow::sums);
        // Gradients 1, 2, 3, 4, 5 on rank 0 and 10 times that on rank 1, of rows 0 .. 4 in sequence order.
        law::matrix const gradients = {{1, 2, 3, 4, 5}, {10, 20, 30, 40, 50}};
        law::matrix expected(2);
        for (std::size_t r = 0; r < 2; ++r)
            for (index_t const row : zigzag.rows[r]) expected[r].push_back(11 * (row + 1));
        CHECK(execute(sums, gradients, 1, index_t{-1}) == expected);

        auto const selection = law::plans(everywhere, zigzag);
        CHECK(selection[0].kind == cpx::flow::selects);
        CHECK(selection[0].messages() == 0);
        auto const back = execute(transposed(selection), zigzag.rows, 1, index_t{-1});
        for (std::size_t r = 0; r < 2; ++r)
            for (index_t row = 0; row < 5; ++row) {
                bool const mine = zigzag.owners[static_cast<std::size_t>(row)] == static_cast<int>(r);
                CHECK(back[r][static_cast<std::size_t>(row)] == (mine ? row : 0));
            }
    }

    TEST_CASE("gradients of a head that stands on several ranks are summed") {
        cpx::thd const batch = lengths({4, 3});
        std::vector<cpx::section> const sections = {{2, 1},
                                                    {1, 2}}; // four ranks: each q head on two, the k head on all
        auto const tokens = law::tokens(batch, {shape::zigzag, scope::sequence, 0, 4});
        auto const heads = law::heads(batch, 4, sections);
        auto const plans = law::plans(tokens, heads);
        CHECK(plans[0].kind == cpx::flow::copies);
        law::matrix const ones(4, std::vector<index_t>(7 * 3, 1));
        auto const sums = execute(transposed(plans), ones, 4, index_t{-1});
        for (std::size_t r = 0; r < 4; ++r)
            for (std::size_t i = 0; i < sums[r].size(); ++i) CHECK(sums[r][i] == (i % 4 < 2 ? 2 : 4));
    }

    TEST_CASE("plans of more than 2^33 tokens count right") {
        index_t const big = (index_t{1} << 33) + 1;
        cpx::thd const batch = lengths({big, 7, 3 * big});
        auto const a = cpx::shard(batch, cpx::zigzag<4>{});
        auto const b = cpx::shard(batch, cpx::sequential<4>{});
        index_t held = 0, sent = 0;
        for (int r = 0; r < 4; ++r) {
            auto const p = cpx::relayout(a, b, r);
            held += p.source_rows;
            sent += p.sent_rows();
            CHECK(p.target_rows == b.rows(r));
            CHECK(p.covers_target());
            CHECK(p.covers_source());
            CHECK(p.messages() <= 2);
            for (cpx::message const& m : p.sends)
                for (cpx::run const& run : m.rows) CHECK(run.first + run.count <= p.source_rows);
        }
        CHECK(held == batch.tokens());
        CHECK(sent == cpx::lower_bound(a, b).rows);
        CHECK(sent > batch.tokens() / 8 * 6 - 100); // 6 of 8 half-chunks change hands
        CHECK(sent < batch.tokens() / 8 * 6 + 100);
        auto const heads = cpx::relayout(a, cpx::head_sharded<4>(batch, {{4, 128}}), 1);
        CHECK(heads.target_rows == batch.tokens());
        CHECK(heads.sent_elements(512) == a.rows(1) * 384);
        CHECK(heads.covers_target());
        CHECK(heads.covers_source());
        auto const all = cpx::relayout(a, cpx::replicated<4>(batch), 1);
        CHECK(all.covers_target());
        CHECK(!all.covers_source()); // its rows are copied
        CHECK(all.transposed().covers_source());
    }

    TEST_CASE("a plan has one message a peer, and rows that stay are a message to itself") {
        auto const batch = cpx::thd::uniform(100, 16);
        auto const p = cpx::relayout(cpx::shard(batch, cpx::zigzag<4>{}), cpx::shard(batch, cpx::sequential<4>{}), 0);
        REQUIRE(p.sends.size() == 2); // front half stays, back half goes to rank 3
        CHECK(p.sends[0].peer == 0);
        CHECK(p.sends[1].peer == 3);
        CHECK(p.messages() == 1);
        CHECK(p.sent_rows() == 200);
        CHECK(cpx::total(p.sends[0].rows) == 200);
    }

    TEST_CASE("relayout of a batch without tokens is empty and valid") {
        for (cpx::thd const& batch : {cpx::thd(), lengths({0}), lengths({0, 0, 0})})
            for (int r = 0; r < 3; ++r) {
                auto const p = cpx::relayout(cpx::shard(batch, cpx::zigzag<3>{}),
                                             cpx::shard<scope::batch>(batch, cpx::striped<3>{}), r);
                CHECK(p.sends.empty());
                CHECK(p.receives.empty());
                CHECK(p.source_rows == 0);
                CHECK(p.covers_target());
            }
    }
}

} // namespace
