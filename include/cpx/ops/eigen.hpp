// SPDX-License-Identifier: Apache-2.0
// The one header that includes Eigen: matrices as cpx uses them, and `rows` seen as a matrix.
#pragma once

#include <cpx/core/rows.hpp>

#if !__has_include(<Eigen/Core>)
#error "cpx: ops need Eigen 3.4 or newer; link cpx::ops (find_package(cpx COMPONENTS ops)), or add its folder to -I"
#include "end of compilation"
#endif
#include <Eigen/Core>

#include <type_traits>

namespace cpx {

template <class T>
using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using column = Eigen::Matrix<T, Eigen::Dynamic, 1>;

/// Views `view` as a (count, width) matrix without copying.
///
/// Eigen picks its loops by shape and alignment, so the bits of a sum over such a matrix may depend on both. Code
/// whose rows must not depend on each other sums over fixed blocks instead, see ops/local/lanes.hpp.
template <class T>
auto as_matrix(rows<T> view) {
    using base = matrix<std::remove_const_t<T>>;
    using target = std::conditional_t<std::is_const_v<T>, base const, base>;
    return Eigen::Map<target, Eigen::Unaligned, Eigen::OuterStride<>>(view.data(), view.count(), view.width(),
                                                                      Eigen::OuterStride<>(view.stride()));
}

} // namespace cpx
