// SPDX-License-Identifier: Apache-2.0
// Linear attention under context parallelism: a gated delta net whose recurrence runs where its rows are, or by heads.
#pragma once

#include "mlp.hpp"

#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/gated_delta_net.hpp>
#include <cpx/ops/gated_delta_rule_backward.hpp>

namespace qwen {

/// Returns the sizes of the model's gated delta nets.
inline cpx::gated_delta_net_config delta_net_config(cpx::hf_config const& c, index_t chunk) {
    auto const size = [](auto const& of) { return of.value_or(0); }; // none where no layer has linear attention
    return {*c.hidden_size,
            {size(c.linear_num_key_heads), size(c.linear_num_value_heads), size(c.linear_key_head_dim),
             size(c.linear_value_head_dim)},
            size(c.linear_conv_kernel_dim),
            chunk,
            *c.rms_norm_eps};
}

/// The rows of a weight of channels or heads that a rank holds, and where it adds their gradients: each but once.
template <class R>
struct held_rows {
    typename tape<R>::list taken, owned;

    template <class S>
    held_rows(tape<R> const& at, S const& sharding, std::span<cpx::section const> sections) {
        std::vector<index_t> all;
        for (cpx::section const& s : sections)
            for (index_t row = 0; row < s.heads * s.width; ++row) all.push_back(std::ssize(all));
        int const rank = at.rank.rank();
        auto list = cpx::local_rows(sharding, rank, sections, cpx::rows<index_t const>(all, 1));
        taken = at.list_of(list);
        std::vector<index_t> const one(list.size(), 1);
        std::vector<index_t> speaks(all.size());
        cpx::add_local_rows(sharding, rank, sections, cpx::rows<index_t const>(one, 1), cpx::rows<index_t>(speaks, 1));
        for (index_t& row : list) row = speaks[static_cast<std::size_t>(row)] ? row : -1;
        owned = at.list_of(list);
    }
};

/// h + linear_attention(norm(h)) of rows on `S`, whose recurrence runs on `Mix`: the same, or by heads. Made once a
/// batch, for all layers. On the host `cpx::gated_delta_net` is this without the norm, in one call.
template <class R, cpx::any_sharding S, cpx::any_sharding Mix>
class linear_attention {
    using T = typename R::element;
    using W = cpx::wide<T>;
    using M = typename R::memory_type;
    using buffer = typename tape<R>::buffer;
    using var = typename tape<R>::template var<S>;
    using wide_buffer = typename tape<R>::wide_buffer;
    using mixed = typename tape<R>::template var<Mix>;
    using wide_mixed = typename tape<R>::template wide_var<Mix>;
    using recurrence = cpx::delta_rule_tensors<T, Mix, M>;
    using recurrence_gradients = cpx::delta_rule_gradient_tensors<T, Mix, M>;

public:
    template <cpx::carry_kind How>
    linear_attention(tape<R>& at, How, S const& where, Mix const& mix)
        : at_(at), config_(delta_net_config(at.rank.model.config, at.rank.chunk)), mix_(mix), output_(mix),
          before_(halo(mix, rank(), config_.kernel - 1)),
          after_(halo(mix, rank(), config_.kernel - 1, cpx::side::after)), sections_(config_.sections()),
          channels_(at, mix, std::span(sections_).first(3)), of_heads_(at, mix, std::span(sections_).last(1)),
          values_(mix.heads(rank(), config_.heads.value_heads).size()),
          q_(mix.heads(rank(), config_.heads.key_heads).size() * config_.heads.key_dim),
          v_(values_ * config_.heads.value_dim), qkv_(2 * q_ + v_) {
        divide(where);
        auto const carry = cpx::carry<How>(mix, rank());
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

    var operator()(index_t layer, var const& h) {
        auto const x = at_.norm(layer_name(layer, "input_layernorm.weight"), h);
        auto const in = at_.linear({name(layer, "in_proj_qkv.weight"), name(layer, "in_proj_b.weight"),
                                    name(layer, "in_proj_a.weight")},
                                   x),
                   z = at_.linear({name(layer, "in_proj_z.weight")}, x);
        var o;
        if constexpr (Mix::every_row)
            o = at_.move(moves_->back, moves_->again, mix(layer, at_.move(moves_->there, moves_->home, in)));
        else
            o = mix(layer, in);
        auto const normed = at_.norm(name(layer, "norm.weight"), o, z);
        return at_.sum(h, at_.linear({name(layer, "out_proj.weight")}, normed));
    }

private:
    struct four_moves {
        cpx::relayout_plan<S, Mix> there;
        cpx::relayout_plan<Mix, S> home, back;
        cpx::relayout_plan<S, Mix> again;
    };

    /// Prepares what moves rows to the recurrence and back, where that runs by heads.
    void divide(S const& where) {
        if constexpr (Mix::every_row) {
            output_ = Mix(where.ranks(), where.batch(), config_.output_sections());
            moves_ = four_moves{relayout(where, mix_, rank()), relayout(mix_, where, rank()),
                                relayout(output_, where, rank()), relayout(where, output_, rank())};
        }
    }
    static std::string name(index_t layer, char const* suffix) { return layer_name(layer, "linear_attn.") + suffix; }
    int rank() const { return at_.rank.rank(); }
    cpx::delta_rule_options options() const { return {.chunk = config_.chunk, .qk_l2norm = true}; }

    /// Returns this rank's rows of a weight.
    buffer held(index_t layer, char const* suffix, held_rows<R> const& rows) const {
        auto const weight = at_.rank.weight(name(layer, suffix));
        buffer made(at_.rank.memory(), rows.taken->count(), weight.width());
        gather_rows<T>(at_.rank.memory(), weight, at_.numbers(rows.taken), made.view());
        return made;
    }
    void add_held(index_t layer, char const* suffix, held_rows<R> const& rows, cpx::rows<W const> from) const {
        auto const to = at_.grads.of(name(layer, suffix));
        at_.each_column(to, rowwise::add_rows<W>{from, rows.owned->view().data(), to});
    }

    /// What needs neighbours: x, the projections of q, k, v, b and a on the recurrence's sharding, has one reader.
    mixed mix(index_t layer, mixed const& x) { return recur(convolve(layer, x), gate(layer, x)); }

    mixed convolve(index_t layer, mixed const& x) {
        auto const y = at_.make(mix_, qkv_);
        causal_conv1d(before_, x->view().columns(0, qkv_), held(layer, "conv1d.weight", channels_).view(), {},
                      cpx::activation::silu, y->view(), at_.rank.comm);
        at_.rank.ended(before_, qkv_);
        if (rank() == 0) at_.counted.halo(mix_, before_.reach, qkv_);
        at_.back([=, this] {
            auto const weight = held(layer, "conv1d.weight", channels_);
            wide_buffer dweight(at_.rank.memory(), qkv_, config_.kernel);
            cpx::causal_conv1d_gradients<T, Mix, M> const to{
                x->grad().columns(0, qkv_), dweight.view(), {}, at_.sums(mix_).order()};
            causal_conv1d_backward(before_, after_, x->view().columns(0, qkv_), weight.view(), {},
                                   cpx::activation::silu, y->grad(), to, at_.rank.comm);
            at_.rank.ended();
            add_held(layer, "conv1d.weight", channels_, dweight.view());
        });
        return y;
    }

    /// Returns g, then beta.
    wide_mixed gate(index_t layer, mixed const& x) {
        auto const y = at_.wide_beside(x, 2 * values_);
        auto const A_log = std::make_shared<buffer>(held(layer, "A_log", of_heads_)),
                   dt_bias = std::make_shared<buffer>(held(layer, "dt_bias", of_heads_));
        auto const first = [this](auto const& of, index_t from = 0) { return of.columns(from, values_); };
        auto const second = [this](auto const& of, index_t from = 0) { return of.columns(from + values_, values_); };
        at_.each(first(y->data()),
                 rowwise::delta_gates<T>{first(x->data(), qkv_), second(x->data(), qkv_), A_log->view(),
                                         dt_bias->view(), first(y->data()), second(y->data())});
        at_.back([=, this] {
            auto const terms = at_.wide_beside(y, 2 * values_);
            auto const d = y->grad().data();
            auto const dx = x->grad().data();
            at_.each(first(d), rowwise::delta_gates_backward<T>{first(x->data(), qkv_), second(x->data(), qkv_),
                                                                A_log->view(), dt_bias->view(), first(d), second(d),
                                                                first(dx, qkv_), second(dx, qkv_), terms->data()});
            wide_buffer sums(at_.rank.memory(), 2 * values_, 1);
            at_.add_terms(terms->value, sums.view());
            add_held(layer, "A_log", of_heads_, sums.view().sub(0, values_));
            add_held(layer, "dt_bias", of_heads_, sums.view().sub(values_, values_));
        });
        return y;
    }

    mixed recur(mixed const& x, wide_mixed const& gates) {
        auto const o = at_.make(output_, v_);
        auto const states = std::make_shared<cpx::delta_rule_saved<T, M>>();
        auto const as_mixed = [this](auto const& of) {
            return cpx::sharded(of.data(), mix_, rank(), at_.rank.memory());
        };
        auto const tensors = [=, this]() -> recurrence {
            auto const of = x->view();
            auto const g = gates->view();
            return {of.columns(0, q_),
                    of.columns(q_, q_),
                    of.columns(2 * q_, v_),
                    g.columns(0, values_),
                    g.columns(values_, values_),
                    as_mixed(o->view()),
                    {},
                    {},
                    states.get()};
        };
        recur_(tensors());
        at_.back([=, this] {
            auto const d = x->grad();
            auto const dg = gates->grad();
            recur_backward_(tensors(), {as_mixed(o->grad()), d.columns(0, q_), d.columns(q_, q_), d.columns(2 * q_, v_),
                                        dg.columns(0, values_), dg.columns(values_, values_)});
        });
        return o;
    }

    tape<R>& at_;
    cpx::gated_delta_net_config config_;
    Mix mix_, output_; ///< output_: of o where it moves, the same heads
    cpx::halo_plan<Mix> before_, after_;
    std::vector<cpx::section> sections_;
    held_rows<R> channels_, of_heads_;
    index_t values_, q_, v_, qkv_;                 ///< value heads, and columns of q, v and of all three, of this rank
    std::optional<four_moves> moves_;              ///< by heads
    std::function<void(recurrence const&)> recur_; ///< by the carry, whose type nothing else need know
    std::function<void(recurrence const&, recurrence_gradients const&)> recur_backward_;
};

/// Runs layers of linear attention that follow each other, with their MLPs, on hidden states where these enter.
template <class R>
using linear_layers = std::function<typename tape<R>::template var<entry_sharding>(
    cpx::range layers, typename tape<R>::template var<entry_sharding> const& h)>;
template <class R>
using make_linear = std::function<linear_layers<R>(tape<R>& at)>;

/// Such layers on `Linear`, their recurrence on `Mix`: the same, or head_sharded.
///
/// Norms, projections and MLPs see one token at a time, so relayouts stand outside them, on the residual stream, and
/// only where the next layer wants another sharding.
template <class R, class Linear, class Mix>
class layers_on {
    using var = typename tape<R>::template var<entry_sharding>;

public:
    template <class How>
    layers_on(tape<R>& at, entry_sharding const& entry, How carry, Linear const& linear, Mix const& mix)
        : at_(at), mixer_(new linear_attention<R, Linear, Mix>(at, carry, linear, mix)), // make_shared is beyond nvcc
          there_(relayout(entry, linear, at.rank.rank())), back_(there_.transposed()) {
        at.counted.balance(linear);
    }
    var operator()(cpx::range layers, var const& h) const {
        auto x = at_.move(there_, back_, h); // and stay there for all of them
        for (index_t i = layers.first; i < layers.last; ++i) x = mlp(at_, i, (*mixer_)(i, x));
        return at_.move(back_, there_, x);
    }

private:
    tape<R>& at_;
    std::shared_ptr<linear_attention<R, Linear, Mix>> mixer_;
    cpx::relayout_plan<entry_sharding, Linear> there_;
    cpx::relayout_plan<Linear, entry_sharding> back_;
};

} // namespace qwen
