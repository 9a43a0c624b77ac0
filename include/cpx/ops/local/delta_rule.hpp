// SPDX-License-Identifier: Apache-2.0
// The gated delta rule of one head over one segment, in chunks.
#pragma once

#include <cpx/ops/local/chunks.hpp>
#include <cpx/ops/local/delta_gates.hpp>
#include <cpx/ops/local/linear.hpp>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace cpx {

struct delta_rule_options {
    index_t chunk = 64;               ///< tokens computed at once
    bool qk_l2norm = true;            ///< divide q and k by sqrt(sum x^2 + 1e-6) first
    std::optional<double> scale = {}; ///< factor of q; none: 1 / sqrt(Dk)
};

namespace detail {

/// The keys of a chunk of n tokens and how they fade.
template <class T>
struct delta_keys {
    padded<T> keys;           // (n, Dk), normalised
    padded<T> products;       // (n, n): k_i . k_j
    padded<T> decay;          // (n, n): exp(g_{j+1} + ... + g_i) for j <= i, else 0
    std::vector<T> decay_all; // (n): exp(g_0 + ... + g_i)
};

/// A chunk of n tokens without its queries and without the state that reaches it.
///
/// The chunk changes the state S into `decay_all S + onward fresh(S)`, where `fresh(S) = u + minus_w S` holds what each
/// token writes beyond what is already stored. Row i depends on the tokens up to i alone.
template <class T>
struct delta_chunk : delta_keys<T> {
    padded<T> minus_w; // (n, Dk)
    padded<T> u;       // (n, Dv)
    padded<T> onward;  // (Dk, n): keys, decayed to the end of the chunk

    /// Returns (n, width of S).
    padded<T> fresh(padded<T> result, padded<T> const& state) const {
        for (index_t i = 0; i < minus_w.count(); ++i)
            combine(minus_w.row(i), state.count(), state, T(1), result.row(i));
        return result;
    }

    void advance(padded<T> const& fresh_rows, padded<T>& state) const {
        for (index_t d = 0; d < state.count(); ++d)
            combine(onward.row(d), onward.width(), fresh_rows, this->decay_all.back(), state.row(d));
    }
};

template <class T>
delta_keys<T> prepare_keys(rows<T const> k, rows<T const> g, bool l2norm) {
    index_t const n = k.count();
    delta_keys<T> c{scaled_rows(k, l2norm, T(1)), {n, n}, {n, n}, std::vector<T>(static_cast<std::size_t>(n))};
    project<T>(c.keys.view(), c.keys.view(), c.products.view());
    double until_now = 1;
    std::vector<double> since(static_cast<std::size_t>(n), 1.0); // each token
    for (index_t i = 0; i < n; ++i) {
        // A product of decays: a difference of sums of g would cancel, and a quotient of decays could be 0 / 0. In
        // double, for many equal decays, rounded to T, would be off in one direction.
        double const decay = std::exp(static_cast<double>(g(i, 0)));
        for (index_t j = 0; j < i; ++j) c.decay(i, j) = static_cast<T>(since[static_cast<std::size_t>(j)] *= decay);
        c.decay(i, i) = 1;
        c.decay_all[static_cast<std::size_t>(i)] = static_cast<T>(until_now *= decay);
    }
    return c;
}

template <class T>
delta_chunk<T> prepare_chunk(rows<T const> k, rows<T const> v, rows<T const> g, rows<T const> beta, bool l2norm) {
    index_t const n = k.count();
    delta_chunk<T> c{prepare_keys(k, g, l2norm), {n, k.width()}, {n, v.width()}, {k.width(), n}};
    std::vector<T> factors(static_cast<std::size_t>(n));
    for (index_t i = 0; i < n; ++i) {
        // Row i of the two unit triangular systems (I + A) W = diag(beta decay_all) K and (I + A) U = diag(beta) V.
        for (index_t j = 0; j < i; ++j)
            factors[static_cast<std::size_t>(j)] = -(beta(i, 0) * c.products(i, j) * c.decay(i, j));
        T const until_now = c.decay_all[static_cast<std::size_t>(i)];
        for (index_t d = 0; d < k.width(); ++d) c.minus_w(i, d) = -(beta(i, 0) * until_now * c.keys(i, d));
        for (index_t d = 0; d < v.width(); ++d) c.u(i, d) = beta(i, 0) * v(i, d);
        combine(factors.data(), i, c.minus_w, T(1), c.minus_w.row(i));
        combine(factors.data(), i, c.u, T(1), c.u.row(i));
    }
    for (index_t i = 0; i < n; ++i)
        for (index_t d = 0; d < k.width(); ++d) c.onward(d, i) = c.decay(n - 1, i) * c.keys(i, d);
    return c;
}

/// Checks the gates of `count` tokens, and the chunks.
template <class T>
void require_gates(char const* where, index_t count, rows<T const> g, rows<T const> beta, index_t first,
                   delta_rule_options const& options, caller here) {
    require_shape(where, "g", g, count, 1, here);
    require_shape(where, "beta", beta, count, 1, here);
    require(options.chunk >= 1, where, "chunk", "at least 1", options.chunk, here);
    product(where, "first", {first}, here);
}

/// A segment of one head, of arguments that fit.
template <class T>
struct delta_segment {
    rows<T const> q, k, v, g, beta;
    index_t first;
    delta_rule_options const& options;

