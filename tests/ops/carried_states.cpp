// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/carried_states.hpp>

#include <cpx/layout/zigzag.hpp>
#include <cpx/transport/threads.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <concepts>
#include <optional>
#include <string>
#include <vector>

namespace {

using cpx::side;
using groups = std::vector<std::vector<std::size_t>>;

using visits_list = std::vector<cpx::detail::visit<double>>;

std::vector<std::size_t> segments_of(visits_list const& visits) {
    std::vector<std::size_t> list;
    for (auto const& v : visits) list.push_back(v.segment);
    return list;
}

/// Writes down which segments are run together, and what of them is expected.
struct listing final : cpx::detail::states_pass<double> {
    cpx::state_shape of = {};
    mutable groups together = {};
    mutable std::optional<visits_list> expected = {};
    mutable cpx::index_t expectations = 0, awaited = 0; ///< awaited: of the last visits, those that others wait for
    mutable std::string problem = {};

    cpx::state_shape const& shape() const override { return of; }
    void expect(visits_list const& visits) const override {
        if (awaited > 0) problem = "others wait for what it has gone over";
        if (expected) problem = "it expects twice";
        expected = visits;
        if (!visits.empty()) ++expectations;
    }
    void over(visits_list visits) const override {
        if (expected) {
            if (segments_of(*expected) != segments_of(visits)) problem = "it goes over what it has not expected";
            for (std::size_t i = 0; i < std::min(expected->size(), visits.size()); ++i)
                if ((*expected)[i].handed_on != visits[i].handed_on) problem = "who waits is not as expected";
        }
        expected.reset();
        awaited = std::ranges::count_if(visits, &cpx::detail::visit<double>::handed_on);
        for (bool const handed_on : {true, false}) {
            std::vector<std::size_t> list;
            for (auto const& v : visits)
                if (v.handed_on == handed_on) list.push_back(v.segment);
            if (!list.empty()) together.push_back(list);
        }
    }
    void fold(std::vector<cpx::detail::visit<double>> const&) const override {}
};

template <cpx::carry_kind How>
void check(cpx::thd const& batch, int ranks) {
    cpx::threads::run(ranks, [&](cpx::threads& comm) {
        auto const plan = cpx::carry<How>(cpx::shard(batch, cpx::zigzag<>(ranks)), comm.rank());
        for (side const from : {side::before, side::after}) {
            listing const pass;
            cpx::detail::states_on_host<cpx::threads> memory{comm};
            cpx::detail::carry_states<double>("test", plan, from, pass, nullptr, memory, cpx::caller::here());
            cpx::require(cpx::detail::run_together(plan, from) == pass.together, "test", "groups", "those of the pass",
                         "others");
            cpx::require(pass.problem.empty() && !pass.expected, "test", "pass", "what it expects", pass.problem);
            bool const waits = std::same_as<How, cpx::serial> && batch.sequences() == 1 &&
                               std::ranges::any_of(plan.links, [&](auto const& l) { return l.beside(from) > 0; });
            cpx::require(!waits || pass.expectations > 0, "test", "expectations of who waits", "some",
                         pass.expectations);
        }
    });
}

TEST_SUITE("ops") {
    TEST_CASE("segments are run together, and expected, as it is said, from both sides, by scan and by serial") {
        for (int const ranks : {1, 2, 3, 5})
            for (auto const& lengths : {std::vector<cpx::index_t>{64}, {1, 0, 30, 2, 100}, {0}, {7, 7, 7}}) {
                CAPTURE(ranks);
                auto const batch = cpx::thd::from_lengths(lengths);
                CHECK_NOTHROW(check<cpx::scan>(batch, ranks));
                CHECK_NOTHROW(check<cpx::serial>(batch, ranks));
            }
    }
}

} // namespace
