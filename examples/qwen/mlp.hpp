// SPDX-License-Identifier: Apache-2.0
// The blocks that see one token at a time: the MLP of the dense model and the mixture of experts.
#pragma once

#include "site.hpp"

namespace qwen {

/// h += down(silu(gate(x)) up(x)), x = norm(h).
template <class Site>
typename Site::backward dense_mlp(Site& at, cpx::index_t layer, typename Site::tensor& h) {
    using T = typename Site::element;
    auto const norm = layer_name(layer, "post_attention_layernorm.weight");
    auto const gate_proj = layer_name(layer, "mlp.gate_proj.weight"), up_proj = layer_name(layer, "mlp.up_proj.weight"),
               down_proj = layer_name(layer, "mlp.down_proj.weight");
    auto const before = h;
    auto x = h, y = h;
    auto gate = at.make(at.model.config.intermediate_size), up = gate, activation = gate;
    at.norm(norm, h.view(), x.view());
    at.linear(gate_proj, x.view(), gate.view());
    at.linear(up_proj, x.view(), up.view());
    cpx::silu_mul<T>(gate.data(), up.data(), activation.data());
    at.linear(down_proj, activation.view(), y.view());
    at.add(y.data(), h.data());

    return [=, &at](typename Site::tensor& dh) {
        auto dactivation = at.make(activation.width()), dgate = dactivation, dup = dactivation, dx = at.make(x.width());
        at.linear_backward(down_proj, at.whole(activation.view()), dh.view(), dactivation.view());
        cpx::silu_mul_backward<T>(gate.data(), up.data(), dactivation.data(), dgate.data(), dup.data());
        auto const whole = at.whole(x.view());
        at.linear_backward(gate_proj, whole, dgate.view(), dx.view());
        at.linear_backward(up_proj, whole, dup.view(), dx.view());
        at.norm_backward(norm, before.view(), dx.view(), dx.view());
        at.add(dx.data(), dh.data());
    };
}

/// Returns the weights of the mixture of experts in a layer.
template <class T>
cpx::moe_weights<T> expert_weights(checkpoint<T> const& model, cpx::index_t layer) {
    auto const w = [&](char const* name) { return model.weight(layer_name(layer, "mlp.") + name); };
    return {w("gate.weight"),
            w("experts.gate_up_proj"),
            w("experts.down_proj"),
            w("shared_expert.gate_proj.weight"),
            w("shared_expert.up_proj.weight"),
            w("shared_expert.down_proj.weight"),
            w("shared_expert_gate.weight")};
}

/// h += experts(x), x = norm(h).
template <class Site>
typename Site::backward expert_mlp(Site& at, cpx::index_t layer, typename Site::tensor& h) {
    using T = typename Site::element;
    auto const norm = layer_name(layer, "post_attention_layernorm.weight");
    auto const& config = at.model.config;
    auto const before = h;
    auto x = h, y = h;
    at.norm(norm, h.view(), x.view());
    auto saved = cpx::moe<T>(expert_weights(at.model, layer), x.data(), config.num_experts_per_tok, y.data());
    at.add(y.data(), h.data());

    return [=, &at, saved = std::move(saved)](typename Site::tensor& dh) {
        auto const name = [&](char const* suffix) { return layer_name(layer, "mlp.") + suffix; };
        auto const on_site = [&](auto const& rows) { return cpx::sharded(rows.view(), at.sharding, at.rank()); };
        auto dx = at.make(x.width());
        auto const d = cpx::moe_backward<T>(expert_weights(at.model, layer), saved, dh.data(), dx.data());

        auto const linear = [&](char const* weight, cpx::summed_rows<T> const& input, auto const& dy) {
            at.sums.linear(input, dy, at.grads.of(name(weight)), at.comm);
        };
        auto const whole = at.whole(x.view());
        auto const gate_up = on_site(d.dshared_gate_up);
        cpx::index_t const shared = config.shared_expert_intermediate_size;
        linear("gate.weight", whole, on_site(d.dlogits));
        linear("shared_expert.gate_proj.weight", whole, gate_up.columns(0, shared));
        linear("shared_expert.up_proj.weight", whole, gate_up.columns(shared, shared));
        linear("shared_expert.down_proj.weight", at.whole(on_site(saved.shared_activation)), on_site(d.dshared_output));
        linear("shared_expert_gate.weight", whole, on_site(d.dshared_gate));

        auto const chosen = at.sums.whole(on_site(saved.chosen), at.comm);
        auto const experts = [&](char const* weight, cpx::summed_rows<T> const& input, auto const& dy,
                                 cpx::index_t outputs) {
            auto const own = at.sums.share(dy, outputs, at.comm);
            if (!own.share.empty())
                cpx::expert_linear_backward_weight<T>(chosen.data, config.num_experts, own.data, input.data,
                                                      at.grads.of(name(weight)), own.share.first);
        };
        experts("experts.gate_up_proj", whole, on_site(d.dgate_up), 2 * config.moe_intermediate_size);
        experts("experts.down_proj", at.whole(on_site(saved.activation)), on_site(d.doutput), config.hidden_size);
        at.norm_backward(norm, before.view(), dx.view(), dx.view());
        at.add(dx.data(), dh.data());
    };
}

/// The MLP of the model, which is one of these.
template <class Site>
typename Site::backward mlp(Site& at, cpx::index_t layer, typename Site::tensor& h) {
    return at.model.config.moe() ? expert_mlp(at, layer, h) : dense_mlp(at, layer, h);
}

} // namespace qwen
