// SPDX-License-Identifier: Apache-2.0
// The blocks that mix tokens: full attention and linear attention.
#pragma once

#include "site.hpp"

#include <cmath>

namespace qwen {

/// Returns the weights of the gated delta net in a layer.
template <class T>
cpx::gated_delta_net_weights<T> delta_net_weights(checkpoint<T> const& model, cpx::index_t layer) {
    auto const w = [&](char const* name) { return model.weight(layer_name(layer, "linear_attn.") + name); };
    return {w("in_proj_qkv.weight"),
            w("in_proj_z.weight"),
            w("in_proj_b.weight"),
            w("in_proj_a.weight"),
            w("conv1d.weight"),
            w("A_log"),
            w("dt_bias"),
            w("norm.weight"),
            w("out_proj.weight")};
}

/// h += linear_attention(norm(h)), by `net`, which knows on which sharding its recurrence runs.
template <class Site, class Net>
typename Site::backward linear_attention(Site& at, Net const& net, cpx::index_t layer, typename Site::tensor& h) {
    using T = typename Site::element;
    auto const norm = layer_name(layer, "input_layernorm.weight");
    auto const before = h;
    auto x = h, y = h;
    at.norm(norm, h.view(), x.view());
    typename Net::template saved_of<T> saved;
    net(delta_net_weights(at.model, layer), x.view(), y.view(), at.comm, {{}, &saved});
    at.add(y.data(), h.data());

    return [=, &at, &net, saved = std::move(saved)](typename Site::tensor& dh) mutable {
        auto dx = at.make(x.width());
        cpx::gated_delta_net_gradients<T, typename Site::sharding_type> to{dx.view(), {}, at.sums.order()};
        for_each_parameter(to.weights, net.config(), [&](char const* name, auto& gradient, auto...) {
            gradient = at.grads.of(layer_name(layer, "linear_attn.") + name);
        });
        gated_delta_net_backward(net, delta_net_weights(at.model, layer), std::as_const(x).view(), saved,
                                 std::as_const(dh).view(), to, at.comm);
        at.norm_backward(norm, before.view(), dx.view(), dx.view());
        at.add(dx.data(), dh.data());
    };
}

/// Where tokens are, which every layer of full attention asks, and what turns their queries and keys by it.
template <class T, class S>
struct rotation {
    cpx::sharded_positions<S> positions;
    cpx::rotary_pairs<T> pairs;
};

/// h += full_attention(norm(h)): norms and rotary embedding of q and k, attention, an output gate if the model has one,
/// a projection.
template <class Site>
class full_attention {
    using T = typename Site::element;
    using S = typename Site::sharding_type;
    using tensor = typename Site::tensor;
    using by_heads = cpx::head_sharded<>;

public:
    full_attention(Site& at, attention_by how, rotation<T, S> const& turn, cpx::index_t layer)
        : at_(at), how_(how), turn_(turn), layer_(layer), gate_(at.model.config.attn_output_gate),
          heads_{at.model.config.num_attention_heads, at.model.config.num_key_value_heads, at.model.config.head_dim},
          dim_(heads_.dim), projected_(gate_ ? 2 * dim_ : dim_), q_(heads_.query_heads * dim_),
          kv_(heads_.key_heads * dim_), scale_(1 / std::sqrt(static_cast<double>(dim_))),
          split_(at.sharding.ranks(), at.sharding.batch(),
                 {{heads_.query_heads, dim_}, {heads_.key_heads, dim_}, {heads_.key_heads, dim_}}),
          split_o_(at.sharding.ranks(), at.sharding.batch(), {{heads_.query_heads, dim_}}) {}

    typename Site::backward operator()(tensor& h) const {
        saved s{h,
                h,
                at_.make(heads_.query_heads * projected_),
                at_.make(q_ + 2 * kv_),
                at_.make(q_ + 2 * kv_),
                at_.make(q_),
                {},
                {},
                {},
                {}};
        auto y = h;
        at_.norm(name("input_layernorm.weight"), h.view(), s.x.view());
        at_.linear(name("self_attn.q_proj.weight"), s.x.view(), s.q_and_gate.view());
        at_.linear(name("self_attn.k_proj.weight"), s.x.view(), s.raw.view().columns(q_, kv_));
        at_.linear(name("self_attn.v_proj.weight"), s.x.view(), s.raw.view().columns(q_ + kv_, kv_));
        for (cpx::index_t head = 0; head < heads_.query_heads; ++head) // q_proj gives its query, then its gate, if any
            cpx::as_matrix(s.raw.data().columns(head * dim_, dim_)) =
                cpx::as_matrix(s.q_and_gate.data().columns(head * projected_, dim_));
        s.qkv = s.raw;
        for (auto const& [weight, first, width] : normed()) {
            auto const some = s.qkv.view().columns(first, width);
            at_.norm(weight, some, some);
            cpx::rotary(turn_.positions, typename Site::const_view(some), dim_, turn_.pairs, some);
        }
        if (how_ == attention_by::gather)
            attend_gathered(s);
        else
            attend_by_heads(s);
        auto gated = s.o;
        each_gate(
            s, [&](T& o, T gate) { o *= cpx::sigmoid(gate); }, gated);
        at_.linear(name("self_attn.o_proj.weight"), gated.view(), y.view());
        at_.add(y.data(), h.data());
        return
            [block = *this, s = std::move(s), gated = std::move(gated)](tensor& dh) { block.backward(s, gated, dh); };
    }

private:
    struct saved {
        tensor before, x, q_and_gate, raw, qkv, o; ///< raw: q, k, v before norms and rotation
        std::vector<T> lse;
        std::optional<cpx::tensor<T, cpx::replicated<>>> keys;
        std::optional<cpx::tensor<T, by_heads>> split, o_split;
    };
    struct normed_columns {
        std::string weight;
        cpx::index_t first, width;
    };

