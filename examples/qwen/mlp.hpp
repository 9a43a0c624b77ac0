// SPDX-License-Identifier: Apache-2.0
// The blocks that see one token at a time: the MLP of the dense model and the mixture of experts.
#pragma once

#include "site.hpp"

namespace qwen {

/// y = down(silu(gate(x)) up(x)), by the weights of one name, and its backward.
template <class Site>
class dense_mlp {
    using T = typename Site::element;
    using tensor = typename Site::tensor;

public:
    dense_mlp(Site& at, std::string mlp, index_t inner)
        : at_(at), mlp_(std::move(mlp)), gate_(at.make(inner)), up_(at.make(inner)), activation_(at.make(inner)) {}

    void operator()(tensor const& x, tensor& y) {
        at_.linear(mlp_ + "gate_proj.weight", x, gate_);
        at_.linear(mlp_ + "up_proj.weight", x, up_);
        at_.each(rowwise::silu_mul<T>{gate_.data(), up_.data(), activation_.data()}, activation_);
        at_.linear(mlp_ + "down_proj.weight", activation_, y);
    }
    /// Adds to dx.
    void backward(typename Site::summed const& x, tensor const& dy, tensor& dx) const {
        auto d = at_.make(gate_.width()), dgate = at_.make(d.width()), dup = at_.make(d.width());
        at_.linear_backward(mlp_ + "down_proj.weight", at_.whole(activation_), dy, d);
        at_.each(rowwise::silu_mul_backward<T>{gate_.data(), up_.data(), d.data(), dgate.data(), dup.data()}, d);
        at_.linear_backward(mlp_ + "gate_proj.weight", x, dgate, dx);
        at_.linear_backward(mlp_ + "up_proj.weight", x, dup, dx);
    }

private:
    Site& at_;
    std::string mlp_;
    tensor gate_, up_, activation_;
};

/// y = sum_s w_s down_e(silu(gate_e x) up_e x) + sigmoid(shared_expert_gate x) shared(x), over the experts e chosen, by
/// descending w_s: their probabilities over their sum. Experts see rows of their own, on the ranks that own them.
template <class Site>
class expert_mlp {
    using R = typename Site::rank_type;
    using T = typename Site::element;
    using tensor = typename Site::tensor;
    using summed = typename Site::summed;
    using numbers = cpx::tensor<index_t, decltype(Site::sharding), typename Site::memory>;
    using buffer = cpx::row_buffer<T, typename Site::memory>;

public:
    expert_mlp(Site& at, std::string const& mlp, cpx::qwen_config const& c)
        : at_(at), mlp_(mlp), inner_(c.moe_intermediate_size), choices_(c.num_experts_per_tok),
          shared_(at, mlp + "shared_expert.", c.shared_expert_intermediate_size),
          chosen_(at.sharding, at.rank.rank(), choices_, at.rank.memory()), weights_(at.make(choices_)),
          logits_(at.make(c.num_experts)), output_(at.make(choices_ * c.hidden_size)),
          shared_output_(at.make(c.hidden_size)), shared_gate_(at.make(1)) {}

