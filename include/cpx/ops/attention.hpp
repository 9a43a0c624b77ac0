// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention of sharded queries on all keys of their sequences.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/ops/local/attention.hpp>
#include <cpx/plan/segments.hpp>

namespace cpx {

/// Heads of an attention, over all ranks. `query_heads` is a multiple of `key_heads`.
struct attention_heads {
    index_t query_heads = 1, key_heads = 1;
    index_t dim = 1;
};

namespace detail {

/// Throws unless the heads fit each other and their columns have a size.
inline void require_attention(char const* where, attention_heads const& heads, caller here) {
    require_groups(where, "query heads", heads.query_heads, "key heads", heads.key_heads, here);
    product(where, "query heads x dim", {heads.query_heads, heads.dim}, here);
}

/// Throws unless keys are of the queries' batch, on the same rank of the same group.
template <any_sharding Q, class T, any_sharding K>
void require_keys(char const* where, Q const& queries, int rank, sharded<T, K> const& k, caller here) {
    require_batch(where, "batch of keys and values", "the queries'", queries.batch(), k.sharding().batch(), here);
    require_own(where, "rank of k", k.rank(), k.sharding().ranks(), rank, queries.ranks(), here);
}

template <class T, any_sharding Q, any_sharding K>
void attend(sharded<T const, Q> const& q, sharded<T const, K> const& k, sharded<T const, K> const& v,
            attention_heads const& heads, double scale, sharded<T, Q> const& o, rows_or_list<T> const& numbers,
            caller here) {
    char const* const where = "attention";
    int const rank = q.rank();
    require_attention(where, heads, here);
    require_keys(where, q.sharding(), rank, k, here);
    require_place(where, "v", v, k, "that of k", here);
    require_place(where, "o", o, q, "that of q", here);
    thd const& batch = q.sharding().batch();
    range const queries = q.sharding().heads(rank, heads.query_heads), keys = k.sharding().heads(rank, heads.key_heads);
    index_t const group = heads.query_heads / heads.key_heads, dim = heads.dim;
    require(keys.first <= queries.first / group && (queries.last - 1) / group < keys.last, where,
            "key heads on this rank", "those that its query heads read", "others", here);
    index_t const held = q.sharding().rows(rank);
    require_shape(where, "q", q.data(), held, queries.size() * dim, here);
    require_shape(where, "o", o.data(), held, queries.size() * dim, here);
    require_shape(where, "k", k.data(), batch.tokens(), keys.size() * dim, here);
    require_shape(where, "v", v.data(), batch.tokens(), keys.size() * dim, here);

    rows<T> const lse = numbers.of_width(queries.size());
    if (lse.data()) require_shape(where, "lse", lse, held, queries.size(), here);
    require_apart(where, {{"o", o.data()}, {"lse", lse}}, {{"q", q.data()}, {"k", k.data()}, {"v", v.data()}}, here);

    std::vector<T> of_head;
    auto const segments = cpx::segments(q.sharding(), rank);
    auto const tokens = positions(segments);
    for (segment const& s : segments)
        for (index_t h = 0; h < queries.size(); ++h) {
            index_t const key_head = (queries.first + h) / group - keys.first;
            auto const seen =
                [&](sharded<T const, K> const& x) -> rows<T const> { // later keys are masked for all of these
                return x.data().sub(batch.offset(s.sequence), s.token + s.count).columns(key_head * dim, dim);
            };
            of_head.resize(lse.data() ? static_cast<std::size_t>(s.count) : 0);
            attend_head<T>(
                q.data().sub(s.row, s.count).columns(h * dim, dim),
                std::span(tokens).subspan(static_cast<std::size_t>(s.row), static_cast<std::size_t>(s.count)), seen(k),
                seen(v), static_cast<T>(scale), o.data().sub(s.row, s.count).columns(h * dim, dim), std::span(of_head),
                here);
            for (index_t i = 0; i < std::ssize(of_head); ++i) lse(s.row + i, h) = of_head[static_cast<std::size_t>(i)];
        }
}

} // namespace detail

/// Computes `o = softmax(scale q K^T) V` for every query, over the keys of its sequence up to its own token.
///
/// q, o: (rows, query heads * dim) on any sharding; k, v: (tokens, key heads * dim) where every rank holds every token:
/// `replicated` (keys and values gathered) or the same `head_sharded` as q. Heads are those that their rank holds.
/// lse: (rows, query heads), rows or a list, takes what the backward needs; empty if not wanted.
/// No communication: relayout q, k and v first. A row's result does not depend on the other rows.
///
/// Throws `cpx::error` on shapes, batches or heads that do not fit, and on overlapping memory.
template <sharded_like Q, sharded_like K, sharded_like V, sharded_like O>
void attention(Q const& q, K const& k, V const& v, attention_heads const& heads, double scale, O&& o,
               rows_or_list<element_of<O>> const& lse = {}, caller here = caller::here()) {
    constexpr bool keys = sharding_of<K>::every_row && sharding_of<V>::every_row, writes = detail::writes<O, Q, K, V>;
    constexpr bool fits = detail::sharded_as<sharding_of<Q>, O> && detail::sharded_as<sharding_of<K>, V>;
    static_assert(keys, "cpx: attention wants keys and values on every rank for all tokens of a sequence; relayout "
                        "them to replicated or head_sharded first");
    static_assert(fits,
                  "cpx: attention of q and o, or of k and v, on two shardings; make o of q's sharding, and relayout "
                  "k and v alike");
    static_assert(writes, "cpx: attention wants q, k and v of o's elements, and an o that is not const and has a name");
    if constexpr (keys && fits && writes)
        detail::attend<element_of<O>, sharding_of<Q>, sharding_of<K>>(q.view(), k.view(), v.view(), heads, scale,
                                                                      o.view(), lse, here);
}
template <class X>
void attention(X const&, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
               detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: attention(q, k, v, heads, scale, o) wants tensors q, k, v and o, and then "
                                    "perhaps rows for lse; view other memory as sharded(rows, sharding, rank)");
}

} // namespace cpx
