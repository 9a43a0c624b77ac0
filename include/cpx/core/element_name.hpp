// SPDX-License-Identifier: Apache-2.0
// The name by which ranks agree on the type of what they exchange.
#pragma once

#include <concepts>
#include <limits>
#include <string_view>

namespace cpx {

namespace detail {

/// Returns the name of a type without "cpx::", as the compiler spells it.
template <class T>
constexpr std::string_view type_name() {
    std::string_view name = __PRETTY_FUNCTION__;
    auto const first = name.find("T = ");
    if (first == std::string_view::npos) return name;
    name.remove_prefix(first + 4);
    name = name.substr(0, name.find_first_of(";]"));
    return name.substr(0, 5) == "cpx::" ? name.substr(5) : name;
}

template <class T>
constexpr std::string_view number_name() {
    using limits = std::numeric_limits<T>;
    if (std::same_as<T, bool>) return "bool";
    int bits = limits::digits; // of a floating-point number those of the fraction, with the hidden one
    if (std::floating_point<T>) {
        switch (bits) {
        case 8: return "bfloat16";
        case 11: return "float16";
        case 24: return "float32";
        case 53: return "float64";
        default: break;
        }
    } else {
        switch (bits += limits::is_signed) {
        case 8: return limits::is_signed ? "int8" : "uint8";
        case 16: return limits::is_signed ? "int16" : "uint16";
        case 32: return limits::is_signed ? "int32" : "uint32";
        case 64: return limits::is_signed ? "int64" : "uint64";
        default: break;
        }
    }
    return type_name<T>();
}

/// Returns `spelled`, or what stands for the same numbers in every library.
constexpr std::string_view known_element(std::string_view spelled) {
    for (std::string_view const half : {"__half", "_Float16", "Eigen::half"})
        if (spelled == half) return "float16";
    for (std::string_view const brain : {"__nv_bfloat16", "__bf16", "Eigen::bfloat16"})
        if (spelled == brain) return "bfloat16";
    return spelled;
}

template <class T>
constexpr std::string_view default_element_name() {
    if constexpr (std::integral<T> || std::floating_point<T>)
        return number_name<T>();
    else
        return known_element(type_name<T>());
}

} // namespace detail

/// "float32", "int64", "bool"; "float16" and "bfloat16", whatever library's; of another type the name that the compiler
/// spells. Ranks that exchange elements of T have one name for it. Specialise it for a type of your own whose name
/// compilers spell in different ways, or that has the numbers of another one:
///
///     template <>
///     inline constexpr std::string_view cpx::element_name<my::half> = "float16";
template <class T>
inline constexpr std::string_view element_name = detail::default_element_name<T>();

} // namespace cpx
