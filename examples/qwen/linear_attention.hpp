// SPDX-License-Identifier: Apache-2.0
// Linear attention under context parallelism: a gated delta net whose recurrence runs where its rows are, or by heads.
#pragma once

#include "site.hpp"

#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/gated_delta_net.hpp>
#include <cpx/ops/gated_delta_rule_backward.hpp>

#include <optional>

namespace qwen {

/// The rows of a weight of channels or heads that a rank holds, and where it adds their gradients: each but once.
template <class M>
struct held_rows {
    cpx::row_buffer<index_t, M> taken, owned;

    template <class S>
    held_rows(M const& memory, S const& sharding, int rank, std::span<cpx::section const> sections)
        : taken(memory, 0, 1), owned(memory, 0, 1) {
        std::vector<index_t> all;
        for (cpx::section const& s : sections)
            for (index_t row = 0; row < s.heads * s.width; ++row) all.push_back(std::ssize(all));
        auto list = cpx::local_rows(sharding, rank, sections, cpx::rows<index_t const>(all, 1));
        taken = list_of(memory, list);
        std::vector<index_t> const one(list.size(), 1);
        std::vector<index_t> speaks(all.size());
        cpx::add_local_rows(sharding, rank, sections, cpx::rows<index_t const>(one, 1), cpx::rows<index_t>(speaks, 1));
        for (index_t& row : list) row = speaks[static_cast<std::size_t>(row)] ? row : -1;
        owned = list_of(memory, list);
    }
};

/// h += linear_attention(norm(h)) of rows on `S`, whose recurrence runs on `Mix`: the same, or by heads. Made once a
/// batch, for all layers. On the host `cpx::gated_delta_net` is this without the norm, in one call.
template <class R, cpx::any_sharding S, cpx::any_sharding Mix>
class linear_attention {
    using T = typename R::element;
    using M = typename R::memory_type;
    using place = site<R, S>;
    using tensor = typename place::tensor;
    using mixed = cpx::tensor<T, Mix, M>;
    using recurrence = cpx::delta_rule_tensors<T, Mix, M>;
    using recurrence_gradients = cpx::delta_rule_gradient_tensors<T, Mix, M>;

public:
    template <cpx::carry_kind How>
    linear_attention(place& at, How, Mix const& mix)
        : at_(at), by_(at.rank, at.grads, mix, at.sums.order()),
          config_(delta_net_config(at.rank.model.config, at.rank.chunk)),
          before_(halo(mix, at.rank.rank(), config_.kernel - 1)),
          after_(halo(mix, at.rank.rank(), config_.kernel - 1, cpx::side::after)), sections_(config_.sections()),
          channels_(at.rank.memory(), mix, at.rank.rank(), std::span(sections_).first(3)),
          of_heads_(at.rank.memory(), mix, at.rank.rank(), std::span(sections_).last(1)),
          values_(mix.heads(at.rank.rank(), config_.heads.value_heads).size()),
          q_(mix.heads(at.rank.rank(), config_.heads.key_heads).size() * config_.heads.key_dim),
          v_(values_ * config_.heads.value_dim), qkv_(2 * q_ + v_) {
        auto const carry = cpx::carry<How>(mix, at.rank.rank());
        recur_ = [this, carry](recurrence const& t) {
            gated_delta_rule(carry, t, config_.heads, options(), at_.rank.carrier());
            at_.rank.ended_states(carry, cpx::state_shape{values_, config_.heads.key_dim, config_.heads.value_dim});
        };
        recur_backward_ = [this, carry](recurrence const& t, recurrence_gradients const& to) {
            gated_delta_rule_backward(carry, t, to, config_.heads, options(), at_.rank.carrier());
            at_.rank.ended();
        };
    }

    linear_attention(linear_attention const&) = delete;
    linear_attention& operator=(linear_attention const&) = delete;

