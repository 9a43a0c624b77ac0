// SPDX-License-Identifier: Apache-2.0
// Cases of other projects as rows of tables, one runner an operator. catalogue.cpp lists them all.
#pragma once

#include <doctest/doctest.h>

#include <ops/on_ranks.hpp>

#include <set>

namespace peers {

using cpx::index_t;
using list = std::vector<index_t>;

/// Calls `check(row)` for every row of a table, in a subcase that has the row's id and source as its name.
template <class Row, class F>
void each(std::vector<Row> const& table, F&& check) {
    std::set<std::string> names; // doctest runs one of two subcases of the same name
    for (Row const& row : table) CHECK_MESSAGE(names.insert(row.id).second, row.id << " is there twice");
    for (Row const& row : table) SUBCASE((std::string(row.id) + ": " + row.source).c_str()) check(row);
}

/// flash-linear-attention's measure, rms(reference - x) / (rms(reference) + 1e-8). A NaN is as far as another size.
template <class A, class B>
double ratio(std::vector<A> const& x, std::vector<B> const& reference) {
    double difference = 0, norm = 0;
    if (x.size() != reference.size()) return std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < x.size(); ++i) {
        double const expected = static_cast<double>(reference[i]), d = static_cast<double>(x[i]) - expected;
        difference += d * d;
        norm += expected * expected;
    }
    double const count = static_cast<double>(std::max<std::size_t>(1, x.size()));
    double const result = std::sqrt(difference / count) / (std::sqrt(norm / count) + 1e-8);
    return std::isnan(result) ? std::numeric_limits<double>::infinity() : result;
}

/// Calls `f(name, sharding)` with flash-linear-attention's sharding and with that of attention, each cut anywhere and
/// at multiples of `chunk` tokens: 2 types.
template <class F>
void shardings(cpx::thd const& batch, int ranks, int chunk, F&& f) {
    using cpx::scope;
    for (int const unit : {1, chunk}) {
        cpx::aligned<cpx::dynamic> const cut(unit);
        std::string const name = ", cut at multiples of " + std::to_string(unit);
        f("sequential over batch" + name, cpx::shard<scope::batch>(batch, cpx::table(cpx::sequential<>(ranks)), cut));
        f("zigzag over sequence" + name, cpx::shard<scope::sequence>(batch, cpx::table(cpx::zigzag<>(ranks)), cut));
    }
}

} // namespace peers
