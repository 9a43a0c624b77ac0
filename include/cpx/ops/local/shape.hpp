// SPDX-License-Identifier: Apache-2.0
// The check of shapes that every operator makes before it reads its input.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/overlap.hpp>
#include <cpx/core/rows.hpp>

#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

namespace cpx::detail {

/// Throws `cpx::error` that names `where` and `name` unless `view` is (count, width), in memory.
template <class T>
void require_shape(char const* where, char const* name, rows<T> view, index_t count, index_t width,
                   caller here = caller::here()) {
    bool const fits = view.count() == count && view.width() == width;
    if (fits && (view.data() || count == 0 || width == 0)) return;
    if (fits) throw error(where, std::string("memory of ") + name, "some", "null", here);
    auto const shape = [](index_t n, index_t w) { return '(' + std::to_string(n) + ", " + std::to_string(w) + ')'; };
    throw error(where, std::string("shape of ") + name, shape(count, width), shape(view.count(), view.width()), here);
}

/// Throws `cpx::error` unless all these sizes are at least 1.
inline void require_sizes(char const* where, std::initializer_list<std::pair<char const*, index_t>> sizes,
                          caller here) {
    for (auto const& [name, size] : sizes) require(size >= 1, where, name, "at least 1", size, here);
}

/// Throws `cpx::error` unless groups of `heads` heads of one size each share one of `shared` heads.
inline void require_groups(char const* where, char const* name, index_t heads, char const* shared_name, index_t shared,
                           caller here) {
    require(shared > 0, where, shared_name, "at least 1", shared, here);
    require(heads % shared == 0, where, name,
            std::string("a multiple of the ") + shared_name + ' ' + std::to_string(shared), heads, here);
    require(heads >= 0 && heads <= std::numeric_limits<int>::max(), where, name, "0 to 2147483647", heads, here);
}

} // namespace cpx::detail
