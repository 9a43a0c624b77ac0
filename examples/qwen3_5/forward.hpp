// SPDX-License-Identifier: Apache-2.0
// One rank's forward pass of a Qwen3.5 model whose tokens are sharded over ranks.
#pragma once

#include "checkpoint.hpp"

#include <cpx/cpx.hpp>

#include <cmath>

namespace qwen3_5 {

/// How full attention sees all keys: keys and values gathered on every rank, or queries, keys and values by heads.
enum class attention_by { gather, heads };

/// The forward pass of one rank.
///
/// Hidden states enter zigzag over sequence (`Entry`). Linear attention runs on `Linear`, its recurrence on `Mix`:
/// the same, or head_sharded. Norms, projections and MLPs see one token at a time, so relayouts stand outside them,
/// on the residual stream, and only where the next layer wants another sharding.
template <class T, class How, class Entry, class Linear, class Mix, cpx::transport Comm>
class forward {
public:
    template <class S>
    using tensor = cpx::tensor<T, S>;
    using delta_net = cpx::gated_delta_net<How, Linear, Mix>;

    forward(checkpoint<T> const& model, Entry const& entry, Linear const& linear, delta_net const& net,
            attention_by attention, Comm& comm)
        : model_(model), c_(model.config), attention_(attention), net_(net), comm_(comm),
          to_linear_(relayout(entry, linear, comm.rank())), to_entry_(relayout(linear, entry, comm.rank())) {}

    /// Returns log p(label) for the rows of this rank; 0 where the label is -1.
    tensor<Entry> operator()(std::vector<cpx::index> const& ids, std::vector<cpx::index> const& labels) {
        tensor<Entry> h(to_linear_.from, comm_.rank(), c_.hidden_size);
        auto const embedding = model_.weight("model.embed_tokens.weight");
        for (std::size_t i = 0; i < ids.size(); ++i)
            std::copy_n(embedding.row(ids[i]), c_.hidden_size, h.data().row(static_cast<cpx::index>(i)));

        for (cpx::index i = 0; i < c_.num_hidden_layers;) {
            if (type(i) == cpx::layer_type::full_attention) {
                full_attention(i, h);
                mlp(i++, h.data());
                continue;
            }
            auto there = move(to_linear_, h); // and stay there for all linear attention layers in a row
            for (; i < c_.num_hidden_layers && type(i) == cpx::layer_type::linear_attention; ++i) {
                linear_attention(i, there);
                mlp(i, there.data());
            }
            h = move(to_entry_, there);
        }
        return log_probabilities(h, labels);
    }

private:
    cpx::layer_type type(cpx::index layer) const { return c_.layer_types[static_cast<std::size_t>(layer)]; }
    static std::string name(cpx::index layer, char const* part) {
        return "model.layers." + std::to_string(layer) + '.' + part;
    }

    template <class From, class To>
    tensor<To> move(cpx::relayout_plan<From, To> const& plan, tensor<From> const& from) {
        if constexpr (std::same_as<From, To>)
            if (plan.from == plan.to) return from;
        return exchange(plan, from, comm_);
    }

    template <class S>
    tensor<S> norm(std::string const& weight, tensor<S> const& x) const {
        tensor<S> y = x;
        rms_norm<T>(x.data(), model_.gain(weight), static_cast<T>(c_.rms_norm_eps), T(1), y.data());
        return y;
    }

    static void add(cpx::rows<T const> x, cpx::rows<T> h) { cpx::map(h) += cpx::map(x); }

    void linear_attention(cpx::index layer, tensor<Linear>& h) {
        auto const x = norm(name(layer, "input_layernorm.weight"), h);
        tensor<Linear> y = x;
        net_(model_.delta_net(layer), x.view(), y.view(), comm_);
        add(y.data(), h.data());
    }

