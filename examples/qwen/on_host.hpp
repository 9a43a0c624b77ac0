// SPDX-License-Identifier: Apache-2.0
// Runs a model over threads under one strategy and accounts for what moved.
#pragma once

#include "delta_net.hpp"
#include "outcome.hpp"
#include "pass.hpp"

#include <mutex>

namespace qwen {

namespace detail {

/// Returns what turns the pairs of a head by its position on each axis.
template <class T>
cpx::rotary_pairs<T> rotary_pairs(checkpoint<T> const& model) {
    auto const& c = model.config;
    cpx::rotary_pairs<T> pairs{cpx::rotary_frequencies<T>({c.rope_theta, c.rotary_dim()})};
    if (auto const& s = c.mrope_section; !s.empty())
        pairs.axes = cpx::rotary_axes({s[0], s[1], s[2]}, cpx::axis_order::interleaved, c.rotary_dim() / 2);
    return pairs;
}

/// How layers of linear attention are made, and whether their results are bitwise those of one rank.
template <class T>
struct linear_choice {
    typename pass<T>::make_linear make = {};
    bool exact = true;
};

/// The only place that knows all types of shardings: 9 kinds of layers for each type of numbers.
template <class T>
linear_choice<T> choose_linear(strategy const& how, entry_sharding const& entry,
                               cpx::gated_delta_net_config const& net) {
    if (how.without()) return {};
    auto const choose = [&]<class How, class Linear, class Mix>(How, Linear const& linear, Mix const& mix) {
        auto const make = [=](on_rank<T> const& of) -> std::unique_ptr<linear_layers<T>> {
            return std::make_unique<linear_layers_on<T, How, Linear, Mix>>(of, linear, mix, net);
        };
        return linear_choice<T>{make, cpx::is_exact<How>(mix, net.chunk)};
    };
    return with_linear(how, entry, net.sections(), by_layout, choose);
}

} // namespace detail

template <class T>
outcome run(checkpoint<T> const& model, input const& in, strategy const& how, int ranks, cpx::index_t chunk,
            bool backward) {
    auto const entry = enter(in.batch, ranks);
    auto const linear = detail::choose_linear<T>(how, entry, delta_net_config(model.config, chunk));
    outcome result;
    result.exact = linear.exact;
    result.counted = count_forward(model.config, how, in.batch, ranks, chunk);
    std::mutex guard;
    cpx::threads::run(ranks, [&](cpx::threads& threads) {
        host_ranks comm(threads);
        int const rank = comm.rank();
        cpx::tensor<cpx::index_t, entry_sharding> ids(entry, rank, 1), labels = ids;
        auto const rows = global_rows(entry, rank);
        for (std::size_t row = 0; row < rows.size(); ++row)
            ids.data().data()[row] = in.ids[static_cast<std::size_t>(rows[row])];
        next_token_labels(halo(entry, rank, 1, cpx::side::after), std::as_const(ids).view(), labels.view(), threads);
        cpx::media_tokens const tokens{model.config.image_token_id, model.config.video_token_id};
        rotation<T, entry_sharding> const turn{mrope_positions(in.media, ids, tokens, comm),
                                               detail::rotary_pairs(model)};
        auto const order = result.exact ? cpx::sum_order::by_row : cpx::sum_order::by_rank;
        pass<T> step(model, in, turn, linear.make, how.attention, order, comm);
        auto const local = step.forward(ids, labels);
        auto const sent = [&](char const* operation) { return comm.sent(operation); };
        cpx::tally const relayouts = sent("relayout"), halos = sent("halo");
        cpx::tally states = sent("carry");
        states += sent("carry, scan");

        auto const loss = mean_token_loss(local.view(), std::as_const(labels).view(), threads);
        std::map<std::string, gradient<T>> gradients;
        if (backward) {
            auto dlogp = local;
            mean_token_loss_backward(loss, std::as_const(labels).view(), 1, dlogp.view());
            gradients = step.backward(dlogp);
        }
        auto const all = exchange(local, cpx::replicated<>(ranks, in.batch), threads);
        std::lock_guard const lock(guard);
        for (cpx::index_t axis = 0; axis < 3 && !in.position_ids.empty(); ++axis)
            for (std::size_t row = 0; row < rows.size(); ++row)
                result.positions_equal &=
                    turn.positions.axes()(axis, static_cast<cpx::index_t>(row)) ==
                    in.position_ids[static_cast<std::size_t>(axis * in.batch.tokens() + rows[row])];
        result.rows += relayouts;
        result.rows += halos;
        result.states += states;
        if (rank != 0) return;
        result.log_probabilities.assign(all.data().data(), all.data().data() + all.data().count());
        result.loss = loss;
        step.count_moves(result.counted);
        for (auto const& [name, of] : gradients)
            result.gradients[model.file_name(name)] = {of.columns, {of.values.begin(), of.values.end()}};
    });
    return result;
}

} // namespace qwen
