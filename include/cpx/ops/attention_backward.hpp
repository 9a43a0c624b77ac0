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
template <class T, any_sharding Q>
struct attention_queries {
    sharded<T const, Q> q, dout, lse, delta;
};

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
void check_queries(char const* where, int rank, attention_queries<T, Q> const& from, attention_heads const& heads,
                   caller here) {
    require_attention(where, heads, rank, from.q.sharding().ranks(), here);
    for (auto const* x : {&from.dout, &from.lse, &from.delta})
        require(x->sharding() == from.q.sharding(), where, "sharding of dout, lse and delta", "that of q", "another",
                here);
    index_t const held = from.q.sharding().rows(rank), n = from.q.sharding().heads(rank, heads.query_heads).size();
    require_shape(where, "q", from.q.data(), held, n * heads.dim, here);
    require_shape(where, "dout", from.dout.data(), held, n * heads.dim, here);
    require_shape(where, "lse", from.lse.data(), held, n, here);
    require_shape(where, "delta", from.delta.data(), held, n, here);
}

} // namespace detail

/// Computes `delta = sum over a head of o dout` for every row and head.
///
/// o, dout: (rows, heads * dim), delta: (rows, heads), all of one sharding. No communication.
/// Throws `cpx::error` on shapes or shardings that do not fit.
template <class T, any_sharding Q, elements_of<T> A, elements_of<T> B>
void attention_delta(sharded<A, Q> const& o, sharded<B, Q> const& dout, index_t dim, sharded<T, Q> const& delta,
                     caller here = caller::here()) {
    require(dout.sharding() == o.sharding() && delta.sharding() == o.sharding(), "attention_delta",
            "sharding of dout and delta", "that of o", "another", here);
    index_t const count = o.data().count(), heads = delta.data().width();
    detail::product("attention_delta", "heads x dim", {heads, dim}, here);
    detail::require_shape("attention_delta", "o", o.data(), count, heads * dim, here);
    detail::require_shape("attention_delta", "dout", dout.data(), count, heads * dim, here);
    detail::require_shape("attention_delta", "delta", delta.data(), count, heads, here);
    std::vector<T> of_head(static_cast<std::size_t>(count));
    for (index_t h = 0; h < heads; ++h) {
        attend_head_delta<T>(o.data().columns(h * dim, dim), dout.data().columns(h * dim, dim), std::span(of_head));
        for (index_t row = 0; row < count; ++row) delta.data()(row, h) = of_head[static_cast<std::size_t>(row)];
    }
}

/// Computes dq, the gradient of the queries of `attention`, where they live.
///
/// k, v: on every rank for all tokens, as in the forward; dq: as q. No communication. Bitwise the same on every
/// sharding.
///
/// Throws `cpx::error` on shapes, batches or heads that do not fit.
template <class T, any_sharding Q, any_sharding K, elements_of<T> A>
void attention_backward_queries(int rank, attention_queries<T, Q> const& from, sharded<A, K> const& k,
                                sharded<A, K> const& v, attention_heads const& heads, double scale,
                                sharded<T, Q> const& dq, caller here = caller::here()) {
    static_assert(K::every_row, "cpx: the gradient of queries wants keys and values on every rank; relayout them to "
                                "replicated or head_sharded first");
    char const* const where = "attention_backward_queries";
    detail::check_queries(where, rank, from, heads, here);
    Q const& sharding = from.q.sharding();
    thd const& batch = sharding.batch();
    require(batch == k.sharding().batch() && v.sharding() == k.sharding(), where, "batch of keys and values",
            "the queries' batch", "another", here);
    require(dq.sharding() == sharding, where, "sharding of dq", "that of q", "another", here);
    range const queries = sharding.heads(rank, heads.query_heads), keys = k.sharding().heads(rank, heads.key_heads);
    index_t const group = heads.query_heads / heads.key_heads, dim = heads.dim;
    require(keys.first <= queries.first / group && (queries.last - 1) / group < keys.last, where,
            "key heads on this rank", "those that its query heads read", "others", here);
    detail::require_shape(where, "k", k.data(), batch.tokens(), keys.size() * dim, here);
    detail::require_shape(where, "v", v.data(), batch.tokens(), keys.size() * dim, here);
    detail::require_shape(where, "dq", dq.data(), from.q.data().count(), from.q.data().width(), here);
    for (segment const& s : segments(sharding, rank))
        for (index_t h = 0; h < queries.size(); ++h) {
            index_t const key_head = (queries.first + h) / group - keys.first;
            auto const seen = [&](sharded<A, K> const& x) -> rows<T const> {
                return x.data().sub(batch.offset(s.sequence), s.token + s.count).columns(key_head * dim, dim);
            };
            detail::queries_of_head<T> const own(from, s, h, dim);
            attend_head_backward_query<T>(own.get(), seen(k), seen(v), static_cast<T>(scale),
                                          dq.data().sub(s.row, s.count).columns(h * dim, dim));
        }
}

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
/// Throws `cpx::error` on shapes, batches or heads that do not fit.
template <class T, any_sharding Q, any_sharding K, elements_of<T> A, class Comm>
void attention_backward_keys(attention_queries<T, Q> const& from, sharded<A, K> const& k, sharded<A, K> const& v,
                             attention_heads const& heads, double scale, sharded<T, K> const& dk,
                             sharded<T, K> const& dv, Comm& comm, caller here = caller::here()) {
    static_assert(
        Q::every_row || K::every_row,
        "cpx: the gradients of keys want every query of a key's sequence, or every key of a query's; relayout "
        "the queries, or the keys and values, to replicated or head_sharded first");
    char const* const where = "attention_backward_keys";
    int const rank = comm.rank();
    detail::check_queries(where, rank, from, heads, here);
    K const& sharding = k.sharding();
    require(from.q.sharding().batch() == sharding.batch(), where, "batch of keys and values", "the queries' batch",
            "another", here);
    for (auto const* x : {&dk, &dv})
        require(x->sharding() == sharding, where, "sharding of dk and dv", "that of k", "another", here);
    require(v.sharding() == sharding, where, "sharding of v", "that of k", "another", here);
    range const queries = from.q.sharding().heads(rank, heads.query_heads);
    require(queries == sharding.heads(rank, heads.query_heads), where, "query heads on this rank",
            "those of the keys' sharding", "others", here);
    index_t const held = sharding.rows(rank), dim = heads.dim, n = queries.size();
    range const keys = sharding.heads(rank, heads.key_heads);
    for (auto const* x : {&dk, &dv})
        detail::require_shape(where, "dk and dv", x->data(), held, keys.size() * dim, here);
    for (auto const* x : {&k, &v}) detail::require_shape(where, "k and v", x->data(), held, keys.size() * dim, here);

    auto memory = detail::zeros<T>(where, {held, 2, n, dim}, here); // of every query head
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
                detail::queries_of_head<T> const q(from, *seen, h, dim);
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

} // namespace cpx
