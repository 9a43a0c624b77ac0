// SPDX-License-Identifier: Apache-2.0
// One rank's forward and backward pass of a model whose tokens are sharded over ranks.
#pragma once

#include "attention.hpp"
#include "linear_attention.hpp"
#include "vision.hpp"

namespace qwen {

/// The training step of one rank, on the host or on a GPU: log-probabilities of the next tokens, and gradients.
///
/// Hidden states enter zigzag over sequences, where full attention is, and return there from linear attention.
template <class R>
class pass {
    using T = typename R::element;
    using W = cpx::wide<T>;
    using var = typename tape<R>::template var<entry_sharding>;
    using wide_var = typename tape<R>::template wide_var<entry_sharding>;

public:
    using numbers = cpx::tensor<index_t, entry_sharding, typename R::memory_type>;

    pass(R& rank, input const& in, positions const& where, make_linear<R> const& make, attention_by attention,
         cpx::sum_order order)
        : at_(rank, in.of_media, order), attention_(at_, where.sharding(), attention, where), vision_(in, where, at_),
          linear_(make ? make(at_) : nullptr) {
        if (!linear_) at_.counted.balance(where.sharding());
    }

    /// Returns log p(label) for the rows of this rank; 0 where the label is `cpx::ignored`.
    wide_var forward(numbers const& ids, numbers const& labels) {
        auto h = embed(ids);
        vision_(features::embedding, h);
        auto const types = at_.rank.model.config.layers();
        auto const linear = [&](index_t i) {
            return i < std::ssize(types) && types[static_cast<std::size_t>(i)] == cpx::layer_type::linear_attention;
        };
        for (index_t i = 0; i < std::ssize(types);) {
            index_t const first = i;
            while (linear(i)) ++i;
            if (i > first) {
                h = linear_({first, i}, h);
            } else {
                h = mlp(at_, i, attention_(i, h));
                vision_(i++, h);
            }
        }
        return predict(h, labels);
    }

    /// Returns, on rank 0, the gradients of what `forward` returned, given that of its log-probabilities, summed over
    /// ranks.
    std::map<std::string, gradient<W>> backward() {
        at_.run_back();
        return at_.grads.sum();
    }

    /// Returns what the forward pass had to move, on rank 0.
    needs const& counted() const { return at_.counted; }

private:
    var embed(numbers const& ids) {
        char const* const name = "model.embed_tokens.weight";
        auto const h = at_.make(ids.sharding(), *at_.rank.model.config.hidden_size);
        gather_rows<T>(at_.rank.memory(), at_.rank.weight(name), ids.elements(), h->data());
        at_.back([=, this, &ids] {
            auto const whole = at_.sums(ids.sharding()).whole(ids);
            auto const own = at_.share(h->grad(), h->width());
            auto const to = at_.grads.of(name).columns(own.share.first, own.share.size());
            at_.each_column(to, rowwise::add_rows<T, W>{own.data, whole.data.data(), to});
        });
        return h;
    }

    wide_var predict(var const& h, numbers const& labels) {
        auto const logits = at_.linear("lm_head.weight", at_.norm("model.norm.weight", h));
        auto const logp = at_.wide_beside(h, 1);
        index_t const* const label = labels.data().data();
        at_.each(logp->data(), rowwise::log_probability<T>{logits->data(), label, logp->data()});
        at_.back([=, this] {
            auto const d = logp->grad().data();
            at_.each(d, rowwise::log_probability_backward<T>{logits->data(), label, d, logits->grad().data()});
        });
        return logp;
    }

    tape<R> at_;
    full_attention<R> attention_;
    vision<R> vision_;
    linear_layers<R> linear_;
};

} // namespace qwen
