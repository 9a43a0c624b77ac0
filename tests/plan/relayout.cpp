// SPDX-License-Identifier: Apache-2.0
#include <cpx/plan/relayout.hpp>

#include <doctest/doctest.h>

#include <law.hpp>

namespace {

using namespace support;
using cpx::index;

/// The shardings between which every packing is moved: by tokens, by heads (even, grouped, uneven, few), replicated.
std::vector<law::subject> subjects(cpx::thd const& batch, std::vector<spec> const& specs) {
    std::vector<law::subject> list;
    for (spec const& s : specs) list.push_back(law::tokens(batch, s));
    int const ranks = specs.front().ranks;
    list.push_back(law::replicated(batch, ranks));
    list.push_back(law::heads(batch, ranks, {{12, 1}, {6, 2}}));
    list.push_back(law::heads(batch, ranks, {{5, 1}, {1, 3}}));
    list.push_back(law::heads(batch, ranks, {{2, 2}, {2, 1}}));
    return list;
}

TEST_SUITE("plan") {
    TEST_CASE("all laws hold for all packings of up to 7 tokens, up to 6 ranks and all pairs of shardings") {
        for (int ranks = 1; ranks <= 6; ++ranks) {
            auto const specs = all_specs(ranks, {0, 2});
            for (index tokens = 0; tokens <= 7; ++tokens)
                for_each_packing(tokens, [&](cpx::thd const& batch) {
                    std::string const problem = law::all_pairs(subjects(batch, specs));
                    REQUIRE_MESSAGE(problem.empty(), problem << " of lengths " << text(batch));
                });
        }
    }
}

} // namespace
