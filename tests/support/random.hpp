// SPDX-License-Identifier: Apache-2.0
// Numbers that look random and are the same on every machine.
#pragma once

#include <cpx/core/index.hpp>

#include <vector>

namespace support {

/// Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (SplitMix64).
class splitmix {
public:
    explicit splitmix(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    /// Returns a number from `first` to `last`, both included.
    cpx::index_t between(cpx::index_t first, cpx::index_t last) {
        return first + static_cast<cpx::index_t>(next() % static_cast<std::uint64_t>(last - first + 1));
    }

private:
    std::uint64_t state_;
};

/// Returns one rank for each of `chunks` chunks.
inline std::vector<int> random_owners(splitmix& numbers, int ranks, int chunks) {
    std::vector<int> owners;
    for (int c = 0; c < chunks; ++c) owners.push_back(static_cast<int>(numbers.between(0, ranks - 1)));
    return owners;
}

} // namespace support
