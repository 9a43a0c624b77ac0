// SPDX-License-Identifier: Apache-2.0
// The laws of relayout plans, each checked against brute force over tokens. A law returns "" if it holds.
#pragma once

#include <support/serial.hpp>
#include <support/spec.hpp>

#include <variant>

namespace law {

using cpx::index_t;
using matrix = std::vector<std::vector<index_t>>;

/// A sharding: as cpx sees it, and what each rank holds according to the definitions.
struct subject {
    std::string name;
    std::variant<support::any_tokens, support::any_rows> sharding;
    std::vector<int> owners;            ///< of every global row; empty: every rank holds every row
    std::vector<cpx::section> sections; ///< of head shardings
    int ranks;
    matrix rows; ///< global rows of each rank, in local order

    bool every_row() const { return sharding.index() == 1; }
};

subject tokens(cpx::thd const& batch, support::spec const& s);

subject replicated(cpx::thd const& batch, int ranks);

subject heads(cpx::thd const& batch, int ranks, std::vector<cpx::section> const& sections);

/// Returns whether `rank` of `ranks` holds head `h` of a section, where the largest section has `groups` heads.
bool holds_head(int rank, int ranks, index_t h, index_t heads, index_t groups);

/// Returns the columns of whole rows that `rank` holds, in local order, of rows made of `sections`.
std::vector<index_t> columns(subject const& a, int rank, std::vector<cpx::section> const& sections);

/// Returns what each rank's buffer holds if every element is its global row * 1000 + its column.
matrix tagged(subject const& a, std::vector<cpx::section> const& sections);

std::vector<cpx::plan> plans(subject const& a, subject const& b);

/// The sections of the rows that move between two shardings: one element a row if neither has any.
std::vector<cpx::section> sections_of(subject const& a, subject const& b);

/// Every ordered pair of shardings of one batch: the laws of a pair, and that there and back are each other's
/// transpose.
///
/// Skips pairs of head shardings with different sections.
std::string all_pairs(std::vector<subject> const& subjects);

} // namespace law
