// SPDX-License-Identifier: Apache-2.0
// Kimi delta attention, the delta rule with a decay a channel, of one head over one segment.
#pragma once

#include <cpx/ops/local/decay.hpp>
#include <cpx/ops/local/delta_rule.hpp>
#include <cpx/ops/local/recurrence.hpp>

#include <vector>

namespace cpx {
namespace detail {

/// A chunk of n tokens without its queries and without the state that reaches it.
///
/// Token i writes beta_i rest_i under its key, where rest_i is its value less what the faded state holds under its key.
template <class T>
struct kimi_chunk {
    chunk_decays<T> decays;
    padded<T> keys;        // (n, Dk), normalised
    padded<T> minus_read;  // (n, Dk): what each token takes from the state before the chunk
    padded<T> minus_pairs; // (n, n): and from what token j has written, j < i
    std::vector<T> beta;

    kimi_chunk(rows<T const> k, rows<T const> g, rows<T const> of_beta, bool l2norm)
        : decays(g, k.width()), keys(scaled_rows(k, l2norm, T(1))) {
        auto const minus_keys = scaled_rows(k, l2norm, T(-1));
        minus_read = decays.since_start(minus_keys);
        minus_pairs = decays.pairs(minus_keys, keys);
        for (index_t i = 0; i < k.count(); ++i) beta.push_back(of_beta(i, 0));
    }

    padded<T> times_beta(padded<T> x) const {
        for (index_t i = 0; i < x.count(); ++i)
            for (index_t c = 0; c < x.width(); ++c) x(i, c) *= beta[static_cast<std::size_t>(i)];
        return x;
    }

    /// Makes `rest` of values, (n, width of S), and returns what the tokens write.
    padded<T> write(padded<T>& rest, padded<T> const& state) const {
        padded<T> written(rest.count(), rest.width());
        for (index_t i = 0; i < rest.count(); ++i) {
            combine(minus_read.row(i), state.count(), state, T(1), rest.row(i));
            combine(minus_pairs.row(i), i, written, T(1), rest.row(i));
            for (index_t c = 0; c < rest.width(); ++c) written(i, c) = beta[static_cast<std::size_t>(i)] * rest(i, c);
        }
        return written;
    }
    void advance(padded<T> const& written, padded<T>& state) const {
        decays.add_outer(decays.until_end(keys), written, true, state);
    }
};

/// What flows back through a chunk whatever its values are and whatever state reaches it.
template <class T>
struct kimi_reverse {
    padded<T> queries; // (n, Dk), normalised
    padded<T> dout;    // (n, Dv), times the scale
    padded<T> drest;   // (n, Dv): the gradient of `rest` times beta
    padded<T> erased;  // (n, Dv): times beta: the gradient of the values, what is read less of the state

    kimi_reverse(kimi_chunk<T> const& c, rows<T const> q, rows<T const> of_o, delta_rule_options const& options,
                 padded<T> const& dstate)
        : queries(scaled_rows(q, options.qk_l2norm, T(1))),
          dout(scaled_rows(of_o, false, query_scale<T>(options.scale, q.width()))), drest(of_o.count(), of_o.width()) {
        index_t const n = q.count();
        auto const weights = c.decays.pairs(queries, c.keys), writes = c.decays.until_end(c.keys);
        padded<T> read_by(n, n), minus_a(n, n); // row i: the tokens from i on
        for (index_t i = 0; i < n; ++i)
            for (index_t j = 0; j <= i; ++j) {
                read_by(j, i) = weights(i, j);
                minus_a(j, i) = c.beta[static_cast<std::size_t>(i)] * c.minus_pairs(i, j);
            }
        for (index_t i = n - 1; i >= 0; --i) {
            combine(writes.row(i), c.keys.width(), dstate, T(0), drest.row(i));
            accumulate(read_by.row(i), i, n, dout, drest.row(i));
            accumulate(minus_a.row(i), i + 1, n, drest, drest.row(i));
        }
        erased = c.times_beta(drest);
    }

