// SPDX-License-Identifier: Apache-2.0
// Layers of linear attention, on a sharding of their own: all of a pass that depends on which.
#pragma once

#include "linear_attention.hpp"
#include "mlp.hpp"

namespace qwen {

/// The steps of the way back, the first one last.
using steps = std::vector<std::function<void()>>;

/// Layers of linear attention that follow each other, with their MLPs.
template <class R>
class linear_layers {
public:
    using hidden = typename site<R, entry_sharding>::tensor;

    virtual ~linear_layers() = default;
    /// Runs the layers from `first` up to `last` on h, and adds their way back, on dh, to `back`.
    virtual void operator()(cpx::range layers, hidden& h, hidden& dh, steps& back) = 0;
};

/// Layers on `Linear`, their recurrence on `Mix`: the same, or head_sharded.
///
/// Norms, projections and MLPs see one token at a time, so relayouts stand outside them, on the residual stream, and
/// only where the next layer wants another sharding.
template <class R, class Linear, class Mix>
class linear_layers_on final : public linear_layers<R> {
public:
    using hidden = typename linear_layers<R>::hidden;
    using tensor = typename site<R, Linear>::tensor;

    template <class How>
    linear_layers_on(R& rank, gradients<R>& grads, entry_sharding const& entry, cpx::sum_order order, How carry,
                     Linear const& linear, Mix const& mix)
        : at_(rank, grads, linear, order), mixer_(at_, carry, mix), there_(relayout(entry, linear, rank.rank())),
          back_(relayout(linear, entry, rank.rank())), dthere_(at_.make(rank.model.config.hidden_size)) {}

    void operator()(cpx::range layers, hidden& h, hidden& dh, steps& back) override {
        auto there = move(there_, h, dh, dthere_, back); // and stay there for all of them
        for (index_t i = layers.first; i < layers.last; ++i) {
            record(mixer_(i, there), back);
            record(mlp(at_, i, there), back);
        }
        h = move(back_, there, dthere_, dh, back);
    }

private:
    void record(typename site<R, Linear>::backward step, steps& back) {
        back.push_back([this, step = std::move(step)] { step(dthere_); });
    }

    template <class Plan, class From, class To>
    To move(Plan const& plan, From& h, From& dfrom, To& dto, steps& back) {
        if constexpr (std::same_as<From, To>)
            if (plan.from == plan.to) {
                back.push_back([&] { std::swap(dfrom, dto); });
                return std::move(h);
            }
        back.push_back([&] { at_.move(plan.transposed(), dto, dfrom); });
        return at_.move(plan, h);
    }

    site<R, Linear> at_;
    linear_attention<R, Linear, Mix> mixer_;
    cpx::relayout_plan<entry_sharding, Linear> there_;
    cpx::relayout_plan<Linear, entry_sharding> back_;
    tensor dthere_; ///< the gradient of the residual stream here
};

} // namespace qwen
