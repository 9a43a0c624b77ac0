// SPDX-License-Identifier: Apache-2.0
// The bytes of a weight on their way between Hugging Face's order, dtype and zero and Megatron's.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/printable.hpp>
#include <cpx/model/element.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/model/weight_share.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cpx {

/// Calls `f(source, first, own, bytes)` for all bytes of a share that stand side by side: `bytes` of them from `first`
/// on in a source, and from `own` on in the share. Padding is not called for.
///
/// `columns` are those of the sources, whose elements have `element` bytes. What is copied one way here and the other
/// way there comes back as it was.
template <class F>
void for_each_bytes(weight_share const& share, index_t columns, index_t element, F f) {
    index_t own = 0;
    index_t const row = columns * element, skip = share.columns.first * element, width = share.columns.size() * element;
    for (auto const& p : share.blocks) {
        if (width == row && !p.rows.empty()) {
            f(p.source, p.rows.first * row, own, p.rows.size() * row);
            own += p.rows.size() * row;
            continue;
        }
        for (index_t r = p.rows.first; r < p.rows.last; ++r, own += width) f(p.source, r * row + skip, own, width);
    }
}

/// A weight's bytes and what they are.
struct weight_bytes {
    safetensors::dtype dtype{};
    std::vector<std::byte> bytes{};
};

namespace detail {

/// Returns a float's nearest bfloat16, of two the even one.
inline std::uint16_t to_bfloat(float value) {
    auto const bits = std::bit_cast<std::uint32_t>(value);
    if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
/// Returns a float's nearest IEEE 754 binary16, of two the even one.
inline std::uint16_t to_half(float value) {
    unsigned const sign = std::signbit(value) ? 0x8000 : 0;
    float const magnitude = std::abs(value);
    unsigned bits = 0x7e00;
    if (magnitude >= 65520.0f)
        bits = 0x7c00;
    else if (magnitude < 65520.0f) {
        int const exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
        bits = static_cast<unsigned>((exponent + 14) << 10) +
               static_cast<unsigned>(std::lrint(std::ldexp(magnitude, 10 - exponent)));
    }
    return static_cast<std::uint16_t>(sign | bits);
}

template <class Stored, class Number>
Number stored_number(std::byte const* at, safetensors::dtype type) {
    Stored stored;
    std::memcpy(&stored, at, sizeof stored);
    if constexpr (sizeof(Stored) == 2)
        return static_cast<Number>(type == safetensors::dtype::bf16 ? from_bfloat(stored) : from_half(stored));
    else
        return static_cast<Number>(stored);
}

inline bool is_floating(safetensors::dtype type) {
    using d = safetensors::dtype;
    return type == d::f64 || type == d::f32 || type == d::f16 || type == d::bf16;
}

/// Returns floating-point elements plus `summand`, rounded once in float, or in double where one side is, and once more
/// to their new dtype, as frameworks do it.
template <class Number>
std::vector<std::byte> recast_in(std::span<std::byte const> bytes, safetensors::dtype from, safetensors::dtype to,
                                 int summand) {
    using d = safetensors::dtype;
    std::size_t const in = safetensors::size_of(from), out = safetensors::size_of(to), count = bytes.size() / in;
    std::vector<std::byte> result(count * out);
    for (std::size_t i = 0; i < count; ++i) {
        auto const* const at = bytes.data() + i * in;
        Number value = from == d::f64   ? stored_number<double, Number>(at, from)
                       : from == d::f32 ? stored_number<float, Number>(at, from)
                                        : stored_number<std::uint16_t, Number>(at, from);
        if (summand != 0) value += static_cast<Number>(summand); // else -0 would not stay
        auto const put = [&](auto stored) { std::memcpy(result.data() + i * out, &stored, sizeof stored); };
        auto const narrow = static_cast<float>(value);
        switch (to) {
        case d::f64: put(static_cast<double>(value)); break;
        case d::f32: put(narrow); break;
        case d::f16: put(to_half(narrow)); break;
        default: put(to_bfloat(narrow)); break;
        }
    }
    return result;
}
inline std::vector<std::byte> recast(std::span<std::byte const> bytes, safetensors::dtype from, safetensors::dtype to,
                                     int summand) {
    using d = safetensors::dtype;
    if (from == to && summand == 0) return {bytes.begin(), bytes.end()};
    return from == d::f64 || to == d::f64 ? recast_in<double>(bytes, from, to, summand)
                                          : recast_in<float>(bytes, from, to, summand);
}

/// Returns the elements in the first of some dtypes from which they come back bit for bit, if there is one.
inline std::optional<weight_bytes> recast_and_back(std::span<std::byte const> bytes, safetensors::dtype from,
                                                   std::span<safetensors::dtype const> to, int summand) {
    for (auto const type : to) {
        if (safetensors::size_of(type) < safetensors::size_of(from)) continue;
        auto moved = recast(bytes, from, type, summand);
        if (std::ranges::equal(recast(moved, type, from, -summand), bytes)) return {{type, std::move(moved)}};
    }
    return {};
}

inline void require_floating(weight_rule const& rule, safetensors::dtype type, caller here) {
    require(
        is_floating(type), "weights", "dtype", "F64, F32, F16 or BF16",
        [&] { return std::string(safetensors::name_of(type)) + " of " + std::string(rule.megatron); }, here);
}

} // namespace detail

/// Returns a share's bytes, gathered from its sources, as Megatron keeps them.
///
/// Most rules keep every bit. What Megatron keeps in float32 is widened if it is narrower. What it keeps minus 1 stays
/// in its dtype if it comes back from there bit for bit, as numbers from 0.5 to 2 always do; else it is widened to
/// float32 or float64. Throws `cpx::error` if it comes back from neither, as -0 does not, and for what is no
/// floating-point number.
inline weight_bytes to_megatron(weight_rule const& rule, weight_bytes share, caller here = caller::here()) {
    using d = safetensors::dtype;
    if (!rule.float32 && !rule.zero_centred) return share;
    auto const type = share.dtype;
    detail::require_floating(rule, type, here);
    std::array<d, 3> const wider{type, d::f32, d::f64};
    auto const to = rule.zero_centred || type == d::f32 || type == d::f64 ? std::span<d const>(wider)
                                                                          : std::span<d const>(wider).subspan(1);
    auto moved = detail::recast_and_back(share.bytes, type, to, rule.zero_centred ? -1 : 0);
    require(moved.has_value(), "weights", std::string(rule.megatron).c_str(),
            rule.zero_centred ? "numbers that come back bit for bit from less 1 in float64"
                              : "numbers that come back bit for bit from float32, as signalling NaNs do not",
            "one that does not", here);
    return std::move(*moved);
}

/// Returns a share's bytes as Hugging Face has them: the inverse, if `wanted` is the dtype that they had there.
///
/// Weights that were trained since may have no inverse: those in float32 stay so if `wanted` cannot hold one of them,
/// and 1 plus a weight is rounded to `wanted`, or to the weight's own dtype if none is wanted.
inline weight_bytes to_hf(weight_rule const& rule, weight_bytes share, std::optional<safetensors::dtype> wanted,
                          caller here = caller::here()) {
    if (!rule.float32 && !rule.zero_centred) return share;
    auto const to = wanted.value_or(share.dtype);
    detail::require_floating(rule, share.dtype, here);
    detail::require_floating(rule, to, here);
    auto moved = detail::recast(share.bytes, share.dtype, to, rule.zero_centred ? 1 : 0);
    if (rule.float32 && !std::ranges::equal(detail::recast(moved, to, share.dtype, 0), share.bytes)) return share;
    return {to, std::move(moved)};
}

} // namespace cpx
