// SPDX-License-Identifier: Apache-2.0
// Full attention under context parallelism: keys and values gathered on every rank, or everything by heads.
#pragma once

#include "tape.hpp"

#include <cpx/ops/attention_backward.hpp>
#include <cpx/ops/mrope.hpp>

#include <cmath>

namespace qwen {

using positions = cpx::sharded_positions<entry_sharding>;

/// h + full_attention(norm(h)): norms and rotary embedding of q and k, attention, an output gate if the model has one,
/// a projection. Made once a batch, for all layers.
template <class R>
class full_attention {
    using S = entry_sharding;
    using T = typename R::element;
    using M = typename R::memory_type;
    using var = typename tape<R>::template var<S>;
    using by_heads = cpx::head_sharded<>;
    template <class Q>
    using queries = cpx::attention_queries<T, Q, M>;

public:
    full_attention(tape<R>& at, S const& where, attention_by how, positions const& of_rows)
        : at_(at), how_(how), positions_(of_rows), gated_(at.rank.model.config.attn_output_gate),
          heads_{at.rank.model.config.num_attention_heads, at.rank.model.config.num_key_value_heads,
                 at.rank.model.config.head_dim},
          q_(heads_.query_heads * heads_.dim), kv_(heads_.key_heads * heads_.dim),
          scale_(1 / std::sqrt(static_cast<double>(heads_.dim))),
          split_(where.ranks(), where.batch(), {of_queries(), of_keys(), of_keys()}),
          gather_(relayout(where, cpx::replicated<>(where.ranks(), where.batch()), rank())),
          there_(relayout(where, split_, rank())), home_(relayout(split_, where, rank())),
          back_(relayout(by_heads(where.ranks(), where.batch(), {of_queries()}), where, rank())),
          again_(relayout(where, back_.from, rank())) {}

    var operator()(index_t layer, var const& h) {
        auto const name = [&](char const* suffix) { return layer_name(layer, "self_attn.") + suffix; };
        auto const x = at_.norm(layer_name(layer, "input_layernorm.weight"), h);
        auto const v = at_.linear({name("v_proj.weight")}, x), k_of_x = at_.linear({name("k_proj.weight")}, x),
                   q_and_gate = at_.linear({name("q_proj.weight")}, x);
        auto const part = [&](index_t first) { // q_proj gives each head its query, then its gate
            return at_.take_heads(q_and_gate, first, gated_ ? 2 * heads_.dim : heads_.dim, heads_.dim);
        };
        auto const q = at_.norm(name("q_norm.weight"), part(0)), k = at_.norm(name("k_norm.weight"), k_of_x);
        rotate(q);
        rotate(k);
        auto o = how_ == attention_by::gather ? attend_gathered(q, at_.join({k, v})) : attend_by_heads(q, k, v);
        if (gated_) o = at_.open(o, part(heads_.dim));
        return at_.sum(h, at_.linear({name("o_proj.weight")}, o));
    }

private:
    cpx::section of_queries() const { return {heads_.query_heads, heads_.dim}; }
    cpx::section of_keys() const { return {heads_.key_heads, heads_.dim}; }
    int rank() const { return at_.rank.rank(); }

    /// In place: nothing reads what a norm has written but this.
    void rotate(var const& x) {
        at_.rank.rotary(positions_, x->view(), false);
        at_.back([=, this] { at_.rank.rotary(positions_, x->grad(), true); });
    }

    /// What the backward knows of queries: q, dout, lse and delta side by side, so that they move as one.
    template <class Q>
    queries<Q> queries_of(cpx::sharded<T, Q, M> const& all) const {
        index_t const n = heads_.query_heads;
        return {all.columns(0, q_), all.columns(q_, q_), all.columns(2 * q_, n), all.columns(2 * q_ + n, n)};
    }

