// SPDX-License-Identifier: Apache-2.0
// Relayouts within layers of tensors on devices, prepared once a batch, or once for every batch, for all layers.
#pragma once

#include <cpx/core/hash.hpp>
#include <cpx/ops/cuda/state_exchange.hpp>
#include <cpx/ops/layer_move.hpp>

#include <array>
#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

namespace cpx::detail {

/// What has been prepared for one batch, with memory for what it sends and receives.
template <class T, any_sharding From, any_sharding To>
struct kept_move {
    From from;
    To to;
    cuda::exchange<T> by;
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
    std::array<index_t, 4> const kind{sections(of.plan.from), sections(of.plan.to)};
    if (capacity const& most = layers.most(); most.rows > 0) {
        using kept = movement<T, relayout_plan<From, To>, cuda::communicator>;
        auto& move = layers.template kept<kept>(
            kind, [](kept const&) { return true; },
            [&] { return std::make_unique<kept>(of.plan, from.width(), most, layers.ranks(), here); }, here);
        move(of.from, of.to, here);
    } else {
        using kept = kept_move<T, From, To>;
        auto& move = layers.template kept<kept>(
            kind, [&](kept const& there) { return there.from == of.plan.from && there.to == of.plan.to; },
            [&] {
                auto& nccl = comm.nccl_communicator();
                return std::unique_ptr<kept>(
                    new kept{of.plan.from, of.plan.to, {of.plan, from.width(), nccl, {}, here}});
            },
            here);
        move.by(from, of.to.data(), layers.stream(), {}, here);
    }
    by.ended(of.plan, from.width());
}

} // namespace cpx::detail
