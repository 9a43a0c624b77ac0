// SPDX-License-Identifier: Apache-2.0
// One rank's forward and backward pass of a model whose tokens are sharded over ranks.
#pragma once

#include "linear_layers.hpp"
#include "vision.hpp"

namespace qwen {

/// The training step of one rank: log-probabilities of the next tokens, their mean loss, its gradients.
///
/// Hidden states enter zigzag over sequences, where full attention is, and return there from linear attention.
template <class T>
class pass {
public:
    using hidden = cpx::tensor<T, entry_sharding>;
    using numbers = cpx::tensor<cpx::index_t, entry_sharding>;
    /// Makes the layers of linear attention; empty where there are none.
    using make_linear = std::function<std::unique_ptr<linear_layers<T>>(on_rank<T> const&)>;

    pass(checkpoint<T> const& model, input const& in, rotation<T, entry_sharding> const& turn, make_linear const& make,
         attention_by attention, cpx::sum_order order, host_ranks& comm)
        : model_(model), grads_(model, in.of_media), attention_(attention), turn_(turn), comm_(comm),
          at_(model, grads_, turn.positions.sharding(), order, comm), vision_(in, turn.positions, grads_, comm),
          linear_(make ? make({model, grads_, at_.sharding, order, comm}) : nullptr),
          dh_(at_.make(model.config.hidden_size)) {}

    /// Returns log p(label) for the rows of this rank; 0 where the label is `cpx::ignored`.
    hidden forward(numbers const& ids, numbers const& labels) {
        auto h = embed(ids);
        add_features(features::embedding, h);
        auto const& c = model_.config;
        for (cpx::index_t i = 0; i < c.num_hidden_layers;) {
            cpx::index_t const first = i;
            while (i < c.num_hidden_layers && type(i) == cpx::layer_type::linear_attention) ++i;
            if (i > first) {
                (*linear_)({first, i}, h, dh_, tape_);
                continue;
            }
            record(full_attention(at_, attention_, turn_, i)(h));
            record(mlp(at_, i, h));
            add_features(i, h);
            ++i;
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

    void record(typename site<T, entry_sharding, host_ranks>::backward step) {
        tape_.push_back([this, step = std::move(step)] { step(dh_); });
    }

    hidden embed(numbers const& ids) {
        char const* const name = "model.embed_tokens.weight";
        auto const weight = model_.weight(name);
        auto h = at_.make(weight.width());
        for (cpx::index_t row = 0; row < h.data().count(); ++row)
            std::copy_n(weight.row(ids.data()(row, 0)), weight.width(), h.data().row(row));
        tape_.push_back([this, ids, dweight = grads_.of(name)] {
            auto const whole = at_.sums.whole(ids.view(), comm_);
            auto const dh = at_.sums.share(dh_.view(), dweight.width(), comm_);
            for (cpx::index_t row = 0; row < dh.data.count(); ++row)
                for (cpx::index_t j = dh.share.first; j < dh.share.last; ++j)
                    dweight(whole.data(row, 0), j) += dh.data(row, j - dh.share.first);
        });
        return h;
    }

    hidden predict(hidden const& h, numbers const& labels) {
        std::string const norm = "model.norm.weight", head = "lm_head.weight";
        auto x = h, logp = at_.make(1);
        auto logits = at_.make(model_.config.vocab_size);
        at_.norm(norm, h.view(), x.view());
        at_.linear(head, x.view(), logits.view());
        cpx::log_probabilities<T>(logits.data(), column(labels), column(logp));
        tape_.push_back([this, norm, head, h, x, logits, labels]() mutable {
            cpx::log_probabilities_backward<T>(logits.data(), column(labels),
                                               {dlogp_.data(), static_cast<std::size_t>(dlogp_.count())},
                                               logits.data());
            auto dx = at_.make(x.width());
            at_.linear_backward(head, at_.whole(x.view()), logits.view(), dx.view());
            at_.norm_backward(norm, h.view(), dx.view(), dh_.view());
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
    rotation<T, entry_sharding> const& turn_;
    host_ranks& comm_;
    site<T, entry_sharding, host_ranks> at_;
    vision<T> vision_;
    std::unique_ptr<linear_layers<T>> linear_;
    hidden dh_; ///< the gradient of the residual stream as far as the way back has come
    cpx::rows<T const> dlogp_;
    steps tape_;
};

} // namespace qwen
