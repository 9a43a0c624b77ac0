// SPDX-License-Identifier: Apache-2.0
// Relayouts within layers of tensors on devices, prepared once a batch, or once for every batch, for all layers.
#pragma once

#include <cpx/core/hash.hpp>
#include <cpx/ops/cuda/state_exchange.hpp>
#include <cpx/ops/layer_move.hpp>

#include <array>
#include <concepts>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

namespace cpx::detail {

/// A relayout that has been prepared, with memory for what it sends and receives: for one batch, or for all that fit.
template <class T, any_sharding From, any_sharding To>
class kept_move {
    using plan_type = relayout_plan<From, To>;
    using kind = moved<plan_type>;

public:
    kept_move(plan_type const& plan, index_t width, capacity const& most, cuda::communicator& comm, caller here)
        : most_(most), first_(plan.from, plan.to), now_(first_),
          by_(alone(plan), kind::lanes(plan, width, false), {}, width, comm,
              later() ? cuda::exchange_options{.room = kind::room(plan, width, most, here)} : cuda::exchange_options{},
              here) {}

    /// Whether it can run a plan.
    bool takes(plan_type const& plan) const { return later() || is_now(plan); }
    /// Moves rows. One that is made for all batches is set for that of the plan first; nothing waits.
    void operator()(plan_type const& plan, rows<T const> from, rows<T> to, caller here) {
        if (!is_now(plan)) {
            std::tuple const next(plan.from, plan.to);
            by_.set(
                plan.from.batch(), cut_alike(next, first_), [&](auto&& use) { use(alone(plan)); }, here);
            now_ = next;
        }
        by_(from, to, {}, here);
    }

private:
    static std::span<cpx::plan const> alone(cpx::plan const& plan) { return {&plan, 1}; }
    bool later() const { return most_.rows > 0; }
    bool is_now(plan_type const& plan) const { return plan.from == std::get<0>(now_) && plan.to == std::get<1>(now_); }

    capacity most_;
    std::tuple<From, To> first_, now_; ///< for which it was made, and has been set
    cuda::batch_exchange<T> by_;
};

template <class By>
concept keeps_moves =
    std::derived_from<std::remove_cvref_t<decltype(std::declval<By&>().carrier())>, cuda::state_exchange>;

/// Moves by what is kept; rows are as far apart as they are wide. It is found by what all ranks have alike; where they
/// have not, one that prepares waits for the others, until the deadline. With room for other batches it is set for this
/// one, and nothing waits.
template <class T, any_sharding From, any_sharding To, keeps_moves By>
void run_move(layer_move<T, From, To, cuda::memory> const& of, By& by, caller here) {
    cuda::state_exchange& layers = by.carrier();
    cuda::communicator const& comm = layers.ranks();
    rows<T const> const from = of.from.data();
    require_own(of.where, "rank of the plan", of.plan.rank, of.plan.ranks(), comm.rank(), comm.ranks(), here);
    auto const sections = [](auto const& sharding) {
        std::uint64_t hash = 0;
        for (section const& s : sharding.sections()) hash = mix_all(hash, std::array{s.heads, s.width});
        return static_cast<index_t>(hash);
    };
    capacity const& most = layers.most();
    thd const& batch = of.plan.from.batch();
    require(most.rows == 0 || (batch.tokens() <= most.rows && batch.sequences() <= most.sequences), of.where,
            "tokens and sequences of the batch, all of which every rank has by heads",
            in_words("at most ", most.rows, ", ", most.sequences), in_words(batch.tokens(), ", ", batch.sequences()),
            here);
    using kept = kept_move<T, From, To>;
    auto& move = layers.template kept<kept>(
        {sections(of.plan.from), sections(of.plan.to)}, [&](kept const& there) { return there.takes(of.plan); },
        [&] { return std::make_unique<kept>(of.plan, from.width(), most, layers.ranks(), here); }, here);
    move(of.plan, from, of.to.data(), here);
    by.ended(of.plan, from.width());
}

} // namespace cpx::detail
