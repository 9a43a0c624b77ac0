// SPDX-License-Identifier: Apache-2.0
// Linear attention under context parallelism: a gated delta net whose recurrence runs where its rows are, or by heads.
#pragma once

#include "mlp.hpp"

#include <cpx/ops/gated_delta_net_backward.hpp>

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

/// Returns the net of rows on `where`, whose recurrence runs on `mix`: there, or by heads; of elements Rule, void for
/// those of rows.
template <class Rule = void, class How, class S>
auto delta_net_of(How, S const&, S const& mix, int rank, cpx::gated_delta_net_config const& config) {
    return cpx::gated_delta_net<How, S, S, Rule>(cpx::carry<How>(mix, rank), config);
}
template <class Rule = void, class How, class S, class Mix>
auto delta_net_of(How, S const& where, Mix const& mix, int rank, cpx::gated_delta_net_config const& config) {
    Mix const output(mix.ranks(), mix.batch(), config.output_sections());
    return cpx::gated_delta_net<How, S, Mix, Rule>(cpx::carry<How>(mix, rank), relayout(where, mix, rank),
                                                   relayout(output, where, rank), config);
}

/// h + linear_attention(norm(h)) by a `cpx::gated_delta_net`, made once a batch, for all layers.
template <class R, class Net>
class linear_attention {
    using T = typename R::element;
    using W = cpx::wide<T>;
    using M = typename R::memory_type;

public:
    linear_attention(tape<R>& at, Net const& net) : at_(at), net_(net) {}
    linear_attention(linear_attention const&) = delete;

    template <class Var>
    Var operator()(index_t layer, Var const& h) {
        auto const x = at_.norm(layer_name(layer, "input_layernorm.weight"), h), y = at_.beside(x, x->width());
        auto const saved = std::make_shared<typename Net::template saved_of<T, M>>();
        auto const weights = [=, this] {
            return parameters<T const>(layer, [this]<class A>(std::string const& name, cpx::rows<A const>& weight) {
                weight = at_.rank.template weight<A>(name);
            });
        };
        net_(weights(), x->view(), y->view(), at_.rank, {{}, saved.get()});
        if (at_.rank.rank() == 0) count();
        at_.back([=, this] {
            auto const to =
                parameters<W>(layer, [this](std::string const& name, cpx::rows<W>& sum) { sum = at_.grads.of(name); });
            auto const order = at_.sums(net_.sharding()).order();
            // The loss is a mean over tokens, so that gradients are as small as there are many of these.
            double const scale = std::same_as<typename Net::template rule_of<T>, T>
                                     ? 1
                                     : static_cast<double>(net_.sharding().batch().tokens());
            cpx::gated_delta_net_gradients<T, typename Net::sharding_type, M> const all{x->grad(), to, order, scale};
            gated_delta_net_backward(net_, weights(), x->view(), *saved, y->grad(), all, at_.rank);
        });
        return at_.sum(h, y);
    }

private:
    template <class A, class F>
    auto parameters(index_t layer, F const& of) const {
        cpx::gated_delta_net_parameters<A> all;
        for_each_parameter(all, net_.config(), [&](char const* name, auto& weight, index_t, index_t) {
            of(layer_name(layer, "linear_attn.") + name, weight);
        });
        return all;
    }
    /// Counts what a layer has to move.
    void count() {
        net_.each_move([this](auto const& plan, index_t width) { at_.counted.move(plan.from, plan.to, width); });
        at_.counted.halo(net_.halo().sharding, net_.halo().reach, net_.widths().qkv());
    }

    tape<R>& at_;
    Net net_;
};

/// Runs layers of linear attention that follow each other, with their MLPs, on hidden states where these enter.
template <class R>
using linear_layers = std::function<typename tape<R>::template var<entry_sharding>(
    cpx::range layers, typename tape<R>::template var<entry_sharding> const& h)>;
template <class R>
using make_linear = std::function<linear_layers<R>(tape<R>& at)>;

/// Such layers on `Linear` by a `cpx::gated_delta_net`, `Net`.
///
/// Norms, projections and MLPs see one token at a time, so relayouts stand outside them, on the residual stream, and
/// only where the next layer wants another sharding.
template <class R, class Linear, class Net>
class layers_on {
    using var = typename tape<R>::template var<entry_sharding>;
    using mixer = linear_attention<R, Net>;

public:
    layers_on(tape<R>& at, entry_sharding const& entry, Linear const& linear, Net const& net)
        : at_(at), mixer_(new mixer(at, net)), // make_shared is beyond nvcc
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
    std::shared_ptr<mixer> mixer_;
    cpx::relayout_plan<entry_sharding, Linear> there_;
    cpx::relayout_plan<Linear, entry_sharding> back_;
};

} // namespace qwen
