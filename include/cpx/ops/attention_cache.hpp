// SPDX-License-Identifier: Apache-2.0
// Attention of sequences that go on, over keys and values that every rank keeps where it had them.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/piecewise.hpp>
#include <cpx/ops/attention.hpp>
#include <cpx/transport/exchange.hpp>

#include <algorithm>
#include <limits>

namespace cpx {

template <any_sharding Q>
class cached_attention;

/// Owns the keys and values of one attention layer on one rank, none at first: of its tokens, or of its heads where
/// every rank has every token. Every batch is appended on the sharding on which its keys and values are; nothing moves.
///
///     prefill                             append, then `attention` or `cached_attention`
///     decode, a token a sequence a step   append over thd::uniform(sequences, 1), then `cached_attention`
template <class T>
class attention_cache {
public:
    /// `sharding` is on what keys and values are: by tokens, whatever their layout; by heads; or replicated. Of its
    /// batch only the number of sequences counts. Throws `cpx::error` if there is no such rank or heads do not fit.
    template <any_sharding S>
    attention_cache(attention_heads const& heads, S const& sharding, int rank, caller here = caller::here())
        : heads_(heads), rank_(rank), ranks_(sharding.ranks()), whole_(S::every_row),
          last_(thd::uniform(sharding.batch().sequences(), 0)), lengths_(static_cast<std::size_t>(last_.sequences())),
          kept_(lengths_.size()) {
        detail::require_rank(where, rank, ranks_, here);
        detail::require_some_heads(where, heads, here);
        keys_ = sharding.heads(rank, heads.key_heads);
    }
    template <class X = void>
    explicit attention_cache(detail::any, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: attention_cache<T>(heads, sharding, rank) wants attention_heads, on what "
                                        "keys and values are sharded, and a rank");
    }

    /// Appends the keys and values of a batch in which sequences go on, those of no token by none. k, v: (rows, key
    /// heads * dim) of the heads of this rank. Rows behind a sequence's valid length are not kept.
    ///
    /// Every rank calls it with its rows of the same batch. Throws `cpx::error` on what does not fit, before anything
    /// is kept.
    template <sharded_like K, sharded_like V>
    void append(K const& k, V const& v, caller here = caller::here()) {
        constexpr bool fits =
            detail::sharded_as<sharding_of<K>, V> && std::same_as<element_of<K>, T> && std::same_as<element_of<V>, T>;
        static_assert(fits, "cpx: attention_cache of keys and values on two shardings, or of other elements than its");
        if constexpr (fits) keep<sharding_of<K>>(k.view(), v.view(), here);
    }
    template <class X>
    void append(X const&, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: append(k, v) wants two tensors; view other memory as sharded(rows, "
                                        "sharding, rank)");
    }

    /// Returns how many tokens of a sequence have come, on all ranks: where its next one stands.
    index_t length(index_t sequence, caller here = caller::here()) const {
        require(sequence >= 0 && sequence < last_.sequences(), where, "sequence",
                "0 to " + std::to_string(last_.sequences() - 1), sequence, here);
        return lengths_[static_cast<std::size_t>(sequence)];
    }
    /// Returns the batch that was appended last.
    thd const& batch() const { return last_; }

private:
    static constexpr char const* where = "attention_cache";
    template <any_sharding Q>
    friend class cached_attention;

    /// Of one sequence, tokens ascending.
    struct kept {
        std::vector<index_t> tokens;
        std::vector<T> k, v;
    };

