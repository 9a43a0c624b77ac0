// SPDX-License-Identifier: Apache-2.0
// The backward of causal softmax attention of one query head over one sequence.
#pragma once

#include <cpx/ops/local/attention.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace cpx {

/// What the backward of `attend_head` must know of some queries; row i is that of `positions[i]`.
template <class T>
struct attended_queries {
    rows<T const> q;                    ///< (queries, Dk)
    rows<T const> dout;                 ///< (queries, Dv), the gradient of o
    std::span<index_t const> positions; ///< the token of each query
    std::span<T const> lse;             ///< as `attend_head` wrote it
    std::span<T const> delta;           ///< as `attend_head_delta` wrote it
};

namespace detail {

/// As `attend_head_delta`, of arguments that fit.
template <class T>
void delta_of_one_head(rows<T const> o, rows<T const> dout, std::span<T> delta) {
    for (index_t i = 0; i < o.count(); ++i) delta[static_cast<std::size_t>(i)] = dot(dout.row(i), o.row(i), o.width());
}

} // namespace detail

/// Computes `delta_i = dout_i . o_i`, the mean of the gradients of the weights of a query. A function of the row alone.
///
/// o, dout: (queries, Dv); delta: one a query. Throws `cpx::error` if the shapes do not fit.
template <class T>
void attend_head_delta(rows<T const> o, rows<T const> dout, std::span<T> delta, caller here = caller::here()) {
    detail::require_shape("attend_head_delta", "dout", dout, o.count(), o.width(), here);
    require(std::ssize(delta) == o.count(), "attend_head_delta", "size of delta", o.count(), delta.size(), here);
    detail::require_apart("attend_head_delta", {{"delta", delta}}, {{"o", o}, {"dout", dout}}, here);
    detail::delta_of_one_head(o, dout, delta);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, std::span<T>), X...>)
detail::refused attend_head_delta(X&&...) {
    static_assert(detail::never<X...>, "cpx: attend_head_delta<T>(o, dout, delta) wants rows of T and a span to write, "
                                       "not const where they are written; take rows with view() or data()");
    return {};
}

namespace detail {

template <class T>
void require_attended(char const* where, attended_queries<T> const& to, rows<T const> k, rows<T const> v,
                      std::initializer_list<operand> written, caller here) {
    auto const queries = static_cast<index_t>(to.positions.size());
    require_shape(where, "q", to.q, queries, k.width(), here);
    require_shape(where, "dout", to.dout, queries, v.width(), here);
    require_shape(where, "v", v, k.count(), v.width(), here);
    require(std::ssize(to.lse) == queries, where, "size of lse", queries, to.lse.size(), here);
    require(std::ssize(to.delta) == queries, where, "size of delta", queries, to.delta.size(), here);
    require_apart(where, written,
                  {{"q", to.q}, {"dout", to.dout}, {"lse", to.lse}, {"delta", to.delta}, {"k", k}, {"v", v}}, here);
}

/// Turns the scaled score of query `i` and a key into the weight of the key's value, and `pull`, the gradient of this
/// weight, into the gradient of the score.
template <class T>
void attention_pull(attended_queries<T> const& from, index_t i, T scale, T& score, T& pull) {
    auto const at = static_cast<std::size_t>(i);
    score = std::exp(score - from.lse[at]);
    pull = score * (pull - from.delta[at]) * scale;
}

/// As `attend_head_backward_query` and `attend_head_backward_key`, of arguments that fit.
template <class T>
void backward_of_one_query_head(attended_queries<T> const& from, rows<T const> k, rows<T const> v, T scale,
                                rows<T> dq) {
    padded<T> const keys(k), values(v);
    index_t const queries = std::ssize(from.positions), block = linear_rows;
    padded<T> out(1, k.width()), scores(block, k.count()), pulls(block, k.count());
    for (index_t first = 0; first < queries; first += block) {
        index_t const n = std::min(block, queries - first);
        auto const of_block = from.positions.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(n));
        index_t const visible = *std::max_element(of_block.begin(), of_block.end()) + 1;
        project<T>(from.q.sub(first, n), keys.view().sub(0, visible), scores.view().sub(0, n).columns(0, visible));
        project<T>(from.dout.sub(first, n), values.view().sub(0, visible), pulls.view().sub(0, n).columns(0, visible));
        for (index_t i = 0; i < n; ++i) {
            index_t const count = of_block[static_cast<std::size_t>(i)] + 1;
            // Rounded as in the forward before lse is subtracted, so that no weight is above 1.
            for (index_t j = 0; j < count; ++j) scores(i, j) *= scale;
            for (index_t j = 0; j < count; ++j) attention_pull(from, first + i, scale, scores(i, j), pulls(i, j));
            std::fill_n(out.row(0), out.stride(), T(0));
            accumulate(pulls.row(i), 0, count, keys, out.row(0));
            std::copy_n(out.row(0), k.width(), dq.row(first + i));
        }
    }
}
template <class T>
void backward_of_one_key_head(attended_queries<T> const& from, rows<T const> k, rows<T const> v,
                              std::span<index_t const> tokens, T scale, rows<T> dk, rows<T> dv) {
    padded<T> const q(from.q), dout(from.dout);
    index_t const queries = std::ssize(from.positions), keys = std::ssize(tokens), block = linear_rows;
    padded<T> to_key(1, k.width()), to_value(1, v.width()), scores(block, queries), pulls(block, queries);
    for (index_t begin = 0; begin < keys; begin += block) {
        index_t const n = std::min(block, keys - begin);
        auto const of_block = tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n));
        auto const seen_from = [&](index_t token) { // the first query that sees it
            return std::lower_bound(from.positions.begin(), from.positions.end(), token) - from.positions.begin();
        };
        index_t const first = seen_from(*std::min_element(of_block.begin(), of_block.end())), count = queries - first;
        project<T>(k.sub(begin, n), q.view().sub(first, count), scores.view().sub(0, n).columns(first, count));
        project<T>(v.sub(begin, n), dout.view().sub(first, count), pulls.view().sub(0, n).columns(first, count));
        for (index_t j = 0; j < n; ++j) {
            index_t const own = seen_from(of_block[static_cast<std::size_t>(j)]);
            for (index_t i = own; i < queries; ++i) scores(j, i) *= scale;
            for (index_t i = own; i < queries; ++i) attention_pull(from, i, scale, scores(j, i), pulls(j, i));
            std::copy_n(dk.row(begin + j), k.width(), to_key.row(0));
            std::copy_n(dv.row(begin + j), v.width(), to_value.row(0));
            accumulate(pulls.row(j), own, queries, q, to_key.row(0));
            accumulate(scores.row(j), own, queries, dout, to_value.row(0));
            std::copy_n(to_key.row(0), k.width(), dk.row(begin + j));
            std::copy_n(to_value.row(0), v.width(), dv.row(begin + j));
        }
    }
}

} // namespace detail