    /// Calls `f(row, chunk)` for the chunks in turn; `row` is the chunk's first row.
    template <class F>
    void each_chunk(F&& f) const {
        for_each_chunk(k.count(), first, options.chunk, [&](index_t row, index_t n) {
            f(row, prepare_chunk<T>(k.sub(row, n), v.sub(row, n), g.sub(row, n), beta.sub(row, n), options.qk_l2norm));
        });
    }
    /// As `delta_rule_forward`.
    void forward(rows<T> state, rows<T> o) const {
        T const scale = query_scale<T>(options.scale, k.width());
        padded<T> s(state);
        each_chunk([&](index_t row, delta_chunk<T> const& chunk) {
            index_t const n = chunk.keys.count();
            auto const queries = scaled_rows(q.sub(row, n), options.qk_l2norm, scale);
            auto const fresh = chunk.fresh(chunk.u, s);
            padded<T> weights(n, n), out(n, v.width());
            project<T>(queries.view(), chunk.keys.view(), weights.view());
            for (index_t i = 0; i < n; ++i) {
                for (index_t j = 0; j <= i; ++j) weights(i, j) *= chunk.decay(i, j);
                combine(queries.row(i), s.count(), s, T(0), out.row(i));
                combine(weights.row(i), i + 1, fresh, chunk.decay_all[static_cast<std::size_t>(i)], out.row(i));
            }
            copy_out(out, o.sub(row, n));
            chunk.advance(fresh, s);
        });
        copy_out(s, state);
    }
    /// As `delta_rule_fold`, which reads no queries.
    void fold(rows<T> end, rows<T> map) const {
        padded<T> e(end), m;
        bool const with_map = map.data() != nullptr;
        if (with_map) m = {k.width(), k.width()};
        for (index_t d = 0; d < m.count(); ++d) m(d, d) = 1;
        each_chunk([&](index_t, delta_chunk<T> const& chunk) {
            chunk.advance(chunk.fresh(chunk.u, e), e);
            if (with_map) chunk.advance(chunk.fresh({chunk.keys.count(), k.width()}, m), m);
        });
        copy_out(e, end);
        if (with_map) copy_out(m, map);
    }
};

} // namespace detail

