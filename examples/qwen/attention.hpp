// SPDX-License-Identifier: Apache-2.0
// Full attention under context parallelism: keys and values gathered on every rank, or everything by heads.
#pragma once

#include "site.hpp"

#include <cpx/ops/attention_backward.hpp>
#include <cpx/ops/mrope.hpp>

#include <cmath>
#include <optional>

namespace qwen {

using positions = cpx::sharded_positions<entry_sharding>;

/// h += full_attention(norm(h)): norms and rotary embedding of q and k, attention, an output gate if the model has one,
/// a projection.
template <class R>
class full_attention {
    using S = entry_sharding;
    using T = typename R::element;
    using M = typename R::memory_type;
    using place = site<R, S>;
    using tensor = typename place::tensor;
    using by_heads = cpx::head_sharded<>;
    template <class Q>
    using on = cpx::tensor<T, Q, M>;

public:
    full_attention(place& at, attention_by how, positions const& where, index_t layer)
        : at_(at), how_(how), positions_(where), layer_(layer), gate_(at.rank.model.config.attn_output_gate),
          heads_{at.rank.model.config.num_attention_heads, at.rank.model.config.num_key_value_heads,
                 at.rank.model.config.head_dim},
          dim_(heads_.dim), projected_(gate_ ? 2 * dim_ : dim_), q_(heads_.query_heads * dim_),
          kv_(heads_.key_heads * dim_), scale_(1 / std::sqrt(static_cast<double>(dim_))),
          split_(at.sharding.ranks(), at.sharding.batch(),
                 {{heads_.query_heads, dim_}, {heads_.key_heads, dim_}, {heads_.key_heads, dim_}}),
          split_o_(at.sharding.ranks(), at.sharding.batch(), {{heads_.query_heads, dim_}}) {}

    typename place::backward operator()(tensor& h) const {
        auto const s = std::make_shared<saved>(*this, h);
        at_.norm(name("input_layernorm.weight"), h, s->x);
        at_.linear(name("self_attn.q_proj.weight"), s->x, s->q_and_gate);
        at_.linear(name("self_attn.k_proj.weight"), s->x, s->raw.view().columns(q_, kv_));
        at_.linear(name("self_attn.v_proj.weight"), s->x, s->raw.view().columns(q_ + kv_, kv_));
        auto const take = [&](index_t first, cpx::rows<T> to) { // q_proj gives each head its query, then its gate
            auto const from = s->q_and_gate.data().columns(first, heads_.query_heads * projected_ - first);
            at_.each(rowwise::copy_heads<T>{from, projected_, to, dim_, dim_}, q_);
        };
        take(0, s->raw.data().columns(0, q_));
        s->qkv = at_.copy(s->raw);
        for (auto const& [weight, first, width] : normed()) {
            auto const some = s->qkv.view().columns(first, width);
            at_.norm(weight, some, some);
            at_.rank.rotary(positions_, some, false);
        }
        how_ == attention_by::gather ? attend_gathered(*s) : attend_by_heads(*s);
        if (gate_) {
            take(dim_, s->gate.data());
            at_.each(rowwise::open<T>{s->o.data(), s->gate.data(), s->gated.data()}, q_);
        }
        auto y = at_.make(h.width());
        at_.linear(name("self_attn.o_proj.weight"), gate_ ? s->gated : s->o, y);
        at_.add(y, h);
        return [block = *this, s](tensor& dh) { block.backward(*s, dh); };
    }

private:
    struct saved {
        saved(full_attention const& of, tensor const& h)
            : before(of.at_.copy(h)), x(of.at_.make(h.width())),
              q_and_gate(of.at_.make(of.heads_.query_heads * of.projected_)), raw(of.at_.make(of.q_ + 2 * of.kv_)),
              qkv(of.at_.make(0)), o(of.at_.make(of.q_)), gate(of.at_.make(of.gate_ ? of.q_ : 0)),
              gated(of.at_.make(of.gate_ ? of.q_ : 0)), lse(of.at_.make(of.heads_.query_heads)) {}
        tensor before, x, q_and_gate, raw, qkv, o, gate, gated, lse; ///< raw: q, k, v before norms and rotation
        std::optional<on<cpx::replicated<>>> keys;
        std::optional<on<by_heads>> split, o_split, lse_split;
    };
    struct normed_columns {
        std::string weight;
        index_t first, width;
    };

