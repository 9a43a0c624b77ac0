// SPDX-License-Identifier: Apache-2.0
// The backward of the gated delta rule of one head over one segment, in chunks.
#pragma once

#include <cpx/core/field.hpp>
#include <cpx/ops/local/delta_rule.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

namespace cpx {
namespace detail {

/// What flows back through a chunk whatever its values are and whatever state S reaches it.
///
/// The rows `fresh` solve (I + A) fresh = R, where R = diag(beta) (V - diag(decay_all) K S); `right` is the gradient of
/// R. Row i of it depends on the tokens from i on alone.
template <class T>
struct delta_reverse {
    delta_keys<T> keys;
    padded<T> queries; // (n, Dk), normalised
    padded<T> dout;    // (n, Dv), times the scale
    padded<T> weights; // (n, n): (q_i . k_j) decay(i, j) for j <= i, else 0
    padded<T> right;   // (n, Dv)

    /// Turns the gradient of the state after the chunk into that of the state before it.
    void retreat(rows<T const> beta, padded<T>& dstate) const {
        index_t const n = queries.count();
        padded<T> read(dstate.count(), n), erased(dstate.count(), n);
        for (index_t i = 0; i < n; ++i)
            for (index_t d = 0; d < dstate.count(); ++d) {
                T const decay = keys.decay_all[static_cast<std::size_t>(i)];
                read(d, i) = decay * queries(i, d);
                erased(d, i) = -(beta(i, 0) * decay * keys.keys(i, d));
            }
        for (index_t d = 0; d < dstate.count(); ++d) {
            combine(read.row(d), n, dout, keys.decay_all.back(), dstate.row(d));
            combine(erased.row(d), n, right, T(1), dstate.row(d));
        }
    }
};

template <class T>
delta_reverse<T> reverse_chunk(rows<T const> q, rows<T const> k, rows<T const> g, rows<T const> beta,
                               rows<T const> dout, delta_rule_options const& options, padded<T> const& dstate) {
    index_t const n = q.count(), dim = q.width();
    delta_reverse<T> c{prepare_keys(k, g, options.qk_l2norm),
                       scaled_rows(q, options.qk_l2norm, T(1)),
                       scaled_rows(dout, false, query_scale<T>(options.scale, dim)),
                       {n, n},
                       {n, dout.width()}};
    auto const& [keys, products, decay, decay_all] = c.keys;
    project<T>(c.queries.view(), keys.view(), c.weights.view());
    padded<T> read_by(n, n), minus_a(n, n), onward(1, dim); // row i: the tokens from i on
    for (index_t i = 0; i < n; ++i) {
        for (index_t j = 0; j < n; ++j) c.weights(i, j) = j <= i ? c.weights(i, j) * decay(i, j) : 0;
        for (index_t j = 0; j <= i; ++j) read_by(j, i) = c.weights(i, j);
        for (index_t j = 0; j < i; ++j) minus_a(j, i) = -(beta(i, 0) * products(i, j) * decay(i, j));
    }
    for (index_t i = n - 1; i >= 0; --i) {
        for (index_t d = 0; d < dim; ++d) onward(0, d) = decay(n - 1, i) * keys(i, d);
        accumulate(onward.row(0), 0, dim, dstate, c.right.row(i));
        accumulate(read_by.row(i), i, n, c.dout, c.right.row(i));
        accumulate(minus_a.row(i), i + 1, n, c.right, c.right.row(i));
    }
    return c;
}

/// The gradients of a chunk's normalised rows and of its gates.
template <class T>
struct delta_chunk_gradients {
    padded<T> dqueries, dkeys; // (n, Dk)
    std::vector<T> dg, dbeta;  // (n)
};

/// `state` reaches the chunk, `dstate` is the gradient of the state after it.
template <class T>
delta_chunk_gradients<T> differentiate_chunk(delta_reverse<T> const& c, padded<T> const& fresh, rows<T const> v,
                                             rows<T const> beta, padded<T> const& state, padded<T> const& dstate) {
    index_t const n = c.queries.count(), dim = c.queries.width();
    auto const& [keys, products, decay, decay_all] = c.keys;
    auto const times = [](padded<T> const& a, padded<T> const& b) { // a b^T
        padded<T> result(a.count(), b.count());
        project<T>(a.view(), b.view(), result.view());
        return result;
    };
    delta_chunk_gradients<T> result{times(c.dout, state), times(fresh, dstate),
                                    std::vector<T>(static_cast<std::size_t>(n)),
                                    std::vector<T>(static_cast<std::size_t>(n))};
    auto& [dqueries, dkeys, dg, dbeta] = result;
    padded<T> const erased = times(c.right, state), of_weights = times(c.dout, fresh), of_a = times(c.right, fresh);

    // Gradients of the products of two rows of the chunk: queries with keys, and keys with keys.
    padded<T> pairs(n, n), pairs_by_key(n, n), keys_with_keys(n, n);
    std::vector<T> erasing(static_cast<std::size_t>(n));
    T whole = 0, before = 0; // what all tokens' decays multiply, and what the tokens so far leave to the end
    for (index_t d = 0; d < dim; ++d) whole += dot(state.row(d), dstate.row(d), state.width());
    whole *= decay_all.back();
    for (index_t i = 0; i < n; ++i) {
        auto const at = static_cast<std::size_t>(i);
        T const kept = decay(n - 1, i), until_now = decay_all[at], b = beta(i, 0);
        erasing[at] = -(b * until_now);
        T const unread = dot(keys.row(i), erased.row(i), dim);
        dg[at] = whole + before;
        before += kept * dot(keys.row(i), dkeys.row(i), dim);
        dbeta[at] = dot(c.right.row(i), v.row(i), v.width()) - until_now * unread;

        // Every term of dg holds the decay of its token as a factor: a sum of decayed products, never a difference.
        T decayed = until_now * dot(c.queries.row(i), dqueries.row(i), dim) + erasing[at] * unread;
        dg[0] += decayed;
        for (index_t j = 0; j < i; ++j) {
            T const of_product = -(of_a(i, j) * decay(i, j));
            dbeta[at] += of_product * products(i, j);
            keys_with_keys(i, j) = keys_with_keys(j, i) = b * of_product;
            decayed += of_weights(i, j) * c.weights(i, j) + b * of_product * products(i, j);
            dg[static_cast<std::size_t>(j + 1)] += decayed;
        }
        for (index_t j = 0; j <= i; ++j) pairs(i, j) = pairs_by_key(j, i) = of_weights(i, j) * decay(i, j);

        combine(pairs.row(i), i + 1, keys, until_now, dqueries.row(i));
    }
    for (index_t i = 0; i < n; ++i) {
        combine(keys_with_keys.row(i), n, keys, decay(n - 1, i), dkeys.row(i));
        accumulate(erasing.data(), i, i + 1, erased, dkeys.row(i));
        accumulate(pairs_by_key.row(i), i, n, c.queries, dkeys.row(i));
    }
    return result;
}

} // namespace detail

/// The gradients of the inputs of `delta_rule_forward`, shaped as they are.
///
/// dq and dk are added to, so that value heads which share them may be run in turn; dv, dg and dbeta are written.
template <class T>
struct delta_rule_gradients {
    field<rows<T>> dq, dk, dv, dg, dbeta;
    detail::no_more end = {};
};

namespace detail {

/// As `delta_rule_backward`, of arguments that fit.
template <class T>
void delta_backward(delta_segment<T> const& x, rows<T const> state, rows<T const> dout, rows<T> dstate,
                    delta_rule_gradients<T> const& to) {
    std::vector<padded<T>> states, written; // before each chunk, and by it
    padded<T> s(state), ds(dstate);
    x.each_chunk([&](index_t, delta_chunk<T> const& chunk) {
        states.push_back(s);
        written.push_back(chunk.fresh(chunk.u, s));
        chunk.advance(written.back(), s);
    });
    for_each_chunk_reversed(x.k.count(), x.first, x.options.chunk, [&](index_t row, index_t n) {
        auto const of = [&](auto const& all) { return all.sub(row, n); };
        auto const reverse = reverse_chunk<T>(of(x.q), of(x.k), of(x.g), of(x.beta), of(dout), x.options, ds);
        auto const chunk = differentiate_chunk<T>(reverse, written.back(), of(x.v), of(x.beta), states.back(), ds);
        scaled_rows_backward<T>(of(x.q), reverse.queries, chunk.dqueries, x.options.qk_l2norm, of(to.dq));
        scaled_rows_backward<T>(of(x.k), reverse.keys.keys, chunk.dkeys, x.options.qk_l2norm, of(to.dk));
        for (index_t i = 0; i < n; ++i) {
            for (index_t d = 0; d < x.v.width(); ++d) to.dv(row + i, d) = x.beta(row + i, 0) * reverse.right(i, d);
            to.dg(row + i, 0) = chunk.dg[static_cast<std::size_t>(i)];
            to.dbeta(row + i, 0) = chunk.dbeta[static_cast<std::size_t>(i)];
        }
        reverse.retreat(of(x.beta), ds);
        states.pop_back();
        written.pop_back();
    });
    copy_out(ds, dstate);
}
/// As `delta_rule_backward_fold`, which reads no values.
template <class T>
void delta_backward_fold(delta_segment<T> const& x, rows<T const> dout, rows<T> dstate) {
    padded<T> ds(dstate);
    for_each_chunk_reversed(x.k.count(), x.first, x.options.chunk, [&](index_t row, index_t n) {
        auto const of = [&](rows<T const> all) { return all.sub(row, n); };
        reverse_chunk<T>(of(x.q), of(x.k), of(x.g), of(x.beta), of(dout), x.options, ds).retreat(of(x.beta), ds);
    });
    copy_out(ds, dstate);
}

} // namespace detail

/// Computes the gradients of `delta_rule_forward`.
///
/// q, k, v, g, beta, `first` and `options` as there; state: (Dk, Dv), the state before the segment; dout: (tokens, Dv),
/// the gradient of o. dstate: (Dk, Dv), the gradient of the state after the segment on entry, of the state before it on
/// return. No result overlaps anything else.
///
/// Law: cutting a segment at a multiple of the chunk, and handing the state on and dstate back, changes no bit. Row t
/// of dq depends on the tokens up to t alone, row t of dv on those from t on, bit for bit. Nothing is divided by a
/// decay or by beta: g may be minus infinity, beta 0.
///
/// Runs the states forward once and keeps what the chunks begin with and write, (tokens / chunk) Dk Dv + tokens Dv
/// elements.
/// Cost: about 3 times that of `delta_rule_forward`.
/// Source: as there, the transpose of each of its steps.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void delta_rule_backward(rows<T const> q, rows<T const> k, rows<T const> v, rows<T const> g, rows<T const> beta,
                         index_t first, delta_rule_options const& options, rows<T const> state, rows<T const> dout,
                         rows<T> dstate, delta_rule_gradients<T> const& to, caller here = caller::here()) {
    char const* const where = "delta_rule_backward";
    index_t const count = k.count(), dim = k.width(), value_dim = v.width();
    detail::require_shape(where, "q", q, count, dim, here);
    detail::require_shape(where, "v", v, count, value_dim, here);
    detail::require_shape(where, "state", state, dim, value_dim, here);
    detail::require_shape(where, "dout", dout, count, value_dim, here);
    detail::require_shape(where, "dstate", dstate, dim, value_dim, here);
    detail::require_shape(where, "dq", to.dq, count, dim, here);
    detail::require_shape(where, "dk", to.dk, count, dim, here);
    detail::require_shape(where, "dv", to.dv, count, value_dim, here);
    detail::require_shape(where, "dg", to.dg, count, 1, here);
    detail::require_shape(where, "dbeta", to.dbeta, count, 1, here);
    detail::require_gates(where, count, g, beta, first, options, here);
    detail::require_apart(
        where, {{"dq", to.dq}, {"dk", to.dk}, {"dv", to.dv}, {"dg", to.dg}, {"dbeta", to.dbeta}, {"dstate", dstate}},
        {{"q", q}, {"k", k}, {"v", v}, {"g", g}, {"beta", beta}, {"state", state}, {"dout", dout}}, here);

    detail::delta_backward<T>({q, k, v, g, beta, first, options}, state, dout, dstate, to);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T const>, rows<T const>, rows<T const>, index_t,
                                 delta_rule_options const&, rows<T const>, rows<T const>, rows<T>,
                                 delta_rule_gradients<T> const&),
                            X...>)
