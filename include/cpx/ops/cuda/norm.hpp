// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norms of rows in a device's memory, called as those of rows on the host.
#pragma once

#include <cpx/cuda/head_norm.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/ops/local/norm.hpp>

namespace cpx::cuda {

namespace detail {

inline norm_input norm_of(head_norm<float> const& n) {
    return {n.x, n.z, n.weight, n.eps, n.z.data() ? 0 : n.gain_offset};
}

} // namespace detail

/// As `normalise` of the host, in the stream of a memory; see `normalise_rows`.
inline void normalise(memory const& in, head_norm<float> const& n, rows<float> y, caller here = caller::here()) {
    normalise_rows(detail::norm_of(n), y, in.stream(), here);
}
inline void normalise_backward(memory const& in, head_norm<float> const& n, rows<float const> dy, rows<float> dx,
                               rows<float> dz, rows<float> terms, caller here = caller::here()) {
    normalise_rows_backward(detail::norm_of(n), dy, dx, dz, terms, in.stream(), here);
}

} // namespace cpx::cuda
