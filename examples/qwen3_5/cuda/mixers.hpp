// SPDX-License-Identifier: Apache-2.0
// The blocks that mix tokens, on a GPU: full attention and linear attention by heads.
#pragma once

#include "attention.cuh"
#include "delta_rule.cuh"
#include "site.hpp"

#include <cpx/cuda/conv_exchange.hpp>
#include <cpx/cuda/rotary.hpp>
#include <cpx/ops/local/rotary.hpp>
#include <cpx/ops/sections.hpp>

#include <array>
#include <optional>

namespace qwen3_5::gpu {

/// h += linear_attention(norm(h)): the recurrence runs by heads, so that it needs neither halo nor carry.
class linear_attention {
    using by_heads = cpx::head_sharded<>;

public:
    /// Collective.
    explicit linear_attention(site& at)
        : at_(at), sections_(sections(at.config)), out_{sections_[2]}, key_(sections_[0]), value_(sections_[2]),
          mix_(at.sharding.ranks(), at.sharding.batch(), sections_),
          back_(at.sharding.ranks(), at.sharding.batch(), out_), keys_(mix_.heads(at.rank(), key_.heads)),
          values_(mix_.heads(at.rank(), value_.heads)), q_(keys_.size() * key_.width),
          v_(values_.size() * value_.width), there_(at, relayout(at.sharding, mix_, at.rank())),
          home_(at, relayout(back_, at.sharding, at.rank())),
          conv_(halo(mix_, at.rank(), at.config.linear_conv_kernel_dim - 1), 2 * q_ + v_, at.comm),
          offsets_(at.sharding.batch().offsets()), x_(at.make(at.config.hidden_size)),
          projected_(at.make(width(sections_))), z_(at.make(width(out_))), o_(at.make(width(out_))),
          local_(tokens(), 2 * q_ + v_ + 2 * values_.size()), mixed_(tokens(), 2 * q_ + v_),
          gates_(tokens(), 2 * values_.size()), local_o_(tokens(), v_) {
        index_t layer = 0;
        for (cpx::layer_type const type : at.config.layer_types) {
            if (type == cpx::layer_type::linear_attention) own_.emplace(layer, own_weights(layer));
            ++layer;
        }
    }

    void operator()(index_t layer, rows<float> h) {
        auto const name = [&](char const* suffix) { return layer_name(layer, "linear_attn.") + suffix; };
        index_t const heads = value_.heads, qkv = projected_.view().width() - 2 * heads;
        at_.norm(layer_name(layer, "input_layernorm.weight"), h, x_);
        at_.linear(name("in_proj_qkv.weight"), x_, projected_.columns(0, qkv));
        at_.linear(name("in_proj_b.weight"), x_, projected_.columns(qkv, heads));
        at_.linear(name("in_proj_a.weight"), x_, projected_.columns(qkv + heads, heads));
        at_.linear(name("in_proj_z.weight"), x_, z_);
        there_(projected_, local_);
        recur(own_.at(layer));
        home_(local_o_, o_);
        gated_rms_norm(o_, z_, at_.weight(name("norm.weight")).data(), value_.width, at_.eps(), o_, at_.stream);
        at_.linear(name("out_proj.weight"), o_, x_);
        at_.add(x_, h);
    }

private:
    /// A layer's weights of the channels and heads that this rank holds.
    struct of_heads {
        cpx::cuda::buffer<float> conv, A_log, dt_bias;
    };
    /// Returns the sections of the rows that the recurrence reads: q, k, v, b, a.
    static std::vector<cpx::section> sections(cpx::qwen3_5_config const& c) {
        cpx::section const key{c.linear_num_key_heads, c.linear_key_head_dim}, gate{c.linear_num_value_heads, 1};
        return {key, key, {c.linear_num_value_heads, c.linear_value_head_dim}, gate, gate};
    }
    static index_t width(std::vector<cpx::section> const& sections) {
        index_t all = 0;
        for (cpx::section const& s : sections) all += s.heads * s.width;
        return all;
    }
    index_t tokens() const { return at_.sharding.batch().tokens(); }

    of_heads own_weights(index_t layer) const {
        auto const own = [&](char const* name, std::span<cpx::section const> of) {
            auto const weight = at_.on_host(layer_name(layer, "linear_attn.") + name);
            return upload(cpx::local_rows(mix_, at_.rank(), of, weight));
        };
        auto const all = std::span(sections_);
        return {own("conv1d.weight", all.first(3)), own("A_log", all.last(1)), own("dt_bias", all.last(1))};
    }

    /// The convolution, the gates and the delta rule of this rank's heads.
    void recur(of_heads const& own) {
        index_t const heads = values_.size(), qkv = 2 * q_ + v_;
        rows<float const> const conv_weight(own.conv.data(), qkv, conv_.plan().taps());
        cpx::cuda::memory const in(at_.stream);
        cpx::cuda::causal_conv1d(conv_, cpx::sharded(local_.columns(0, qkv), mix_, at_.rank(), in), conv_weight, {},
                                 cpx::activation::silu, cpx::sharded(mixed_.view(), mix_, at_.rank(), in));
        auto const g = gates_.columns(0, heads), beta = gates_.columns(heads, heads);
        delta_rule_gates(local_.columns(qkv, heads), local_.columns(qkv + heads, heads), own.A_log.data(),
                         own.dt_bias.data(), g, beta, at_.stream);
        delta_rule_tensors t;
        t.q = mixed_.columns(0, q_);
        t.k = mixed_.columns(q_, q_);
        t.v = mixed_.columns(2 * q_, v_);
        t.g = g;
        t.beta = beta;
        t.o = local_o_;
        t.offsets = offsets_.data();
        t.sequences = at_.sharding.batch().sequences();
        t.key_dim = key_.width;
        t.value_dim = value_.width;
        t.first_value = values_.first;
        t.first_key = keys_.first;
        t.group = value_.heads / key_.heads;
        t.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(t.key_dim)));
        gated_delta_rule(t, at_.stream);
    }

    site& at_;
    std::vector<cpx::section> sections_, out_; ///< of what the recurrence reads, and writes
    cpx::section key_, value_;
    by_heads mix_, back_;
    cpx::range keys_, values_; ///< the heads of this rank
    index_t q_, v_;            ///< their columns of q, and of v
    movement there_, home_;
    cpx::cuda::conv_exchange<float, by_heads> conv_;
    cpx::cuda::buffer<index_t> offsets_;
    device_rows<float> x_, projected_, z_, o_;           ///< rows of this rank
    device_rows<float> local_, mixed_, gates_, local_o_; ///< all tokens, heads of this rank
    std::map<index_t, of_heads> own_;
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

} // namespace qwen3_5::gpu