detail::refused delta_rule_backward(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: delta_rule_backward<T>(q, k, v, g, beta, first, options, state, dout, dstate, gradients) wants "
                  "rows of T, not const where they are written; take rows with view() or data()");
    return {};
}

/// Takes the gradient of the state through one segment, without other gradients.
///
/// Arguments as in `delta_rule_backward`, whose dstate it returns bit for bit. From a dstate of zero it gives the E of
/// the step `dstate_start = M^T dstate_end + E`, where M is the map that `delta_rule_fold` wrote for the segment.
/// Neither the values nor the state before the segment matter.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void delta_rule_backward_fold(rows<T const> q, rows<T const> k, rows<T const> g, rows<T const> beta, index_t first,
                              delta_rule_options const& options, rows<T const> dout, rows<T> dstate,
                              caller here = caller::here()) {
    char const* const where = "delta_rule_backward_fold";
    detail::require_shape(where, "q", q, k.count(), k.width(), here);
    detail::require_shape(where, "dout", dout, k.count(), dout.width(), here);
    detail::require_shape(where, "dstate", dstate, k.width(), dout.width(), here);
    detail::require_gates(where, k.count(), g, beta, first, options, here);
    detail::require_apart(where, {{"dstate", dstate}}, {{"q", q}, {"k", k}, {"g", g}, {"beta", beta}, {"dout", dout}},
                          here);
    detail::delta_backward_fold<T>({q, k, {}, g, beta, first, options}, dout, dstate);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T const>, rows<T const>, index_t,
                                 delta_rule_options const&, rows<T const>, rows<T>),
                            X...>)
detail::refused delta_rule_backward_fold(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: delta_rule_backward_fold<T>(q, k, g, beta, first, options, dout, dstate) wants rows of T, not "
                  "const where they are written; take rows with view() or data()");
    return {};
}

} // namespace cpx
