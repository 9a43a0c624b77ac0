// SPDX-License-Identifier: Apache-2.0
// Norms of one rank's rows, head by head: root-mean-square norms, and the lengths by which q and k are divided.
#pragma once

#include <cpx/core/gradient_scale.hpp>
#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/launch.hpp>

#include <cpx/head_norm.cuh>

#include <algorithm>
#include <concepts>
#include <string>
#include <type_traits>

namespace cpx::cuda {

using kernels::norm_input;

namespace detail {

template <class T, class X>
void norm_given(char const* where, norm_input<T, X> const& n, caller here) {
    require(n.dim() > 0 && n.x.width() % n.dim() == 0, where, "width of x",
            in_words("a multiple of the size of weight, ", n.dim()), n.x.width(), here);
    require(n.x.width() < index_t{1} << 31, where, "width of x", "less than 2^31", n.x.width(), here);
    cpx::detail::require_gradient_scale(where, !std::same_as<T, X>, n.gradient_scale, here);
    require_rows(where, {{"x", n.x}, {"weight", n.weight, 1, n.dim()}}, here);
    if (n.z.data()) require_rows(where, {{"z", n.z, n.x.count(), n.x.width()}}, here);
}

/// Launches a warp for each row: `vectors` by lanes, where there are some, else `any`.
template <class Vectors, class Any, class... X>
void launch_rows(char const* where, Vectors vectors, Any any, kernels::norm_lanes by, index_t count,
                 cudaStream_t stream, caller here, X const&... arguments) {
    index_t const blocks = (count + 7) / 8;
    require(blocks < index_t{1} << 31, where, "rows", "less than 2^34", count, here);
    if (blocks == 0) return;
    if (by.lanes > 0)
        launch(vectors, dims(blocks), dim3(32, 8), 0, stream, where, here, arguments..., by);
    else
        launch(any, dims(blocks), dim3(32, 8), 0, stream, where, here, arguments...);
}

} // namespace detail

/// Computes `y = x / sqrt(mean x^2 + eps) * (offset + weight)`, and with z silu(z) times that; the mean is a head's. y
/// may be x or z. x, and its gradient, may be of another type of 16 bits, X: y is of T, as z and weight are. Sums and
/// what `terms` holds are float. A row's bits are the same wherever it lies. Can be captured.
///
/// Throws `cpx::error` on shapes that do not fit and memory that overlaps or is another device's, before anything is
/// launched.
template <gpu_number T, gpu_number X>
void normalise_rows(norm_input<T, X> const& n, std::type_identity_t<rows<T>> y, cudaStream_t stream,
                    caller here = caller::here()) {
    char const* const where = "cuda::normalise_rows";
    detail::norm_given(where, n, here);
    detail::require_rows(where, {{"y", y, n.x.count(), n.x.width()}}, here);
    detail::require_apart(where, {{"y", y}}, {{"x", n.x}, {"z", n.z}}, here, detail::in_place::yes);
    detail::require_apart(where, {{"y", y}}, {{"weight", n.weight}}, here);
    rows<T const> const z = n.z.data() ? n.z : y;
    auto const by = kernels::norm_lanes_of<T>(n.dim(), detail::row_vector(n.x, z, n.weight, y) == 16);
    detail::launch_rows(where, n.z.data() ? kernels::normalise_rows<T, true, X> : kernels::normalise_rows<T, false, X>,
                        kernels::normalise_any_rows<T, X>, by, n.x.count(), stream, here, n, y);
}

/// Computes the gradients of x and, with z, of z, and adds to each row of `terms`, (rows, dim), what that row adds to
/// the weight's. dx may be dy. Where x is half, elements of dx below 6e-5 lose bits, and those below 6e-8 all, and
/// beyond 65504 are infinite: dx is `n.gradient_scale` times the gradient, 1 where x is of T. All else as above.
template <gpu_number T, gpu_number X>
void normalise_rows_backward(norm_input<T, X> const& n, std::type_identity_t<rows<T const>> dy,
                             std::type_identity_t<rows<X>> dx, std::type_identity_t<rows<T>> dz, rows<float> terms,
                             cudaStream_t stream, caller here = caller::here()) {
    char const* const where = "cuda::normalise_rows_backward";
    detail::norm_given(where, n, here);
    index_t const count = n.x.count(), width = n.x.width();
    detail::require_rows(where, {{"dy", dy, count, width}, {"dx", dx, count, width}}, here);
    if (n.z.data()) detail::require_rows(where, {{"dz", dz, count, width}}, here);
    detail::require_rows(where, {{"terms", terms, count, n.dim()}}, here);
    detail::require_apart(where, {{"dx", dx}}, {{"dy", dy}}, here, detail::in_place::yes);
    detail::require_apart(where, {{"dz", dz}, {"terms", terms}}, {{"dy", dy}}, here);
    detail::require_apart(where, {{"dx", dx}, {"dz", dz}, {"terms", terms}},
                          {{"x", n.x}, {"z", n.z}, {"weight", n.weight}}, here);
    rows<T const> const z = n.z.data() ? n.z : dy, of_z = n.z.data() ? dz : dy;
    auto const by = kernels::norm_lanes_of<T>(n.dim(), detail::row_vector(n.x, z, n.weight, dy, dx, of_z) == 16);
    detail::launch_rows(where,
                        n.z.data() ? kernels::normalise_rows_backward<T, true, X>
                                   : kernels::normalise_rows_backward<T, false, X>,
                        kernels::normalise_any_rows_backward<T, X>, by, count, stream, here, n, dy, dx, dz, terms);
}

namespace detail {

/// Runs `normalise_heads` of arguments that fit.
template <class T>
void run_normalise_heads(rows<T const> x, index_t dim, rows<T> y, bool back, cudaStream_t stream, caller here) {
    index_t const heads = x.width() / dim, items = x.count() * heads;
    if (items == 0) return;
    bool const whole = row_vector(x, y) == 16;
    auto const by = kernels::norm_lanes_of<T>(dim, whole);
    int const columns = static_cast<int>(dim);
    if (by.lanes > 0 && x.count() < index_t{1} << 33 && x.width() < index_t{1} << 31)
        launch(back ? kernels::normalise_heads<T, true> : kernels::normalise_heads<T, false>, dims((x.count() + 7) / 8),
               dim3(32, 8), 0, stream, "normalise_heads", here, x.data(), x.stride(), y.data(), y.stride(), x.count(),
               static_cast<int>(x.width()), columns, by);
    else
        launch(kernels::normalise_any_heads<T>, dims(std::min<index_t>((items + 7) / 8, 4096)), dim3(32, 8), 0, stream,
               "normalise_heads", here, x.data(), x.stride(), y.data(), y.stride(), x.count(), static_cast<int>(heads),
               columns, back);
}

} // namespace detail

/// Writes `y = x / sqrt(sum x^2 + 1e-6)`, the sum over each head of `dim` columns; any strides.
///
/// With `back`, y holds the gradient of that result and becomes the gradient of x. Bitwise the same for a row wherever
/// it lies. Throws `cpx::error` on shapes that do not fit and memory of another device, before anything is launched.
template <class T>
void normalise_heads(rows<T const> x, index_t dim, rows<T> y, bool back, cudaStream_t stream,
                     caller here = caller::here()) {
    char const* const where = "cuda::normalise_heads";
    require(dim >= 1 && x.width() % dim == 0, where, "width", detail::in_words("whole heads of ", dim), x.width(),
            here);
    detail::require_rows(where, {{"x", x}, {"y", y, x.count(), x.width()}}, here);
    detail::require_apart(where, {{"y", y}}, {{"x", x}}, here);
    detail::run_normalise_heads(x, dim, y, back, stream, here);
}

} // namespace cpx::cuda
