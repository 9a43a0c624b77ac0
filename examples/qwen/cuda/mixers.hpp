// SPDX-License-Identifier: Apache-2.0
// The blocks that mix tokens, on a GPU: full attention and linear attention.
#pragma once

#include "attention.cuh"
#include "site.hpp"

#include <cpx/cuda/rotary.hpp>
#include <cpx/ops/cuda/conv_exchange.hpp>
#include <cpx/ops/cuda/gated_delta_rule.hpp>
#include <cpx/ops/local/rotary.hpp>
#include <cpx/ops/sections.hpp>

#include <array>
#include <optional>

namespace qwen::gpu {

/// Returns the sections of the rows that the recurrence reads: q, k, v, b, a.
inline std::vector<cpx::section> delta_sections(cpx::qwen_config const& c) {
    cpx::section const key{c.linear_num_key_heads, c.linear_key_head_dim}, gate{c.linear_num_value_heads, 1};
    return {key, key, {c.linear_num_value_heads, c.linear_value_head_dim}, gate, gate};
}
inline index_t width(std::vector<cpx::section> const& sections) {
    index_t all = 0;
    for (cpx::section const& s : sections) all += s.heads * s.width;
    return all;
}

/// The convolution, the gates and the delta rule on the sharding S, of the heads that this rank holds.
template <class How, cpx::any_sharding S>
class delta_mixer {
public:
    /// Collective.
    delta_mixer(site& at, S const& where)
        : at_(at), where_(where), heads_(heads(at.config)), q_(held(heads_.key_heads) * heads_.key_dim),
          values_(held(heads_.value_heads)), v_(values_ * heads_.value_dim),
          halo_(halo(where, at.rank(), at.config.linear_conv_kernel_dim - 1)), plan_(cpx::carry<How>(where, at.rank())),
          conv_(met(at, halo_), qkv(), at.comm, in()), states_(at.device), mixed_(where.rows(at.rank()), qkv()),
          gates_(where.rows(at.rank()), 2 * values_) {
        at.meet();
        cpx::state_shape const shape{values_, heads_.key_dim, heads_.value_dim};
        states_.prepare(plan_, shape);
        index_t const state = shape.state_width(), map = shape.map_width();
        for (index_t k = 0; k < plan_.steps; ++k)
            if constexpr (std::same_as<How, cpx::scan>)
                each_ += tally_of(plan_.step(k, cpx::side::before, state, map), plan_.row_width(state, map));
            else
                each_ += tally_of(plan_.step(k, cpx::side::before), state);
        for (cpx::layer_type const type : at.config.layer_types)
            own_.push_back(type == cpx::layer_type::linear_attention ? own_weights(std::ssize(own_)) : of_heads());
    }

    /// Columns of what the recurrence reads and writes on this rank.
    index_t in() const { return qkv() + 2 * values_; }
    index_t out() const { return v_; }

    /// x: (rows, in()), dense; o: (rows, out()).
    void operator()(index_t layer, rows<float> x, rows<float> o) {
        of_heads const& own = own_[static_cast<std::size_t>(layer)];
        rows<float const> const conv_weight(own.conv.data(), qkv(), conv_.plan().taps());
        cpx::cuda::causal_conv1d(conv_, at(x.columns(0, qkv())), conv_weight, {}, cpx::activation::silu,
                                 at(mixed_.view()));
        auto const g = gates_.columns(0, values_), beta = gates_.columns(values_, values_);
        delta_rule_gates(x.columns(qkv(), values_), x.columns(qkv() + values_, values_), own.A_log.data(),
                         own.dt_bias.data(), g, beta, at_.stream);
        auto const q = at(mixed_.columns(0, q_)), k = at(mixed_.columns(q_, q_)), v = at(mixed_.columns(2 * q_, v_));
        cpx::delta_rule_tensors<float, S, cpx::cuda::memory> const t{q, k, v, at(g), at(beta), at(o)};
        gated_delta_rule(plan_, t, heads_, {}, states_);
        at_.sent += tally_of(halo_, qkv());
        at_.states += each_;
    }

private:
    /// A layer's weights of the channels and heads that this rank holds.
    struct of_heads {
        cpx::cuda::buffer<float> conv, A_log, dt_bias;
    };
    static cpx::delta_rule_heads heads(cpx::qwen_config const& c) {
        return {c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim};
    }
    index_t held(index_t heads) const { return where_.heads(at_.rank(), heads).size(); }
    index_t qkv() const { return 2 * q_ + v_; }
    cpx::sharded<float, S, cpx::cuda::memory> at(rows<float> x) const {
        return {x, where_, at_.rank(), at_.device.memory()};
    }
    of_heads own_weights(index_t layer) const {
        auto const all = delta_sections(at_.config);
        auto const own = [&](char const* name, std::span<cpx::section const> of) {
            auto const weight = at_.on_host(layer_name(layer, "linear_attn.") + name);
            return upload(cpx::local_rows(where_, at_.rank(), of, weight));
        };
        return {own("conv1d.weight", std::span(all).first(3)), own("A_log", std::span(all).last(1)),
                own("dt_bias", std::span(all).last(1))};
    }

