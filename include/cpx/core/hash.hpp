// SPDX-License-Identifier: Apache-2.0
// A hash of numbers: the same on every machine, for ranks to compare.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <utility>

namespace cpx::detail {

/// Mixes one number into a 64-bit hash. Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators",
/// OOPSLA 2014, the finaliser of SplitMix64.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
    std::uint64_t z = (hash ^ value) + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

template <class Numbers>
std::uint64_t mix_all(std::uint64_t hash, Numbers const& numbers) {
    hash = mix(hash, static_cast<std::uint64_t>(std::size(numbers)));
    for (auto const number : numbers) hash = mix(hash, static_cast<std::uint64_t>(number));
    return hash;
}

/// The same of text, eight letters at a time.
inline std::uint64_t mix_all(std::uint64_t hash, std::string_view text) {
    hash = mix(hash, text.size());
    std::uint64_t letters = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
        letters |= std::uint64_t{static_cast<unsigned char>(text[i])} << (8 * (i % 8));
        if (i % 8 == 7 || i + 1 == text.size()) hash = mix(hash, std::exchange(letters, 0));
    }
    return hash;
}

} // namespace cpx::detail
