// SPDX-License-Identifier: Apache-2.0
// One rank's forward pass of a Qwen3.5 model on a GPU.
#pragma once

#include "log_probability.cuh"
#include "mixers.hpp"
#include "mlp.hpp"

#include <cpx/cuda/row_gather.hpp>

namespace qwen3_5::gpu {

/// The forward pass of one rank. All memory is allocated, and every exchange made ready, before the first layer.
class pass {
public:
    /// Collective.
    pass(site& at, attention_by how)
        : at_(at), linear_attention_(at), full_attention_(at, how), h_(at.make(at.config.hidden_size)),
          x_(at.make(at.config.hidden_size)), y_(at.make(at.config.hidden_size)),
          logits_(at.make(at.config.vocab_size)), logp_(at.make(1)) {
        if (at.config.moe())
            expert_mlp_.emplace(at);
        else
            dense_mlp_.emplace(at, at.config.intermediate_size);
    }

    /// Returns log p(label) for the rows of this rank, (rows, 1); 0 where the label is `cpx::ignored`.
    rows<float const> forward(cpx::cuda::buffer<index_t> const& ids, cpx::cuda::buffer<index_t> const& labels) {
        cpx::cuda::gather_rows<float, index_t>(
            at_.weight("model.embed_tokens.weight"),
            std::span<index_t const>(ids.data(), static_cast<std::size_t>(ids.size())), h_, at_.stream);
        index_t layer = 0;
        for (cpx::layer_type const type : at_.config.layer_types) {
            if (type == cpx::layer_type::full_attention)
                full_attention_(layer, h_);
            else
                linear_attention_(layer, h_);
            mlp(layer++);
        }
        at_.norm("model.norm.weight", h_, x_);
        at_.linear("lm_head.weight", x_, logits_);
        log_probabilities(logits_, labels.data(), logp_, at_.stream);
        return logp_;
    }

private:
    /// h += mlp(norm(h)).
    void mlp(index_t layer) {
        at_.norm(layer_name(layer, "post_attention_layernorm.weight"), h_, x_);
        auto const run = [&](auto const& block) { block(layer_name(layer, "mlp."), x_, y_); };
        expert_mlp_ ? run(*expert_mlp_) : run(*dense_mlp_);
        at_.add(y_, h_);
    }

    site& at_;
    linear_attention linear_attention_;
    full_attention full_attention_;
    std::optional<dense_mlp> dense_mlp_;
    std::optional<expert_mlp> expert_mlp_;
    device_rows<float> h_, x_, y_, logits_, logp_;
};

} // namespace qwen3_5::gpu