    template <any_sharding S>
    void keep(sharded<T const, S> const& k, sharded<T const, S> const& v, caller here) {
        S const& s = k.sharding();
        index_t const width = keys_.size() * heads_.dim;
        require(s.batch().sequences() == last_.sequences(), where, "sequences", last_.sequences(),
                s.batch().sequences(), here);
        detail::require_own(where, "rank of k", k.rank(), s.ranks(), rank_, ranks_, here);
        require(S::every_row == whole_ && s.heads(rank_, heads_.key_heads) == keys_, where, "sharding of k",
                whole_ ? "every token, of the heads of this cache" : "one by tokens", "another", here);
        detail::require_shape(where, "k", k.data(), s.rows(rank_), width, here);
        detail::require_place(where, "v", v, k, "that of k", here);
        detail::require_shape(where, "v", v.data(), s.rows(rank_), width, here);
        for (segment const& of : segments(s, rank_)) {
            auto const sequence = static_cast<std::size_t>(of.sequence);
            kept& to = kept_[sequence];
            index_t const count = std::min(of.count, s.batch().valid(of.sequence) - of.token);
            for (index_t i = 0; i < count; ++i) {
                to.tokens.push_back(lengths_[sequence] + of.token + i);
                to.k.insert(to.k.end(), k.data().row(of.row + i), k.data().row(of.row + i) + width);
                to.v.insert(to.v.end(), v.data().row(of.row + i), v.data().row(of.row + i) + width);
            }
        }
        last_ = s.batch();
        for (index_t i = 0; i < last_.sequences(); ++i) lengths_[static_cast<std::size_t>(i)] += last_.valid(i);
    }

    /// Attention of queries of the last batch over what this rank keeps; where that is nothing of what a query sees, o
    /// is 0 and lse minus infinity. q, o: (rows, query heads * dim), lse: (rows, query heads), if it is memory.
    void attend(std::vector<segment> const& of, detail::attended_heads const& at, T scale, rows<T const> q, rows<T> o,
                rows<T> lse) const {
        std::vector<T> of_head;
        for (segment const& s : of) {
            auto const sequence = static_cast<std::size_t>(s.sequence);
            kept const& own = kept_[sequence];
            index_t const before = lengths_[sequence] - last_.valid(s.sequence);
            std::vector<index_t> seen; // the last one that a query sees
            index_t none = 0;          // queries that see none
            for (index_t i = 0; i < s.count; ++i) {
                auto const end = std::ranges::upper_bound(own.tokens, before + s.token + i);
                seen.push_back(end - own.tokens.begin() - 1);
                none += seen.back() < 0;
            }
            index_t const first = s.row + none, count = s.count - none;
            auto const positions = std::span(seen).subspan(static_cast<std::size_t>(none));
            for (index_t i = s.row; i < first; ++i) {
                std::fill_n(o.row(i), at.query_width(), T(0));
                if (lse.data()) std::fill_n(lse.row(i), at.queries.size(), -std::numeric_limits<T>::infinity());
            }
            of_head.resize(lse.data() ? static_cast<std::size_t>(count) : 0);
            for (index_t h = 0; h < at.queries.size() && count > 0; ++h) {
                auto const kept_of = [&](std::vector<T> const& x) {
                    return rows<T const>(x.data(), seen.back() + 1, at.key_width())
                        .columns(at.key_of(h) * at.dim, at.dim);
                };
                auto const columns = [&](auto const& x) { return x.sub(first, count).columns(h * at.dim, at.dim); };
                detail::attend_one_head<T>(columns(q), positions, kept_of(own.k), kept_of(own.v), scale, columns(o),
                                           of_head);
                for (index_t i = 0; i < std::ssize(of_head); ++i)
                    lse(first + i, h) = of_head[static_cast<std::size_t>(i)];
            }
        }
    }

    attention_heads heads_;
    range keys_;
    int rank_, ranks_;
    bool whole_;
    thd last_;
    std::vector<index_t> lengths_; ///< of every sequence, on all ranks
    std::vector<kept> kept_;
};