/// Computes the gradients of some queries of `attend_head`.
///
/// from: these queries, in any order; k: (tokens, Dk), v: (tokens, Dv), the sequence from its beginning at least up to
/// their tokens; dq: (queries, Dk), not overlapping the others.
/// A row of dq is a function of its query and of the keys and values up to its token, bit for bit.
/// Cost: queries * tokens * (2 Dk + Dv) multiplications; copies k and v once.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps or a position is not a token of k.
template <class T>
void attend_head_backward_query(attended_queries<T> const& from, rows<T const> k, rows<T const> v, T scale, rows<T> dq,
                                caller here = caller::here()) {
    char const* const where = "attend_head_backward_query";
    auto const queries = static_cast<index_t>(from.positions.size());
    detail::require_attended<T>(where, from, k, v, {{"dq", dq}}, here);
    detail::require_shape(where, "dq", dq, queries, k.width(), here);
    detail::require_tokens(where, "position", from.positions, k.count(), here);

    detail::backward_of_one_query_head(from, k, v, scale, dq);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(attended_queries<T> const&, rows<T const>, rows<T const>, T, rows<T>), X...>)
detail::refused attend_head_backward_query(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: attend_head_backward_query<T>(from, k, v, scale, dq) wants attended_queries and rows of T, not "
                  "const where they are written; take rows with view() or data()");
    return {};
}

/// Adds to the gradients of some keys and values what some queries of `attend_head` contribute.
///
/// from: queries in ascending order of tokens; k: (keys, Dk), v: (keys, Dv), any tokens of the sequence in any order,
/// `tokens[j]` is that of key j; dk, dv: as k and v, not overlapping the others, added to. Queries before a key do not
/// contribute to it.
///
/// A row of dk and dv is a function of what it holds, of its key and value and of the queries from its token on, bit
/// for bit. Queries are added one after the other, so they may be split between calls, in order, without changing a
/// bit; so may the heads that share a key.
/// Cost: queries * keys * (2 Dk + 2 Dv) multiplications; copies q and dout once.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps or the queries are not in order.
template <class T>
void attend_head_backward_key(attended_queries<T> const& from, rows<T const> k, rows<T const> v,
                              std::span<index_t const> tokens, T scale, rows<T> dk, rows<T> dv,
                              caller here = caller::here()) {
    char const* const where = "attend_head_backward_key";
    auto const keys = static_cast<index_t>(tokens.size());
    detail::require_attended<T>(where, from, k, v, {{"dk", dk}, {"dv", dv}}, here);
    detail::require_shape(where, "k", k, keys, k.width(), here);
    detail::require_shape(where, "dk", dk, keys, k.width(), here);
    detail::require_shape(where, "dv", dv, keys, v.width(), here);
    auto const unordered = std::is_sorted_until(from.positions.begin(), from.positions.end());
    require(unordered == from.positions.end(), where, "positions", "tokens in ascending order", "a later one first",
            here);

    detail::backward_of_one_key_head(from, k, v, tokens, scale, dk, dv);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(attended_queries<T> const&, rows<T const>, rows<T const>, std::span<index_t const>, T,
                                 rows<T>, rows<T>),
                            X...>)
detail::refused attend_head_backward_key(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: attend_head_backward_key<T>(from, k, v, tokens, scale, dk, dv) wants attended_queries, rows of "
                  "T and a token for each key, not const where they are written; take rows with view() or data()");
    return {};
}

} // namespace cpx
