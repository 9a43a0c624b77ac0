// SPDX-License-Identifier: Apache-2.0
// Backward of causal softmax attention of sharded queries.
#pragma once

#include <cpx/ops/attention.hpp>
#include <cpx/ops/local/attention_backward.hpp>
#include <cpx/ops/shared_heads.hpp>

namespace cpx {

/// What the backward of `attention` must know of this rank's queries.
///
/// q, dout: (rows, query heads * dim), the queries and the gradient of o; lse: (rows, query heads), as `attention`
/// wrote it; delta: (rows, query heads), as `attention_delta` wrote it. All for the heads that the rank holds.
template <class T, any_sharding Q, any_memory M = host_memory>
struct attention_queries {
    sharded_field<T const, Q, M> q, dout, lse, delta;
    detail::no_more end = {};
};
template <class X = detail::any>
attention_queries(X&& = {}, detail::any = {}, detail::any = {}, detail::any = {}, ...)
    -> attention_queries<typename detail::first_field<X>::element, typename detail::first_field<X>::sharding>;

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

template <class T, any_sharding Q>
void check_queries(char const* where, attention_queries<T, Q> const& from, attention_heads const& heads, caller here) {
    int const rank = from.q.rank();
    require_attention(where, heads, here);
    for (auto const* x : {&from.dout, &from.lse, &from.delta})
        require_place(where, "dout, lse and delta", *x, from.q, "that of q", here);
    index_t const held = from.q.sharding().rows(rank), n = from.q.sharding().heads(rank, heads.query_heads).size();
    require_shape(where, "q", from.q.data(), held, n * heads.dim, here);
    require_shape(where, "dout", from.dout.data(), held, n * heads.dim, here);
    require_shape(where, "lse", from.lse.data(), held, n, here);
    require_shape(where, "delta", from.delta.data(), held, n, here);
}

template <class T, any_sharding Q>
void sum_delta(sharded<T const, Q> const& o, sharded<T const, Q> const& dout, index_t dim, sharded<T, Q> const& delta,
               caller here) {
    require_place("attention_delta", "dout", dout, o, "that of o", here);
    require_place("attention_delta", "delta", delta, o, "that of o", here);
    index_t const count = o.data().count(), heads = delta.data().width();
    product("attention_delta", "heads x dim", {heads, dim}, here);
    require_shape("attention_delta", "o", o.data(), count, heads * dim, here);
    require_shape("attention_delta", "dout", dout.data(), count, heads * dim, here);
    require_shape("attention_delta", "delta", delta.data(), count, heads, here);
    require_apart("attention_delta", {{"delta", delta.data()}}, {{"o", o.data()}, {"dout", dout.data()}}, here);
    std::vector<T> of_head(static_cast<std::size_t>(count));
    for (index_t h = 0; h < heads; ++h) {
        attend_head_delta<T>(o.data().columns(h * dim, dim), dout.data().columns(h * dim, dim), std::span(of_head),
                             here);
        for (index_t row = 0; row < count; ++row) delta.data()(row, h) = of_head[static_cast<std::size_t>(row)];
    }
}

} // namespace detail

/// Computes `delta = sum over a head of o dout` for every row and head.
///
/// o, dout: (rows, heads * dim), delta: (rows, heads), all of one sharding. No communication.
/// Throws `cpx::error` on shapes or shardings that do not fit, and on overlapping memory.
template <sharded_like O, sharded_like D, sharded_like Y>
void attention_delta(O const& o, D const& dout, index_t dim, Y&& delta, caller here = caller::here()) {
    constexpr bool fits = detail::sharded_as<sharding_of<O>, D, Y>, writes = detail::writes<Y, O, D>;
    static_assert(fits, "cpx: attention_delta of tensors on two shardings; make dout and delta of o's sharding");
    static_assert(writes,
                  "cpx: attention_delta wants o and dout of delta's elements, and a delta that is not const and "
                  "has a name");
    if constexpr (fits && writes)
        detail::sum_delta<element_of<Y>, sharding_of<O>>(o.view(), dout.view(), dim, delta.view(), here);
}
template <class X>
void attention_delta(X const&, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(
        detail::never<X>,
        "cpx: attention_delta(o, dout, dim, delta) wants tensors; view other memory as sharded(rows, sharding, rank)");
}

