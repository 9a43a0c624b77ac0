// SPDX-License-Identifier: Apache-2.0
// Shardings by tokens described by values, made twice: by cpx, and token by token from the definitions of the words.
#pragma once

#include <cpx/cpx.hpp>

#include <support/erased.hpp>
#include <support/packings.hpp>
#include <support/random.hpp>

namespace support {

enum class shape { sequential, zigzag, striped, table, by_length };

struct spec {
    shape layout = shape::sequential;
    cpx::scope cuts = cpx::scope::sequence;
    int unit = 0; ///< 0: balanced, else aligned to so many tokens
    int ranks = 1;
    std::vector<int> owners{}; ///< of a table
};

std::string text(spec const& s);

/// The rule of `shape::by_length`: zigzag for even lengths, sequential for odd ones.
inline bool even(cpx::index_t n) { return n % 2 == 0; }

any_tokens make(cpx::thd const& batch, spec const& s);

/// Returns the rank of every global row, from the definitions alone: cut the run, move the cuts, count those before.
std::vector<int> brute_owners(cpx::thd const& batch, spec const& s);

/// Returns the five layouts over both scopes with each of the cuts, on `ranks` ranks.
std::vector<spec> all_specs(int ranks, std::vector<int> const& units, std::uint64_t seed = 1);

} // namespace support