/// Attention of a batch in which sequences go on, over what `attention_cache`s keep: of this batch, appended before,
/// and of all before it. Made once a batch, for all layers.
///
/// Where caches hold tokens, queries go to every rank, each attends over what it keeps, and what comes of it goes back
/// with the logarithm of its sum of weights, by which the query's rank joins the parts in the order of ranks. Where
/// caches hold every token, of all heads or of some, nothing moves, and results have the bits of `attention` of whole
/// sequences; so has a query of which one rank keeps all that it sees.
template <any_sharding Q>
class cached_attention {
public:
    /// `queries`: on what the queries are; q and o are tensors of it. Pure. Throws `cpx::error` if there is no such
    /// rank.
    cached_attention(Q const& queries, int rank, caller here = caller::here())
        : queries_(queries), everywhere_(queries.ranks(), queries.batch()), rank_(rank),
          gather_(relayout(source(queries, everywhere_), everywhere_, rank, here)),
          back_(relayout(parts(queries, here), joined(queries, here), rank, here)) {}
    template <class X>
    explicit cached_attention(X const&, detail::any = {}, detail::any = {}) : cached_attention(unfit<X>()) {}

    /// Computes `o = softmax(scale q K^T) V` for every query over the tokens of its sequence up to its own.
    ///
    /// q, o: (rows, query heads * dim). Rows behind a sequence's valid length see its last token. Collective where the
    /// cache holds tokens: two exchanges. Throws `cpx::error` on what does not fit, and what `exchange` throws.
    template <class T, sharded_like X, sharded_like O, transport Comm>
    void operator()(attention_cache<T> const& cache, X const& q, double scale, O&& o, Comm& comm,
                    caller here = caller::here()) const {
        constexpr bool fits = detail::sharded_as<Q, X, O> && std::same_as<element_of<O>, T> && detail::writes<O, X>;
        static_assert(fits, "cpx: cached_attention wants q and o of the sharding that it was made of and of the "
                            "cache's elements, and an o that is not const and has a name");
        if constexpr (fits) run<T>(cache, q.view(), static_cast<T>(scale), o.view(), comm, here);
    }
    template <class X>
    void operator()(X const&, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                    detail::any = {}) const {
        static_assert(detail::never<X>, "cpx: attend(cache, q, scale, o, comm) of a cached_attention wants an "
                                        "attention_cache, two tensors and a transport");
    }

private:
    static constexpr char const* where = "cached_attention";
    struct of_queries;
    using parts_type = piecewise<of_queries>;
    using source_type = std::conditional_t<Q::every_row, replicated<>, Q>;
    using joined_type = std::conditional_t<Q::every_row, replicated<>, parts_type>;

    template <class X>
    static cached_attention const& unfit() {
        static_assert(detail::never<X>, "cpx: cached_attention(queries, rank) wants on what queries are sharded, and "
                                        "this rank");
        throw;
    }

    static source_type source(Q const& queries, replicated<> const& everywhere) {
        if constexpr (Q::every_row)
            return everywhere;
        else
            return queries;
    }
    /// A part of every query on every rank, rank by rank.
    static parts_type parts(Q const& queries, caller here) {
        index_t const tokens = queries.batch().tokens();
        return parts_type::by_counts(thd::uniform(queries.ranks(), tokens),
                                     std::vector<index_t>(static_cast<std::size_t>(queries.ranks()), tokens), here);
    }
    /// All parts of a query where it is.
    static joined_type joined(Q const& queries, caller here) {
        index_t const tokens = queries.batch().tokens();
        thd const all = thd::uniform(queries.ranks(), tokens);
        if constexpr (Q::every_row) {
            return joined_type(queries.ranks(), all, here);
        } else {
            std::vector<owned_piece> pieces;
            for (index_t first = 0; first < queries.ranks() * tokens; first += tokens) {
                index_t hint = 0;
                queries.for_each_holder(range{0, tokens}, hint, [&](int rank, range rows) {
                    pieces.push_back({{first + rows.first, first + rows.last}, rank});
                });
            }
            return joined_type(queries.ranks(), all, pieces, here);
        }
    }

