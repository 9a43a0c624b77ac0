// SPDX-License-Identifier: Apache-2.0
// The blocks that see one token at a time: the MLP of the dense model and the mixture of experts.
#pragma once

#include "tape.hpp"

namespace qwen {

/// Returns `down(silu(gate(x)) up(x))`, by the weights of one name.
template <class R, class S>
auto dense_mlp(tape<R>& at, std::string const& name, std::shared_ptr<S> const& x) {
    auto const up = at.linear({name + "up_proj.weight"}, x), gate = at.linear({name + "gate_proj.weight"}, x);
    return at.linear({name + "down_proj.weight"}, at.silu_mul(gate, up));
}

/// The mixture of experts of a layer: sum_s w_s down_e(silu(gate_e x) up_e x) + sigmoid(shared_expert_gate x)
/// shared(x), over the experts e chosen, by descending w_s: their probabilities over their sum.
template <class R, class S>
class expert_mlp {
    using T = typename R::element;
    using M = typename R::memory_type;
    using var = typename tape<R>::template var<S>;
    using rows = cpx::rows<T>;
    using buffer = typename tape<R>::buffer;

public:
    expert_mlp(tape<R>& at, std::string const& name, var const& x)
        : at_(at), name_(name + "experts."), config_(at.rank.model.config), shared_(shared(name, x)),
          logits_(at.linear({name + "gate.weight"}, x)), weights_(at.beside(x, config_.num_experts_per_tok)),
          chosen_(x->value.sharding(), at.rank.rank(), weights_->width(), at.rank.memory()),
          output_(at.beside(x, weights_->width() * x->width())) {}

    static var run(tape<R>& at, std::string const& name, var const& x) {
        auto const block = std::make_shared<expert_mlp>(at, name, x); // until its last step back
        block->choose();
        at.back([=] { block->choose_backward(); });
        block->run_experts(*x);
        at.back([=] { block->run_experts_backward(*x); });
        auto const y = at.beside(x, x->width());
        block->combine(*y);
        at.back([=] { block->combine_backward(*y); });
        return y;
    }

private:
    using in = variable<T, S, M>;

    var shared(std::string const& name, var const& x) const {
        auto const gate = at_.linear({name + "shared_expert_gate.weight"}, x);
        return at_.open(dense_mlp(at_, name + "shared_expert.", x), gate);
    }
    void choose() {
        auto const row = weights_->data().columns(0, 1);
        at_.each(row, rowwise::choose_experts<T>{logits_->data(), chosen_.data(), weights_->data()});
        experts_.emplace(at_.rank.experts(chosen_));
    }
    void choose_backward() const {
        auto const row = weights_->data().columns(0, 1);
        at_.each(row, rowwise::choose_backward<T>{chosen_.data(), weights_->data(), weights_->grad().data(),
                                                  logits_->grad().data()});
    }
    /// Experts see rows of their own, on the ranks that own them.
    void run_experts(in& x) {
        index_t const inner = config_.moe_intermediate_size;
        input_ = experts_->template to_experts<T>(x.data(), x.width());
        gate_up_ = of_experts(2 * inner), activation_ = of_experts(inner);
        auto output = of_experts(x.width());
        at_.rank.expert_linear(*experts_, input_.view(), weight("gate_up_proj"), gate_up_.view());
        auto const gate_up = gate_up_.view(), y = activation_.view();
        at_.each(y, rowwise::silu_mul<T>{gate_up.columns(0, inner), gate_up.columns(inner, inner), y});
        at_.rank.expert_linear(*experts_, y, weight("down_proj"), output.view());
        experts_->template to_tokens<T>(output.view(), output_->data());
    }
    void run_experts_backward(in& x) {
        index_t const inner = config_.moe_intermediate_size;
        auto const terms = output_->grad().data();
        auto const dy = experts_->template to_experts<T>(terms, x.width());
        auto dactivation = of_experts(inner), dgate_up = of_experts(2 * inner), dx = of_experts(x.width());
        at_.rank.expert_linear_backward_input(*experts_, dy.view(), weight("down_proj"), dactivation.view());
        auto const gate_up = gate_up_.view(), d = dgate_up.view();
        at_.each(dactivation.view(),
                 rowwise::silu_mul_backward<T>{gate_up.columns(0, inner), gate_up.columns(inner, inner),
                                               dactivation.view(), d.columns(0, inner), d.columns(inner, inner)});
        at_.rank.expert_linear_backward_input(*experts_, d, weight("gate_up_proj"), dx.view());
        experts_->template to_tokens<T>(dx.view(), terms);
        at_.each(x.data(), rowwise::add_choices<T>{terms, x.grad().data()});
        auto const of_weight = [&](char const* of, buffer const& from, cpx::rows<T const> to) {
            at_.rank.expert_linear_backward_weight(at_.sums(x.value.sharding()), chosen_, *experts_, from.view(), to,
                                                   at_.grads.of(name_ + of));
        };
        of_weight("gate_up_proj", input_, d);
        of_weight("down_proj", activation_, dy.view());
    }
    void combine(in& y) const {
        at_.each(y.data(), rowwise::combine_experts<T>{weights_->data(), output_->data(), shared_->data(), y.data()});
    }
    void combine_backward(in& y) const {
        rows const dy = y.grad().data(), doutput = output_->grad().data(), dweights = weights_->grad().data();
        at_.each(doutput, rowwise::combine_backward<T>{weights_->data(), dy, doutput});
        at_.each(dweights, rowwise::weigh_backward<T>{output_->data(), dy, dweights});
        at_.copy(dy, shared_->grad().data());
    }

    /// Returns a weight of this rank's experts.
    cpx::rows<T const> weight(char const* of) const {
        auto const all = at_.rank.weight(name_ + of);
        index_t const out = all.count() / experts_->experts();
        return all.sub(experts_->own().first * out, experts_->own().size() * out);
    }
    buffer of_experts(index_t width) const { return {at_.rank.memory(), experts_->count(), width}; }

    tape<R>& at_;
    std::string name_;
    cpx::qwen_config const& config_;
    var shared_, logits_, weights_;
    cpx::tensor<index_t, S, M> chosen_;
    var output_; ///< of the experts chosen, side by side
    std::optional<typename R::experts_type> experts_;
    buffer input_, gate_up_, activation_; ///< of the rows of experts
};

/// Returns `h + mlp(norm(h))` of a layer.
template <class R, class T, class S, class M>
auto mlp(tape<R>& at, index_t layer, std::shared_ptr<variable<T, S, M>> const& h) {
    auto const x = at.norm(layer_name(layer, "post_attention_layernorm.weight"), h);
    auto const name = layer_name(layer, "mlp.");
    return at.sum(h, at.rank.model.config.moe() ? expert_mlp<R, S>::run(at, name, x) : dense_mlp(at, name, x));
}

} // namespace qwen
