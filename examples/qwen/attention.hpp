// SPDX-License-Identifier: Apache-2.0
// Full attention under context parallelism: keys and values gathered on every rank, or everything by heads.
#pragma once

#include "tape.hpp"

#include <cpx/ops/attention_backward.hpp>
#include <cpx/ops/mrope.hpp>

#include <cmath>

namespace qwen {

using positions = cpx::sharded_positions<entry_sharding>;

/// Returns a layer's attention(x): projections, norms of q and k, `attend(q, k, v)`, which may write to q and k, and an
/// output gate if the model has one.
template <class X>
X attention_layer(auto& at, index_t layer, X const& x, auto const& attend) {
    auto const& config = at.rank.model.config;
    auto const name = [&](char const* suffix) { return layer_name(layer, "self_attn.") + suffix; };
    auto const v = at.linear(name("v_proj.weight"), x), k_of_x = at.linear(name("k_proj.weight"), x),
               q_and_gate = at.linear(name("q_proj.weight"), x);
    auto const columns = [&](index_t first) { // q_proj gives each head its query, then its gate
        return at.take_heads(q_and_gate, first, (config.gated() ? 2 : 1) * *config.head_dim, *config.head_dim);
    };
    auto const q = at.norm(name("q_norm.weight"), columns(0)), k = at.norm(name("k_norm.weight"), k_of_x);
    X o = attend(q, k, v);
    if (config.gated()) o = at.open(o, columns(*config.head_dim));
    return at.linear(name("o_proj.weight"), o);
}

/// h + attention(norm(h)), with a rotary embedding. Made once a batch, for all layers.
template <class R>
class full_attention {
    using S = entry_sharding;
    using T = typename R::element;
    using M = typename R::memory_type;
    using var = typename tape<R>::template var<S>;
    template <class Q>
    using queries = cpx::attention_queries<T, Q, M>;

public:
    full_attention(tape<R>& at, S const& where, attention_by how, positions const& of_rows)
        : at_(at), how_(how), positions_(of_rows),
          heads_{*at.rank.model.config.num_attention_heads, *at.rank.model.config.num_key_value_heads,
                 *at.rank.model.config.head_dim, true, at.rank.attention_engine()},
          split_(where.ranks(), where.batch(), {of_queries(), of_keys(), of_keys()}),
          gather_(relayout(where, cpx::replicated<>(where.ranks(), where.batch()), rank())),
          there_(relayout(where, split_, rank())), home_(relayout(split_, where, rank())),
          back_(relayout(cpx::head_sharded<>(where.ranks(), where.batch(), {of_queries()}), where, rank())),
          again_(relayout(where, back_.from, rank())) {}

    var operator()(index_t layer, var const& h) {
        auto const x = at_.norm(layer_name(layer, "input_layernorm.weight"), h);
        auto const attend = [this](var const& q, var const& k, var const& v) {
            for (auto const& y : {q, k}) rotate(y);
            return how_ == attention_by::gather ? gathered(q, at_.join({k, v})) : by_heads(at_.join({q, k, v}));
        };
        return at_.sum(h, attention_layer(at_, layer, x, attend));
    }

private:
    cpx::section of_queries() const { return {heads_.query_heads, heads_.dim}; }
    cpx::section of_keys() const { return {heads_.key_heads, heads_.dim}; }
    int rank() const { return at_.rank.rank(); }
    double scale() const { return 1 / std::sqrt(static_cast<double>(heads_.dim)); }

    /// In place: nothing reads what a norm has written but this.
    void rotate(var const& x) {
        at_.rank.rotary(positions_, x->view(), false);
        at_.back([=, this] { at_.rank.rotary(positions_, x->grad(), true); });
    }

    /// Returns the keys, or the values, of rows that end with both.
    auto keys(auto const& x, index_t of_queries = 0) const {
        return x.columns(of_queries, (x.data().width() - of_queries) / 2);
    }
    auto values(auto const& x, index_t of_queries = 0) const {
        return x.columns((x.data().width() + of_queries) / 2, (x.data().width() - of_queries) / 2);
    }

