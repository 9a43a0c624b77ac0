// SPDX-License-Identifier: Apache-2.0
// Keys and values that a rank keeps of sequences, and attention over them: what `attention_cache` is made of.
#pragma once

#include <cpx/ops/attention.hpp>

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

namespace cpx::detail {

/// `count` rows of a batch, from `row` on, that belong to the end of what is kept of a sequence.
struct appended_rows {
    index_t sequence, row, count;
};
/// Queries of a sequence, in rows from `row` on, and of each the place of the last row kept that it sees; -1: none.
struct cached_queries {
    index_t sequence, row;
    std::vector<index_t> seen;
};

/// Lets `more` elements come without an exception. Memory grows as it does when elements come one by one.
template <class T>
void make_room(std::vector<T>& list, std::size_t more) {
    if (list.capacity() - list.size() < more) list.reserve(std::max(list.size() + more, 2 * list.capacity()));
}

/// Owns rows of keys and values by sequence, in memory M. `append` keeps all rows, or throws and keeps none.
/// On devices: `ops/cuda/attention_cache.hpp`.
template <class T, any_memory M>
class cached_keys {
    static_assert(never<M>, "cpx: an attention_cache on devices, of float, bfloat16 or half: include "
                            "<cpx/ops/cuda/attention_cache.hpp>");
};

template <class T>
class cached_keys<T, host_memory> {
public:
    /// `width`: of a row.
    cached_keys(index_t sequences, index_t width, host_memory)
        : width_(width), kept_(static_cast<std::size_t>(sequences)) {}

    host_memory memory() const { return {}; }

    void append(std::span<appended_rows const> list, rows<T const> k, rows<T const> v, caller) {
        std::vector<index_t> counts(kept_.size());
        for (appended_rows const& of : list) counts[static_cast<std::size_t>(of.sequence)] += of.count;
        for (std::size_t s = 0; s < counts.size(); ++s)
            for (auto* const x : {&kept_[s].k, &kept_[s].v})
                make_room(*x, static_cast<std::size_t>(counts[s] * width_));
        for (appended_rows const& of : list) {
            kept& to = kept_[static_cast<std::size_t>(of.sequence)];
            for (index_t i = of.row; i < of.row + of.count; ++i) {
                to.k.insert(to.k.end(), k.row(i), k.row(i) + width_);
                to.v.insert(to.v.end(), v.row(i), v.row(i) + width_);
            }
        }
    }

    /// Throws unless a memory has queries and outputs of these heads, before any moves; the host's has.
    void check(attended_heads const&, rows<T const>, rows<T>, caller) const {}
    /// Where a query sees nothing, o is 0 and lse minus infinity. q, o: (rows, query heads * dim), lse: (rows, query
    /// heads), if it is memory.
    void attend(std::span<cached_queries const> list, attended_heads const& at, double scale, rows<T const> q,
                rows<T> o, rows<T> lse, caller) const {
        std::vector<T> of_head;
        for (cached_queries const& of : list) {
            kept const& own = kept_[static_cast<std::size_t>(of.sequence)];
            auto const none = std::ranges::upper_bound(of.seen, -1) - of.seen.begin(); // queries that see nothing
            index_t const first = of.row + none, count = std::ssize(of.seen) - none;
            auto const positions = std::span(of.seen).subspan(static_cast<std::size_t>(none));
            for (index_t i = of.row; i < first; ++i) {
                std::fill_n(o.row(i), at.query_width(), T(0));
                if (lse.data()) std::fill_n(lse.row(i), at.queries.size(), -std::numeric_limits<T>::infinity());
            }
            of_head.resize(lse.data() ? static_cast<std::size_t>(count) : 0);
            for (index_t h = 0; h < at.queries.size() && count > 0; ++h) {
                auto const kept_of = [&](std::vector<T> const& x) {
                    return rows<T const>(x.data(), of.seen.back() + 1, width_).columns(at.key_of(h) * at.dim, at.dim);
                };
                auto const columns = [&](auto const& x) { return x.sub(first, count).columns(h * at.dim, at.dim); };
                attend_one_head<T>(columns(q), positions, kept_of(own.k), kept_of(own.v), static_cast<T>(scale),
                                   columns(o), of_head);
                for (index_t i = 0; i < std::ssize(of_head); ++i)
                    lse(first + i, h) = of_head[static_cast<std::size_t>(i)];
            }
        }
    }

private:
    /// Of one sequence, tokens ascending.
    struct kept {
        std::vector<T> k, v;
    };
    index_t width_;
    std::vector<kept> kept_;
};

} // namespace cpx::detail

namespace cpx::rowwise {

/// o = sum over ranks, in their order, of the partials of a query by their share of all weights; 0 where none has any.
/// partials: of every rank, rank by rank, (rows of o, heads * dim and then heads logarithms of sums of weights).
template <class W, class T>
struct join_partials {
    rows<W const> partials;
    rows<T> o;
    int ranks;
    index_t dim;
    CPX_HOST_DEVICE void operator()(index_t row, index_t column) const {
        constexpr W nothing = -std::numeric_limits<W>::infinity();
        index_t const lse = o.width() + column / dim, each = o.count();
        W highest = nothing, total = 0, sum = 0;
        for (int rank = 0; rank < ranks; ++rank) {
            W const weight = partials(rank * each + row, lse);
            highest = highest < weight ? weight : highest;
        }
        for (int rank = 0; rank < ranks; ++rank) {
            W const weight = partials(rank * each + row, lse);
            W const share = weight == nothing ? W(0) : std::exp(weight - highest);
            total += share;
            if (share != 0) sum += share * partials(rank * each + row, column);
        }
        o(row, column) = static_cast<T>(total == 0 ? W(0) : sum / total);
    }
};

} // namespace cpx::rowwise
