// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention of sharded queries on all keys of their sequences.
#pragma once

#include <cpx/layout/sharded.hpp>
#include <cpx/ops/local/attention.hpp>
#include <cpx/plan/segments.hpp>

#include <cmath>
#include <concepts>

namespace cpx {

namespace cuda {
class attention_engine;
} // namespace cuda

/// Heads of an attention, over all ranks. `query_heads` is a multiple of `key_heads`.
struct attention_heads {
    index_t query_heads = 1, key_heads = 1;
    index_t dim = 1;
    /// On devices, of elements of 16 bits: tensor cores multiply, where these can (`cuda::attention_path_of`), with
    /// weights rounded to such elements; else a plain kernel, some ten times slower. Has no effect elsewhere.
    bool on_tensor_cores = true;
    /// On devices, of elements of 16 bits: is asked for the forward first, say `cuda::cudnn_attention`. What it serves
    /// may have other bits on every sharding. Has no effect elsewhere; the backward is cpx's, whose sums have an order.
    cuda::attention_engine* engine = nullptr;
};

namespace detail {

/// The heads of an attention that a rank holds.
struct attended_heads {
    range queries, keys;
    index_t group, dim; ///< query heads that read a key head, columns of a head
    bool on_tensor_cores;
    cuda::attention_engine* engine = nullptr;

