// SPDX-License-Identifier: Apache-2.0
// Numbers, words and lists between Python and cpx.
#pragma once

#include "array.hpp"
#include "fill.hpp"

#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace binding {

/// Returns what one can go through. Throws `cpx::error` that names the argument, and what is `expected`, if one cannot.
nb::object items_of(char const* where, char const* name, char const* expected, nb::handle object);

/// Returns a list or an array of integers, one behind the other. Throws `cpx::error` that names the argument if it is
/// anything else, or an array of more dimensions.
std::vector<index_t> integers(char const* where, char const* name, nb::handle object, index_t dimensions = 1);
/// The same; None is none.
std::vector<index_t> integers_if(char const* where, char const* name, nb::handle object);

/// Returns a number, as exactly as it is an integer. Throws `cpx::error` that names the argument if it is none.
fill_value number(char const* where, char const* name, nb::handle object);

/// Returns an array of NumPy that owns the list.
inline nb::ndarray<nb::numpy, std::int64_t> to_numpy(std::vector<index_t> list, std::vector<std::size_t> shape = {}) {
    auto owned = std::make_unique<std::vector<std::int64_t>>(list.begin(), list.end());
    if (shape.empty()) shape = {owned->size()};
    auto* const data = owned->data();
    nb::capsule const owner(owned.release(),
                            [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
    return {data, shape.size(), shape.data(), owner};
}

/// Returns what a word means. Throws `cpx::error` that lists the words if it is none.
template <class E>
E word(char const* where, char const* name, std::string_view given,
       std::initializer_list<std::pair<std::string_view, E>> words) {
    std::string all;
    for (auto const& [text, meaning] : words) {
        if (text == given) return meaning;
        all += (all.empty() ? "" : ", ") + ('"' + std::string(text) + '"');
    }
    throw cpx::error(where, name, all, '"' + std::string(given) + '"');
}

/// Throws `cpx::error` unless `0 <= i < count`.
inline index_t index_in(char const* where, char const* name, index_t i, index_t count) {
    if (i < 0 || i >= count) throw cpx::error(where, name, "0 to " + std::to_string(count - 1), std::to_string(i));
    return i;
}

} // namespace binding
