// SPDX-License-Identifier: Apache-2.0
// Names of weights with places to be filled in: `$` for the model's prefix, `#` for the number of an expert.
#pragma once

#include <cpx/core/index.hpp>

#include <charconv>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace cpx::detail {

/// Removes `prefix` from the beginning of `name`, if it is there, and returns whether it was.
inline bool skip(std::string_view& name, std::string_view prefix) {
    if (!name.starts_with(prefix)) return false;
    name.remove_prefix(prefix.size());
    return true;
}

/// Removes a number from the beginning of `name`: digits as programs write them, without zeros before, of at most 2^31.
inline std::optional<index_t> skip_number(std::string_view& name) {
    int number = 0;
    auto const [end, failure] = std::from_chars(name.data(), name.data() + name.size(), number);
    auto const digits = static_cast<std::size_t>(end - name.data());
    if (failure != std::errc{} || number < 0 || name[0] == '-' || (name[0] == '0' && digits > 1)) return {};
    name.remove_prefix(digits);
    return number;
}

/// Returns the name that a pattern becomes.
inline std::string fill(std::string_view pattern, std::string_view model, index_t expert) {
    std::string name;
    for (char const c : pattern)
        if (c == '$')
            name += model;
        else if (c == '#')
            name += std::to_string(expert);
        else
            name += c;
    return name;
}

/// Returns the expert in a name that a pattern may have become, -1 of a pattern without one; of other names nothing. A
/// number ends where its digits do.
inline std::optional<index_t> match(std::string_view pattern, std::string_view name, std::string_view model) {
    if (skip(pattern, "$") && !skip(name, model)) return {};
    auto const place = pattern.find('#');
    if (place == std::string_view::npos) return name == pattern ? std::optional<index_t>(-1) : std::nullopt;
    if (!skip(name, pattern.substr(0, place))) return {};
    auto const expert = skip_number(name);
    return expert && name == pattern.substr(place + 1) ? expert : std::nullopt;
}

/// What a name of a layer's weight says.
struct name_in_layer {
    index_t layer = 0;
    std::string_view name{}; ///< what stands behind the layer's number and its dot
};
/// Reads a name that begins with `prefix`, a number and a dot; of others returns nothing.
inline std::optional<name_in_layer> after_layer(std::string_view name, std::string_view prefix) {
    if (!skip(name, prefix)) return {};
    auto const layer = skip_number(name);
    if (!layer || !skip(name, ".")) return {};
    return name_in_layer{*layer, name};
}

} // namespace cpx::detail
