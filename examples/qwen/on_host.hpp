// SPDX-License-Identifier: Apache-2.0
// Runs a model over threads under one strategy and accounts for what moved.
#pragma once

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

using entry_sharding = examples::token_sharding<cpx::scope::sequence>;

template <class How, class T, class Linear, class Mix>
outcome run(checkpoint<T> const& model, input const& in, attention_by attention, bool backward,
            entry_sharding const& entry, Linear const& linear, Mix const& mix, cpx::gated_delta_net_config const& net) {
    int const ranks = linear.ranks();
    outcome result;
    bool const linear_layers = model.config.linear();
    result.exact = !linear_layers || cpx::is_exact<How>(mix, net.chunk);
    result.counted = count_forward(model.config, attention, entry, linear, mix, net);
    std::mutex guard;
    cpx::threads::run(ranks, [&](cpx::threads& threads) {
        cpx::counted comm(threads);
        int const rank = comm.rank();
        cpx::tensor<cpx::index_t, entry_sharding> ids(entry, rank, 1), labels = ids;
        auto const rows = global_rows(entry, rank);
        for (std::size_t row = 0; row < rows.size(); ++row)
            ids.data().data()[row] = in.ids[static_cast<std::size_t>(rows[row])];
        next_token_labels(halo(entry, rank, 1, cpx::side::after), std::as_const(ids).view(), labels.view(), threads);
        std::optional<cpx::gated_delta_net<How, Linear, Mix>> delta_net;
        if constexpr (Mix::every_row)
            delta_net.emplace(linear, mix, Mix(ranks, in.batch, net.output_sections()), rank, net);
        else if (linear_layers)
            delta_net.emplace(linear, rank, net);
        cpx::media_tokens const tokens{model.config.image_token_id, model.config.video_token_id};
        rotation<T, entry_sharding> const turn{mrope_positions(in.media, ids, tokens, comm), rotary_pairs(model)};
        auto const order = result.exact ? cpx::sum_order::by_row : cpx::sum_order::by_rank;
        pass<T, How, entry_sharding, Linear, Mix, cpx::counted<cpx::threads>> step(model, in, turn, linear, delta_net,
                                                                                   attention, order, comm);
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

} // namespace detail

template <class T>
outcome run(checkpoint<T> const& model, input const& in, strategy const& how, int ranks, cpx::index_t chunk,
            bool backward) {
    auto const net = delta_net_config(model.config, chunk);
    detail::entry_sharding const entry(in.batch, cpx::table(cpx::zigzag<>(ranks)), cpx::aligned<cpx::dynamic>(1));
    return with_linear(how, entry, net.sections(), [&]<class How>(How, auto const& linear, auto const& mix) {
        return detail::run<How>(model, in, how.attention, backward, entry, linear, mix, net);
    });
}

} // namespace qwen
