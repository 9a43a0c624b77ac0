// SPDX-License-Identifier: Apache-2.0
// The blocks that see one token at a time: the MLP of the dense model and the mixture of experts.
#pragma once

#include "tape.hpp"

namespace qwen {

/// Returns `down(silu(gate(x)) up(x))`, by the weights of one name.
template <class R, class S>
auto dense_mlp(tape<R>& at, std::string const& name, std::shared_ptr<S> const& x) {
    auto const up = at.linear(name + "up_proj.weight", x), gate = at.linear(name + "gate_proj.weight", x);
    return at.linear(name + "down_proj.weight", at.silu_mul(gate, up));
}

/// The mixture of experts of a layer: sum_s w_s down_e(silu(gate_e x) up_e x) + sigmoid(shared_expert_gate x)
/// shared(x), over the experts e chosen, by descending w_s: their probabilities over their sum.
template <class R, class S>
class expert_mlp {
    using T = typename R::element;
    using W = cpx::wide<T>;
    using M = typename R::memory_type;
    using var = typename tape<R>::template var<S>;
    using rows = cpx::rows<T>;
    using const_rows = cpx::rows<T const>;
    using buffer = typename tape<R>::buffer;

public:
    expert_mlp(tape<R>& at, std::string const& name, var const& x)
        : at_(at), name_(name + "experts."), config_(at.rank.model.config), shared_(shared(name, x)),
          logits_(at.linear(name + "gate.weight", x)), weights_(at.wide_beside(x, *config_.num_experts_per_tok)),
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
        auto const gate = at_.linear(name + "shared_expert_gate.weight", x);
        return at_.open(dense_mlp(at_, name + "shared_expert.", x), gate);
    }
    void choose() {
        auto const row = weights_->data().columns(0, 1);
        typename tape<R>::wide_buffer probabilities(at_.rank.memory(), logits_->data().count(), logits_->width());
        at_.each(row,
                 rowwise::choose_experts<T>{logits_->data(), probabilities.view(), chosen_.data(), weights_->data()});
        experts_.emplace(chosen_.data(), *config_.num_experts, global_rows(chosen_.sharding(), at_.rank.rank()),
                         at_.rank.neighbours());
    }
    void choose_backward() const {
        auto const row = weights_->data().columns(0, 1);
        at_.each(row, rowwise::choose_experts_backward<T>{chosen_.data(), weights_->data(), weights_->grad().data(),
                                                          logits_->grad().data()});
    }
    /// Experts see rows of their own, on the ranks that own them.
    void run_experts(in& x) {
        index_t const inner = *config_.moe_intermediate_size;
        input_ = experts_->template to_experts<T>(x.data(), x.width());
        gate_up_ = of_experts(2 * inner), activation_ = of_experts(inner);
        auto output = of_experts(x.width());
        linear(input_.view(), "gate_up_proj", gate_up_.view());
        auto const gate_up = gate_up_.view(), y = activation_.view();
        at_.each(y, rowwise::silu_mul<T>{gate_up.columns(0, inner), gate_up.columns(inner, inner), y});
        linear(y, "down_proj", output.view());
        experts_->template to_tokens<T>(output.view(), output_->data());
    }
    void run_experts_backward(in& x) {
        index_t const inner = *config_.moe_intermediate_size;
        auto const sums = at_.sums(x.value.sharding());
        auto const terms = output_->grad().data();
        auto dy = experts_->template to_experts<T>(terms, x.width());
        auto dactivation = of_experts(inner), dgate_up = of_experts(2 * inner), dx = of_experts(x.width());
        auto const y = activation_.view(), d = dactivation.view(), gate_up = gate_up_.view(), to = dgate_up.view();
        linear_backward(sums, y, "down_proj", dy.view(), d);
        at_.each(d, rowwise::silu_mul_backward<T>{gate_up.columns(0, inner), gate_up.columns(inner, inner), d,
                                                  to.columns(0, inner), to.columns(inner, inner)});
        linear_backward(sums, input_.view(), "gate_up_proj", to, dx.view());
        experts_->template to_tokens<T>(dx.view(), terms);
        at_.each(x.data(), rowwise::add<T>{terms, x.grad().data()});
    }
    /// y = W_e x for the rows of every expert e.
    void linear(rows x, char const* of, rows y) const {
        each_expert(*experts_, weight(of), y.width(), [&](auto const& w, index_t row, index_t count) {
            at_.rank.linear(x.sub(row, count), w, y.sub(row, count));
        });
    }
    /// Adds the gradients of x and of the weight.
    void linear_backward(auto const& sums, rows x, char const* of, rows dy, rows dx) const {
        each_expert(*experts_, weight(of), dy.width(), [&](auto const& w, index_t row, index_t count) {
            at_.rank.linear_backward_input(dy.sub(row, count), w, dx.sub(row, count), true);
        });
        auto const add = [&](auto const& at, const_rows all_x, const_rows all_dy) {
            cpx::rows<W> const dweights = own(at, at_.grads.of(name_ + of));
            each_expert(at, dweights, dy.width(), [&](auto const& dw, index_t row, index_t count) {
                at_.rank.linear_backward_weight(all_dy.sub(row, count), all_x.sub(row, count), dw);
            });
        };
        sums.template experts<T>(*experts_, x, dy, at_.rank.comm, add);
    }
    /// Calls `f(weight, row, count)` for every expert of these that has rows, of `out` rows of the weights.
    template <class Experts, class W, class F>
    static void each_expert(Experts const& at, W const& weights, index_t out, F const& f) {
        auto const begins = at.begins();
        for (std::size_t e = 0; e + 1 < begins.size(); ++e)
            if (begins[e] < begins[e + 1])
                f(weights.sub(static_cast<index_t>(e) * out, out), begins[e], begins[e + 1] - begins[e]);
    }
    /// Returns those of the experts `at` of the weights of all.
    template <class Experts, class W>
    static W own(Experts const& at, W const& all) {
        index_t const out = all.count() / at.experts();
        return all.sub(at.own().first * out, at.own().size() * out);
    }
    const_rows weight(char const* of) const { return own(*experts_, at_.rank.weight(name_ + of)); }
    void combine(in& y) const {
        at_.each(y.data(), rowwise::combine_experts<T>{weights_->data(), output_->data(), shared_->data(), y.data()});
    }
    void combine_backward(in& y) const {
        rows const dy = y.grad().data(), doutput = output_->grad().data();
        cpx::rows<W> const dweights = weights_->grad().data();
        at_.each(doutput, rowwise::weigh_choices<T>{weights_->data(), dy, doutput});
        at_.each(dweights, rowwise::weigh_backward<T>{output_->data(), dy, dweights});
        at_.copy(dy, shared_->grad().data());
    }

    buffer of_experts(index_t width) const { return {at_.rank.memory(), experts_->count(), width}; }

    tape<R>& at_;
    std::string name_;
    cpx::hf_config const& config_;
    var shared_, logits_;
    typename tape<R>::template wide_var<S> weights_;
    cpx::tensor<index_t, S, M> chosen_;
    var output_; ///< of the experts chosen, side by side
    std::optional<cpx::expert_exchange<typename R::neighbours_type>> experts_;
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