    var attend_gathered(var const& q, var const& kv) {
        using gathered = typename tape<R>::template tensor<cpx::replicated<>>;
        auto const all = std::make_shared<gathered>(at_.moved(gather_, kv->value));
        auto const o = at_.beside(q, q_), lse = at_.beside(q, heads_.query_heads);
        at_.rank.attention(q->view(), all->view().columns(0, kv_), all->view().columns(kv_, kv_), heads_, scale_,
                           o->view(), lse->data());
        at_.back([=, this] {
            auto const own = at_.beside(q, 2 * q_ + 2 * lse->width());
            at_.copy(q->data(), own->data().columns(0, q_));
            at_.copy(o->grad().data(), own->data().columns(q_, q_));
            at_.copy(lse->data(), own->data().columns(2 * q_, lse->width()));
            auto const delta = own->data().columns(2 * q_ + lse->width(), lse->width());
            at_.each(delta, rowwise::attention_delta<T>{o->data(), o->grad().data(), delta});
            at_.rank.attention_backward_queries(queries_of(own->view()), all->view().columns(0, kv_),
                                                all->view().columns(kv_, kv_), heads_, scale_, q->grad());
            attend_gathered_backward(*own, *all, *kv);
        });
        return o;
    }
    /// dk and dv: where the keys live, from all queries, if sums are to be in the order of the batch; else from this
    /// rank's queries for all keys, and the transposed gather adds the ranks.
    template <class Gathered>
    void attend_gathered_backward(variable<T, S, M>& own, Gathered& all, variable<T, S, M>& kv) const {
        auto const from = [&](auto const& of, auto const& x, auto const& to) {
            at_.rank.attention_backward_keys(of, x.columns(0, kv_), x.columns(kv_, kv_), heads_, scale_,
                                             to.columns(0, kv_), to.columns(kv_, kv_));
        };
        if (at_.sums(kv.value.sharding()).moves()) {
            auto everyones = exchange(gather_, own.value, at_.rank.comm);
            at_.rank.ended();
            from(queries_of(everyones.view()), kv.view(), kv.grad());
        } else {
            auto shares = cpx::make_tensor<T>(gather_.to, rank(), 2 * kv_, at_.rank.memory());
            from(queries_of(own.view()), all.view(), shares.view());
            exchange(gather_.transposed(), shares, kv.grad(), at_.rank.comm);
        }
        at_.rank.ended();
    }

    var attend_by_heads(var const& q, var const& k, var const& v) {
        auto const all = at_.move(there_, home_, at_.join({q, k, v}));
        auto const o = at_.make(back_.from, split_.heads(rank(), heads_.query_heads).size() * heads_.dim),
                   lse = at_.make(split_, o->width() / heads_.dim);
        index_t const of_q = o->width(), of_k = (all->width() - of_q) / 2;
        auto const split = [this](auto const& x) { return cpx::sharded(x.data(), split_, rank(), at_.rank.memory()); };
        auto const keys = [=](auto const& x) { return x.columns(of_q, of_k); };
        auto const values = [=](auto const& x) { return x.columns(of_q + of_k, of_k); };
        at_.rank.attention(all->view().columns(0, of_q), keys(all->view()), values(all->view()), heads_, scale_,
                           split(o->view()), lse->data());
        at_.back([=, this] {
            auto const delta = at_.beside(lse, lse->width());
            at_.each(delta->data(), rowwise::attention_delta<T>{o->data(), o->grad().data(), delta->data()});
            auto const x = all->view(), dx = all->grad();
            queries<by_heads> const own{x.columns(0, of_q), split(o->grad()), lse->view(), delta->view()};
            at_.rank.attention_backward_queries(own, keys(x), values(x), heads_, scale_, dx.columns(0, of_q));
            at_.rank.attention_backward_keys(own, keys(x), values(x), heads_, scale_, keys(dx), values(dx));
            at_.rank.ended();
        });
        return at_.move(back_, again_, o);
    }

    tape<R>& at_;
    attention_by how_;
    positions const& positions_;
    bool gated_;
    cpx::attention_heads heads_;
    index_t q_, kv_;
    double scale_;
    by_heads split_;
    cpx::relayout_plan<S, cpx::replicated<>> gather_;
    cpx::relayout_plan<S, by_heads> there_;
    cpx::relayout_plan<by_heads, S> home_, back_;
    cpx::relayout_plan<S, by_heads> again_;
};

} // namespace qwen
