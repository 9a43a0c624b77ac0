// SPDX-License-Identifier: Apache-2.0
// One rank's forward pass of a Qwen3.5 model on a GPU.
#pragma once

#include "log_probability.cuh"
#include "mixers.hpp"
#include "mlp.hpp"

#include <cpx/cuda/row_gather.hpp>

namespace qwen::gpu {

/// The residual stream h on one sharding, and the blocks that see one token at a time.
class tokens {
public:
    tokens(site& at, index_t count)
        : h(count, at.config.hidden_size), x(count, at.config.hidden_size), at_(at), y_(count, at.config.hidden_size) {
        if (at.config.moe())
            experts_.emplace(at, count);
        else
            dense_.emplace(at, count, at.config.intermediate_size);
    }
    /// h += mlp(norm(h)).
    void mlp(index_t layer) {
        at_.norm(layer_name(layer, "post_attention_layernorm.weight"), h, x);
        auto const run = [&](auto const& block) { block(layer_name(layer, "mlp."), x, y_); };
        experts_ ? run(*experts_) : run(*dense_);
        at_.add(y_, h);
    }

    device_rows<float> h, x;

private:
    site& at_;
    device_rows<float> y_;
    std::optional<dense_mlp> dense_;
    std::optional<expert_mlp> experts_;
};

/// The forward pass of one rank, linear attention on `Linear` and its recurrence on `Mix`. All memory is allocated, and
/// every exchange made ready, before the first layer.
template <class How, cpx::any_sharding Linear, cpx::any_sharding Mix>
class pass {
public:
    /// Collective.
    pass(site& at, attention_by how, Linear const& linear, Mix const& mix)
        : at_(at), entry_(at, at.sharding.rows(at.rank())), linear_attention_(at, linear.rows(at.rank()), mix),
          full_attention_(at, how), logits_(at.make(at.config.vocab_size)), logp_(at.make(1)) {
        if constexpr (std::same_as<Linear, entry_sharding>) return;
        index_t const hidden = at.config.hidden_size;
        there_.emplace(at, relayout(at.sharding, linear, at.rank()), hidden);
        home_.emplace(at, relayout(linear, at.sharding, at.rank()), hidden);
        linear_.emplace(at, linear.rows(at.rank()));
    }

    /// Returns log p(label) for the rows of this rank, (rows, 1); 0 where the label is `cpx::ignored`.
    rows<float const> forward(cpx::cuda::buffer<index_t> const& ids, cpx::cuda::buffer<index_t> const& labels) {
        cpx::cuda::gather_rows<float, index_t>(
            at_.weight("model.embed_tokens.weight"),
            std::span<index_t const>(ids.data(), static_cast<std::size_t>(ids.size())), entry_.h, at_.stream);
        tokens* now = &entry_;
        auto const go = [&](tokens& to) { // and stay there for all layers of one kind
            if (now != &to) (&to == &entry_ ? *home_ : *there_)(now->h, to.h);
            now = &to;
        };
        index_t layer = 0;
        for (cpx::layer_type const type : at_.config.layer_types) {
            bool const full = type == cpx::layer_type::full_attention;
            go(full || !linear_ ? entry_ : *linear_);
            full ? full_attention_(layer, now->h) : linear_attention_(layer, now->h);
            now->mlp(layer++);
        }
        go(entry_);
        at_.norm("model.norm.weight", entry_.h, entry_.x);
        at_.linear("lm_head.weight", entry_.x, logits_);
        log_probabilities(logits_, labels.data(), logp_, at_.stream);
        return logp_;
    }

private:
    site& at_;
    tokens entry_;
    linear_attention<How, Mix> linear_attention_;
    full_attention full_attention_;
    device_rows<float> logits_, logp_;
    std::optional<tokens> linear_; ///< where linear attention runs on another sharding than that of `entry_`
    std::optional<movement> there_, home_;
};

} // namespace qwen::gpu
