// SPDX-License-Identifier: Apache-2.0
// Runs a Qwen3.5 model over ranks under one strategy and accounts for what moved.
#pragma once

#include "pass.hpp"

#include <mutex>

namespace qwen {

/// The packed batch and its token ids.
struct input {
    cpx::thd batch;
    std::vector<cpx::index_t> ids;
};

/// What one forward pass must move, counted from who owns which rows, and what gathering whole tensors would move.
struct needs {
    cpx::volume least, all_gather;
};

struct outcome {
    std::vector<double> log_probabilities; ///< by global row
    cpx::token_loss loss;
    std::map<std::string, std::vector<double>> gradients; ///< of the loss, by weight; none unless asked for
    std::map<std::string, cpx::index_t> columns;          ///< of a gradient
    bool exact = false;                                   ///< bitwise those of one rank, by construction
    cpx::tally rows, states; ///< what all ranks sent: rows (relayouts and halos) and recurrent states
    needs counted;
};

/// Returns the sizes of the model's gated delta nets.
inline cpx::gated_delta_net_config delta_net_config(cpx::qwen3_5_config const& c, cpx::index_t chunk) {
    return {c.hidden_size,
            {c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim},
            c.linear_conv_kernel_dim,
            chunk,
            c.rms_norm_eps};
}

namespace detail {

/// Adds what moving one tensor of `width` between two shardings takes.
template <class From, class To>
void count(From const& from, To const& to, cpx::index_t width, needs& n) {
    cpx::volume const least = lower_bound(from, to, width);
    cpx::index_t const everywhere = (from.ranks() - 1) * from.batch().tokens();
    n.least.rows += least.rows;
    n.least.elements += least.elements;
    if (least.rows == 0) return;
    n.all_gather.rows += everywhere;
    n.all_gather.elements += everywhere * width;
}

/// Counts a forward pass from ownership alone: no plan is asked.
template <class Entry, class Linear, class Mix>
needs count_forward(cpx::qwen3_5_config const& c, attention_by attention, Entry const& entry, Linear const& linear,
                    Mix const& mix, cpx::gated_delta_net_config const& net) {
    needs n;
    cpx::index_t const v = net.heads.value_heads * net.heads.value_dim;
    cpx::index_t const q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
    cpx::index_t const conv = 2 * net.heads.key_heads * net.heads.key_dim + v;
    cpx::index_t const ranks = entry.ranks(), before = net.kernel - 1;
    cpx::head_sharded<> const o(static_cast<int>(ranks), entry.batch(), {{c.num_attention_heads, c.head_dim}});
    cpx::head_sharded<> const o_linear(static_cast<int>(ranks), entry.batch(), net.output_sections());
    cpx::section const query{c.num_attention_heads, c.head_dim}, key{c.num_key_value_heads, c.head_dim};
    cpx::layer_type before_this = cpx::layer_type::full_attention;
    for (cpx::layer_type const type : c.layer_types) {
        bool const full = type == cpx::layer_type::full_attention;
        if (!full && type != before_this) { // a stretch of linear attention: there and back
            count(entry, linear, c.hidden_size, n);
            count(linear, entry, c.hidden_size, n);
        }
        before_this = type;
        if (full && attention == attention_by::gather) {
            count(entry, cpx::replicated<>(static_cast<int>(ranks), entry.batch()), 2 * kv, n);
        } else if (full) {
            count(entry, cpx::head_sharded<>(static_cast<int>(ranks), entry.batch(), {query, key, key}), q + 2 * kv, n);
            count(o, entry, q, n);
        } else if constexpr (Mix::every_row) {
            count(linear, mix, conv + 2 * net.heads.value_heads, n);
            count(o_linear, linear, v, n);
        } else {
            cpx::index_t const halo = halo_lower_bound(mix, before);
            n.least.rows += halo;
            n.least.elements += halo * conv;
            cpx::index_t tails = 0; // the last rows of every segment, which would be gathered on every rank
            for (int rank = 0; rank < ranks; ++rank)
                for (auto const& segment : segments(mix, rank)) tails += std::min(before, segment.count);
            n.all_gather.rows += halo ? (ranks - 1) * tails : 0;
            n.all_gather.elements += halo ? (ranks - 1) * tails * conv : 0;
        }
    }
    return n;
}

using entry_sharding = examples::token_sharding<cpx::scope::sequence>;

template <class How, class T, class Linear, class Mix>
outcome run(checkpoint<T> const& model, input const& in, attention_by attention, bool backward,
            entry_sharding const& entry, Linear const& linear, Mix const& mix, cpx::gated_delta_net_config const& net) {
    int const ranks = linear.ranks();
    outcome result;
    result.exact = cpx::is_exact<How>(mix, net.chunk);
    result.counted = count_forward(model.config, attention, entry, linear, mix, net);
    std::mutex guard;
    cpx::threads::run(ranks, [&](cpx::threads& threads) {
        cpx::counted comm(threads);
        int const rank = comm.rank();
        cpx::tensor<cpx::index_t, entry_sharding> ids(entry, rank, 1), labels = ids;
        cpx::index_t row = 0;
        entry.for_each_piece(rank, [&](cpx::range rows) {
            std::copy(in.ids.begin() + rows.first, in.ids.begin() + rows.last, ids.data().row(row));
            row += rows.size();
        });
        next_token_labels(halo(entry, rank, 1, cpx::side::after), std::as_const(ids).view(), labels.view(), threads);
        auto const delta_net = [&] {
            if constexpr (Mix::every_row)
                return cpx::gated_delta_net<How, Linear, Mix>(linear, mix, Mix(ranks, in.batch, net.output_sections()),
                                                              rank, net);
            else
                return cpx::gated_delta_net<How, Linear>(linear, rank, net);
        }();
        auto const order = result.exact ? cpx::sum_order::by_row : cpx::sum_order::by_rank;
        pass<T, How, entry_sharding, Linear, Mix, cpx::counted<cpx::threads>> step(model, entry, linear, delta_net,
                                                                                   attention, order, comm);
        auto const local = step.forward(ids, labels);
        auto const sent = [&](char const* operation) { return comm.sent(operation); };
        cpx::tally const relayouts = sent("relayout"), halos = sent("halo");
        cpx::tally states = sent("carry");
        states += sent("carry, scan");

        auto const loss = mean_token_loss(local.view(), std::as_const(labels).view(), threads);
        std::map<std::string, std::vector<T>> gradients;
        if (backward) {
            auto dlogp = local;
            mean_token_loss_backward(loss, std::as_const(labels).view(), 1, dlogp.view());
            gradients = step.backward(dlogp);
        }
        auto const all = exchange(local, cpx::replicated<>(ranks, in.batch), threads);
        std::lock_guard const lock(guard);
        result.rows += relayouts;
        result.rows += halos;
        result.states += states;
        if (rank != 0) return;
        result.log_probabilities.assign(all.data().data(), all.data().data() + all.data().count());
        result.loss = loss;
        for (auto const& [name, values] : gradients) {
            result.gradients[name].assign(values.begin(), values.end());
            result.columns[name] = model.weight(name).width();
        }
    });
    return result;
}

} // namespace detail

/// Runs the model over `ranks` threads, forward and, if asked for, backward. Throws `cpx::error` on bad input.
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
