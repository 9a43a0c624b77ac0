// SPDX-License-Identifier: Apache-2.0
// What the exchange of a batch's choices says of its rows, wherever these are.
#pragma once

#include <cpx/core/index.hpp>

#include <vector>

namespace binding {

/// See the members of `cpx::expert_exchange`.
struct expert_lists {
    cpx::index_t experts = 0, tokens = 0, choices = 0;
    cpx::range own;
    std::vector<cpx::index_t> begins, places;
};

/// Returns those of an exchange.
template <class E>
expert_lists lists_of(E const& of) {
    return {of.experts(),
            of.tokens(),
            of.choices(),
            of.own(),
            {of.begins().begin(), of.begins().end()},
            {of.places().begin(), of.places().end()}};
}

} // namespace binding