    std::string name(char const* suffix) const { return layer_name(layer_, suffix); }
    std::vector<normed_columns> normed() const {
        return {{name("self_attn.q_norm.weight"), 0, q_}, {name("self_attn.k_norm.weight"), q_, kv_}};
    }
    /// Calls `f(o, gate)` for every element of `o`, if there are gates.
    template <class F>
    void each_gate(saved const& s, F&& f, tensor& o) const {
        for (cpx::index_t row = 0; gate_ && row < o.data().count(); ++row)
            for (cpx::index_t j = 0; j < q_; ++j)
                f(o.data()(row, j), s.q_and_gate.data()(row, j / dim_ * projected_ + dim_ + j % dim_));
    }
    template <class Q>
    cpx::rows<T> lse(std::vector<T>& values, cpx::tensor<T, Q> const& of, cpx::index_t query_heads) const {
        values.resize(static_cast<std::size_t>(of.data().count() * query_heads));
        return {values.data(), of.data().count(), query_heads};
    }

    void attend_gathered(saved& s) const {
        cpx::replicated<> const everywhere(at_.sharding.ranks(), at_.sharding.batch());
        auto keys = at_.make(2 * kv_);
        cpx::as_matrix(keys.data()) = cpx::as_matrix(s.qkv.data().columns(q_, 2 * kv_));
        s.keys = exchange(keys, everywhere, at_.comm);
        attention(s.qkv.view().columns(0, q_), s.keys->view().columns(0, kv_), s.keys->view().columns(kv_, kv_), heads_,
                  scale_, s.o.view(), lse(s.lse, s.o, heads_.query_heads));
    }

    void attend_by_heads(saved& s) const {
        int const rank = at_.rank();
        s.split = exchange(s.qkv, split_, at_.comm);
        auto const [q, k] = widths();
        s.o_split.emplace(split_o_, rank, q);
        auto const all = s.split->view();
        attention(all.columns(0, q), all.columns(q, k), all.columns(q + k, k), heads_, scale_,
                  cpx::sharded(s.o_split->data(), split_, rank), lse(s.lse, *s.o_split, q / dim_));
        exchange(relayout(split_o_, at_.sharding, rank), s.o_split->view(), s.o.view(), at_.comm);
    }
    /// Returns the columns of q, and of k, that this rank holds by heads.
    std::pair<cpx::index_t, cpx::index_t> widths() const {
        return {split_.heads(at_.rank(), heads_.query_heads).size() * dim_,
                split_.heads(at_.rank(), heads_.key_heads).size() * dim_};
    }

    void backward(saved const& s, tensor const& gated, tensor& dh) const {
        auto d_o = at_.make(q_), dqkv = at_.make(q_ + 2 * kv_), dq_and_gate = s.q_and_gate, dx = at_.make(dh.width());
        at_.linear_backward(name("self_attn.o_proj.weight"), at_.whole(gated.view()), dh.view(), d_o.view());
        auto dgate = d_o;
        for (cpx::index_t row = 0; row < s.o.data().count(); ++row)
            for (cpx::index_t j = 0; j < q_; ++j) dgate.data()(row, j) *= s.o.data()(row, j);
        each_gate(
            s, [&](T& d, T gate) { d = cpx::sigmoid_backward(gate, d); }, dgate);
        each_gate(
            s, [&](T& d, T gate) { d *= cpx::sigmoid(gate); }, d_o);

        if (how_ == attention_by::gather)
            attend_gathered_backward(s, d_o, dqkv);
        else
            attend_by_heads_backward(s, d_o, dqkv);
        for (auto const& [weight, first, width] : normed()) {
            auto const some = dqkv.view().columns(first, width);
            cpx::rotary_backward(turn_.positions, typename Site::const_view(some), dim_, turn_.pairs, some);
            at_.norm_backward(weight, s.raw.view().columns(first, width), some, some);
        }
        for (cpx::index_t head = 0; head < heads_.query_heads; ++head) {
            auto const query = dq_and_gate.data().columns(head * projected_, projected_);
            cpx::as_matrix(query.columns(0, dim_)) = cpx::as_matrix(dqkv.data().columns(head * dim_, dim_));
            if (gate_)
                cpx::as_matrix(query.columns(dim_, dim_)) = cpx::as_matrix(dgate.data().columns(head * dim_, dim_));
        }
        auto const whole = at_.whole(s.x.view());
        at_.linear_backward(name("self_attn.q_proj.weight"), whole, dq_and_gate.view(), dx.view());
        at_.linear_backward(name("self_attn.k_proj.weight"), whole, dqkv.view().columns(q_, kv_), dx.view());
        at_.linear_backward(name("self_attn.v_proj.weight"), whole, dqkv.view().columns(q_ + kv_, kv_), dx.view());
        at_.norm_backward(name("input_layernorm.weight"), s.before.view(), dx.view(), dx.view());
        at_.add(dx.data(), dh.data());
    }

