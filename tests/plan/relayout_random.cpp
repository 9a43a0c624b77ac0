// SPDX-License-Identifier: Apache-2.0
// The laws of relayout for random packings, ranks and shardings.
#include <cpx/plan/relayout.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <law.hpp>

namespace {

using namespace support;
using cpx::index_t;

/// Numbers from `first` to `last`, both included, however early in the run.
template <class T>
rc::Gen<T> between(T first, T last) {
    return rc::gen::resize(rc::kNominalSize, rc::gen::inRange<T>(first, last + 1));
}

rc::Gen<cpx::thd> packings(index_t longest, std::size_t sequences) {
    auto const length = rc::gen::weightedOneOf<index_t>(
        {{1, between<index_t>(0, 4)}, {2, between<index_t>(0, 200)}, {2, between<index_t>(0, longest)}});
    return rc::gen::mapcat(between<std::size_t>(0, sequences), [length](std::size_t count) {
        return rc::gen::map(rc::gen::container<std::vector<index_t>>(count, length),
                            [](std::vector<index_t> const& list) { return lengths(list); });
    });
}

rc::Gen<spec> specs(int ranks) {
    auto const layout =
        rc::gen::element(shape::sequential, shape::zigzag, shape::striped, shape::table, shape::by_length);
    auto const owners = rc::gen::mapcat(between<std::size_t>(1, 40), [ranks](std::size_t chunks) {
        return rc::gen::container<std::vector<int>>(chunks, between(0, ranks - 1));
    });
    return rc::gen::build<spec>(rc::gen::set(&spec::layout, layout),
                                rc::gen::set(&spec::cuts, rc::gen::element(cpx::scope::sequence, cpx::scope::batch)),
                                rc::gen::set(&spec::unit, rc::gen::element(0, 0, 1, 2, 3, 64, 100)),
                                rc::gen::set(&spec::ranks, rc::gen::just(ranks)), rc::gen::set(&spec::owners, owners));
}

void fails_with(std::string const& problem) {
    if (!problem.empty()) RC_FAIL(problem);
}

TEST_SUITE("plan") {
    TEST_CASE("all laws hold between random shardings of random packings") {
        CHECK(rc::check("relayout by tokens", [] {
            cpx::thd const batch = *packings(5000, 12);
            int const ranks = *between(1, 16);
            spec const from = *specs(ranks), to = *specs(ranks);
            RC_LOG() << text(batch) << ": " << text(from) << " -> " << text(to);
            fails_with(law::all_pairs({law::tokens(batch, from), law::tokens(batch, to)}));
        }));
    }

    TEST_CASE("all laws hold between tokens and random shares of heads") {
        CHECK(rc::check("relayout by heads", [] {
            cpx::thd const batch = *packings(60, 8);
            int const ranks = *between(1, 16);
            spec const from = *specs(ranks);
            index_t const groups = *between<index_t>(1, 6), times = *between<index_t>(1, 4);
            std::vector<cpx::section> const sections = {{groups, *between<index_t>(1, 3)},
                                                        {groups * times, *between<index_t>(1, 3)}};
            RC_LOG() << text(batch) << ": " << text(from) << ", heads " << groups << " and " << groups * times;
            fails_with(law::all_pairs(
                {law::tokens(batch, from), law::heads(batch, ranks, sections), law::replicated(batch, ranks)}));
        }));
    }
}

} // namespace
