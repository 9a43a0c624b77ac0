// SPDX-License-Identifier: Apache-2.0
// Runs a model over GPUs and accounts for what moved.
#pragma once

#include "gpus.hpp"
#include "outcome.hpp"

#include <cpx/ops/token_loss.hpp>

namespace qwen {

outcome run_on_gpus(checkpoint<float> const& model, input const& in, strategy const& how, int ranks) {
    using whole_batch = cpx::replicated<>;
    whole_batch const whole(1, in.batch);
    auto const count = static_cast<std::size_t>(in.batch.tokens());
    cpx::tensor<cpx::index_t, whole_batch> ids(whole, 0, 1), labels(whole, 0, 1);
    cpx::tensor<float, whole_batch> logp(whole, 0, 1);
    std::ranges::copy(in.ids, ids.data().data());

    outcome result;
    cpx::threads::run(1, [&](cpx::threads& host) {
        next_token_labels(halo(whole, 0, 1, cpx::side::after), std::as_const(ids).view(), labels.view(), host);
        gpu_input from{model.config, {}, in.batch, in.ids, {}, how};
        model.each([&](std::string const& name, cpx::rows<float const> weight) { from.weights[name] = weight; });
        from.labels.assign(labels.data().data(), labels.data().data() + count);
        auto const output = forward_on_gpus(from, ranks);
        std::ranges::copy(output.log_probabilities, logp.data().data());
        result.rows = output.sent;
        result.states = output.states;
        result.loss = mean_token_loss(std::as_const(logp).view(), std::as_const(labels).view(), host);
    });
    result.log_probabilities.assign(logp.data().data(), logp.data().data() + count);
    result.counted = count_forward(model.config, how, in.batch, ranks, 64);
    return result;
}

} // namespace qwen
