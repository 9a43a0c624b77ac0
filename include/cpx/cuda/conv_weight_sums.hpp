// SPDX-License-Identifier: Apache-2.0
// The gradients of a convolution's weight and bias from whole sequences, added up in the order of the batch.
#pragma once

#include <cpx/core/activation.hpp>
#include <cpx/core/thd.hpp>
#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/elements.hpp>
#include <cpx/cuda/write_numbers.hpp>

#include <cpx/conv_weight_sums.cuh>

#include <span>

namespace cpx::cuda {

/// Adds to dweight and dbias, each unless it is empty, the terms of all tokens in their order.
///
/// x, dy: (tokens, channels) of the whole batch; weight: (channels, taps), bias: (channels) or empty; dweight and dbias
/// as these. A thread adds up a tap of a channel over all tokens: for sums that must be reproduced, not for speed. In
/// stream order, nobody waits. Throws `cpx::error` on shapes that do not fit and memory of another device.
template <class T>
void add_conv_weight_sums(memory const& in, rows<T const> x, rows<T const> dy, rows<T const> weight,
                          std::span<T const> bias, activation act, thd const& batch, rows<float> dweight,
                          std::span<float> dbias, caller here = caller::here()) {
    char const* const where = "cuda::add_conv_weight_sums";
    index_t const channels = x.width(), taps = weight.width();
    cpx::detail::require_activation(where, act, here);
    detail::require_rows(where, {{"x", x, batch.tokens(), channels}, {"dy", dy, batch.tokens(), channels}}, here);
    detail::require_rows(where, {{"weight", weight, channels, taps}}, here);
    if (dweight.data()) detail::require_rows(where, {{"dweight", dweight, channels, taps}}, here);
    for (index_t const size : {std::ssize(bias), std::ssize(dbias)})
        require(size == 0 || size == channels, where, "size of bias and of dbias", channels, size, here);
    detail::require_memory(where, {{"bias", bias}, {"dbias", dbias}}, here);
    auto const offsets = numbers_on_device(in, batch.offsets(), here);
    kernels::conv_weight_sums<T> const sum{x,
                                           dy,
                                           weight,
                                           bias.empty() ? nullptr : bias.data(),
                                           act == activation::silu,
                                           offsets.data(),
                                           batch.sequences(),
                                           dweight,
                                           dbias.empty() ? nullptr : dbias.data()};
    for_each_element(in, channels, taps + (dbias.empty() ? 0 : 1), sum, here);
}

} // namespace cpx::cuda