    site& at_;
    S where_;
    cpx::delta_rule_heads heads_;
    index_t q_, values_, v_; ///< columns of q, value heads, and their columns, of this rank
    cpx::halo_plan<S> halo_;
    cpx::carry_plan<How, S> plan_;
    cpx::cuda::conv_exchange<float, S> conv_;
    cpx::cuda::state_exchange states_;
    cpx::tally each_; ///< states that a layer sends
    device_rows<float> mixed_, gates_;
    std::vector<of_heads> own_; ///< of every layer, empty of another kind
};

/// h += linear_attention(norm(h)), whose recurrence runs on `Mix`: where h is, or by heads.
template <class How, cpx::any_sharding Mix>
class linear_attention {
public:
    /// `count`: rows of h. Collective.
    linear_attention(site& at, index_t count, Mix const& mix)
        : at_(at), mixer_(at, mix), x_(count, at.config.hidden_size),
          projected_(count, width(delta_sections(at.config))), z_(count, values()), o_(count, values()) {
        if constexpr (Mix::every_row)
            moved_.emplace(at, mix, Mix(mix.ranks(), mix.batch(), {delta_sections(at.config)[2]}), mixer_.in(),
                           mixer_.out());
    }

    void operator()(index_t layer, rows<float> h) {
        auto const name = [&](char const* suffix) { return layer_name(layer, "linear_attn.") + suffix; };
        index_t const heads = at_.config.linear_num_value_heads, qkv = projected_.view().width() - 2 * heads;
        at_.norm(layer_name(layer, "input_layernorm.weight"), h, x_);
        at_.linear(name("in_proj_qkv.weight"), x_, projected_.columns(0, qkv));
        at_.linear(name("in_proj_b.weight"), x_, projected_.columns(qkv, heads));
        at_.linear(name("in_proj_a.weight"), x_, projected_.columns(qkv + heads, heads));
        at_.linear(name("in_proj_z.weight"), x_, z_);
        if (moved_) {
            moved_->there(projected_, moved_->x);
            mixer_(layer, moved_->x, moved_->o);
            moved_->home(moved_->o, o_);
        } else {
            mixer_(layer, projected_, o_);
        }
        gated_rms_norm(o_, z_, at_.weight(name("norm.weight")).data(), at_.config.linear_value_head_dim, at_.eps(), o_,
                       at_.stream);
        at_.linear(name("out_proj.weight"), o_, x_);
        at_.add(x_, h);
    }

private:
    index_t values() const { return at_.config.linear_num_value_heads * at_.config.linear_value_head_dim; }

    /// All tokens and the heads of this rank, and the way there.
    struct by_heads {
        movement there, home;
        device_rows<float> x, o;

        by_heads(site& at, Mix const& mix, Mix const& back, index_t in, index_t out)
            : there(at, relayout(at.sharding, mix, at.rank())), home(at, relayout(back, at.sharding, at.rank())),
              x(mix.rows(at.rank()), in), o(mix.rows(at.rank()), out) {}
    };

    site& at_;
    delta_mixer<How, Mix> mixer_;
    std::optional<by_heads> moved_;
    device_rows<float> x_, projected_, z_, o_;
};

/// h += full_attention(norm(h)): norms and rotary embedding of q and k, attention, an output gate, a projection.
class full_attention {
    using by_heads = cpx::head_sharded<>;

public:
    /// Collective.
    full_attention(site& at, attention_by how)
        : at_(at), query_heads_(at.config.num_attention_heads), key_heads_(at.config.num_key_value_heads),
          dim_(at.config.head_dim), q_(query_heads_ * dim_), kv_(key_heads_ * dim_),
          split_(ranks(), batch(), {{query_heads_, dim_}, {key_heads_, dim_}, {key_heads_, dim_}}),
          split_o_(ranks(), batch(), {{query_heads_, dim_}}), pairs_(frequencies()),
          positions_(segments(at.sharding, at.rank())), x_(at.make(at.config.hidden_size)),
          q_and_gate_(at.make(2 * q_)), qkv_(at.make(q_ + 2 * kv_)), o_(at.make(q_)) {
        if (how == attention_by::gather) {
            cpx::replicated<> const everywhere(ranks(), batch());
            gather_.emplace(at, relayout(at.sharding, everywhere, at.rank()), 2 * kv_, q_ + 2 * kv_);
            everyones_.emplace(batch().tokens(), 2 * kv_);
            seen_ = seen(segments(at.sharding, at.rank()));
        } else {
            queries_ = split_.heads(at.rank(), query_heads_);
            keys_ = split_.heads(at.rank(), key_heads_);
            there_.emplace(at, relayout(at.sharding, split_, at.rank()));
            home_.emplace(at, relayout(split_o_, at.sharding, at.rank()));
            everyones_.emplace(batch().tokens(), (queries_.size() + 2 * keys_.size()) * dim_);
            o_split_.emplace(batch().tokens(), queries_.size() * dim_);
            seen_ = seen(segments(split_, at.rank()));
        }
    }