    typename place::backward operator()(index_t layer, tensor& h) const {
        index_t const heads = config_.heads.value_heads, v = heads * config_.heads.value_dim;
        auto const s = std::make_shared<saved>(*this, h, v);
        auto projected = at_.make(2 * config_.heads.key_heads * config_.heads.key_dim + v + 2 * heads);
        index_t const conv = projected.width() - 2 * heads;
        at_.norm(layer_name(layer, "input_layernorm.weight"), h, s->x);
        at_.linear(name(layer, "in_proj_qkv.weight"), s->x, projected.view().columns(0, conv));
        at_.linear(name(layer, "in_proj_b.weight"), s->x, projected.view().columns(conv, heads));
        at_.linear(name(layer, "in_proj_a.weight"), s->x, projected.view().columns(conv + heads, heads));
        at_.linear(name(layer, "in_proj_z.weight"), s->x, s->z);
        if constexpr (Mix::every_row) {
            s->projected = at_.move(relayout(at_.sharding, by_.sharding, at_.rank.rank()), projected);
            auto o = by_.make(v_);
            mix(layer, *s, o);
            at_.move(relayout(by_output(), at_.sharding, at_.rank.rank()), of_output(o), s->o);
        } else {
            s->projected = std::move(projected);
            mix(layer, *s, s->o);
        }
        at_.rank.norm(s->o.data(), s->z.data(), at_.rank.weight(name(layer, "norm.weight")), s->normed.data());
        auto y = at_.make(h.width());
        at_.linear(name(layer, "out_proj.weight"), s->normed, y);
        at_.add(y, h);
        return [this, layer, s](tensor& dh) { backward(layer, *s, dh); };
    }

private:
    struct saved {
        saved(linear_attention const& of, tensor const& h, index_t v)
            : before(of.at_.copy(h)), x(of.at_.make(h.width())), z(of.at_.make(v)), o(of.at_.make(v)),
              normed(of.at_.make(v)), projected(of.by_.make(0)), convolved(of.by_.make(of.qkv_)),
              gates(of.by_.make(2 * of.values_)) {}
        tensor before, x, z, o, normed;
        mixed projected, convolved, gates; ///< gates: g, then beta
        cpx::delta_rule_saved<T, M> states;
    };

    static std::string name(index_t layer, char const* suffix) { return layer_name(layer, "linear_attn.") + suffix; }
    cpx::head_sharded<> by_output() const {
        return {at_.sharding.ranks(), at_.sharding.batch(), config_.output_sections()};
    }
    template <class X>
    auto of_output(X& x) const {
        return cpx::sharded(x.data(), by_output(), at_.rank.rank(), at_.rank.memory());
    }
    /// Returns this rank's rows of a weight.
    cpx::row_buffer<T, M> held(index_t layer, char const* suffix, held_rows<M> const& rows) const {
        auto const weight = at_.rank.weight(name(layer, suffix));
        auto const list = rows.taken.view();
        cpx::row_buffer<T, M> made(at_.rank.memory(), list.count(), weight.width());
        at_.rank.each(list.count(), weight.width(), rowwise::take_rows<T>{weight, list.data(), made.view()});
        return made;
    }
    void add_held(index_t layer, char const* suffix, held_rows<M> const& rows, cpx::rows<T const> from) const {
        auto const to = at_.grads.of(name(layer, suffix));
        at_.rank.each(1, to.width(), rowwise::add_rows<T>{from, rows.owned.view().data(), to});
    }
    recurrence tensors(saved& s, cpx::sharded<T, Mix, M> const& o) const {
        auto const x = s.convolved.view(), gates = s.gates.view();
        return {x.columns(0, q_),
                x.columns(q_, q_),
                x.columns(2 * q_, v_),
                gates.columns(0, values_),
                gates.columns(values_, values_),
                o,
                {},
                {},
                &s.states};
    }
    cpx::delta_rule_options options() const { return {.chunk = config_.chunk, .qk_l2norm = true}; }

    /// The convolution, the gates and the delta rule: what needs neighbours.
    void mix(index_t layer, saved& s, mixed& o) const {
        auto const conv = held(layer, "conv1d.weight", channels_);
        causal_conv1d(before_, s.projected.view().columns(0, qkv_), conv.view(), {}, cpx::activation::silu, s.convolved,
                      at_.rank.comm);
        at_.rank.ended(before_, qkv_);
        auto const A_log = held(layer, "A_log", of_heads_), dt_bias = held(layer, "dt_bias", of_heads_);
        auto const b = s.projected.data().columns(qkv_, values_),
                   a = s.projected.data().columns(qkv_ + values_, values_);
        by_.each(rowwise::delta_gates<T>{b, a, A_log.view(), dt_bias.view(), s.gates.data().columns(0, values_),
                                         s.gates.data().columns(values_, values_)},
                 values_);
        recur_(tensors(s, o.view()));
    }