    /// Attention of what is where it is wanted. `dq()`: where the gradient of q goes; `back_keys(queries)` computes
    /// those of k and v. Both hold what the views are of.
    template <class Q, class K, class Dq, class Back>
    auto attend(cpx::sharded<T, Q, M> const& q, K const& k, K const& v, Dq const& dq, Back const& back_keys) {
        auto const o = at_.make(q.sharding(), q.data().width());
        auto const lse = at_.wide_beside(o, o->width() / heads_.dim);
        cpx::attention(q, k, v, heads_, scale(), o->view(), lse->data());
        at_.back([=, this] {
            auto const delta = at_.wide_beside(o, lse->width());
            cpx::attention_delta(o->view(), o->grad(), heads_.dim, delta->view());
            queries<Q> const own{q, o->grad(), lse->view(), delta->view()};
            cpx::attention_backward_queries(own, k, v, heads_, scale(), dq());
            back_keys(own);
            at_.rank.ended();
        });
        return o;
    }
    template <class From, class X>
    void back_keys(From const& from, X const& x, X const& dx, index_t of_queries = 0) const {
        cpx::attention_backward_keys(from, keys(x, of_queries), values(x, of_queries), heads_, scale(),
                                     keys(dx, of_queries), values(dx, of_queries), at_.rank.comm);
    }

    /// dk and dv: where the keys live, from all queries, if sums are to be in the order of the batch; else from this
    /// rank's queries for all keys, and the transposed gather adds the ranks.
    var gathered(var const& q, var const& kv) {
        using everyones = typename tape<R>::template tensor<cpx::replicated<>>;
        auto const all = std::make_shared<everyones>(at_.moved(gather_, kv->value));
        auto const from = [=, this](queries<S> const& own) {
            if (at_.sums(kv->value.sharding()).moves()) {
                auto const whole = [&](auto const& x) { return exchange(gather_, x, at_.rank.comm); };
                auto of_q = whole(own.q), dout = whole(own.dout);
                auto lse = whole(own.lse), delta = whole(own.delta);
                queries<cpx::replicated<>> const of_all{of_q, dout, lse, delta};
                back_keys(of_all, kv->view(), kv->grad());
            } else {
                auto shares = cpx::make_tensor<T>(gather_.to, rank(), kv->width(), at_.rank.memory());
                back_keys(own, all->view(), shares.view());
                exchange(gather_.transposed(), shares, kv->grad(), at_.rank.comm);
            }
        };
        return attend(
            q->view(), keys(all->view()), values(all->view()), [q] { return q->grad(); }, from);
    }

    var by_heads(var const& qkv) {
        auto const all = at_.move(there_, home_, qkv);
        index_t const of_q = split_.heads(rank(), heads_.query_heads).size() * heads_.dim;
        auto const q = [=, this](auto const& x) {
            return cpx::sharded(x.data().columns(0, of_q), back_.from, rank(), at_.rank.memory());
        };
        auto const from = [=, this](queries<cpx::head_sharded<>> const& own) {
            this->back_keys(own, all->view(), all->grad(), of_q);
        };
        return at_.move(back_, again_,
                        attend(
                            q(all->view()), keys(all->view(), of_q), values(all->view(), of_q),
                            [=] { return q(all->grad()); }, from));
    }

    tape<R>& at_;
    attention_by how_;
    positions const& positions_;
    cpx::attention_heads heads_;
    cpx::head_sharded<> split_;
    cpx::relayout_plan<S, cpx::replicated<>> gather_;
    cpx::relayout_plan<S, cpx::head_sharded<>> there_;
    cpx::relayout_plan<cpx::head_sharded<>, S> home_, back_;
    cpx::relayout_plan<S, cpx::head_sharded<>> again_;
};

} // namespace qwen
