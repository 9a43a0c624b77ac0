// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norms of rows in a device's memory, called as those of rows on the host.
#pragma once

#include <cpx/cuda/head_norm.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/ops/local/norm.hpp>

#include <type_traits>

namespace cpx::cuda {

namespace detail {

template <class T, class X>
norm_input<T, X> norm_of(head_norm<T, X> const& n, float gradient_scale = 1) {
    return {n.x, n.z, n.weight, n.eps, n.z.data() ? 0 : n.gain_offset, gradient_scale};
}

} // namespace detail

/// As `normalise` of the host, in the stream of a memory; see `normalise_rows`.
template <gpu_number T, gpu_number X>
void normalise(memory const& in, head_norm<T, X> const& n, std::type_identity_t<rows<T>> y,
               caller here = caller::here()) {
    normalise_rows(detail::norm_of(n), y, in.stream(), here);
}
template <gpu_number T, gpu_number X>
void normalise_backward(memory const& in, head_norm<T, X> const& n, std::type_identity_t<rows<T const>> dy,
                        std::type_identity_t<rows<X>> dx, std::type_identity_t<rows<T>> dz, rows<float> terms,
                        caller here = caller::here()) {
    normalise_rows_backward(detail::norm_of(n), dy, dx, dz, terms, in.stream(), here);
}
/// The same, where dx is to be `gradient_scale` times the gradient of an x of other elements.
template <gpu_number T, gpu_number X>
void normalise_backward(memory const& in, head_norm<T, X> const& n, std::type_identity_t<rows<T const>> dy,
                        std::type_identity_t<rows<X>> dx, std::type_identity_t<rows<T>> dz, rows<float> terms,
                        float gradient_scale, caller here = caller::here()) {
    normalise_rows_backward(detail::norm_of(n, gradient_scale), dy, dx, dz, terms, in.stream(), here);
}

} // namespace cpx::cuda