    std::string name(char const* suffix) const { return layer_name(layer_, suffix); }
    std::vector<normed_columns> normed() const {
        return {{name("self_attn.q_norm.weight"), 0, q_}, {name("self_attn.k_norm.weight"), q_, kv_}};
    }
    int rank() const { return at_.rank.rank(); }
    cpx::replicated<> everywhere() const { return {at_.sharding.ranks(), at_.sharding.batch()}; }
    template <class Q>
    on<Q> make(Q const& sharding, index_t width) const {
        return {sharding, rank(), width, at_.rank.memory()};
    }
    /// Copies columns to those of a tensor that moves as a whole.
    void put(cpx::rows<T const> from, cpx::rows<T> to) const {
        at_.each(rowwise::take_rows<T>{from, nullptr, to}, to.width());
    }

    void attend_gathered(saved& s) const {
        auto keys = at_.make(2 * kv_);
        put(s.qkv.data().columns(q_, 2 * kv_), keys.data());
        s.keys = at_.move(relayout(at_.sharding, everywhere(), rank()), keys);
        auto const all = std::as_const(*s.keys).view();
        at_.rank.attention(s.qkv.view().columns(0, q_), all.columns(0, kv_), all.columns(kv_, kv_), heads_, scale_,
                           s.o.view(), s.lse.data());
    }
    void attend_by_heads(saved& s) const {
        s.split = at_.move(relayout(at_.sharding, split_, rank()), s.qkv);
        auto const [q, k] = widths();
        s.o_split = make(split_, q);
        s.lse_split = make(split_, q / dim_);
        auto const all = s.split->view();
        at_.rank.attention(all.columns(0, q), all.columns(q, k), all.columns(q + k, k), heads_, scale_,
                           s.o_split->view(), s.lse_split->data());
        at_.move(relayout(split_o_, at_.sharding, rank()), of_output(*s.o_split), s.o);
    }
    /// Returns the columns of q, and of k, that this rank holds by heads.
    std::pair<index_t, index_t> widths() const {
        return {split_.heads(rank(), heads_.query_heads).size() * dim_,
                split_.heads(rank(), heads_.key_heads).size() * dim_};
    }
    /// The heads of q alone are sharded as those of q, k and v.
    template <class X>
    auto of_output(X& x) const {
        return cpx::sharded(x.data(), split_o_, rank(), at_.rank.memory());
    }

    void backward(saved const& s, tensor& dh) const {
        auto d_o = at_.make(q_), dqkv = at_.make(q_ + 2 * kv_), dq_and_gate = at_.make(s.q_and_gate.width()),
             dx = at_.make(dh.width());
        at_.linear_backward(name("self_attn.o_proj.weight"), at_.whole(gate_ ? s.gated : s.o), dh, d_o);
        auto const give = [&](cpx::rows<T const> from, index_t first) {
            auto const to = dq_and_gate.data().columns(first, dq_and_gate.width() - first);
            at_.each(rowwise::copy_heads<T>{from, dim_, to, projected_, dim_}, q_);
        };
        if (gate_) {
            auto dgate = at_.make(q_);
            at_.each(rowwise::sum_heads<T>{s.o.data(), d_o.data(), 1, dgate.data()}, q_);
            at_.each(rowwise::sigmoid_backward<T>{s.gate.data(), dgate.data()}, q_);
            at_.each(rowwise::open<T>{d_o.data(), s.gate.data(), d_o.data()}, q_);
            give(dgate.data(), dim_);
        }
        how_ == attention_by::gather ? attend_gathered_backward(s, d_o, dqkv) : attend_by_heads_backward(s, d_o, dqkv);
        for (auto const& [weight, first, width] : normed()) {
            auto const some = dqkv.view().columns(first, width);
            at_.rank.rotary(positions_, some, true);
            at_.norm_backward(weight, s.raw.view().columns(first, width), some, some);
        }
        give(dqkv.data().columns(0, q_), 0);
        auto const whole = at_.whole(s.x);
        at_.linear_backward(name("self_attn.q_proj.weight"), whole, dq_and_gate, dx);
        at_.linear_backward(name("self_attn.k_proj.weight"), whole, dqkv.view().columns(q_, kv_), dx);
        at_.linear_backward(name("self_attn.v_proj.weight"), whole, dqkv.view().columns(q_ + kv_, kv_), dx);
        at_.norm_backward(name("input_layernorm.weight"), s.before, dx, dx);
        at_.add(dx, dh);
    }

