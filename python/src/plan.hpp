// SPDX-License-Identifier: Apache-2.0
// The plans of Python: relayouts, halos and carries.
#pragma once

#include "sharding.hpp"

#include <cpx/plan/halo.hpp>
#include <cpx/plan/relayout.hpp>

namespace binding {

/// A relayout between two shardings, for one rank.
struct relayout_value {
    cpx::plan plan;
    any_layout from, to;
    bool back = false; ///< transposed, of a plan between `to` and `from`
};

/// The rows beside a rank's segments.
struct halo_value {
    std::variant<cpx::halo_plan<any_tokens>, cpx::halo_plan<any_rows>> real;
    any_layout sharding;

    cpx::plan const& plan() const {
        return std::visit([](auto const& p) -> cpx::plan const& { return p; }, real);
    }
};

/// How states are handed along the segments of a sequence. Where every rank holds every row nothing is handed on.
struct carry_value {
    std::variant<cpx::carry_plan<cpx::scan, any_tokens>, cpx::carry_plan<cpx::serial, any_tokens>,
                 cpx::carry_plan<cpx::serial, any_rows>>
        real;
    any_layout sharding;
    bool serial = false;
};

/// Calls `f(plan, sharding)`, the plan being one over the shardings of `any_layout`.
template <class V, class F>
decltype(auto) visit_plan(V const& value, F&& f) {
    return std::visit([&](auto const& plan) { return f(plan, plan.sharding); }, value.real);
}

relayout_value relayout_between(any_layout const& from, any_layout const& to, int rank);
halo_value halo_of(any_layout const& sharding, int rank, index_t reach, cpx::side where);
carry_value carry_of(any_layout const& sharding, int rank, bool serial);

} // namespace binding
