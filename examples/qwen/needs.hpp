// SPDX-License-Identifier: Apache-2.0
// What a pass must move, counted from who owns which rows: no plan is asked.
#pragma once

#include <cpx/cpx.hpp>

namespace qwen {

/// What one forward pass must move, counted from who owns which rows, what gathering whole tensors would move, and how
/// evenly ranks have rows.
struct needs {
    cpx::volume least, all_gather;
    double imbalance = 1; ///< the most rows of a rank where linear attention runs, by the mean

    /// Adds what moving one tensor of `width` between two shardings takes.
    template <class From, class To>
    void move(From const& from, To const& to, cpx::index_t width) {
        cpx::volume const moved = lower_bound(from, to, width);
        cpx::index_t const everywhere = moved.rows > 0 ? (from.ranks() - 1) * from.batch().tokens() : 0;
        add(moved, everywhere, width);
    }
    /// Adds what the `reach` rows before every segment take, or to gather the last rows of all segments on every rank.
    template <class S>
    void halo(S const& sharding, cpx::index_t reach, cpx::index_t width) {
        cpx::index_t const rows = halo_lower_bound(sharding, reach);
        cpx::index_t tails = 0;
        for (int rank = 0; rank < sharding.ranks() && rows > 0; ++rank)
            for (auto const& segment : segments(sharding, rank)) tails += std::min(reach, segment.count);
        add({rows, rows * width}, (sharding.ranks() - 1) * tails, width);
    }
    template <class S>
    void balance(S const& sharding) {
        cpx::index_t most = 0;
        for (int rank = 0; rank < sharding.ranks(); ++rank) most = std::max(most, sharding.rows(rank));
        if (cpx::index_t const tokens = sharding.batch().tokens(); tokens > 0)
            imbalance = static_cast<double>(most * sharding.ranks()) / static_cast<double>(tokens);
    }

private:
    void add(cpx::volume const& moved, cpx::index_t gathered, cpx::index_t width) {
        least.rows += moved.rows;
        least.elements += moved.elements;
        all_gather.rows += gathered;
        all_gather.elements += gathered * width;
    }
};

} // namespace qwen
