// SPDX-License-Identifier: Apache-2.0
// Rows given to ranks piece by piece: what no layout says, because it depends on what the rows are.
#pragma once

#include <cpx/layout/sharding.hpp>

#include <memory>

namespace cpx {

/// Global rows, and the rank that holds them.
struct owned_piece {
    range rows;
    int rank = 0;
    friend constexpr bool operator==(owned_piece, owned_piece) = default;
};

/// Every row lives on one rank, as a list of pieces says. Copies share the list.
///
/// `Of` says what the list follows, so that two such shardings of the same rows have two types.
template <class Of = void>
class piecewise {
public:
    static constexpr bool every_row = false;
    static constexpr int static_ranks = dynamic;

    /// Takes the pieces in the order of the batch. Empty ones are left out, neighbours of one rank joined.
    ///
    /// Throws `cpx::error` that names the first piece that does not begin where the one before it ends or whose rank is
    /// none, or if they do not end where the batch does.
    piecewise(int ranks, thd batch, std::vector<owned_piece> const& pieces, caller here = caller::here())
        : batch_(std::move(batch)) {
        char const* const where = "piecewise";
        detail::require_ranks(where, "ranks", ranks, here);
        lists made{{}, std::vector<std::vector<range>>(static_cast<std::size_t>(ranks))};
        index_t next = 0;
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            auto const& [rows, rank] = pieces[i];
            auto const name = [&](char const* what) { return what + (" of piece " + std::to_string(i)); };
            if (rows.first != next || rows.last < next)
                throw error(where, name("rows"), "some from " + std::to_string(next),
                            std::to_string(rows.first) + " to " + std::to_string(rows.last), here);
            if (rank < 0 || rank >= ranks)
                throw error(where, name("rank"), "0 to " + std::to_string(ranks - 1), std::to_string(rank), here);
            next = rows.last;
            if (rows.empty()) continue;
            auto& own = made.of_rank[static_cast<std::size_t>(rank)];
            if (!made.all.empty() && made.all.back().rank == rank) {
                made.all.back().rows.last = own.back().last = next;
            } else {
                made.all.push_back({rows, rank});
                own.push_back(rows);
            }
        }
        require(next == batch_.tokens(), where, "end of the last piece", batch_.tokens(), next, here);
        lists_ = std::make_shared<lists const>(std::move(made));
    }

    template <class X = void>
    explicit piecewise(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: piecewise(ranks, batch, pieces) wants the number of ranks, a cpx::thd "
                                        "and its pieces with their ranks; or by_counts(batch, rows of every rank)");
    }

    /// Returns the sharding in which rank r holds the next `counts[r]` rows.
    static piecewise by_counts(thd batch, std::vector<index_t> const& counts, caller here = caller::here()) {
        std::vector<owned_piece> pieces;
        index_t next = 0;
        for (std::size_t rank = 0; rank < counts.size(); next += counts[rank++])
            pieces.push_back({{next, next + counts[rank]}, static_cast<int>(rank)});
        return piecewise(static_cast<int>(counts.size()), std::move(batch), pieces, here);
    }

    int ranks() const { return static_cast<int>(lists_->of_rank.size()); }
    thd const& batch() const { return batch_; }
    std::span<section const> sections() const { return {}; }
    range heads(int, index_t heads) const { return {0, heads}; }
    /// Returns all pieces, in the order of the batch.
    std::vector<owned_piece> const& pieces() const { return lists_->all; }

    /// Returns how many rows `rank` holds. Throws `cpx::error` if there is no such rank.
    index_t rows(int rank, caller here = caller::here()) const {
        detail::require_rank("piecewise::rows", rank, ranks(), here);
        index_t count = 0;
        for (range const piece : lists_->of_rank[static_cast<std::size_t>(rank)]) count += piece.size();
        return count;
    }

    template <class F>
    void for_each_piece(int rank, F&& f) const {
        for (range const piece : lists_->of_rank[static_cast<std::size_t>(rank)]) f(piece);
    }
    template <class F>
    void for_each_holder(range rows, index_t& i, F&& f) const {
        auto const& all = lists_->all;
        if (rows.empty()) return;
        auto const begins = [&](int piece) { return all[static_cast<std::size_t>(piece)].rows.first; };
        i = last_at_or_before(rows.first, static_cast<int>(all.size()), static_cast<int>(i), begins);
        for (;; ++i) {
            auto const& [piece, rank] = all[static_cast<std::size_t>(i)];
            range const common = intersect(rows, piece);
            f(rank, common);
            if (common.last == rows.last) return;
        }
    }

    friend bool operator==(piecewise const& a, piecewise const& b) {
        return a.ranks() == b.ranks() && a.batch_ == b.batch_ && (a.lists_ == b.lists_ || a.pieces() == b.pieces());
    }

private:
    struct lists {
        std::vector<owned_piece> all;
        std::vector<std::vector<range>> of_rank;
    };
    thd batch_;
    std::shared_ptr<lists const> lists_;
};

} // namespace cpx