    void operator()(tensor const& x, tensor& y) {
        at_.linear(mlp_ + "gate.weight", x, logits_);
        at_.each(rowwise::choose_experts<T>{logits_.data(), chosen_.data(), weights_.data()}, 1);
        experts_.emplace(at_.rank.experts(chosen_));
        input_ = experts_->template to_experts<T>(x.data(), x.width());
        gate_up_ = of_experts(2 * inner_), activation_ = of_experts(inner_);
        auto output = of_experts(y.width());
        at_.rank.expert_linear(*experts_, input_.view(), weight("experts.gate_up_proj"), gate_up_.view());
        auto const gate_up = gate_up_.view();
        at_.rank.each(
            gate_up.count(), inner_,
            rowwise::silu_mul<T>{gate_up.columns(0, inner_), gate_up.columns(inner_, inner_), activation_.view()});
        at_.rank.expert_linear(*experts_, activation_.view(), weight("experts.down_proj"), output.view());
        experts_->template to_tokens<T>(output.view(), output_.data());
        shared_(x, shared_output_);
        at_.linear(mlp_ + "shared_expert_gate.weight", x, shared_gate_);
        auto opened = at_.make(y.width());
        at_.each(rowwise::open<T>{shared_output_.data(), shared_gate_.data(), opened.data()}, y);
        at_.each(rowwise::combine_experts<T>{weights_.data(), output_.data(), opened.data(), y.data()}, y);
    }
    void backward(summed const& x, tensor const& dy, tensor& dx) {
        auto dlogits = at_.make(logits_.width()), terms = at_.make(output_.width()), dshared = at_.make(dy.width()),
             dshared_gate = at_.make(1);
        at_.each(
            rowwise::choose_backward<T>{chosen_.data(), weights_.data(), output_.data(), dy.data(), dlogits.data()}, 1);
        at_.each(rowwise::combine_backward<T>{weights_.data(), dy.data(), terms.data()}, terms);
        at_.each(rowwise::open<T>{dy.data(), shared_gate_.data(), dshared.data()}, dshared);
        at_.each(rowwise::sum_heads<T>{shared_output_.data(), dy.data(), dy.width(), dshared_gate.data()}, 1);
        at_.each(rowwise::sigmoid_backward<T>{shared_gate_.data(), dshared_gate.data()}, 1);

        auto const doutput = experts_->template to_experts<T>(std::as_const(terms).data(), dy.width());
        auto dactivation = of_experts(inner_), dgate_up = of_experts(2 * inner_), dinput = of_experts(dy.width());
        at_.rank.expert_linear_backward_input(*experts_, doutput.view(), weight("experts.down_proj"),
                                              dactivation.view());
        auto const gate_up = gate_up_.view(), of_gate_up = dgate_up.view();
        at_.rank.each(gate_up.count(), inner_,
                      rowwise::silu_mul_backward<T>{gate_up.columns(0, inner_), gate_up.columns(inner_, inner_),
                                                    dactivation.view(), of_gate_up.columns(0, inner_),
                                                    of_gate_up.columns(inner_, inner_)});
        at_.rank.expert_linear_backward_input(*experts_, of_gate_up, weight("experts.gate_up_proj"), dinput.view());
        experts_->template to_tokens<T>(dinput.view(), terms.data());
        at_.each(rowwise::add_choices<T>{terms.data(), dx.data()}, dx);

        auto const of_weight = [&](char const* name, buffer const& in, cpx::rows<T const> out) {
            at_.rank.expert_linear_backward_weight(at_.sums, chosen_, *experts_, in.view(), out,
                                                   at_.grads.of(mlp_ + name));
        };
        of_weight("experts.gate_up_proj", input_, of_gate_up);
        of_weight("experts.down_proj", activation_, doutput.view());
        at_.linear_backward(mlp_ + "gate.weight", x, dlogits, dx);
        shared_.backward(x, dshared, dx);
        at_.linear_backward(mlp_ + "shared_expert_gate.weight", x, dshared_gate, dx);
    }

private:
    /// Returns a weight of this rank's experts.
    cpx::rows<T const> weight(char const* name) const {
        auto const all = at_.rank.weight(mlp_ + name);
        index_t const out = all.count() / experts_->experts();
        return all.sub(experts_->own().first * out, experts_->own().size() * out);
    }
    buffer of_experts(index_t width) const { return {at_.rank.memory(), experts_->count(), width}; }

    Site& at_;
    std::string mlp_;
    index_t inner_, choices_;
    dense_mlp<Site> shared_;
    numbers chosen_;
    tensor weights_, logits_, output_, shared_output_, shared_gate_;
    std::optional<typename R::experts_type> experts_;
    buffer input_, gate_up_, activation_; ///< of the rows of experts
};

/// h += mlp(norm(h)) of a layer, by one of these.
template <class Site>
typename Site::backward mlp(Site& at, index_t layer, typename Site::tensor& h) {
    auto const run = [&](auto block) -> typename Site::backward {
        auto const before = std::make_shared<typename Site::tensor>(at.copy(h)),
                   x = std::make_shared<typename Site::tensor>(at.make(h.width()));
        auto const norm = layer_name(layer, "post_attention_layernorm.weight");
        at.norm(norm, h, *x);
        auto y = at.make(h.width());
        (*block)(*x, y);
        at.add(y, h);
        return [=, &at](typename Site::tensor& dh) {
            auto dx = at.make(dh.width());
            block->backward(at.whole(*x), dh, dx);
            at.norm_backward(norm, *before, dx, dx);
            at.add(dx, dh);
        };
    };
    auto const& config = at.rank.model.config;
    auto const name = layer_name(layer, "mlp.");
    if (config.moe()) return run(std::make_shared<expert_mlp<Site>>(at, name, config));
    return run(std::make_shared<dense_mlp<Site>>(at, name, config.intermediate_size));
}

} // namespace qwen
