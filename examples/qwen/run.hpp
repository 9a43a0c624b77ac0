// SPDX-License-Identifier: Apache-2.0
// Runs a model under one strategy and accounts for what moved.
#pragma once

#include "outcome.hpp"
#include "pass.hpp"

#include <cpx/transport/gather.hpp>

#include <type_traits>

namespace qwen {

/// How layers of linear attention are made, and whether their results are bitwise those of one rank.
template <class R>
struct linear_choice {
    make_linear<R> make = {};
    bool exact = true;
};

/// The only place that knows all types of shardings.
template <class R>
linear_choice<R> choose_linear(strategy const& how, entry_sharding const& entry,
                               cpx::gated_delta_net_config const& net) {
    if (how.without()) return {};
    return with_linear(how, entry, net.sections(),
                       [&]<class How, class Linear, class Mix>(How carry, Linear const& linear, Mix const& mix) {
                           auto const make = [=](tape<R>& at) -> linear_layers<R> {
                               auto const layers = [&]<class Rule>(std::type_identity<Rule>) -> linear_layers<R> {
                                   return layers_on(at, entry, linear,
                                                    delta_net_of<Rule>(carry, linear, mix, at.rank.rank(), net));
                               };
                               if constexpr (!std::is_void_v<typename R::finer_rule>)
                                   if (how.rule_in_half) return layers(std::type_identity<typename R::finer_rule>());
                               return layers(std::type_identity<void>());
                           };
                           return linear_choice<R>{make, cpx::is_exact<How>(mix, net.chunk)};
                       });
}

/// What rank 0 hears of every rank.
struct account {
    cpx::tally rows, states; ///< sent
    index_t positions_equal = true;
    kernel_calls kernels = {};
};

/// `make_rank(comm)` returns a rank R; `fixed`: whether its products have the same bits of any number of rows.
template <class R, class F>
outcome run_ranks(cpx::hf_config const& config, input const& in, strategy const& how, group const& on, index_t chunk,
                  bool backward, bool fixed, F const& make_rank) {
    auto const entry = enter(in.batch, on.ranks);
    auto const linear = choose_linear<R>(how, entry, delta_net_config(config, chunk));
    using T = cpx::wide<typename R::element>;
    outcome result;
    result.exact = linear.exact && fixed;
    on.run([&](cpx::transport_ref& comm) {
        R rank = make_rank(comm);
        cpx::tensor<index_t, entry_sharding> ids(entry, rank.rank(), 1), labels = ids;
        auto const rows = global_rows(entry, rank.rank());
        for (std::size_t row = 0; row < rows.size(); ++row)
            ids.data().data()[row] = in.ids[static_cast<std::size_t>(rows[row])];
        next_token_labels(halo(entry, rank.rank(), 1, cpx::side::after), std::as_const(ids).view(), labels.view(),
                          comm);
        cpx::media_tokens tokens{-1, -1}; // no placeholders in text alone
        if (config.multimodal()) tokens = {*config.image_token_id, *config.video_token_id};
        auto const where = mrope_positions(in.media, ids, tokens, comm);
        auto const there = [&](auto const& numbers) { // in the rank's memory
            auto made = cpx::make_tensor<index_t>(entry, rank.rank(), 1, rank.memory());
            made.write(numbers.elements());
            return made;
        };
        auto const own_ids = there(ids), own_labels = there(labels);
        auto const order = result.exact ? cpx::sum_order::by_row : cpx::sum_order::by_rank;
        pass<R> step(rank, in, where, linear.make, how.attention, order);
        auto const logp = step.forward(own_ids, own_labels);
        cpx::tensor<T, entry_sharding> local(entry, rank.rank(), 1);
        local.write(logp->value.read());
        account own{.rows = rank.rows_sent(), .states = rank.states_sent()};

        auto const loss = mean_token_loss(local.view(), std::as_const(labels).view(), comm);
        std::map<std::string, gradient<T>> gradients;
        if (backward) {
            auto dlogp = local;
            mean_token_loss_backward(loss, std::as_const(labels).view(), 1, dlogp.view());
            rank.memory().write(logp->grad().data().data(), std::as_const(dlogp).elements());
            gradients = step.backward();
        }
        auto const all = exchange(local, cpx::replicated<>(on.ranks, in.batch), comm);
        for (index_t axis = 0; axis < 3 && !in.position_ids.empty(); ++axis)
            for (std::size_t row = 0; row < rows.size(); ++row)
                own.positions_equal &= where.axes()(axis, static_cast<index_t>(row)) ==
                                       in.position_ids[static_cast<std::size_t>(axis * in.batch.tokens() + rows[row])];
        own.kernels = rank.kernels();
        std::vector<account> of_ranks(static_cast<std::size_t>(on.ranks));
        gather(comm, &own, of_ranks.data(), sizeof own);
        if (comm.rank() != 0) return;
        for (auto const& of : of_ranks) {
            result.rows += of.rows;
            result.states += of.states;
            result.kernels += of.kernels;
            result.positions_equal &= of.positions_equal != 0;
        }
        result.log_probabilities.assign(all.data().data(), all.data().data() + all.data().count());
        result.loss = loss;
        result.counted = step.counted();
        for (auto const& [name, of] : gradients)
            result.gradients[rank.model.file_name(name)] = {of.columns, {of.values.begin(), of.values.end()}};
    });
    return result;
}

} // namespace qwen
