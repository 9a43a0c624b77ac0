// SPDX-License-Identifier: Apache-2.0
// The blocks that see one token at a time, on a GPU: the MLP of the dense model and the mixture of experts.
#pragma once

#include "experts.cuh"
#include "site.hpp"

namespace qwen::gpu {

/// down(silu(gate(x)) up(x)), by the weights of one name, into y.
class dense_mlp {
public:
    dense_mlp(site& at, index_t count, index_t inner) : at_(at), gate_(count, inner), up_(count, inner) {}

    void operator()(std::string const& mlp, rows<float const> x, rows<float> y) const {
        at_.linear(mlp + "gate_proj.weight", x, gate_);
        at_.linear(mlp + "up_proj.weight", x, up_);
        silu_mul(gate_, up_, gate_, at_.stream);
        at_.linear(mlp + "down_proj.weight", gate_, y);
    }

private:
    site& at_;
    device_rows<float> gate_, up_;
};

/// The experts chosen and the shared one, into y.
class expert_mlp {
public:
    expert_mlp(site& at, index_t count)
        : at_(at), choices_(at.config.num_experts_per_tok), inner_(at.config.moe_intermediate_size),
          shared_(at, count, at.config.shared_expert_intermediate_size), logits_(count, at.config.num_experts),
          weights_(count, choices_), gate_up_(count, choices_ * 2 * inner_), activation_(count, choices_ * inner_),
          output_(count, choices_ * at.config.hidden_size), shared_output_(count, at.config.hidden_size),
          shared_gate_(count, 1), chosen_(count, choices_) {}

    void operator()(std::string const& mlp, rows<float const> x, rows<float> y) const {
        at_.linear(mlp + "gate.weight", x, logits_);
        choose_experts(logits_, chosen_, weights_, at_.stream);
        expert_linear(chosen_, x, at_.weight(mlp + "experts.gate_up_proj"), gate_up_, at_.stream);
        index_t const count = x.count() * choices_; // each choice has its gate, then its up
        rows<float const> const gate_up(gate_up_.view().data(), count, 2 * inner_);
        silu_mul(gate_up.columns(0, inner_), gate_up.columns(inner_, inner_),
                 {activation_.view().data(), count, inner_}, at_.stream);
        expert_linear(chosen_, activation_, at_.weight(mlp + "experts.down_proj"), output_, at_.stream);
        shared_(mlp + "shared_expert.", x, shared_output_);
        at_.linear(mlp + "shared_expert_gate.weight", x, shared_gate_);
        combine_experts(weights_, output_, shared_gate_, shared_output_, y, at_.stream);
    }

private:
    site& at_;
    index_t choices_, inner_;
    dense_mlp shared_;
    device_rows<float> logits_, weights_, gate_up_, activation_, output_, shared_output_, shared_gate_;
    device_rows<index_t> chosen_;
};

} // namespace qwen::gpu
