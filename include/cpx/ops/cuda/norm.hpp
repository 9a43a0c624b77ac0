// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norms of rows in a device's memory, called as those of rows on the host.
#pragma once

#include <cpx/cuda/head_norm.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/ops/local/norm.hpp>

#include <type_traits>

namespace cpx::cuda {

namespace detail {

template <class T>
norm_input<T> norm_of(head_norm<T> const& n) {
    return {n.x, n.z, n.weight, n.eps, n.z.data() ? 0 : n.gain_offset};
}

} // namespace detail

/// As `normalise` of the host, in the stream of a memory; see `normalise_rows`.
template <gpu_number T>
void normalise(memory const& in, head_norm<T> const& n, std::type_identity_t<rows<T>> y, caller here = caller::here()) {
    normalise_rows<T>(detail::norm_of(n), y, in.stream(), here);
}
template <gpu_number T>
void normalise_backward(memory const& in, head_norm<T> const& n, std::type_identity_t<rows<T const>> dy,
                        std::type_identity_t<rows<T>> dx, std::type_identity_t<rows<T>> dz, rows<float> terms,
                        caller here = caller::here()) {
    normalise_rows_backward<T>(detail::norm_of(n), dy, dx, dz, terms, in.stream(), here);
}

} // namespace cpx::cuda