    template <class T, class Comm>
    void run(attention_cache<T> const& cache, sharded<T const, Q> const& q, T scale, sharded<T, Q> const& o, Comm& comm,
             caller here) const {
        detail::require_place(where, "q", q, queries_, rank_, "that of this plan", here);
        detail::require_place(where, "o", o, q, "that of q", here);
        detail::require_own(where, "rank of the cache", cache.rank_, cache.ranks_, rank_, queries_.ranks(), here);
        detail::require_batch(where, "batch of q", "that appended last", cache.last_, queries_.batch(), here);
        attention_heads const& heads = cache.heads_;
        detail::attended_heads const at{queries_.heads(rank_, heads.query_heads), cache.keys_,
                                        heads.query_heads / heads.key_heads, heads.dim, false};
        detail::require_read_heads(where, at, here);
        require(cache.whole_ || at.queries.size() == heads.query_heads, where, "cache",
                "one of every token, for queries by heads", "one by tokens", here);
        detail::require_shape(where, "q", q.data(), queries_.rows(rank_), at.query_width(), here);
        detail::require_shape(where, "o", o.data(), queries_.rows(rank_), at.query_width(), here);
        detail::require_apart(where, {{"o", o.data()}}, {{"q", q.data()}}, here);
        if (cache.whole_) return cache.attend(segments(queries_, rank_), at, scale, q.data(), o.data(), {});

        tensor<T, replicated<>> all(everywhere_, rank_, Q::every_row ? 0 : at.query_width());
        if constexpr (!Q::every_row) detail::exchange_rows(gather_, q.data(), all.data(), comm, here, where);
        tensor<T, parts_type> part(back_.from, rank_, at.query_width() + at.queries.size());
        cache.attend(segments(everywhere_, rank_), at, scale, Q::every_row ? q.data() : std::as_const(all).data(),
                     part.data().columns(0, at.query_width()),
                     part.data().columns(at.query_width(), at.queries.size()));
        tensor<T, joined_type> every(back_.to, rank_, part.width());
        detail::exchange_rows(back_, std::as_const(part).data(), every.data(), comm, here, where);
        join(at, std::as_const(every).data(), o.data());
    }

    /// o = sum over ranks, in their order, of the parts by their share of all weights.
    template <class T>
    void join(detail::attended_heads const& at, rows<T const> parts, rows<T> o) const {
        std::vector<T> share(static_cast<std::size_t>(queries_.ranks()));
        auto const of = [&](int rank) { return parts.sub(rank * o.count(), o.count()); };
        for (index_t row = 0; row < o.count(); ++row)
            for (index_t h = 0; h < at.queries.size(); ++h) {
                index_t const lse = at.query_width() + h;
                T highest = of(0)(row, lse), total = 0;
                for (int rank = 1; rank < queries_.ranks(); ++rank) highest = std::max(highest, of(rank)(row, lse));
                for (int rank = 0; rank < queries_.ranks(); ++rank) {
                    T const weight = of(rank)(row, lse);
                    // minus infinity of all: nobody keeps what the query sees
                    total += share[static_cast<std::size_t>(rank)] =
                        weight == -std::numeric_limits<T>::infinity() ? T(0) : std::exp(weight - highest);
                }
                for (index_t d = h * at.dim; d < (h + 1) * at.dim; ++d) {
                    T sum = 0;
                    for (int rank = 0; rank < queries_.ranks(); ++rank)
                        if (T const weight = share[static_cast<std::size_t>(rank)]; weight != 0)
                            sum += weight * of(rank)(row, d);
                    o(row, d) = total == 0 ? T(0) : sum / total;
                }
            }
    }

    Q queries_;
    replicated<> everywhere_;
    int rank_;
    relayout_plan<source_type, replicated<>> gather_;
    relayout_plan<parts_type, joined_type> back_;
};
template <class X>
cached_attention(X const&, detail::any = {}, detail::any = {}) -> cached_attention<replicated<>>;
template <any_sharding Q>
cached_attention(Q const&, int) -> cached_attention<Q>;
template <any_sharding Q>
cached_attention(Q const&, int, caller) -> cached_attention<Q>;

} // namespace cpx
