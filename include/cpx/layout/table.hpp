// SPDX-License-Identifier: Apache-2.0
// Owners chosen at run time, one for each chunk.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/layout/concept.hpp>

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <vector>

namespace cpx {

/// As many chunks as the table has entries; rank `owners[c]` owns chunk c. Copies share the table.
///
/// For dispatchers that balance load at run time, such as MagiAttention's (there: over the batch).
class table {
public:
    /// Throws `cpx::error` that names the first chunk whose owner is not a rank.
    table(int ranks, std::vector<int> owners, caller here = caller::here()) : ranks_(ranks) {
        require(ranks > 0, "table", "ranks", "at least 1", ranks, here);
        require(!owners.empty(), "table", "number of chunks", "at least 1", 0, here);
        for (std::size_t c = 0; c < owners.size(); ++c)
            if (owners[c] < 0 || owners[c] >= ranks)
                throw error("table", "owner of chunk " + std::to_string(c), "0 to " + std::to_string(ranks - 1),
                            std::to_string(owners[c]), here);
        owners_ = std::make_shared<std::vector<int> const>(std::move(owners));
    }

    /// Takes the owners of any other layout: every layout can be written as a table.
    template <class L>
        requires(!std::same_as<L, table>) &&
                layout<L> // last, because for a table it would ask for this class, which is not complete
    explicit table(L const& l, caller here = caller::here()) : table(l.ranks(), owners_of(l), here) {}

    template <class X = detail::any>
        requires(!std::same_as<X, table>) && (!layout<X>)
    explicit table(X const& = {}, detail::any = {}, detail::any = {}) {
        unfit<X>();
    }
    template <class X = void>
    explicit table(std::initializer_list<int>) {
        unfit<X>();
    }

    int ranks() const { return ranks_; }
    int chunks() const { return static_cast<int>(owners_->size()); }
    int owner(int chunk) const { return (*owners_)[static_cast<std::size_t>(chunk)]; }
    friend bool operator==(table const& a, table const& b) { return a.ranks_ == b.ranks_ && *a.owners_ == *b.owners_; }

private:
    template <class X>
    static void unfit() {
        static_assert(detail::never<X>, "cpx: table wants the number of ranks and the rank of every chunk: "
                                        "table(2, {0, 1, 1, 0}); or another layout");
    }
    template <layout L>
    static std::vector<int> owners_of(L const& l) {
        std::vector<int> owners;
        for (int c = 0; c < l.chunks(); ++c) owners.push_back(l.owner(c));
        return owners;
    }

    int ranks_;
    std::shared_ptr<std::vector<int> const> owners_;
};

} // namespace cpx