    /// Turns the gradient of the state after the chunk into that of the state before it.
    void retreat(kimi_chunk<T> const& c, padded<T>& dstate) const {
        c.decays.add_outer(c.decays.since_start(queries), dout, true, dstate);
        c.decays.add_outer(c.minus_read, erased, false, dstate);
    }
};

} // namespace detail

/// A model of `recurrence`: S_t = (I - beta_t k_t k_t^T) Diag(a_t) S_{t-1} + beta_t k_t v_t^T, o_t = scale S_t^T q_t,
/// with a_t = exp(g_t).
///
/// Inputs q, k: key_dim wide, v: value_dim, g, for each value head: key_dim, never positive, may be minus infinity,
/// beta: 1. Options as of the gated delta rule, which this is if the channels of a head decay alike.
///
/// Law: cutting a segment at a multiple of the chunk and handing the state on, or its gradient back, changes no bit.
/// Row t of o depends on the tokens up to t alone, bit for bit. Nothing is divided by a decay or by beta.
/// Cost: about tokens * (chunk (2 key_dim + value_dim) / 2 + 3 key_dim value_dim) multiplications; backward 3 times
/// that. Source: Kimi Team, "Kimi Linear", 2025, arXiv 2510.26692.
struct kimi_delta_attention {
    recurrence_heads heads;
    delta_rule_options options = {};

    static constexpr char const* name = "kimi_delta_attention";
    state_shape states() const { return {heads.value_heads, heads.key_dim, heads.value_dim}; }
    std::array<recurrence_input, 5> inputs() const {
        return {{{"q", heads.key_heads, heads.key_dim},
                 {"k", heads.key_heads, heads.key_dim},
                 {"v", heads.value_heads, heads.value_dim},
                 {"g", heads.value_heads, heads.key_dim},
                 {"beta", heads.value_heads, 1}}};
    }
    recurrence_settings settings() const {
        return {options.chunk, detail::query_scale<double>(options.scale, heads.key_dim), options.qk_l2norm};
    }
    void check(char const* where, caller here) const {
        heads.check(where, here);
        require(options.chunk >= 1, where, "chunk", "at least 1", options.chunk, here);
    }

    template <class T>
    void forward(std::array<rows<T const>, 5> const& x, index_t first, rows<T> state, rows<T> o) const {
        detail::padded<T> s(state);
        T const scale = detail::query_scale<T>(options.scale, heads.key_dim);
        detail::for_each_chunk(o.count(), first, options.chunk, [&](index_t row, index_t n) {
            auto const c = chunk(x, row, n);
            auto const queries = detail::scaled_rows(x[0].sub(row, n), options.qk_l2norm, scale);
            auto const weights = c.decays.pairs(queries, c.keys), reads = c.decays.since_start(queries);
            detail::padded<T> rest(x[2].sub(row, n)), out(n, o.width());
            auto const written = c.write(rest, s);
            for (index_t i = 0; i < n; ++i) {
                detail::combine(reads.row(i), s.count(), s, T(0), out.row(i));
                detail::combine(weights.row(i), i + 1, written, T(1), out.row(i));
            }
            detail::copy_out(out, o.sub(row, n));
            c.advance(written, s);
        });
        detail::copy_out(s, state);
    }

    template <class T>
    void fold(std::array<rows<T const>, 5> const& x, index_t first, rows<T> end, rows<T> map) const {
        detail::padded<T> s(end), m(map.count(), map.width());
        for (index_t d = 0; d < map.count(); ++d) m(d, d) = 1;
        detail::for_each_chunk(x[0].count(), first, options.chunk, [&](index_t row, index_t n) {
            auto const c = chunk(x, row, n);
            detail::padded<T> rest(x[2].sub(row, n)), none(n, map.width());
            c.advance(c.write(rest, s), s);
            c.advance(c.write(none, m), m);
        });
        detail::copy_out(s, end);
        detail::copy_out(m, map);
    }

