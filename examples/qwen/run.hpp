// SPDX-License-Identifier: Apache-2.0
// Runs a model under one strategy, a thread a rank, and accounts for what moved.
#pragma once

#include "outcome.hpp"
#include "pass.hpp"

#include <mutex>

namespace qwen {

/// How layers of linear attention are made, and whether their results are bitwise those of one rank.
template <class R>
struct linear_choice {
    typename pass<R>::make_linear make = {};
    bool exact = true;
};

/// The only place that knows all types of shardings. `by_tokens`: see `with_linear`.
template <class R, class Make>
linear_choice<R> choose_linear(strategy const& how, entry_sharding const& entry, cpx::gated_delta_net_config const& net,
                               Make const& by_tokens) {
    if (how.without()) return {};
    return with_linear(how, entry, net.sections(), by_tokens,
                       [&]<class How, class Linear, class Mix>(How carry, Linear const& linear, Mix const& mix) {
                           auto const make = [=](R& rank, gradients<R>& grads, cpx::sum_order order) {
                               using layers = linear_layers_on<R, Linear, Mix>;
                               return std::make_unique<layers>(rank, grads, entry, order, carry, linear, mix);
                           };
                           return linear_choice<R>{make, cpx::is_exact<How>(mix, net.chunk)};
                       });
}

/// `make_rank(threads)` returns a rank R; `fixed`: whether its products have the same bits of any number of rows.
template <class R, class Make, class F>
outcome run_ranks(cpx::qwen_config const& config, input const& in, strategy const& how, int ranks, index_t chunk,
                  bool backward, bool fixed, Make const& by_tokens, F const& make_rank) {
    auto const entry = enter(in.batch, ranks);
    auto const linear = choose_linear<R>(how, entry, delta_net_config(config, chunk), by_tokens);
    using T = typename R::element;
    outcome result;
    result.exact = linear.exact && fixed;
    result.counted = count_forward(config, how, in.batch, ranks, chunk);
    std::mutex guard;
    cpx::threads::run(ranks, [&](cpx::threads& threads) {
        R rank = make_rank(threads);
        cpx::tensor<index_t, entry_sharding> ids(entry, rank.rank(), 1), labels = ids;
        auto const rows = global_rows(entry, rank.rank());
        for (std::size_t row = 0; row < rows.size(); ++row)
            ids.data().data()[row] = in.ids[static_cast<std::size_t>(rows[row])];
        next_token_labels(halo(entry, rank.rank(), 1, cpx::side::after), std::as_const(ids).view(), labels.view(),
                          threads);
        cpx::media_tokens const tokens{config.image_token_id, config.video_token_id};
        auto const where = mrope_positions(in.media, ids, tokens, threads);
        auto const there = [&](auto const& numbers) { // in the rank's memory
            auto made = cpx::make_tensor<index_t>(entry, rank.rank(), 1, rank.memory());
            made.write(numbers.elements());
            return made;
        };
        auto const own_ids = there(ids), own_labels = there(labels);
        auto const order = result.exact ? cpx::sum_order::by_row : cpx::sum_order::by_rank;
        pass<R> step(rank, in, where, linear.make, how.attention, order);
        auto logp = step.forward(own_ids, own_labels);
        cpx::tensor<T, entry_sharding> local(entry, rank.rank(), 1);
        local.write(logp.read());
        cpx::tally const sent = rank.rows_sent(), states = rank.states_sent();

        auto const loss = mean_token_loss(local.view(), std::as_const(labels).view(), threads);
        std::map<std::string, gradient<T>> gradients;
        if (backward) {
            auto dlogp = local;
            mean_token_loss_backward(loss, std::as_const(labels).view(), 1, dlogp.view());
            logp.write(dlogp.elements());
            gradients = step.backward(logp);
        }
        auto const all = exchange(local, cpx::replicated<>(ranks, in.batch), threads);
        std::lock_guard const lock(guard);
        for (index_t axis = 0; axis < 3 && !in.position_ids.empty(); ++axis)
            for (std::size_t row = 0; row < rows.size(); ++row)
                result.positions_equal &=
                    where.axes()(axis, static_cast<index_t>(row)) ==
                    in.position_ids[static_cast<std::size_t>(axis * in.batch.tokens() + rows[row])];
        result.rows += sent;
        result.states += states;
        if (rank.rank() != 0) return;
        result.log_probabilities.assign(all.data().data(), all.data().data() + all.data().count());
        result.loss = loss;
        step.count_moves(result.counted);
        for (auto const& [name, of] : gradients)
            result.gradients[rank.model.file_name(name)] = {of.columns, {of.values.begin(), of.values.end()}};
    });
    return result;
}

} // namespace qwen
