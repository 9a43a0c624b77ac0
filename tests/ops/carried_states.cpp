// SPDX-License-Identifier: Apache-2.0
#include <cpx/ops/carried_states.hpp>

#include <cpx/layout/zigzag.hpp>
#include <cpx/transport/threads.hpp>

#include <doctest/doctest.h>

namespace {

using cpx::side;
using groups = std::vector<std::vector<std::size_t>>;

/// Writes down which segments are run together.
struct listing final : cpx::detail::states_pass<double> {
    cpx::state_shape of = {};
    mutable groups together = {};

    cpx::state_shape const& shape() const override { return of; }
    void over(std::vector<cpx::detail::visit<double>> visits) const override {
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
            std::vector<double> maps;
            cpx::detail::states_on_host<cpx::threads> memory{comm};
            cpx::detail::carry_states<double>("test", plan, from, pass, maps, memory, cpx::caller::here());
            cpx::require(cpx::detail::run_together(plan, from) == pass.together, "test", "groups", "those of the pass",
                         "others");
        }
    });
}

TEST_SUITE("ops") {
    TEST_CASE("segments are run together as it is said, from both sides, by scan and one after the other") {
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
