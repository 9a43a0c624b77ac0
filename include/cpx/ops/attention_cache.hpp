// SPDX-License-Identifier: Apache-2.0
// Attention of sequences that go on, over keys and values that every rank keeps where it had them.
#pragma once

#include <cpx/core/element.hpp>
#include <cpx/core/hash.hpp>
#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/piecewise.hpp>
#include <cpx/ops/cached_keys.hpp>
#include <cpx/transport/exchange.hpp>

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstdint>

namespace cpx {

template <any_sharding Q>
class cached_attention;

/// Owns the keys and values of one attention layer on one rank, none at first: of its tokens, or of its heads where
/// every rank has every token. Every batch is appended on the sharding on which its keys and values are; nothing moves.
///
///     prefill                             append, then `attention` or `cached_attention`
///     decode, a token a sequence a step   append over thd::uniform(sequences, 1), then `cached_attention`
/// Of tensors on devices: include <cpx/ops/cuda/attention_cache.hpp>.
template <class T, any_memory M = host_memory>
class attention_cache {
public:
    static_assert(
        !std::same_as<T, detail::untold>,
        "cpx: an attention_cache cannot tell its elements; write attention_cache<float>(heads, sharding, comm)");

    /// `sharding` is on what keys and values are: by tokens, whatever their layout; by heads; or replicated. Of its
    /// batch only the number of sequences counts. comm: in the memory of whose rank they are kept; nothing moves.
    /// Throws `cpx::error` if its ranks are not the sharding's or heads do not fit.
    template <any_sharding S, any_transport Comm>
        requires std::same_as<rank_memory_of<Comm>, M>
    attention_cache(attention_heads const& heads, S const& sharding, Comm const& comm, caller here = caller::here())
        : heads_(heads), keys_(checked(heads, sharding, comm, here)), rank_(comm.rank()), ranks_(comm.ranks()),
          whole_(S::every_row), last_(thd::uniform(sharding.batch().sequences(), 0)),
          lengths_(static_cast<std::size_t>(last_.sequences())), tokens_(lengths_.size()),
          kept_(last_.sequences(), keys_.size() * heads.dim, rank_memory(comm)) {
        static_assert(!std::integral<T>, "cpx: attention_cache of whole numbers; use float or double");
    }
    template <class X = void>
    explicit attention_cache(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : attention_cache(unfit<X>()) {}
    template <class O = attention_heads>
        requires std::same_as<O, attention_heads>
    explicit attention_cache(O const&, detail::any = {}, detail::any = {}, detail::any = {})
        : attention_cache(unfit<O>()) {}

    /// Appends the keys and values of a batch in which sequences go on, those of no token by none. k, v: (rows, key
    /// heads * dim) of the heads of this rank. Rows behind a sequence's valid length are not kept.
    ///
    /// Every rank calls it with its rows of the same batch. Throws `cpx::error` on what does not fit; a call that
    /// throws, for want of memory, too, has kept nothing.
    template <sharded_like<M> K, sharded_like<M> V>
    void append(K const& k, V const& v, caller here = caller::here()) {
        constexpr bool fits =
            detail::sharded_as<sharding_of<K>, V> && std::same_as<element_of<K>, T> && std::same_as<element_of<V>, T>;
        static_assert(fits, "cpx: attention_cache of keys and values on two shardings, or of other elements than its");
        if constexpr (fits) keep<sharding_of<K>>(k.view(), v.view(), here);
    }
    template <class X = detail::any>
    detail::refused append(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: append(k, v) wants two tensors; view other memory as sharded(rows, "
                                        "sharding, rank)");
        return {};
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
    template <class X>
    static attention_cache&& unfit() {
        static_assert(detail::never<X>, "cpx: attention_cache<T>(heads, sharding, comm) wants attention_heads, on what "
                                        "keys and values are sharded, and the transport of its ranks");
        throw;
    }
    template <any_sharding Q>
    friend class cached_attention;

    template <any_sharding S, class Comm>
    static range checked(attention_heads const& heads, S const& sharding, Comm const& comm, caller here) {
        int const rank = detail::rank_in(where, sharding, comm, here);
        detail::require_some_heads(where, heads, here);
        return sharding.heads(rank, heads.key_heads);
    }

    template <any_sharding S>
    void keep(sharded<T const, S, M> const& k, sharded<T const, S, M> const& v, caller here) {
        S const& s = k.sharding();
        index_t const width = keys_.size() * heads_.dim;
        require(s.batch().sequences() == last_.sequences(), where, "sequences", last_.sequences(),
                s.batch().sequences(), here);
        detail::require_own(where, "rank of k", k.rank(), s.ranks(), rank_, ranks_, here);
        require(S::every_row == whole_ && s.heads(rank_, heads_.key_heads) == keys_, where, "sharding of k",
                whole_ ? "every token, of the heads of this cache" : "one by tokens", "another", here);
        detail::require_shape(where, "k", k.data(), s.rows(rank_), width, here);
        detail::require_in_memory(where, "k", k, kept_.memory(), "that of this cache", here);
        detail::require_there(where, "v", v, k, "that of k", here);
        detail::require_shape(where, "v", v.data(), s.rows(rank_), width, here);
        std::vector<detail::appended_rows> list;
        std::vector<std::vector<index_t>> tokens(tokens_.size()); // that come
        for (segment const& of : segments(s, rank_)) {
            auto const sequence = static_cast<std::size_t>(of.sequence);
            index_t const count = std::min(of.count, s.batch().valid(of.sequence) - of.token);
            if (count <= 0) continue;
            list.push_back({of.sequence, of.row, count});
            for (index_t i = 0; i < count; ++i) tokens[sequence].push_back(lengths_[sequence] + of.token + i);
        }
        for (std::size_t i = 0; i < tokens.size(); ++i) detail::make_room(tokens_[i], tokens[i].size());
        kept_.append(list, k.data(), v.data(), here); // the last that may throw: a call keeps all of a batch or nothing
        for (std::size_t i = 0; i < tokens.size(); ++i)
            tokens_[i].insert(tokens_[i].end(), tokens[i].begin(), tokens[i].end());
        last_ = s.batch();
        for (index_t i = 0; i < last_.sequences(); ++i) lengths_[static_cast<std::size_t>(i)] += last_.valid(i);
    }

    /// Attention of queries of the last batch over what this rank keeps, see `detail::cached_keys`.
    template <class Out, class Sum>
    void attend(std::vector<segment> const& of, detail::attended_heads const& at, double scale, rows<T const> q,
                rows<Out> o, rows<Sum> lse, caller here) const {
        std::vector<detail::cached_queries> list;
        for (segment const& s : of) {
            auto const sequence = static_cast<std::size_t>(s.sequence);
            auto const& own = tokens_[sequence];
            index_t const before = lengths_[sequence] - last_.valid(s.sequence);
            auto& seen = list.emplace_back(detail::cached_queries{s.sequence, s.row, {}}).seen;
            for (index_t i = 0; i < s.count; ++i)
                seen.push_back(std::ranges::upper_bound(own, before + s.token + i) - own.begin() - 1);
        }
        kept_.attend(list, at, scale, q, o, lse, here);
    }

    /// Hashes what every rank has alike, beside the numbers of heads.
    std::uint64_t hash() const { return detail::mix_all(static_cast<std::uint64_t>(heads_.dim), lengths_); }

    attention_heads heads_;
    range keys_;
    int rank_, ranks_;
    bool whole_;
    thd last_;
    std::vector<index_t> lengths_;             ///< of every sequence, on all ranks
    std::vector<std::vector<index_t>> tokens_; ///< of every sequence, those that are kept here, ascending
    detail::cached_keys<T, M> kept_;
};

template <class X = void>
attention_cache(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> attention_cache<detail::untold>;
template <class O = attention_heads>
    requires std::same_as<O, attention_heads>
attention_cache(O const&, detail::any = {}, detail::any = {}, detail::any = {}) -> attention_cache<detail::untold>;

/// Attention of a batch in which sequences go on, over what `attention_cache`s keep: of this batch, appended before,
/// and of all before it. Made once a batch, for all layers.
///
/// Where caches hold tokens, queries go to every rank, each attends over what it keeps, and what comes of it goes back
/// with the logarithm of its sum of weights, by which the query's rank joins the partials in the order of ranks. Where
/// caches hold every token, of all heads or of some, nothing moves, and results have the bits of `attention` of whole
/// sequences; so has a query of which one rank keeps all that it sees.
template <any_sharding Q>
class cached_attention {
public:
    /// `queries`: on what the queries are; q and o are tensors of it. comm: whose rank attends; nothing moves. Throws
    /// `cpx::error` if its ranks are not those of the queries.
    template <any_transport Comm>
    cached_attention(Q const& queries, Comm const& comm, caller here = caller::here())
        : queries_(queries), everywhere_(queries.ranks(), queries.batch()),
          rank_(detail::rank_in(where, queries, comm, here)),
          gather_(relayout(source(queries, everywhere_), everywhere_, rank_, here)),
          back_(relayout(partials(queries, here), joined(queries, here), rank_, here)) {}
    template <class X = detail::any>
    explicit cached_attention(X const& = {}, detail::any = {}, detail::any = {}) : cached_attention(unfit<X>()) {}

    /// Computes `o = softmax(scale q K^T) V` for every query over the tokens of its sequence up to its own.
    ///
    /// q, o: (rows, query heads * dim). Rows behind a sequence's valid length see its last token. Collective where the
    /// cache holds tokens: two exchanges, before which ranks that have another scale, or whose caches have other heads,
    /// or have had another number of tokens of a sequence, throw an error that says so. Throws `cpx::error` on what
    /// does not fit, and what `exchange` throws.
    template <class T, any_memory M, sharded_like<M> X, sharded_like<M> O, any_transport Comm>
    void operator()(attention_cache<T, M> const& cache, X const& q, double scale, O&& o, Comm& comm,
                    caller here = caller::here()) const {
        constexpr bool fits = detail::sharded_as<Q, X, O> && std::same_as<element_of<O>, T> && detail::writes<O, X>;
        constexpr bool there = detail::in_memory_of<Comm, X>;
        static_assert(fits, "cpx: cached_attention wants q and o of the sharding that it was made of and of the "
                            "cache's elements, and an o that is not const and has a name");
        static_assert(!fits || there,
                      "cpx: cached_attention of tensors in another memory than that of the transport's ranks");
        if constexpr (fits && there) run<T, M>(cache, q.view(), scale, o.view(), comm, here);
    }
    template <class X>
    detail::refused operator()(X const&, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                               detail::any = {}) const {
        static_assert(detail::never<X>, "cpx: attend(cache, q, scale, o, comm) of a cached_attention wants an "
                                        "attention_cache, two tensors and a transport");
        return {};
    }

private:
    static constexpr char const* where = "cached_attention";
    struct of_queries;
    using partials_type = piecewise<of_queries>;
    using source_type = std::conditional_t<Q::every_row, replicated<>, Q>;
    using joined_type = std::conditional_t<Q::every_row, replicated<>, partials_type>;

    template <class X>
    static cached_attention const& unfit() {
        static_assert(detail::never<X>, "cpx: cached_attention(queries, comm) wants on what queries are sharded, and "
                                        "the transport of its ranks");
        throw;
    }

    static source_type source(Q const& queries, replicated<> const& everywhere) {
        if constexpr (Q::every_row)
            return everywhere;
        else
            return queries;
    }
    /// A partial of every query on every rank, rank by rank.
    static partials_type partials(Q const& queries, caller here) {
        index_t const tokens = queries.batch().tokens();
        return partials_type::by_counts(thd::uniform(queries.ranks(), tokens),
                                        std::vector<index_t>(static_cast<std::size_t>(queries.ranks()), tokens), here);
    }
    /// All partials of a query where it is.
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

    /// Returns a plan on which ranks agree only if their caches are alike, and what they attend with.
    template <class T, any_memory M>
    static plan over(plan p, attention_cache<T, M> const& cache, double scale) {
        identity::set(p.id.operation, where);
        p.id[identity::source_width] = static_cast<std::uint64_t>(cache.heads_.query_heads);
        p.id[identity::target_width] = static_cast<std::uint64_t>(cache.heads_.key_heads);
        p.id[identity::parameter] = cache.hash();
        p.id[identity::first_argument] = std::bit_cast<std::uint64_t>(scale);
        return p;
    }

    template <class T, any_memory M, class Comm>
    void run(attention_cache<T, M> const& cache, sharded<T const, Q, M> const& q, double scale,
             sharded<T, Q, M> const& o, Comm& comm, caller here) const {
        detail::require_place(where, "q", q, queries_, rank_, "that of this plan", here);
        detail::require_there(where, "o", o, q, "that of q", here);
        detail::require_in_memory(where, "q", q, cache.kept_.memory(), "that of the cache", here);
        detail::require_own(where, "rank of the cache", cache.rank_, cache.ranks_, rank_, queries_.ranks(), here);
        detail::require_batch(where, "batch of q", "that appended last", cache.last_, queries_.batch(), here);
        attention_heads const& heads = cache.heads_;
        detail::attended_heads const at{queries_.heads(rank_, heads.query_heads), cache.keys_,
                                        heads.query_heads / heads.key_heads, heads.dim, heads.on_tensor_cores};
        detail::require_read_heads(where, at, here);
        require(cache.whole_ || at.queries.size() == heads.query_heads, where, "cache",
                "one of every token, for queries by heads", "one by tokens", here);
        detail::require_shape(where, "q", q.data(), queries_.rows(rank_), at.query_width(), here);
        detail::require_shape(where, "o", o.data(), queries_.rows(rank_), at.query_width(), here);
        detail::require_apart(where, {{"o", o.data()}}, {{"q", q.data()}}, here);
        cache.kept_.check(at, q.data(), o.data(), here);
        using sum = typename M::template sum<T>; // of partials, which are not rounded
        if (cache.whole_)
            return cache.attend(segments(queries_, rank_), at, scale, q.data(), o.data(), rows<sum>(), here);

        M const& memory = q.memory();
        tensor<T, replicated<>, M> all(everywhere_, rank_, Q::every_row ? 0 : at.query_width(), memory, here);
        if constexpr (!Q::every_row)
            detail::exchange_rows(over(gather_, cache, scale), q.data(), all.data(), comm, here, where);
        tensor<sum, partials_type, M> partial(back_.from, rank_, at.query_width() + at.queries.size(), memory, here);
        cache.attend(segments(everywhere_, rank_), at, scale, Q::every_row ? q.data() : std::as_const(all).data(),
                     partial.data().columns(0, at.query_width()),
                     partial.data().columns(at.query_width(), at.queries.size()), here);
        tensor<sum, joined_type, M> every(back_.to, rank_, partial.width(), memory, here);
        auto const send_back = [&](plan const& p) {
            detail::exchange_rows(p, std::as_const(partial).data(), every.data(), comm, here, where);
        };
        if constexpr (Q::every_row) // the first exchange of this call
            send_back(over(back_, cache, scale));
        else
            send_back(back_);
        for_each_element(memory, o.data().count(), o.data().width(),
                         rowwise::join_partials<sum, T>{every.data(), o.data(), queries_.ranks(), at.dim});
    }

    Q queries_;
    replicated<> everywhere_;
    int rank_;
    relayout_plan<source_type, replicated<>> gather_;
    relayout_plan<partials_type, joined_type> back_;
};
template <class X = detail::any>
cached_attention(X const& = {}, detail::any = {}, detail::any = {}) -> cached_attention<replicated<>>;
template <any_sharding Q, any_transport Comm>
cached_attention(Q const&, Comm const&) -> cached_attention<Q>;
template <any_sharding Q, any_transport Comm>
cached_attention(Q const&, Comm const&, caller) -> cached_attention<Q>;

} // namespace cpx
