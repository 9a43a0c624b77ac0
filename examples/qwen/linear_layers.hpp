// SPDX-License-Identifier: Apache-2.0
// Layers of linear attention, on a sharding of their own: all of a pass that depends on which.
#pragma once

#include "mixers.hpp"
#include "mlp.hpp"

#include <memory>

namespace qwen {

/// The steps of the way back, the first one last.
using steps = std::vector<std::function<void()>>;

/// Layers of linear attention that follow each other, with their MLPs.
template <class T>
class linear_layers {
public:
    using hidden = cpx::tensor<T, entry_sharding>;

    virtual ~linear_layers() = default;
    /// Runs the layers from `first` up to `last` on h, and adds their way back, on dh, to `back`.
    virtual void operator()(cpx::range layers, hidden& h, hidden& dh, steps& back) = 0;
};

/// What it takes to make them on one rank.
template <class T>
struct on_rank {
    checkpoint<T> const& model;
    gradients<T>& grads;
    entry_sharding const& entry;
    cpx::sum_order order;
    host_ranks& comm;
};

/// Layers on `Linear`, their recurrence on `Mix`: the same, or head_sharded.
///
/// Norms, projections and MLPs see one token at a time, so relayouts stand outside them, on the residual stream, and
/// only where the next layer wants another sharding.
template <class T, class How, class Linear, class Mix>
class linear_layers_on final : public linear_layers<T> {
public:
    using hidden = typename linear_layers<T>::hidden;

    linear_layers_on(on_rank<T> const& of, Linear const& linear, Mix const& mix,
                     cpx::gated_delta_net_config const& config)
        : at_(of.model, of.grads, linear, of.order, of.comm), net_(make_net(linear, mix, of.comm.rank(), config)),
          there_(relayout(of.entry, linear, of.comm.rank())), back_(relayout(linear, of.entry, of.comm.rank())),
          dthere_(at_.make(config.hidden)) {}

    void operator()(cpx::range layers, hidden& h, hidden& dh, steps& back) override {
        auto there = move(there_, h, dh, dthere_, back); // and stay there for all of them
        for (cpx::index_t i = layers.first; i < layers.last; ++i) {
            record(linear_attention(at_, net_, i, there), back);
            record(mlp(at_, i, there), back);
        }
        h = move(back_, there, dthere_, dh, back);
    }

private:
    using net = cpx::gated_delta_net<How, Linear, Mix>;

    static net make_net(Linear const& linear, Mix const& mix, int rank, cpx::gated_delta_net_config const& config) {
        if constexpr (Mix::every_row)
            return net(linear, mix, Mix(mix.ranks(), mix.batch(), config.output_sections()), rank, config);
        else
            return net(linear, rank, config);
    }

    void record(typename site<T, Linear, host_ranks>::backward step, steps& back) {
        back.push_back([this, step = std::move(step)] { step(dthere_); });
    }

    template <class From, class To>
    cpx::tensor<T, To> move(cpx::relayout_plan<From, To> const& plan, cpx::tensor<T, From> const& h,
                            cpx::tensor<T, From>& dfrom, cpx::tensor<T, To>& dto, steps& back) {
        if constexpr (std::same_as<From, To>)
            if (plan.from == plan.to) {
                back.push_back([&] { dfrom = dto; });
                return h;
            }
        back.push_back([&] { exchange(plan.transposed(), dto.view(), dfrom.view(), at_.comm); });
        return exchange(plan, h, at_.comm);
    }

    site<T, Linear, host_ranks> at_;
    net net_;
    cpx::relayout_plan<entry_sharding, Linear> there_;
    cpx::relayout_plan<Linear, entry_sharding> back_;
    cpx::tensor<T, Linear> dthere_; ///< the gradient of the residual stream here
};

} // namespace qwen