    template <class T>
    void backward(std::array<rows<T const>, 5> const& x, index_t first, rows<T const> state, rows<T const> dout,
                  rows<T> dstate, std::array<rows<T>, 5> const& dx) const {
        struct kept { // of each chunk: the state before it, and of each token what `write` gives
            detail::padded<T> state, rest, written;
        };
        index_t const dim = heads.key_dim;
        std::vector<kept> forth;
        detail::padded<T> s(state), ds(dstate);
        detail::for_each_chunk(dout.count(), first, options.chunk, [&](index_t row, index_t n) {
            auto const c = chunk(x, row, n);
            kept& k = forth.emplace_back(kept{s, detail::padded<T>(x[2].sub(row, n)), {}});
            k.written = c.write(k.rest, s);
            c.advance(k.written, s);
        });
        for (std::size_t i = 0; i < 2; ++i) detail::fill(dx[i], T(0)); // they are added to
        detail::for_each_chunk_reversed(dout.count(), first, options.chunk, [&](index_t row, index_t n) {
            auto const c = chunk(x, row, n);
            detail::kimi_reverse<T> const back(c, x[0].sub(row, n), dout.sub(row, n), options, ds);
            kept const& k = forth.back();
            detail::padded<T> dq(n, dim), dk(n, dim), dg(n, dim);
            auto const minus = [](detail::padded<T> of) {
                for (index_t i = 0; i < of.count(); ++i)
                    for (index_t j = 0; j < of.width(); ++j) of(i, j) = -of(i, j);
                return of;
            };
            auto dpairs = minus(detail::row_products(back.erased, k.written));
            for (index_t i = 0; i < n; ++i) dpairs(i, i) = 0; // a token takes nothing from itself
            c.decays.pairs_backward(c.keys, c.keys, dpairs, dk, dk, dg);
            c.decays.pairs_backward(back.queries, c.keys, detail::row_products(back.dout, k.written), dq, dk, dg);
            c.decays.since_start_backward(back.queries, detail::row_products(back.dout, k.state), dq, dg);
            c.decays.since_start_backward(c.keys, minus(detail::row_products(back.erased, k.state)), dk, dg);
            c.decays.until_end_backward(c.keys, detail::row_products(k.written, ds), dk, dg);
            c.decays.whole_backward(k.state, ds, dg);
            auto const of = [&](std::size_t i) { return dx[i].sub(row, n); };
            detail::scaled_rows_backward<T>(x[0].sub(row, n), back.queries, dq, options.qk_l2norm, of(0));
            detail::scaled_rows_backward<T>(x[1].sub(row, n), c.keys, dk, options.qk_l2norm, of(1));
            detail::copy_out(back.erased, of(2));
            detail::copy_out(dg, of(3));
            for (index_t i = 0; i < n; ++i)
                of(4)(i, 0) = detail::dot(back.drest.row(i), k.rest.row(i), heads.value_dim);
            back.retreat(c, ds);
            forth.pop_back();
        });
        detail::copy_out(ds, dstate);
    }

    template <class T>
    void backward_fold(std::array<rows<T const>, 5> const& x, index_t first, rows<T const> dout, rows<T> dstate) const {
        detail::padded<T> ds(dstate);
        detail::for_each_chunk_reversed(dout.count(), first, options.chunk, [&](index_t row, index_t n) {
            auto const c = chunk(x, row, n);
            detail::kimi_reverse<T>(c, x[0].sub(row, n), dout.sub(row, n), options, ds).retreat(c, ds);
        });
        detail::copy_out(ds, dstate);
    }

private:
    template <class T>
    detail::kimi_chunk<T> chunk(std::array<rows<T const>, 5> const& x, index_t row, index_t n) const {
        return {x[1].sub(row, n), x[3].sub(row, n), x[4].sub(row, n), options.qk_l2norm};
    }
};

} // namespace cpx