    /// From the gradient of o to that of `projected`, and the weights' shares.
    void mix_backward(index_t layer, saved& s, mixed const& dout, mixed& dprojected) const {
        auto dx = by_.make(qkv_), dgates = by_.make(2 * values_), unused = by_.make(v_), terms = by_.make(2 * values_);
        auto const d = dx.view(), dg = dgates.view();
        recur_backward_(tensors(s, unused.view()),
                        {dout.view(), d.columns(0, q_), d.columns(q_, q_), d.columns(2 * q_, v_),
                         dg.columns(0, values_), dg.columns(values_, values_)});
        auto const A_log = held(layer, "A_log", of_heads_), dt_bias = held(layer, "dt_bias", of_heads_);
        auto const in = [&](auto const& x, index_t first) { return x.columns(qkv_ + first, values_); };
        by_.each(rowwise::delta_gates_backward<T>{in(s.projected.data(), 0), in(s.projected.data(), values_),
                                                  A_log.view(), dt_bias.view(), dg.data().columns(0, values_),
                                                  dg.data().columns(values_, values_), in(dprojected.data(), 0),
                                                  in(dprojected.data(), values_), terms.data()},
                 values_);
        cpx::row_buffer<T, M> sums(at_.rank.memory(), 2 * values_, 1);
        by_.add_terms(terms, sums.view());
        add_held(layer, "A_log", of_heads_, sums.view().sub(0, values_));
        add_held(layer, "dt_bias", of_heads_, sums.view().sub(values_, values_));

        auto const conv = held(layer, "conv1d.weight", channels_);
        cpx::row_buffer<T, M> dconv(at_.rank.memory(), qkv_, config_.kernel);
        auto const x = std::as_const(s).projected.view().columns(0, qkv_);
        at_.rank.conv_backward(before_, after_, x, conv.view(), std::as_const(dx).view(),
                               dprojected.view().columns(0, qkv_), dconv.view(), by_.sums);
        at_.rank.ended();
        add_held(layer, "conv1d.weight", channels_, dconv.view());
    }

    void backward(index_t layer, saved& s, tensor& dh) const {
        auto dnormed = at_.make(s.o.width()), dz = at_.make(s.o.width()), dx = at_.make(dh.width());
        at_.linear_backward(name(layer, "out_proj.weight"), at_.whole(s.normed), dh, dnormed);
        auto const gain = at_.rank.weight(name(layer, "norm.weight"));
        auto terms = at_.make(gain.width()), dout = at_.make(s.o.width());
        at_.rank.norm_backward(s.o.data(), s.z.data(), gain, dnormed.data(), dout.data(), dz.data(), terms.data());
        at_.add_terms(terms, at_.grads.of(name(layer, "norm.weight")));

        index_t const heads = config_.heads.value_heads;
        index_t const conv = 2 * config_.heads.key_heads * config_.heads.key_dim + heads * config_.heads.value_dim;
        auto dprojected = at_.make(conv + 2 * heads);
        if constexpr (Mix::every_row) {
            auto const moved = at_.move(relayout(at_.sharding, by_output(), at_.rank.rank()), dout);
            auto here = by_.make(v_), dhere = by_.make(s.projected.width());
            by_.each(rowwise::take_rows<T>{moved.data(), nullptr, here.data()}, here);
            mix_backward(layer, s, here, dhere);
            at_.move(relayout(by_.sharding, at_.sharding, at_.rank.rank()), dhere, dprojected);
        } else {
            mix_backward(layer, s, dout, dprojected);
        }
        auto const in = at_.whole(s.x);
        at_.linear_backward(name(layer, "in_proj_z.weight"), in, dz, dx);
        at_.linear_backward(name(layer, "in_proj_qkv.weight"), in, dprojected.view().columns(0, conv), dx);
        at_.linear_backward(name(layer, "in_proj_b.weight"), in, dprojected.view().columns(conv, heads), dx);
        at_.linear_backward(name(layer, "in_proj_a.weight"), in, dprojected.view().columns(conv + heads, heads), dx);
        at_.norm_backward(layer_name(layer, "input_layernorm.weight"), s.before, dx, dx);
        at_.add(dx, dh);
    }

    place& at_;
    site<R, Mix> by_;
    cpx::gated_delta_net_config config_;
    cpx::halo_plan<Mix> before_, after_;
    std::vector<cpx::section> sections_;
    held_rows<M> channels_, of_heads_;
    index_t values_, q_, v_, qkv_;                 ///< value heads, and columns of q, v and of all three, of this rank
    std::function<void(recurrence const&)> recur_; ///< by the carry, whose type nothing else need know
    std::function<void(recurrence const&, recurrence_gradients const&)> recur_backward_;
};

} // namespace qwen