    /// dq where the queries live. dk and dv: where the keys live, from all queries, if sums are to be in the order of
    /// the batch; else from this rank's queries for all keys, and the transposed gather adds the ranks.
    void attend_gathered_backward(saved const& s, tensor const& d_o, tensor& dqkv) const {
        int const rank = at_.rank();
        cpx::index_t const n = heads_.query_heads;
        cpx::replicated<> const everywhere(at_.sharding.ranks(), at_.sharding.batch());
        auto of_queries = at_.make(2 * q_ + 2 * n); // q, dout, lse, delta
        auto const all = of_queries.view();
        cpx::as_matrix(all.data().columns(0, q_)) = cpx::as_matrix(s.qkv.data().columns(0, q_));
        cpx::as_matrix(all.data().columns(q_, q_)) = cpx::as_matrix(d_o.data());
        cpx::as_matrix(all.data().columns(2 * q_, n)) = cpx::as_matrix(cpx::rows<T const>(s.lse, n));
        attention_delta(s.o.view(), d_o.view(), dim_, all.columns(2 * q_ + n, n));
        auto const queries = [&]<class Q>(cpx::sharded<T const, Q> const& x) {
            return cpx::attention_queries<T, Q>{x.columns(0, q_), x.columns(q_, q_), x.columns(2 * q_, n),
                                                x.columns(2 * q_ + n, n)};
        };
        auto const own = queries(std::as_const(of_queries).view());
        auto const gathered_k = s.keys->view().columns(0, kv_), gathered_v = s.keys->view().columns(kv_, kv_);
        attention_backward_queries(own, gathered_k, gathered_v, heads_, scale_, dqkv.view().columns(0, q_));

        auto const gather = relayout(at_.sharding, everywhere, rank);
        auto const dk = dqkv.view().columns(q_, kv_), dv = dqkv.view().columns(q_ + kv_, kv_);
        if (at_.sums.moves()) {
            auto const everyones = exchange(gather, of_queries, at_.comm);
            attention_backward_keys(queries(everyones.view()), s.qkv.view().columns(q_, kv_),
                                    s.qkv.view().columns(q_ + kv_, kv_), heads_, scale_, dk, dv, at_.comm);
        } else {
            cpx::tensor<T, cpx::replicated<>> shares(everywhere, rank, 2 * kv_);
            attention_backward_keys(own, gathered_k, gathered_v, heads_, scale_, shares.view().columns(0, kv_),
                                    shares.view().columns(kv_, kv_), at_.comm);
            exchange(gather.transposed(), shares.view(), dqkv.view().columns(q_, 2 * kv_), at_.comm);
        }
    }

    void attend_by_heads_backward(saved const& s, tensor const& d_o, tensor& dqkv) const {
        int const rank = at_.rank();
        auto const [q, k] = widths();
        cpx::index_t const n = q / dim_;
        auto const d_split = exchange(d_o, split_o_, at_.comm);
        cpx::tensor<T, by_heads> numbers(split_, rank, n), dsplit(split_, rank, q + 2 * k);
        cpx::sharded<T const, by_heads> const dout(d_split.data(), split_, rank), o(s.o_split->data(), split_, rank),
            lse(cpx::rows<T const>(s.lse, n), split_, rank);
        attention_delta(o, dout, dim_, numbers.view());
        auto const all = s.split->view();
        cpx::attention_queries<T, by_heads> const own{all.columns(0, q), dout, lse, numbers.view()};
        auto const keys = all.columns(q, k), values = all.columns(q + k, k);
        attention_backward_queries(own, keys, values, heads_, scale_, dsplit.view().columns(0, q));
        attention_backward_keys(own, keys, values, heads_, scale_, dsplit.view().columns(q, k),
                                dsplit.view().columns(q + k, k), at_.comm);
        exchange(relayout(split_, at_.sharding, rank), dsplit.view(), dqkv.view(), at_.comm);
    }

    Site& at_;
    attention_by how_;
    rotation<T, S> const& turn_;
    cpx::index_t layer_;
    bool gate_;
    cpx::attention_heads heads_;
    cpx::index_t dim_, projected_, q_, kv_; ///< projected_: what q_proj gives a head
    double scale_;
    by_heads split_, split_o_;
};

} // namespace qwen
