// SPDX-License-Identifier: Apache-2.0
// One rank's forward and backward pass of a model whose tokens are sharded over ranks.
#pragma once

#include "mixers.hpp"
#include "mlp.hpp"
#include "vision.hpp"

namespace qwen {

/// The training step of one rank: log-probabilities of the next tokens, their mean loss, its gradients.
///
/// Hidden states enter zigzag over sequence (`Entry`). Linear attention runs on `Linear`, its recurrence on `Mix`:
/// the same, or head_sharded. Norms, projections and MLPs see one token at a time, so relayouts stand outside them,
/// on the residual stream, and only where the next layer wants another sharding.
template <class T, class How, class Entry, class Linear, class Mix, cpx::transport Comm>
class pass {
public:
    using delta_net = cpx::gated_delta_net<How, Linear, Mix>;
    using hidden = cpx::tensor<T, Entry>;
    using numbers = cpx::tensor<cpx::index_t, Entry>;

    pass(checkpoint<T> const& model, input const& in, rotation<T, Entry> const& turn, Linear const& linear,
         std::optional<delta_net> const& net, attention_by attention, cpx::sum_order order, Comm& comm)
        : model_(model), grads_(model, in.of_media), attention_(attention), turn_(turn), net_(net), comm_(comm),
          at_entry_(model, grads_, turn.positions.sharding(), order, comm),
          at_linear_(model, grads_, linear, order, comm), vision_(in, turn.positions, grads_, comm),
          to_linear_(relayout(at_entry_.sharding, linear, comm.rank())),
          to_entry_(relayout(linear, at_entry_.sharding, comm.rank())), dh_(at_entry_.make(model.config.hidden_size)),
          dthere_(at_linear_.make(model.config.hidden_size)) {}

    /// Returns log p(label) for the rows of this rank; 0 where the label is `cpx::ignored`.
    hidden forward(numbers const& ids, numbers const& labels) {
        auto h = embed(ids);
        add_features(features::embedding, h);
        auto const& c = model_.config;
        for (cpx::index_t i = 0; i < c.num_hidden_layers;) {
            if (type(i) == cpx::layer_type::full_attention) {
                record(full_attention(at_entry_, attention_, turn_, i)(h), dh_);
                record(mlp(at_entry_, i, h), dh_);
                add_features(i, h);
                ++i;
                continue;
            }
            auto there = move(to_linear_, h, dh_, dthere_); // and stay there for all linear attention layers in a row
            for (; i < c.num_hidden_layers && type(i) == cpx::layer_type::linear_attention; ++i) {
                record(linear_attention(at_linear_, *net_, i, there), dthere_);
                record(mlp(at_linear_, i, there), dthere_);
            }
            h = move(to_entry_, there, dthere_, dh_);
        }
        return predict(h, labels);
    }

    /// Returns the gradients of what `forward` returned, given that of its log-probabilities, summed over ranks.
    std::map<std::string, gradient<T>> backward(hidden const& dlogp) {
        dlogp_ = dlogp.data();
        for (; !tape_.empty(); tape_.pop_back()) tape_.back()();
        return grads_.sum(comm_);
    }

    /// Adds what bringing features of images and videos takes.
    void count_moves(needs& n) const { vision_.count_moves(model_.config.hidden_size, n); }

private:
    void add_features(cpx::index_t layer, hidden& h) {
        vision_(layer, h);
        tape_.push_back([this, layer] { vision_.backward(layer, dh_); });
    }

    cpx::layer_type type(cpx::index_t layer) const {
        return model_.config.layer_types[static_cast<std::size_t>(layer)];
    }

    template <class Backward, class Gradient>
    void record(Backward step, Gradient& dh) {
        tape_.push_back([step = std::move(step), &dh] { step(dh); });
    }

    template <class Site>
    typename Site::backward mlp(Site& at, cpx::index_t layer, typename Site::tensor& h) {
        return model_.config.moe() ? expert_mlp(at, layer, h) : dense_mlp(at, layer, h);
    }

    template <class From, class To>
    cpx::tensor<T, To> move(cpx::relayout_plan<From, To> const& plan, cpx::tensor<T, From> const& h,
                            cpx::tensor<T, From>& dfrom, cpx::tensor<T, To>& dto) {
        if constexpr (std::same_as<From, To>)
            if (plan.from == plan.to) {
                tape_.push_back([&] { dfrom = dto; });
                return h;
            }
        tape_.push_back([&] { exchange(plan.transposed(), dto.view(), dfrom.view(), comm_); });
        return exchange(plan, h, comm_);
    }

    hidden embed(numbers const& ids) {
        char const* const name = "model.embed_tokens.weight";
        auto const weight = model_.weight(name);
        auto h = at_entry_.make(weight.width());
        for (cpx::index_t row = 0; row < h.data().count(); ++row)
            std::copy_n(weight.row(ids.data()(row, 0)), weight.width(), h.data().row(row));
        tape_.push_back([this, ids, dweight = grads_.of(name)] {
            auto const whole = at_entry_.sums.whole(ids.view(), comm_);
            auto const dh = at_entry_.sums.share(dh_.view(), dweight.width(), comm_);
            for (cpx::index_t row = 0; row < dh.data.count(); ++row)
                for (cpx::index_t j = dh.share.first; j < dh.share.last; ++j)
                    dweight(whole.data(row, 0), j) += dh.data(row, j - dh.share.first);
        });
        return h;
    }

    hidden predict(hidden const& h, numbers const& labels) {
        std::string const norm = "model.norm.weight", head = "lm_head.weight";
        auto x = h, logp = at_entry_.make(1);
        auto logits = at_entry_.make(model_.config.vocab_size);
        at_entry_.norm(norm, h.view(), x.view());
        at_entry_.linear(head, x.view(), logits.view());
        cpx::log_probabilities<T>(logits.data(), column(labels), column(logp));
        tape_.push_back([this, norm, head, h, x, logits, labels]() mutable {
            cpx::log_probabilities_backward<T>(logits.data(), column(labels),
                                               {dlogp_.data(), static_cast<std::size_t>(dlogp_.count())},
                                               logits.data());
            auto dx = at_entry_.make(x.width());
            at_entry_.linear_backward(head, at_entry_.whole(x.view()), logits.view(), dx.view());
            at_entry_.norm_backward(norm, h.view(), dx.view(), dh_.view());
        });
        return logp;
    }
    /// Returns a tensor of one column as a span.
    template <class Tensor>
    static auto column(Tensor& x) {
        return std::span(x.data().data(), static_cast<std::size_t>(x.data().count()));
    }

    checkpoint<T> const& model_;
    gradients<T> grads_;
    attention_by attention_;
    rotation<T, Entry> const& turn_;
    std::optional<delta_net> const& net_; ///< none where no layer is of linear attention
    Comm& comm_;
    site<T, Entry, Comm> at_entry_;
    site<T, Linear, Comm> at_linear_;
    vision<T, Entry, Comm> vision_;
    cpx::relayout_plan<Entry, Linear> to_linear_;
    cpx::relayout_plan<Linear, Entry> to_entry_;
    hidden dh_;                     ///< the gradient of the residual stream as far as the way back has come
    cpx::tensor<T, Linear> dthere_; ///< the same where linear attention runs
    cpx::rows<T const> dlogp_;
    std::vector<std::function<void()>> tape_; ///< the steps of the way back, the first one last
};

} // namespace qwen