namespace detail {

template <class T, any_sharding Q>
std::array<operand, 4> query_operands(attention_queries<T, Q> const& from) {
    return {{{"q", from.q.data()}, {"dout", from.dout.data()}, {"lse", from.lse.data()}, {"delta", from.delta.data()}}};
}

template <class T, any_sharding Q, any_sharding K>
void attend_backward_queries(attention_queries<T, Q> const& from, sharded<T const, K> const& k,
                             sharded<T const, K> const& v, attention_heads const& heads, double scale,
                             sharded<T, Q> const& dq, caller here) {
    char const* const where = "attention_backward_queries";
    check_queries(where, from, heads, here);
    Q const& sharding = from.q.sharding();
    int const rank = from.q.rank();
    thd const& batch = sharding.batch();
    require_keys(where, sharding, rank, k, here);
    require_place(where, "v", v, k, "that of k", here);
    require_place(where, "dq", dq, from.q, "that of q", here);
    range const queries = sharding.heads(rank, heads.query_heads), keys = k.sharding().heads(rank, heads.key_heads);
    index_t const group = heads.query_heads / heads.key_heads, dim = heads.dim;
    require(keys.first <= queries.first / group && (queries.last - 1) / group < keys.last, where,
            "key heads on this rank", "those that its query heads read", "others", here);
    require_shape(where, "k", k.data(), batch.tokens(), keys.size() * dim, here);
    require_shape(where, "v", v.data(), batch.tokens(), keys.size() * dim, here);
    require_shape(where, "dq", dq.data(), from.q.data().count(), from.q.data().width(), here);
    require_apart(where, {{"dq", dq.data()}}, {{"k", k.data()}, {"v", v.data()}}, here);
    require_apart(where, std::array{operand("dq", dq.data())}, query_operands(from), here);
    for (segment const& s : segments(sharding, rank))
        for (index_t h = 0; h < queries.size(); ++h) {
            index_t const key_head = (queries.first + h) / group - keys.first;
            auto const seen = [&](sharded<T const, K> const& x) -> rows<T const> {
                return x.data().sub(batch.offset(s.sequence), s.token + s.count).columns(key_head * dim, dim);
            };
            queries_of_head<T> const own(from, s, h, dim);
            attend_head_backward_query<T>(own.get(), seen(k), seen(v), static_cast<T>(scale),
                                          dq.data().sub(s.row, s.count).columns(h * dim, dim), here);
        }
}

} // namespace detail

/// Computes dq, the gradient of the queries of `attention`, where they live.
///
/// k, v: on every rank for all tokens, as in the forward; dq: as q. No communication. Bitwise the same on every
/// sharding.
///
/// Throws `cpx::error` on shapes, batches or heads that do not fit, and on overlapping memory.
template <class T, any_sharding Q, sharded_like K, sharded_like V, sharded_like Dq>
void attention_backward_queries(attention_queries<T, Q> const& from, K const& k, V const& v,
                                attention_heads const& heads, double scale, Dq&& dq, caller here = caller::here()) {
    constexpr bool keys = sharding_of<K>::every_row && sharding_of<V>::every_row;
    constexpr bool fits = detail::sharded_as<Q, Dq> && detail::sharded_as<sharding_of<K>, V>;
    constexpr bool writes = detail::writes<Dq, K, V> && std::same_as<element_of<Dq>, T>;
    static_assert(keys, "cpx: the gradient of queries wants keys and values on every rank; relayout them to "
                        "replicated or head_sharded first");
    static_assert(fits || detail::never<T>,
                  "cpx: attention_backward_queries of q and dq, or of k and v, on two shardings; make dq of q's "
                  "sharding, and relayout k and v alike");
    static_assert(writes || detail::never<T>,
                  "cpx: attention_backward_queries wants k, v and dq of q's elements, and a dq that is not const "
                  "and has a name");
    if constexpr (keys && fits && writes)
        detail::attend_backward_queries<T, Q, sharding_of<K>>(from, k.view(), v.view(), heads, scale, dq.view(), here);
}
template <class X>
void attention_backward_queries(detail::any, X const&, detail::any = {}, detail::any = {}, detail::any = {},
                                detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>,
                  "cpx: attention_backward_queries(queries, k, v, heads, scale, dq) wants attention_queries of q, "
                  "dout, lse and delta, and tensors; view other memory as sharded(rows, sharding, rank)");
}