/// Runs the gated delta rule of one head over one segment:
///
///     S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t
///
/// q, k: (tokens, Dk); v, o: (tokens, Dv), o not overlapping the others; g (log decay), beta: (tokens, 1).
/// state: (Dk, Dv), the state before the segment on entry, after it on return.
///
/// Row 0 is token `first` of its sequence. Chunks begin at multiples of `options.chunk` tokens of the sequence, so the
/// first and the last chunk of a segment may be shorter. Law: cutting a segment at such a multiple and handing the
/// state on changes no bit. Row t of o depends on the tokens up to t alone, bit for bit.
///
/// Cost: about tokens * (2 chunk (Dk + Dv) + 3 Dk Dv) multiplications.
/// Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, arXiv 2412.06464, eq. 10 and section 3.3; its state
/// is the transpose of S.
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void delta_rule_forward(rows<T const> q, rows<T const> k, rows<T const> v, rows<T const> g, rows<T const> beta,
                        index_t first, delta_rule_options const& options, rows<T> state, rows<T> o,
                        caller here = caller::here()) {
    char const* const where = "delta_rule_forward";
    detail::require_shape(where, "q", q, k.count(), k.width(), here);
    detail::require_shape(where, "v", v, k.count(), v.width(), here);
    detail::require_shape(where, "state", state, k.width(), v.width(), here);
    detail::require_shape(where, "o", o, k.count(), v.width(), here);
    detail::require_gates(where, k.count(), g, beta, first, options, here);
    detail::require_apart(where, {{"o", o}, {"state", state}}, {{"q", q}, {"k", k}, {"v", v}, {"g", g}, {"beta", beta}},
                          here);
    detail::delta_segment<T>{q, k, v, g, beta, first, options}.forward(state, o);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T const>, rows<T const>, rows<T const>, index_t,
                                 delta_rule_options const&, rows<T>, rows<T>),
                            X...>)
detail::refused delta_rule_forward(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: delta_rule_forward<T>(q, k, v, g, beta, first, options, state, o) wants rows of T, not const "
                  "where they are written; take rows with view() or data()");
    return {};
}

/// Folds one segment into its step `S_end = M S_start + E` of the state, without outputs: `map` takes M, `end` E.
///
/// k: (tokens, Dk), v: (tokens, Dv), g, beta: (tokens, 1), `first` and the chunks as in `delta_rule_forward`.
/// end: (Dk, Dv), on entry the state before the segment, or zero if a predecessor's state is joined later; on return
/// the state after it, with the bits of `delta_rule_forward`.
/// map: (Dk, Dk), written; a view without data if it is not wanted.
/// Law: two segments in turn make the step (map2 map1, map2 end1 + end2).
///
/// Throws `cpx::error` if shapes do not fit or memory overlaps.
template <class T>
void delta_rule_fold(rows<T const> k, rows<T const> v, rows<T const> g, rows<T const> beta, index_t first,
                     delta_rule_options const& options, rows<T> end, rows<T> map, caller here = caller::here()) {
    char const* const where = "delta_rule_fold";
    detail::require_shape(where, "v", v, k.count(), v.width(), here);
    detail::require_shape(where, "end", end, k.width(), v.width(), here);
    if (map.data()) detail::require_shape(where, "map", map, k.width(), k.width(), here);
    detail::require_gates(where, k.count(), g, beta, first, options, here);
    detail::require_apart(where, {{"end", end}, {"map", map}}, {{"k", k}, {"v", v}, {"g", g}, {"beta", beta}}, here);
    detail::delta_segment<T>{{}, k, v, g, beta, first, options}.fold(end, map);
}
template <class T = detail::refused, class... X>
    requires(!detail::takes<void(rows<T const>, rows<T const>, rows<T const>, rows<T const>, index_t,
                                 delta_rule_options const&, rows<T>, rows<T>),
                            X...>)
detail::refused delta_rule_fold(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: delta_rule_fold<T>(k, v, g, beta, first, options, end, map) wants rows of T, not const where "
                  "they are written; take rows with view() or data()");
    return {};
}

} // namespace cpx
