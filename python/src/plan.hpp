// SPDX-License-Identifier: Apache-2.0
// The plans of Python: relayouts, halos and carries.
#pragma once

#include "sharding.hpp"

#include <cpx/plan/halo.hpp>
#include <cpx/plan/relayout.hpp>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace binding {

/// The plan of a relayout with its messages, which are listed when they are first asked for.
class late_plan {
public:
    using maker = cpx::plan(any_tokens const& from, any_tokens const& to, int rank);
    /// `back`: of what moves everything back, if this is transposed.
    explicit late_plan(maker* list, std::shared_ptr<late_plan const> back = {}) : list_(list), back_(std::move(back)) {}
    cpx::plan const& made(any_tokens const& from, any_tokens const& to, int rank) const {
        std::call_once(
            asked_, [&] { made_.emplace(back_ ? back_->made(to, from, rank).transposed() : list_(from, to, rank)); });
        return *made_;
    }
    maker* list() const { return list_; }
    std::shared_ptr<late_plan const> const& back() const { return back_; }

private:
    maker* list_;
    std::shared_ptr<late_plan const> back_;
    mutable std::once_flag asked_;
    mutable std::optional<cpx::plan> made_;
};

/// A relayout between two shardings, for one rank.
struct relayout_value {
    cpx::plan plan; ///< but for its messages, if they are late
    any_layout from, to;
    bool back = false; ///< transposed, of a plan between `to` and `from`
    std::shared_ptr<late_plan const> late = {};

    /// Returns the plan with its messages, which a kernel that moves rows by shardings does not ask for.
    cpx::plan const& whole() const {
        return late ? late->made(std::get<any_tokens>(from.real), std::get<any_tokens>(to.real), plan.rank) : plan;
    }
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
