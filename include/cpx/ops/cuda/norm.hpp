// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norms of rows in a device's memory.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/ops/local/norm.hpp>

#include <cpx/head_norm.cuh>

namespace cpx::cuda {

namespace detail {

inline kernels::norm_input norm_given(char const* where, head_norm<float> const& n, caller here) {
    cpx::detail::require_heads(where, n.x.width(), n.weight.width(), here);
    require_rows(where, "x", n.x, n.x.count(), n.x.width(), here);
    if (n.z.data()) require_rows(where, "z", n.z, n.x.count(), n.x.width(), here);
    require_rows(where, "weight", n.weight, 1, n.weight.width(), here);
    return {n.x, n.z, n.weight.data(), n.weight.width(), n.eps, n.z.data() ? 0 : n.gain_offset};
}

/// Launches a warp for each row.
template <class... P>
void launch_rows(char const* where, void (*kernel)(P...), index_t count, memory const& in, caller here,
                 std::type_identity_t<P>... arguments) {
    index_t const blocks = (count + 7) / 8;
    require(blocks < index_t{1} << 31, where, "rows", "less than 2^34", count, here);
    if (blocks == 0) return;
    kernel<<<static_cast<unsigned>(blocks), dim3(32, 8), 0, in.stream()>>>(arguments...);
    check(cudaGetLastError(), where, here);
}

} // namespace detail

/// As `normalise` of the host, in the stream of a memory. A row's bits are the same wherever it lies. Can be captured.
inline void normalise(memory const& in, head_norm<float> const& n, rows<float> y, caller here = caller::here()) {
    char const* const where = "cuda::normalise";
    auto const given = detail::norm_given(where, n, here);
    detail::require_rows(where, "y", y, n.x.count(), n.x.width(), here);
    detail::require_apart(where, {{"y", y}}, {{"x", n.x}, {"z", n.z}}, here, detail::in_place::yes);
    detail::require_apart(where, {{"y", y}}, {{"weight", n.weight}}, here);
    detail::launch_rows(where, kernels::normalise_rows, n.x.count(), in, here, given, y);
}

/// As `normalise_backward` of the host, in the stream of a memory; dx may be dy. Can be captured.
inline void normalise_backward(memory const& in, head_norm<float> const& n, rows<float const> dy, rows<float> dx,
                               rows<float> dz, rows<float> terms, caller here = caller::here()) {
    char const* const where = "cuda::normalise_backward";
    auto const given = detail::norm_given(where, n, here);
    detail::require_rows(where, "dy", dy, n.x.count(), n.x.width(), here);
    detail::require_rows(where, "dx", dx, n.x.count(), n.x.width(), here);
    if (n.z.data()) detail::require_rows(where, "dz", dz, n.x.count(), n.x.width(), here);
    detail::require_rows(where, "terms", terms, n.x.count(), n.weight.width(), here);
    detail::require_apart(where, {{"dx", dx}}, {{"dy", dy}}, here, detail::in_place::yes);
    detail::require_apart(where, {{"dx", dx}, {"dz", dz}, {"terms", terms}},
                          {{"x", n.x}, {"z", n.z}, {"weight", n.weight}}, here);
    detail::launch_rows(where, kernels::normalise_rows_backward, n.x.count(), in, here, given, dy, dx, dz, terms);
}

} // namespace cpx::cuda