    void operator()(index_t layer, rows<float> h) {
        auto const name = [&](char const* suffix) { return layer_name(layer, suffix); };
        auto const q = qkv_.columns(0, q_), k = qkv_.columns(q_, kv_), v = qkv_.columns(q_ + kv_, kv_);
        at_.norm(name("input_layernorm.weight"), h, x_);
        at_.linear(name("self_attn.q_proj.weight"), x_, q_and_gate_);
        at_.linear(name("self_attn.k_proj.weight"), x_, k);
        at_.linear(name("self_attn.v_proj.weight"), x_, v);
        take_queries(q_and_gate_, dim_, q, at_.stream);
        at_.norm(name("self_attn.q_norm.weight"), q, q);
        at_.norm(name("self_attn.k_norm.weight"), k, k);
        std::array<cpx::cuda::rotated<float>, 2> const both{{{q, q}, {k, k}}};
        cpx::cuda::rotary<float>(both, dim_, pairs_, positions_, at_.stream);
        gather_ ? attend_gathered() : attend_by_heads();
        sigmoid_gate(q_and_gate_, dim_, o_, at_.stream);
        at_.linear(name("self_attn.o_proj.weight"), o_, x_);
        at_.add(x_, h);
    }

private:
    int ranks() const { return at_.sharding.ranks(); }
    cpx::thd const& batch() const { return at_.sharding.batch(); }

    /// As transformers computes them, in float.
    std::vector<double> frequencies() const {
        auto const list = cpx::rotary_frequencies<float>({at_.config.rope_theta, at_.config.rotary_dim()});
        return {list.begin(), list.end()};
    }
    /// Returns, for every row of these segments, the keys up to its own token.
    cpx::cuda::buffer<seen_keys> seen(std::vector<cpx::segment> const& of) const {
        std::vector<seen_keys> list;
        for (cpx::segment const& s : of)
            for (index_t i = 0; i < s.count; ++i) {
                index_t const first = batch().offset(s.sequence);
                list.push_back({first, first + s.token + i});
            }
        return upload(list);
    }

    void attend(rows<float const> q, rows<float const> k, rows<float const> v, rows<float> o) const {
        attention_tensors t;
        t.q = q;
        t.k = k;
        t.v = v;
        t.o = o;
        t.seen = seen_.data();
        t.dim = dim_;
        t.first_query = queries_.first;
        t.first_key = keys_.first;
        t.group = query_heads_ / key_heads_;
        t.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim_)));
        attention(t, at_.stream);
    }
    void attend_gathered() {
        (*gather_)(qkv_.columns(q_, 2 * kv_), *everyones_);
        attend(qkv_.columns(0, q_), everyones_->columns(0, kv_), everyones_->columns(kv_, kv_), o_);
    }
    void attend_by_heads() {
        index_t const q = queries_.size() * dim_, k = keys_.size() * dim_;
        (*there_)(qkv_, *everyones_);
        attend(everyones_->columns(0, q), everyones_->columns(q, k), everyones_->columns(q + k, k), *o_split_);
        (*home_)(*o_split_, o_);
    }

    site& at_;
    index_t query_heads_, key_heads_, dim_, q_, kv_;
    by_heads split_, split_o_;
    cpx::range queries_, keys_; ///< the heads of this rank; gathered, all of them: they begin at 0
    cpx::cuda::rotary_pairs pairs_;
    cpx::cuda::segment_table positions_;
    cpx::cuda::buffer<seen_keys> seen_;
    device_rows<float> x_, q_and_gate_, qkv_, o_;           ///< rows of this rank
    std::optional<movement> gather_, there_, home_;         ///< the first alone, or the other two
    std::optional<device_rows<float>> everyones_, o_split_; ///< all tokens: keys and values, or q, k, v by heads
};

} // namespace qwen::gpu
