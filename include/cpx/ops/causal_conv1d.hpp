// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution over sequences on any sharding.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/ops/local/causal_conv.hpp>
#include <cpx/plan/halo.hpp>
#include <cpx/transport/exchange.hpp>

#include <span>

namespace cpx {

namespace detail {

/// Copies the rows beside segment `i` into `buffer` and returns them, in token order.
template <class T, any_sharding S>
rows<T const> rows_beside(halo_plan<S> const& plan, std::size_t i, rows<T const> own, rows<T const> halo,
                          std::vector<T>& buffer) {
    buffer.clear();
    index count = 0;
    for (std::size_t k = plan.begin[i]; k < plan.begin[i + 1]; ++k) {
        halo_part const& part = plan.parts[k];
        rows<T const> const from = (part.halo ? halo : own).sub(part.first, part.count);
        for (index row = 0; row < part.count; ++row)
            buffer.insert(buffer.end(), from.row(row), from.row(row) + own.width());
        count += part.count;
    }
    return {buffer.data(), count, own.width()};
}

} // namespace detail

/// Computes `y_t = activation(bias + sum_j weight_j x_{t-K+1+j})` for every channel, with zeros before a sequence
/// begins.
///
/// `plan` is `halo(sharding, rank, K - 1)`. x and y: (rows, channels) of the plan's sharding; weight: (channels, K) and
/// bias: (channels) or empty, for the channels that this rank holds (see `local_rows`).
/// Collective: one exchange of the halo. Any K and segments of any length, a halo may span several ranks.
/// Bitwise the same on every sharding.
///
/// Throws `cpx::error` on shapes that do not fit, and what `exchange` throws.
template <class T, any_sharding S, any_sharding X, any_sharding Y, elements_of<T> A, transport Comm>
void causal_conv1d(halo_plan<S> const& plan, sharded<A, X> const& x, rows<T const> weight, std::span<T const> bias,
                   activation act, sharded<T, Y> const& y, Comm& comm, caller here = caller::here()) {
    static_assert(std::same_as<X, S> && std::same_as<Y, S>,
                  "cpx: causal_conv1d of tensors that are not sharded as the plan; make the plan with "
                  "halo(x.sharding(), ...) and y of the same sharding");
    require(x.sharding() == plan.sharding && y.sharding() == plan.sharding, "causal_conv1d", "sharding of x and y",
            "the plan's", "another", here);
    require(plan.reach == weight.width() - 1 && plan.where == side::before, "causal_conv1d",
            "rows before a segment in the plan", weight.width() - 1, plan.where == side::before ? plan.reach : 0, here);
    index const channels = x.data().width();
    require(bias.empty() || std::ssize(bias) == channels, "causal_conv1d", "size of bias", channels, bias.size(), here);
    detail::require_shape("causal_conv1d", "x", x.data(), plan.source_rows, channels, here);
    detail::require_shape("causal_conv1d", "y", y.data(), plan.source_rows, channels, here);
    detail::require_shape("causal_conv1d", "weight", weight, channels, weight.width(), here);
    std::vector<T> halo_rows(static_cast<std::size_t>(plan.target_rows * channels));
    rows<T> const halo(halo_rows.data(), plan.target_rows, channels);
    exchange(plan, x.data(), halo, comm, here);

    std::vector<T> before;
    for (std::size_t i = 0; i < plan.segments.size(); ++i) {
        segment const& s = plan.segments[i];
        convolve_segment<T>(detail::rows_beside<T, S>(plan, i, x.data(), halo, before),
                            rows<T const>(x.data()).sub(s.row, s.count), weight, bias.empty() ? nullptr : bias.data(),
                            act, y.data().sub(s.row, s.count));
    }
}

} // namespace cpx
