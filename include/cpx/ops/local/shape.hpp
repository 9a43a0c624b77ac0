// SPDX-License-Identifier: Apache-2.0
// The check of shapes that every operator makes before it reads its input.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/rows.hpp>

#include <string>

namespace cpx::detail {

/// Throws `cpx::error` that names `where` and `name` unless `view` is (count, width).
template <class T>
void require_shape(char const* where, char const* name, rows<T> view, index_t count, index_t width,
                   caller here = caller::here()) {
    if (view.count() == count && view.width() == width) return;
    auto const shape = [](index_t n, index_t w) { return '(' + std::to_string(n) + ", " + std::to_string(w) + ')'; };
    throw error(where, std::string("shape of ") + name, shape(count, width), shape(view.count(), view.width()), here);
}

} // namespace cpx::detail