namespace detail {

template <class T, any_sharding Q, any_sharding K, class Comm>
void attend_backward_keys(attention_queries<T, Q> const& from, sharded<T const, K> const& k,
                          sharded<T const, K> const& v, attention_heads const& heads, double scale,
                          sharded<T, K> const& dk, sharded<T, K> const& dv, Comm& comm, caller here) {
    char const* const where = "attention_backward_keys";
    int const rank = from.q.rank();
    check_queries(where, from, heads, here);
    K const& sharding = k.sharding();
    require_keys(where, from.q.sharding(), rank, k, here);
    for (auto const* x : {&dk, &dv}) require_place(where, "dk and dv", *x, k, "that of k", here);
    require_place(where, "v", v, k, "that of k", here);
    range const queries = from.q.sharding().heads(rank, heads.query_heads);
    require(queries == sharding.heads(rank, heads.query_heads), where, "query heads on this rank",
            "those of the keys' sharding", "others", here);
    index_t const held = sharding.rows(rank), dim = heads.dim, n = queries.size();
    range const keys = sharding.heads(rank, heads.key_heads);
    for (auto const* x : {&dk, &dv}) require_shape(where, "dk and dv", x->data(), held, keys.size() * dim, here);
    for (auto const* x : {&k, &v}) require_shape(where, "k and v", x->data(), held, keys.size() * dim, here);
    require_apart(where, {{"dk", dk.data()}, {"dv", dv.data()}}, {{"k", k.data()}, {"v", v.data()}}, here);
    require_apart(where, std::array{operand("dk", dk.data()), operand("dv", dv.data())}, query_operands(from), here);

    auto memory = zeros<T>(where, {held, 2, n, dim}, here); // of every query head
    rows<T> const terms(memory.data(), held, 2 * n * dim);
    auto of_queries = segments(from.q.sharding(), rank);
    std::ranges::sort(of_queries, {}, [](segment const& s) { return std::pair(s.sequence, s.token); });
    index_t const group = heads.query_heads / heads.key_heads;
    auto const tokens = positions(segments(sharding, rank));
    for (segment const& s : segments(sharding, rank)) {
        auto const own = std::span(tokens).subspan(static_cast<std::size_t>(s.row), static_cast<std::size_t>(s.count));
        auto const first = std::ranges::lower_bound(of_queries, s.sequence, {}, &segment::sequence);
        auto const last = std::ranges::upper_bound(of_queries, s.sequence, {}, &segment::sequence);
        for (auto seen = first; seen != last; ++seen) {
            if (seen->token + seen->count <= s.token) continue; // all of them before these keys
            for (index_t h = 0; h < n; ++h) {
                index_t const key_head = (queries.first + h) / group - keys.first;
                queries_of_head<T> const q(from, *seen, h, dim);
                rows<T> const own_terms = terms.sub(s.row, s.count);
                attend_head_backward_key<T>(q.get(), k.data().sub(s.row, s.count).columns(key_head * dim, dim),
                                            v.data().sub(s.row, s.count).columns(key_head * dim, dim), own,
                                            static_cast<T>(scale), own_terms.columns(h * dim, dim),
                                            own_terms.columns((n + h) * dim, dim));
            }
        }
    }
    sum_readers<T>(sharding, rank, heads.key_heads, heads.query_heads, dim, terms, std::array{dk.data(), dv.data()},
                   comm, here);
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
template <class T, any_sharding Q, sharded_like K, sharded_like V, sharded_like Dk, sharded_like Dv, transport Comm>
void attention_backward_keys(attention_queries<T, Q> const& from, K const& k, V const& v, attention_heads const& heads,
                             double scale, Dk&& dk, Dv&& dv, Comm& comm, caller here = caller::here()) {
    using S = sharding_of<K>;
    constexpr bool all = Q::every_row || S::every_row, fits = detail::sharded_as<S, V, Dk, Dv>;
    constexpr bool writes = detail::writes<Dk, K, V> && detail::writes<Dv> && std::same_as<element_of<Dk>, T> &&
                            std::same_as<element_of<Dv>, T>;
    static_assert(all || detail::never<T>,
                  "cpx: the gradients of keys want every query of a key's sequence, or every key of a query's; "
                  "relayout the queries, or the keys and values, to replicated or head_sharded first");
    static_assert(fits, "cpx: attention_backward_keys of k, v, dk and dv on two shardings; relayout k and v alike, and "
                        "make dk and dv of their sharding");
    static_assert(writes || detail::never<T>,
                  "cpx: attention_backward_keys wants k, v, dk and dv of q's elements, and dk and dv that are "
                  "not const and have names");
    if constexpr (all && fits && writes)
        detail::attend_backward_keys<T, Q, S>(from, k.view(), v.view(), heads, scale, dk.view(), dv.view(), comm, here);
}
template <class X>
void attention_backward_keys(detail::any, X const&, detail::any = {}, detail::any = {}, detail::any = {},
                             detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(
        detail::never<X>,
        "cpx: attention_backward_keys(queries, k, v, heads, scale, dk, dv, comm) wants attention_queries of q, dout, "
        "lse and delta, tensors, and a cpx::transport; view other memory as sharded(rows, sharding, rank)");
}

} // namespace cpx