    /// Rows of q (and its output gate), k and v; rotary embedding by position; attention; gate; output projection.
    void full_attention(cpx::index layer, tensor<Entry>& h) {
        int const rank = comm_.rank();
        Entry const& entry = h.sharding();
        cpx::attention_heads const heads{c_.num_attention_heads, c_.num_key_value_heads, c_.head_dim};
        cpx::index const dim = heads.dim, q = heads.query_heads * dim, kv = heads.key_heads * dim;
        auto const x = norm(name(layer, "input_layernorm.weight"), h);
        tensor<Entry> q_and_gate(entry, rank, 2 * q), qkv(entry, rank, q + 2 * kv), o(entry, rank, q);
        cpx::linear<T>(x.data(), model_.weight(name(layer, "self_attn.q_proj.weight")), q_and_gate.data());
        cpx::linear<T>(x.data(), model_.weight(name(layer, "self_attn.k_proj.weight")), qkv.data().columns(q, kv));
        cpx::linear<T>(x.data(), model_.weight(name(layer, "self_attn.v_proj.weight")), qkv.data().columns(q + kv, kv));
        for (cpx::index head = 0; head < heads.query_heads; ++head)
            cpx::map(qkv.data().columns(head * dim, dim)) = cpx::map(q_and_gate.data().columns(2 * head * dim, dim));

        auto const rotate = [&](char const* weight, cpx::sharded<T, Entry> const& x_heads) {
            rms_norm<T>(x_heads.data(), model_.gain(name(layer, weight)), static_cast<T>(c_.rms_norm_eps), T(1),
                        x_heads.data());
            rotary(rank, x_heads, dim, {c_.rope_theta, c_.rotary_dim()}, x_heads);
        };
        rotate("self_attn.q_norm.weight", qkv.view().columns(0, q));
        rotate("self_attn.k_norm.weight", qkv.view().columns(q, kv));

        double const scale = 1 / std::sqrt(static_cast<double>(dim));
        if (attention_ == attention_by::gather) {
            tensor<Entry> keys(entry, rank, 2 * kv);
            cpx::map(keys.data()) = cpx::map(qkv.data().columns(q, 2 * kv));
            auto const all = move(relayout(entry, cpx::replicated<>(entry.ranks(), entry.batch()), rank), keys);
            attention(rank, qkv.view().columns(0, q), all.view().columns(0, kv), all.view().columns(kv, kv), heads,
                      scale, o.view());
        } else {
            cpx::section const query{heads.query_heads, dim}, key{heads.key_heads, dim};
            cpx::head_sharded<> const split(entry.ranks(), entry.batch(), {query, key, key});
            cpx::head_sharded<> const split_o(entry.ranks(), entry.batch(), {query});
            auto const part = move(relayout(entry, split, rank), qkv);
            cpx::index const q_part = split.heads(rank, heads.query_heads).size() * dim;
            cpx::index const kv_part = split.heads(rank, heads.key_heads).size() * dim;
            tensor<cpx::head_sharded<>> o_part(split, rank, q_part);
            attention(rank, part.view().columns(0, q_part), part.view().columns(q_part, kv_part),
                      part.view().columns(q_part + kv_part, kv_part), heads, scale, o_part.view());
            exchange(relayout(split_o, entry, rank), cpx::sharded(o_part.data(), split_o), o.view(), comm_);
        }
        for (cpx::index row = 0; row < o.data().count(); ++row)
            for (cpx::index j = 0; j < q; ++j)
                o.data()(row, j) *= cpx::sigmoid(q_and_gate.data()(row, (j / dim * 2 + 1) * dim + j % dim));
        tensor<Entry> y = x;
        cpx::linear<T>(o.data(), model_.weight(name(layer, "self_attn.o_proj.weight")), y.data());
        add(y.data(), h.data());
    }

    void mlp(cpx::index layer, cpx::rows<T> h) const {
        std::size_t const count = static_cast<std::size_t>(h.count()), hidden = static_cast<std::size_t>(h.width());
        std::size_t const wide = static_cast<std::size_t>(c_.intermediate_size);
        std::vector<T> x_values(count * hidden), gate_values(count * wide), up_values(count * wide);
        cpx::rows<T> const x(x_values.data(), h.count(), h.width());
        cpx::rows<T> const gate(gate_values.data(), h.count(), c_.intermediate_size),
            up(up_values.data(), h.count(), c_.intermediate_size);
        rms_norm<T>(h, model_.gain(name(layer, "post_attention_layernorm.weight")), static_cast<T>(c_.rms_norm_eps),
                    T(1), x);
        cpx::linear<T>(x, model_.weight(name(layer, "mlp.gate_proj.weight")), gate);
        cpx::linear<T>(x, model_.weight(name(layer, "mlp.up_proj.weight")), up);
        silu_mul<T>(gate, up, gate);
        cpx::linear<T>(gate, model_.weight(name(layer, "mlp.down_proj.weight")), x);
        add(x, h);
    }

    tensor<Entry> log_probabilities(tensor<Entry> const& h, std::vector<cpx::index> const& labels) const {
        auto const x = norm("model.norm.weight", h);
        tensor<Entry> logits(h.sharding(), comm_.rank(), c_.vocab_size), result(h.sharding(), comm_.rank(), 1);
        cpx::linear<T>(x.data(), model_.head(), logits.data());
        for (cpx::index row = 0; row < logits.data().count(); ++row) {
            cpx::index const label = labels[static_cast<std::size_t>(row)];
            T const* const z = logits.data().row(row);
            T const highest = *std::max_element(z, z + c_.vocab_size);
            T sum = 0;
            for (cpx::index j = 0; j < c_.vocab_size; ++j) sum += std::exp(z[j] - highest);
            if (label >= 0) result.data()(row, 0) = z[label] - highest - std::log(sum);
        }
        return result;
    }

    checkpoint<T> const& model_;
    cpx::qwen3_5_config const& c_;
    attention_by attention_;
    delta_net const& net_;
    Comm& comm_;
    cpx::relayout_plan<Entry, Linear> to_linear_;
    cpx::relayout_plan<Linear, Entry> to_entry_;
};

} // namespace qwen3_5
