// SPDX-License-Identifier: Apache-2.0
// Backward of causal softmax attention of sharded queries.
#pragma once

#include <cpx/ops/attention.hpp>
#include <cpx/ops/local/attention_backward.hpp>
#include <cpx/ops/shared_heads.hpp>

#include <concepts>

namespace cpx {

/// What the backward of `attention` must know of this rank's queries.
///
/// q, dout: (rows, query heads * dim), the queries and the gradient of o; lse: (rows, query heads), as `attention`
/// wrote it; delta: (rows, query heads), as `attention_delta` wrote it. All for the heads that the rank holds.
template <class T, any_sharding Q, any_memory M = host_memory>
struct attention_queries {
    sharded_field<T const, Q, M> q, dout;
    sharded_field<typename M::template sum<T> const, Q, M> lse, delta;
    detail::no_more end = {};
};
template <class X = detail::any, class Y = detail::any, class Z = detail::any, class F = detail::first_fields<X, Y, Z>>
attention_queries(X&& = {}, Y const& = {}, Z const& = {}, detail::any = {}, ...)
    -> attention_queries<typename F::element, typename F::sharding, typename F::memory>;

namespace detail {

/// The queries of one segment and head, with their numbers side by side.
template <class T>
class queries_of_head {
public:
    template <any_sharding Q>
    queries_of_head(attention_queries<T, Q> const& from, segment const& s, index_t head, index_t dim) {
        for (index_t i = 0; i < s.count; ++i) {
            tokens_.push_back(s.token + i);
            lse_.push_back(from.lse.data()(s.row + i, head));
            delta_.push_back(from.delta.data()(s.row + i, head));
        }
        q_ = from.q.data().sub(s.row, s.count).columns(head * dim, dim);
        dout_ = from.dout.data().sub(s.row, s.count).columns(head * dim, dim);
    }
    attended_queries<T> get() const { return {q_, dout_, tokens_, lse_, delta_}; }

private:
    rows<T const> q_, dout_;
    std::vector<index_t> tokens_;
    std::vector<T> lse_, delta_;
};

/// Throws unless all that is known of the queries fits the heads that the rank holds.
template <class T, any_sharding Q, any_memory M>
void require_queries(char const* where, attention_queries<T, Q, M> const& from, attended_heads const& at, caller here) {
    char const* const whose = "that of q";
    require_there(where, "dout", from.dout, from.q, whose, here);
    require_there(where, "lse", from.lse, from.q, whose, here);
    require_there(where, "delta", from.delta, from.q, whose, here);
    index_t const held = from.q.sharding().rows(from.q.rank());
    require_shape(where, "q", from.q.data(), held, at.query_width(), here);
    require_shape(where, "dout", from.dout.data(), held, at.query_width(), here);
    require_shape(where, "lse", from.lse.data(), held, at.queries.size(), here);
    require_shape(where, "delta", from.delta.data(), held, at.queries.size(), here);
}

/// Delta of heads of `dim` columns, of arguments that fit.
template <class T>
void delta_of_rows(host_memory, rows<T const> o, rows<T const> dout, index_t dim, rows<T> delta, caller) {
    std::vector<T> of_head(static_cast<std::size_t>(o.count()));
    for (index_t h = 0; h < delta.width(); ++h) {
        delta_of_one_head<T>(o.columns(h * dim, dim), dout.columns(h * dim, dim), std::span(of_head));
        for (index_t row = 0; row < o.count(); ++row) delta(row, h) = of_head[static_cast<std::size_t>(row)];
    }
}

template <class T, any_sharding Q, any_memory M>
void sum_delta(sharded<T const, Q, M> const& o, sharded<T const, Q, M> const& dout, index_t dim,
               sharded<typename M::template sum<T>, Q, M> const& delta, caller here) {
    char const* const where = "attention_delta";
    index_t const heads = delta.data().width();
    product(where, "heads x dim", {heads, dim}, here);
    require_beside(where, "dout", dout, o, "that of o", heads * dim, here);
    require_beside(where, "delta", delta, o, "that of o", heads, here);
    require_shape(where, "o", o.data(), delta.data().count(), heads * dim, here);
    require_apart(where, {{"delta", delta.data()}}, {{"o", o.data()}, {"dout", dout.data()}}, here);
    delta_of_rows(o.memory(), o.data(), dout.data(), dim, delta.data(), here);
}

} // namespace detail

/// Computes `delta = sum over a head of o dout` for every row and head.
///
/// o, dout: (rows, heads * dim), delta: (rows, heads), all of one sharding; delta on devices float. No communication.
/// Throws `cpx::error` on shapes or shardings that do not fit, and on overlapping memory.
template <detail::attended O, sharded_like<memory_of<O>> D, sharded_like<memory_of<O>> Y>
void attention_delta(O const& o, D const& dout, index_t dim, Y&& delta, caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<sharding_of<O>, D, Y>;
    constexpr bool writes =
        detail::writes<Y> && std::same_as<element_of<O>, element_of<D>> && std::same_as<element_of<Y>, sum_of<O>>;
    static_assert(fits, "cpx: attention_delta of tensors on two shardings; make dout and delta of o's sharding");
    static_assert(
        !fits || writes,
        "cpx: attention_delta wants o and dout of delta's elements, on devices a delta of float, and one that "
        "is not const and has a name");
    if constexpr (fits && writes)
        detail::sum_delta<element_of<O>, sharding_of<O>, memory_of<O>>(o.view(), dout.view(), dim, delta.view(), here);
}
template <class X = detail::any, class Y1 = detail::any, class Y2 = detail::any>
detail::refused attention_delta(X const& = {}, Y1 const& = {}, detail::any = {}, Y2 const& = {}, detail::any = {}) {
    static_assert(
        detail::never<X, Y1, Y2>,
        "cpx: attention_delta(o, dout, dim, delta) wants tensors; view other memory as sharded(rows, sharding, rank)");
    return {};
}

namespace detail {

template <class T, any_sharding Q, any_memory M>
std::array<operand, 4> query_operands(attention_queries<T, Q, M> const& from) {
    return {{{"q", from.q.data()}, {"dout", from.dout.data()}, {"lse", from.lse.data()}, {"delta", from.delta.data()}}};
}

/// The gradient of one rank's queries, of arguments that fit.
template <class T, any_sharding Q, any_sharding K>
void attend_rows_backward_queries(attention_queries<T, Q> const& from, sharded<T const, K> const& k,
                                  sharded<T const, K> const& v, attended_heads const& at, double scale, rows<T> dq,
                                  caller) {
    for (segment const& s : segments(from.q.sharding(), from.q.rank()))
        for (index_t h = 0; h < at.queries.size(); ++h) {
            auto const seen = [&](sharded<T const, K> const& x) -> rows<T const> {
                return x.data()
                    .sub(x.sharding().batch().offset(s.sequence), s.token + s.count)
                    .columns(at.key_of(h) * at.dim, at.dim);
            };
            queries_of_head<T> const own(from, s, h, at.dim);
            backward_of_one_query_head<T>(own.get(), seen(k), seen(v), static_cast<T>(scale),
                                          dq.sub(s.row, s.count).columns(h * at.dim, at.dim));
        }
}

template <class T, any_sharding Q, any_sharding K, any_memory M>
void attend_backward_queries(attention_queries<T, Q, M> const& from, sharded<T const, K, M> const& k,
                             sharded<T const, K, M> const& v, attention_heads const& heads, double scale,
                             sharded<T, Q, M> const& dq, caller here) {
    char const* const where = "attention_backward_queries";
    attended_heads const at = require_heads(where, from.q, k, heads, here);
    require_read_heads(where, at, here);
    require_queries(where, from, at, here);
    require_shape(where, "k", k.data(), k.sharding().rows(k.rank()), at.key_width(), here);
    require_beside(where, "v", v, k, "that of k", at.key_width(), here);
    require_beside(where, "dq", dq, from.q, "that of q", at.query_width(), here);
    require_apart(where, {{"dq", dq.data()}}, {{"k", k.data()}, {"v", v.data()}}, here);
    require_apart(where, std::array{operand("dq", dq.data())}, query_operands(from), here);
    attend_rows_backward_queries(from, k, v, at, scale, dq.data(), here);
}

} // namespace detail

/// Computes dq, the gradient of the queries of `attention`, where they live.
///
/// k, v: on every rank for all tokens, as in the forward; dq: as q. No communication. Bitwise the same on every
/// sharding.
///
/// Throws `cpx::error` on shapes, batches or heads that do not fit, and on overlapping memory.
template <class T, any_sharding Q, detail::attended_memory<T> M, sharded_like<M> K, sharded_like<M> V,
          sharded_like<M> Dq>
void attention_backward_queries(attention_queries<T, Q, M> const& from, K const& k, V const& v,
                                attention_heads const& heads, double scale, Dq&& dq, caller here = caller::here()) {
    constexpr bool keys = sharding_of<K>::every_row && sharding_of<V>::every_row;
    constexpr bool fits = detail::sharded_as<Q, Dq> && detail::sharded_as<sharding_of<K>, V>;
    constexpr bool writes = detail::writes<Dq, K, V> && std::same_as<element_of<Dq>, T>;
    static_assert(keys, "cpx: the gradient of queries wants keys and values on every rank; relayout them to "
                        "replicated or head_sharded first");
    static_assert(!keys || fits || detail::never<T>,
                  "cpx: attention_backward_queries of q and dq, or of k and v, on two shardings; make dq of q's "
                  "sharding, and relayout k and v alike");
    static_assert(!keys || !fits || writes || detail::never<T>,
                  "cpx: attention_backward_queries wants k, v and dq of q's elements, and a dq that is not const "
                  "and has a name");
    if constexpr (keys && fits && writes)
        detail::attend_backward_queries<T, Q, sharding_of<K>, M>(from, k.view(), v.view(), heads, scale, dq.view(),
                                                                 here);
}
template <class X>
detail::refused attention_backward_queries(detail::any, X const&, detail::any = {}, detail::any = {}, detail::any = {},
                                           detail::any = {}, detail::any = {}) {
    static_assert(
        detail::never<X>,
        "cpx: attention_backward_queries(queries, k, v, heads, scale, dq) wants attention_queries of q, dout, lse and "
        "delta, tensors, and attention_heads; view other memory as sharded(rows, sharding, rank)");
    return {};
}
template <class X, class O = attention_heads>
    requires std::same_as<O, attention_heads>
detail::refused attention_backward_queries(detail::any, X const& k, detail::any, O const&, detail::any = {},
                                           detail::any = {}, detail::any = {}) {
    return attention_backward_queries(detail::any(), k);
}

namespace detail {

/// Writes what every `each` query heads, side by side, give to the gradients of keys and values, of arguments that fit:
/// a head of dk and dv for them, to which they are added in their order.
template <class T, any_sharding Q, any_sharding K>
void attend_rows_backward_keys(attention_queries<T, Q> const& from, sharded<T const, K> const& k,
                               sharded<T const, K> const& v, attended_heads const& at, index_t each, double scale,
                               rows<T> dk, rows<T> dv, caller here) {
    auto of_queries = segments(from.q.sharding(), from.q.rank());
    std::ranges::sort(of_queries, {}, [](segment const& s) { return std::pair(s.sequence, s.token); });
    auto const of_keys = segments(k.sharding(), k.rank());
    auto const tokens = positions(of_keys);
    for (segment const& s : of_keys) {
        auto const own = std::span(tokens).subspan(static_cast<std::size_t>(s.row), static_cast<std::size_t>(s.count));
        auto const first = std::ranges::lower_bound(of_queries, s.sequence, {}, &segment::sequence);
        auto const last = std::ranges::upper_bound(of_queries, s.sequence, {}, &segment::sequence);
        for (index_t h = 0; h < at.queries.size(); ++h) {
            auto const of_head = [&](rows<T const> x) {
                return x.sub(s.row, s.count).columns(at.key_of(h) * at.dim, at.dim);
            };
            auto memory = zeros<T>("attention_backward_keys", {2, s.count, at.dim}, here);
            rows<T> const to_k(memory.data(), s.count, at.dim), to_v(to_k.row(s.count), s.count, at.dim);
            for (auto seen = first; seen != last; ++seen) {
                if (seen->token + seen->count <= s.token) continue; // all of them before these keys
                queries_of_head<T> const q(from, *seen, h, at.dim);
                backward_of_one_key_head<T>(q.get(), of_head(k.data()), of_head(v.data()), own, static_cast<T>(scale),
                                            to_k, to_v);
            }
            for (auto const& [to, term] : {std::pair(dk, to_k), std::pair(dv, to_v)})
                for (index_t row = 0; row < s.count; ++row)
                    for (index_t d = 0; d < at.dim; ++d) {
                        T& sum = to(s.row + row, h / each * at.dim + d);
                        sum = h % each == 0 ? term(row, d) : sum + term(row, d);
                    }
        }
    }
}

template <class T, any_sharding Q, any_sharding K, any_memory M, class Comm>
void attend_backward_keys(attention_queries<T, Q, M> const& from, sharded<T const, K, M> const& k,
                          sharded<T const, K, M> const& v, attention_heads const& heads, double scale,
                          sharded<T, K, M> const& dk, sharded<T, K, M> const& dv, Comm& comm, caller here) {
    char const* const where = "attention_backward_keys";
    attended_heads const at = require_heads(where, from.q, k, heads, here);
    require_queries(where, from, at, here);
    K const& sharding = k.sharding();
    int const rank = k.rank();
    index_t const held = sharding.rows(rank);
    require_beside(where, "dk", dk, k, "that of k", at.key_width(), here);
    require_beside(where, "dv", dv, k, "that of k", at.key_width(), here);
    require_beside(where, "v", v, k, "that of k", at.key_width(), here);
    require_shape(where, "k", k.data(), held, at.key_width(), here);
    require(at.queries == sharding.heads(rank, heads.query_heads), where, "query heads on this rank",
            "those of the keys' sharding", "others", here);
    require_apart(where, {{"dk", dk.data()}, {"dv", dv.data()}}, {{"k", k.data()}, {"v", v.data()}}, here);
    require_apart(where, std::array{operand("dk", dk.data()), operand("dv", dv.data())}, query_operands(from), here);
    if (!groups_split(sharding, heads.key_heads, heads.query_heads))
        return attend_rows_backward_keys(from, k, v, at, at.group, scale, dk.data(), dv.data(), here);
    operand const written[] = {{"dk", dk.data()}, {"dv", dv.data()}};
    require_there(k.memory(), where, written, here);
    using sum = typename M::template sum<T>;
    index_t const width = at.query_width(); // of every query head
    auto memory = k.memory().template zeros<sum>(where, {held, 2, width}, here);
    rows<sum> const terms(memory.data(), held, 2 * width);
    attend_rows_backward_keys(from, k, v, at, 1, scale, terms.columns(0, width), terms.columns(width, width), here);
    sum_readers<T>(sharding, heads.key_heads, heads.query_heads, at.dim, terms, std::array{dk.data(), dv.data()}, comm,
                   here, where);
}

} // namespace detail

/// Computes dk and dv, the gradients of the keys and values of `attention`, from the queries that are on this rank.
///
/// k, v, dk, dv: (rows, key heads * dim) of any sharding over the queries' batch. Two ways to run it:
///
/// - queries gathered (`replicated`) or by heads, keys where they live: dk and dv are whole, bitwise the same on every
///   sharding; moves 2 query heads * (dim + 1) elements a token to every rank.
/// - queries where they live, keys gathered: dk and dv are this rank's share of all keys' gradients, which the
///   transposed plan of their relayout adds in rank order; moves 2 key heads * dim elements a token and rank.
///
/// Collective where query heads of one group are on several ranks, by heads (see `sum_readers`); else no communication.
///
/// Throws `cpx::error` on shapes, batches or heads that do not fit, and on overlapping memory.
template <class T, any_sharding Q, detail::attended_memory<T> M, sharded_like<M> K, sharded_like<M> V,
          sharded_like<M> Dk, sharded_like<M> Dv, any_transport Comm>
    requires std::same_as<rank_memory_of<Comm>, M>
void attention_backward_keys(attention_queries<T, Q, M> const& from, K const& k, V const& v,
                             attention_heads const& heads, double scale, Dk&& dk, Dv&& dv, Comm& comm,
                             caller here = caller::here()) {
    using S = sharding_of<K>;
    constexpr bool all = Q::every_row || S::every_row, fits = detail::sharded_as<S, V, Dk, Dv>;
    constexpr bool writes = detail::writes<Dk, K, V> && detail::writes<Dv> && std::same_as<element_of<Dk>, T> &&
                            std::same_as<element_of<Dv>, T>;
    static_assert(all || detail::never<T>,
                  "cpx: the gradients of keys want every query of a key's sequence, or every key of a query's; "
                  "relayout the queries, or the keys and values, to replicated or head_sharded first");
    static_assert(!all || fits,
                  "cpx: attention_backward_keys of k, v, dk and dv on two shardings; relayout k and v alike, and "
                  "make dk and dv of their sharding");
    static_assert(!all || !fits || writes || detail::never<T>,
                  "cpx: attention_backward_keys wants k, v, dk and dv of q's elements, and dk and dv that are "
                  "not const and have names");
    if constexpr (all && fits && writes)
        detail::attend_backward_keys<T, Q, S, M>(from, k.view(), v.view(), heads, scale, dk.view(), dv.view(), comm,
                                                 here);
}
template <class X>
detail::refused attention_backward_keys(detail::any, X const&, detail::any = {}, detail::any = {}, detail::any = {},
                                        detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(
        detail::never<X>,
        "cpx: attention_backward_keys(queries, k, v, heads, scale, dk, dv, comm) wants attention_queries of q, dout, "
        "lse and delta, tensors, attention_heads, and a cpx::transport; view other memory as "
        "sharded(rows, sharding, rank)");
    return {};
}
template <class X, class O = attention_heads>
    requires std::same_as<O, attention_heads>
detail::refused attention_backward_keys(detail::any, X const& k, detail::any, O const&, detail::any = {},
                                        detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    return attention_backward_keys(detail::any(), k);
}

} // namespace cpx