    /// dq where the queries live. dk and dv: where the keys live, from all queries, if sums are to be in the order of
    /// the batch; else from this rank's queries for all keys, and the transposed gather adds the ranks.
    void attend_gathered_backward(saved const& s, tensor const& d_o, tensor& dqkv) const {
        index_t const n = heads_.query_heads;
        auto of_queries = at_.make(2 * q_ + 2 * n); // q, dout, lse, delta
        auto const all = of_queries.data();
        put(s.qkv.data().columns(0, q_), all.columns(0, q_));
        put(d_o.data(), all.columns(q_, q_));
        put(s.lse.data(), all.columns(2 * q_, n));
        at_.each(rowwise::sum_heads<T>{s.o.data(), d_o.data(), dim_, all.columns(2 * q_ + n, n)}, n);
        auto const queries = [&]<class Q>(cpx::sharded<T const, Q, M> const& x) {
            return cpx::attention_queries<T, Q, M>{x.columns(0, q_), x.columns(q_, q_), x.columns(2 * q_, n),
                                                   x.columns(2 * q_ + n, n)};
        };
        auto const own = queries(std::as_const(of_queries).view());
        auto const k = s.keys->view().columns(0, kv_), v = s.keys->view().columns(kv_, kv_);
        at_.rank.attention_backward_queries(own, k, v, heads_, scale_, dqkv.view().columns(0, q_));

        auto const gather = relayout(at_.sharding, everywhere(), rank());
        auto const dk = dqkv.view().columns(q_, kv_), dv = dqkv.view().columns(q_ + kv_, kv_);
        if (at_.sums.moves()) {
            auto const everyones = at_.move(gather, of_queries);
            at_.rank.attention_backward_keys(queries(everyones.view()), s.qkv.view().columns(q_, kv_),
                                             s.qkv.view().columns(q_ + kv_, kv_), heads_, scale_, dk, dv);
        } else {
            auto shares = make(everywhere(), 2 * kv_);
            at_.rank.attention_backward_keys(own, k, v, heads_, scale_, shares.view().columns(0, kv_),
                                             shares.view().columns(kv_, kv_));
            at_.move(gather.transposed(), shares, dqkv.view().columns(q_, 2 * kv_));
        }
        at_.rank.ended();
    }

    void attend_by_heads_backward(saved const& s, tensor const& d_o, tensor& dqkv) const {
        auto const [q, k] = widths();
        index_t const n = q / dim_;
        auto const d_split = at_.move(relayout(at_.sharding, split_o_, rank()), d_o);
        auto delta = make(split_, n), dsplit = make(split_, q + 2 * k);
        at_.rank.each(delta.data().count(), n,
                      rowwise::sum_heads<T>{s.o_split->data(), d_split.data(), dim_, delta.data()});
        cpx::sharded<T const, by_heads, M> const dout(d_split.data(), split_, rank(), at_.rank.memory());
        auto const all = s.split->view();
        cpx::attention_queries<T, by_heads, M> const own{all.columns(0, q), dout, s.lse_split->view(),
                                                         std::as_const(delta).view()};
        auto const keys = all.columns(q, k), values = all.columns(q + k, k);
        at_.rank.attention_backward_queries(own, keys, values, heads_, scale_, dsplit.view().columns(0, q));
        at_.rank.attention_backward_keys(own, keys, values, heads_, scale_, dsplit.view().columns(q, k),
                                         dsplit.view().columns(q + k, k));
        at_.move(relayout(split_, at_.sharding, rank()), dsplit, dqkv);
    }

    place& at_;
    attention_by how_;
    positions const& positions_;
    index_t layer_;
    bool gate_;
    cpx::attention_heads heads_;
    index_t dim_, projected_, q_, kv_; ///< projected_: what q_proj gives a head
    double scale_;
    by_heads split_, split_o_;
};

} // namespace qwen
