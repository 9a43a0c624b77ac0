// SPDX-License-Identifier: Apache-2.0
// One rank's forward and backward pass of a model whose tokens are sharded over ranks.
#pragma once

#include "attention.hpp"
#include "linear_layers.hpp"
#include "vision.hpp"

namespace qwen {

/// The training step of one rank, on the host or on a GPU: log-probabilities of the next tokens, and gradients.
///
/// Hidden states enter zigzag over sequences, where full attention is, and return there from linear attention.
template <class R>
class pass {
    using T = typename R::element;
    using M = typename R::memory_type;
    using place = site<R, entry_sharding>;

public:
    using hidden = typename place::tensor;
    using numbers = cpx::tensor<index_t, entry_sharding, M>;
    /// Makes the layers of linear attention; empty where there are none.
    using make_linear = std::function<std::unique_ptr<linear_layers<R>>(R&, gradients<R>&, cpx::sum_order)>;

    pass(R& rank, input const& in, positions const& where, make_linear const& make, attention_by attention,
         cpx::sum_order order)
        : model_(rank.model), grads_(rank, in.of_media), attention_(attention), positions_(where),
          at_(rank, grads_, where.sharding(), order), vision_(in, where, at_),
          linear_(make ? make(rank, grads_, order) : nullptr), dh_(at_.make(model_.config.hidden_size)) {}

    /// Returns log p(label) for the rows of this rank; 0 where the label is `cpx::ignored`.
    hidden forward(numbers const& ids, numbers const& labels) {
        auto h = embed(ids);
        add_features(features::embedding, h);
        auto const& c = model_.config;
        for (index_t i = 0; i < c.num_hidden_layers;) {
            index_t const first = i;
            while (i < c.num_hidden_layers && type(i) == cpx::layer_type::linear_attention) ++i;
            if (i > first) {
                (*linear_)({first, i}, h, dh_, tape_);
                continue;
            }
            record(full_attention<R>(at_, attention_, positions_, i)(h));
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
        return grads_.sum();
    }

    /// Adds what bringing features of images and videos takes.
    void count_moves(needs& n) const { vision_.count_moves(model_.config.hidden_size, n); }

private:
    void add_features(index_t layer, hidden& h) {
        vision_(layer, h);
        tape_.push_back([this, layer] { vision_.backward(layer, dh_); });
    }

    cpx::layer_type type(index_t layer) const { return model_.config.layer_types[static_cast<std::size_t>(layer)]; }

    void record(typename place::backward step) {
        tape_.push_back([this, step = std::move(step)] { step(dh_); });
    }

    hidden embed(numbers const& ids) {
        char const* const name = "model.embed_tokens.weight";
        auto h = at_.make(model_.config.hidden_size);
        at_.each(rowwise::take_rows<T>{at_.rank.weight(name), ids.data().data(), h.data()}, h);
        tape_.push_back([this, &ids, name] {
            auto const dweight = grads_.of(name);
            auto const whole = at_.sums.whole(ids, at_.rank.comm);
            auto const own = at_.share(dh_, dweight.width());
            auto const to = dweight.columns(own.share.first, own.share.size());
            at_.rank.each(1, to.width(), rowwise::add_rows<T>{own.data, whole.data.data(), to});
        });
        return h;
    }

    hidden predict(hidden const& h, numbers const& labels) {
        struct saved {
            hidden h, x, logits;
        };
        auto const s = std::make_shared<saved>(at_.copy(h), at_.make(h.width()), at_.make(model_.config.vocab_size));
        auto logp = at_.make(1);
        at_.norm("model.norm.weight", s->h, s->x);
        at_.linear("lm_head.weight", s->x, s->logits);
        index_t const* const label = labels.data().data();
        at_.each(rowwise::log_probability<T>{s->logits.data(), label, logp.data()}, logp);
        tape_.push_back([this, s, label] {
            at_.each(rowwise::log_probability_backward<T>{s->logits.data(), label, dlogp_}, 1);
            auto dx = at_.make(s->x.width());
            at_.linear_backward("lm_head.weight", at_.whole(s->x), s->logits, dx);
            at_.norm_backward("model.norm.weight", s->h, dx, dh_);
        });
        return logp;
    }

    checkpoint<T> const& model_;
    gradients<R> grads_;
    attention_by attention_;
    positions const& positions_;
    place at_;
    vision<R> vision_;
    std::unique_ptr<linear_layers<R>> linear_;
    hidden dh_; ///< the gradient of the residual stream as far as the way back has come
    cpx::rows<T const> dlogp_;
    steps tape_;
};

} // namespace qwen