    /// Returns which of the rank's key heads its query head `h` reads.
    index_t key_of(index_t h) const { return (queries.first + h) / group - keys.first; }
    index_t query_width() const { return queries.size() * dim; }
    index_t key_width() const { return keys.size() * dim; }
};

/// Whether there is attention of such elements in memory M.
template <any_memory M, class T>
inline constexpr bool attends = std::same_as<M, host_memory> && !std::integral<T>;
template <class M, class T>
concept attended_memory = any_memory<M> && attends<M, T>;
template <class X>
concept attended = sharded_anywhere<X> && attends<memory_of<X>, element_of<X>>;

/// Throws unless the heads fit each other.
inline void require_some_heads(char const* where, attention_heads const& heads, caller here) {
    require(heads.query_heads > 0, where, "query heads", "at least 1", heads.query_heads, here);
    require_groups(where, "query heads", heads.query_heads, "key heads", heads.key_heads, here);
    product(where, "query heads x dim", {heads.query_heads, heads.dim}, here);
}
/// Returns what the rank of q holds. Throws unless the heads fit each other, and keys the queries' batch and rank.
template <class T, any_sharding Q, class A, any_sharding K, any_memory M>
attended_heads require_heads(char const* where, sharded<T, Q, M> const& q, sharded<A, K, M> const& k,
                             attention_heads const& heads, caller here) {
    require_some_heads(where, heads, here);
    Q const& queries = q.sharding();
    K const& keys = k.sharding();
    require_batch(where, "batch of keys and values", "the queries'", queries.batch(), keys.batch(), here);
    require_own(where, "rank of k", k.rank(), keys.ranks(), q.rank(), queries.ranks(), here);
    require_in_memory(where, "k", k, q.memory(), "that of q", here);
    return {queries.heads(q.rank(), heads.query_heads),
            keys.heads(q.rank(), heads.key_heads),
            heads.query_heads / heads.key_heads,
            heads.dim,
            heads.on_tensor_cores,
            heads.engine};
}
/// Throws unless the key heads that the rank's query heads read are on it.
inline void require_read_heads(char const* where, attended_heads const& at, caller here) {
    require(at.keys.first <= at.queries.first / at.group && (at.queries.last - 1) / at.group < at.keys.last, where,
            "key heads on this rank", "those that its query heads read", "others", here);
}
/// Throws unless `x` lies as `other` does, which is `whose`, in the same memory.
template <class T, class A, any_sharding S, any_memory M>
void require_there(char const* where, char const* what, sharded<T, S, M> const& x, sharded<A, S, M> const& other,
                   char const* whose, caller here) {
    require_place(where, what, x, other, whose, here);
    require_in_memory(where, what, x, other.memory(), whose, here);
}
/// The same, and unless it has all rows, of `width` columns.
template <class T, class A, any_sharding S, any_memory M>
void require_beside(char const* where, char const* what, sharded<T, S, M> const& x, sharded<A, S, M> const& other,
                    char const* whose, index_t width, caller here) {
    require_there(where, what, x, other, whose, here);
    require_shape(where, what, x.data(), other.sharding().rows(other.rank()), width, here);
}

/// Attention of one rank, of arguments that fit. On devices: `ops/cuda/attention.hpp`.
template <class T, any_sharding Q, any_sharding K>
void attend_rows(sharded<T const, Q> const& q, sharded<T const, K> const& k, sharded<T const, K> const& v,
                 attended_heads const& at, double scale, rows<T> o, rows<T> lse, caller) {
    std::vector<T> of_head;
    auto const segments = cpx::segments(q.sharding(), q.rank());
    auto const tokens = positions(segments);
    for (segment const& s : segments)
        for (index_t h = 0; h < at.queries.size(); ++h) {
            auto const seen =
                [&](sharded<T const, K> const& x) -> rows<T const> { // later keys are masked for all of these
                return x.data()
                    .sub(q.sharding().batch().offset(s.sequence), s.token + s.count)
                    .columns(at.key_of(h) * at.dim, at.dim);
            };
            of_head.resize(lse.data() ? static_cast<std::size_t>(s.count) : 0);
            attend_one_head<T>(
                q.data().sub(s.row, s.count).columns(h * at.dim, at.dim),
                std::span(tokens).subspan(static_cast<std::size_t>(s.row), static_cast<std::size_t>(s.count)), seen(k),
                seen(v), static_cast<T>(scale), o.sub(s.row, s.count).columns(h * at.dim, at.dim), std::span(of_head));
            for (index_t i = 0; i < std::ssize(of_head); ++i) lse(s.row + i, h) = of_head[static_cast<std::size_t>(i)];
        }
}

template <class T, any_sharding Q, any_sharding K, any_memory M>
void attend(sharded<T const, Q, M> const& q, sharded<T const, K, M> const& k, sharded<T const, K, M> const& v,
            attention_heads const& heads, double scale, sharded<T, Q, M> const& o,
            rows_or_list<typename M::template sum<T>> const& numbers, caller here) {
    char const* const where = "attention";
    attended_heads const at = require_heads(where, q, k, heads, here);
    require(std::isfinite(scale), where, "scale", "a number", scale, here);
    require_read_heads(where, at, here);
    require_shape(where, "q", q.data(), q.sharding().rows(q.rank()), at.query_width(), here);
    require_beside(where, "o", o, q, "that of q", at.query_width(), here);
    require_shape(where, "k", k.data(), k.sharding().rows(k.rank()), at.key_width(), here);
    require_beside(where, "v", v, k, "that of k", at.key_width(), here);
    auto const lse = numbers.of_width(at.queries.size());
    if (lse.data()) require_shape(where, "lse", lse, o.data().count(), at.queries.size(), here);
    require_apart(where, {{"o", o.data()}, {"lse", lse}}, {{"q", q.data()}, {"k", k.data()}, {"v", v.data()}}, here);
    attend_rows(q, k, v, at, scale, o.data(), lse, here);
}

} // namespace detail

/// Computes `o = softmax(scale q K^T) V` for every query, over the keys of its sequence up to its own token.
///
/// q, o: (rows, query heads * dim) on any sharding; k, v: (tokens, key heads * dim) where every rank holds every token:
/// `replicated` (keys and values gathered) or the same `head_sharded` as q. Heads are those that their rank holds.
/// lse: (rows, query heads), rows or a list, takes what the backward needs, on devices as float; empty if not wanted.
/// No communication: relayout q, k and v first. A row's result does not depend on the other rows.
/// Of tensors on devices: include <cpx/ops/cuda/attention.hpp>.
///
/// Throws `cpx::error` on shapes, batches or heads that do not fit, and on overlapping memory.
template <detail::attended Q, sharded_like<memory_of<Q>> K, sharded_like<memory_of<Q>> V, sharded_like<memory_of<Q>> O>
void attention(Q const& q, K const& k, V const& v, attention_heads const& heads, double scale, O&& o,
               rows_or_list<sum_of<O>> const& lse = {}, caller here = caller::here()) {
    constexpr bool keys = sharding_of<K>::every_row && sharding_of<V>::every_row, writes = detail::writes<O, Q, K, V>;
    constexpr bool fits = detail::sharded_as<sharding_of<Q>, O> && detail::sharded_as<sharding_of<K>, V>;
    static_assert(keys, "cpx: attention wants keys and values on every rank for all tokens of a sequence; relayout "
                        "them to replicated or head_sharded first");
    static_assert(!keys || fits,
                  "cpx: attention of q and o, or of k and v, on two shardings; make o of q's sharding, and relayout "
                  "k and v alike");
    static_assert(!keys || !fits || writes,
                  "cpx: attention wants q, k and v of o's elements, and an o that is not const and has a name");
    if constexpr (keys && fits && writes)
        detail::attend<element_of<O>, sharding_of<Q>, sharding_of<K>, memory_of<Q>>(q.view(), k.view(), v.view(), heads,
                                                                                    scale, o.view(), lse, here);
}
template <class X = detail::any, class Y1 = detail::any, class Y2 = detail::any, class Y3 = detail::any>
detail::refused attention(X const& = {}, Y1 const& = {}, Y2 const& = {}, detail::any = {}, detail::any = {},
                          Y3 const& = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X, Y1, Y2, Y3>,
                  "cpx: attention(q, k, v, heads, scale, o) wants tensors q, k, v and o of floating-point elements, "
                  "attention_heads, and then perhaps rows for lse; view other memory as sharded(rows, sharding, rank)");
    return {};
}
template <class X, class Y1, class Y2, class Y3 = detail::any, class O = attention_heads>
    requires std::same_as<O, attention_heads>
detail::refused attention(X const& q, Y1 const& k, Y2 const& v, O const&, detail::any = {}, Y3 const& o = {},
                          detail::any = {}, detail::any = {}) {
    return attention(q, k, v, detail::any(), detail::any(), o);
}

} // namespace cpx
