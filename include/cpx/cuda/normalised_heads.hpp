// SPDX-License-Identifier: Apache-2.0
// Heads in device memory divided by their lengths, as q and k of the gated delta rule are.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/launch.hpp>

#include <cpx/normalised_heads.cuh>

#include <algorithm>

namespace cpx::cuda {

/// Writes `y = x / sqrt(sum x^2 + 1e-6)`, the sum over each head of `dim` columns; any strides.
///
/// With `back`, y holds the gradient of that result and becomes the gradient of x. Bitwise the same for a row wherever
/// it lies. Throws `cpx::error` on shapes that do not fit and memory of another device, before anything is launched.
template <class T>
void normalise_heads(rows<T const> x, index_t dim, rows<T> y, bool back, cudaStream_t stream,
                     caller here = caller::here()) {
    char const* const where = "cuda::normalise_heads";
    require(dim >= 1 && x.width() % dim == 0, where, "width", "whole heads of " + std::to_string(dim), x.width(), here);
    detail::require_rows(where, {{"x", x}, {"y", y, x.count(), x.width()}}, here);
    detail::require_apart(where, {{"y", y}}, {{"x", x}}, here);
    index_t const heads = x.width() / dim, items = x.count() * heads;
    if (items == 0) return;
    bool const whole = detail::row_vector(x, y) == 16;
    auto const by = kernels::norm_lanes_of<T>(dim, whole);
    int const columns = static_cast<int>(dim);
    if (by.lanes > 0 && x.count() < index_t{1} << 33)
        launch(kernels::normalise_heads<T>, detail::dims((x.count() + 7) / 8), dim3(32, 8), 0, stream,
               "normalise_heads", here, x.data(), x.stride(), y.data(), y.stride(), x.count(), x.width(), columns, back,
               by);
    else
        launch(kernels::normalise_any_heads<T>, detail::dims(std::min<index_t>((items + 7) / 8, 4096)), dim3(32, 8), 0,
               stream, "normalise_heads", here, x.data(), x.stride(), y.data(), y.stride(), x.count(),
               static_cast<int>(heads), columns, back);
}

} // namespace cpx::cuda
