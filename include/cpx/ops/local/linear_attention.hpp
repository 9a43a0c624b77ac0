// SPDX-License-Identifier: Apache-2.0
// Linear attention with a decay a head or a decay a channel, of one head over one segment.
#pragma once

#include <cpx/ops/local/decay.hpp>
#include <cpx/ops/local/recurrence.hpp>

#include <optional>
#include <vector>

namespace cpx {

struct linear_attention_options {
    index_t chunk = 64;               ///< tokens computed at once
    std::optional<double> scale = {}; ///< factor of q; none: 1 / sqrt(key_dim)
};

/// A model of `recurrence`: S_t = Diag(a_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t, with a_t = exp(g_t).
///
/// Inputs q, k: key_dim wide, v: value_dim, g, never positive, may be minus infinity. `Decay` says what a_t is: a
/// number, g 1 wide, or a vector, g key_dim wide; one for each value head.
///
/// Law: cutting a segment at a multiple of the chunk and handing the state on, or its gradient back, changes no bit.
/// Row t of o depends on the tokens up to t alone, bit for bit. Nothing is divided by a decay.
/// Cost: about tokens * (chunk (key_dim + value_dim) / 2 + 2 key_dim value_dim) multiplications; backward 3 times that.
template <map_kind Decay>
struct linear_attention {
    static_assert(Decay != map_kind::matrix, "cpx: linear_attention decays by a number or by a vector");
    recurrence_heads heads;
    linear_attention_options options = {};

    static constexpr char const* name = Decay == map_kind::number ? "head_decay_attention" : "channel_decay_attention";
    state_shape states() const { return {heads.value_heads, heads.key_dim, heads.value_dim, Decay}; }
    std::array<recurrence_input, 4> inputs() const {
        return {{{"q", heads.key_heads, heads.key_dim},
                 {"k", heads.key_heads, heads.key_dim},
                 {"v", heads.value_heads, heads.value_dim},
                 {"g", heads.value_heads, Decay == map_kind::number ? 1 : heads.key_dim}}};
    }
    recurrence_settings settings() const { return {options.chunk, scale<double>(), false}; }
    void check(char const* where, caller here) const {
        heads.check(where, here);
        require(options.chunk >= 1, where, "chunk", "at least 1", options.chunk, here);
    }

    template <class T>
    void forward(std::array<rows<T const>, 4> const& x, index_t first, rows<T> state, rows<T> o) const {
        detail::padded<T> s(state);
        detail::for_each_chunk(o.count(), first, options.chunk, [&](index_t row, index_t n) {
            chunk<T> const c(x, row, n);
            auto const queries = detail::scaled_rows(x[0].sub(row, n), false, scale<T>());
            auto const weights = c.decays.pairs(queries, c.keys), reads = c.decays.since_start(queries);
            detail::padded<T> out(n, o.width());
            for (index_t i = 0; i < n; ++i) {
                detail::combine(reads.row(i), s.count(), s, T(0), out.row(i));
                detail::combine(weights.row(i), i + 1, c.values, T(1), out.row(i));
            }
            detail::copy_out(out, o.sub(row, n));
            c.advance(s);
        });
        detail::copy_out(s, state);
    }

    template <class T>
    void fold(std::array<rows<T const>, 4> const& x, index_t first, rows<T> end, rows<T> map) const {
        detail::padded<T> s(end);
        for (index_t d = 0; d < map.count(); ++d) map(d, 0) = 1;
        detail::for_each_chunk(x[0].count(), first, options.chunk, [&](index_t row, index_t n) {
            chunk<T> const c(x, row, n);
            c.advance(s);
            for (index_t d = 0; d < map.count(); ++d) map(d, 0) *= c.decays.whole(d);
        });
        detail::copy_out(s, end);
    }

    template <class T>
    void backward(std::array<rows<T const>, 4> const& x, index_t first, rows<T const> state, rows<T const> dout,
                  rows<T> dstate, std::array<rows<T>, 4> const& dx) const {
        index_t const channels = heads.key_dim;
        std::vector<detail::padded<T>> before; // each chunk
        detail::padded<T> s(state), ds(dstate);
        detail::for_each_chunk(dout.count(), first, options.chunk, [&](index_t row, index_t n) {
            before.push_back(s);
            chunk<T>(x, row, n).advance(s);
        });
        detail::for_each_chunk_reversed(dout.count(), first, options.chunk, [&](index_t row, index_t n) {
            chunk<T> const c(x, row, n);
            detail::padded<T> const queries(x[0].sub(row, n)),
                of_o = detail::scaled_rows(dout.sub(row, n), false, scale<T>()),
                weights = c.decays.pairs(queries, c.keys), writes = c.decays.until_end(c.keys);
            detail::padded<T> read_by(n, n), dq(n, channels), dk(n, channels), dv(n, heads.value_dim), dg(n, channels);
            for (index_t i = 0; i < n; ++i)
                for (index_t j = 0; j <= i; ++j) read_by(j, i) = weights(i, j);
            for (index_t j = 0; j < n; ++j) {
                detail::combine(writes.row(j), channels, ds, T(0), dv.row(j));
                detail::accumulate(read_by.row(j), j, n, of_o, dv.row(j));
            }
            auto const& s0 = before.back();
            c.decays.pairs_backward(queries, c.keys, detail::row_products(of_o, c.values), dq, dk, dg);
            c.decays.since_start_backward(queries, detail::row_products(of_o, s0), dq, dg);
            c.decays.until_end_backward(c.keys, detail::row_products(c.values, ds), dk, dg);
            c.decays.whole_backward(s0, ds, dg);
            if (Decay == map_kind::number)
                for (index_t i = 0; i < n; ++i)
                    for (index_t d = 1; d < channels; ++d) dg(i, 0) += dg(i, d);
            c.decays.add_outer(c.decays.since_start(queries), of_o, true, ds);
            detail::padded<T> const* const gradients[] = {&dq, &dk, &dv, &dg};
            for (std::size_t i = 0; i < dx.size(); ++i) detail::copy_out(*gradients[i], dx[i].sub(row, n));
            before.pop_back();
        });
        detail::copy_out(ds, dstate);
    }

    template <class T>
    void backward_fold(std::array<rows<T const>, 4> const& x, index_t first, rows<T const> dout, rows<T> dstate) const {
        detail::padded<T> ds(dstate);
        detail::for_each_chunk_reversed(dout.count(), first, options.chunk, [&](index_t row, index_t n) {
            detail::chunk_decays<T> const decays(x[3].sub(row, n), heads.key_dim);
            decays.add_outer(decays.since_start(detail::padded<T>(x[0].sub(row, n))),
                             detail::scaled_rows(dout.sub(row, n), false, scale<T>()), true, ds);
        });
        detail::copy_out(ds, dstate);
    }

private:
    template <class T>
    T scale() const {
        return detail::query_scale<T>(options.scale, heads.key_dim);
    }

    template <class T>
    struct chunk {
        chunk(std::array<rows<T const>, 4> const& x, index_t row, index_t n)
            : decays(x[3].sub(row, n), x[1].width()), keys(x[1].sub(row, n)), values(x[2].sub(row, n)) {}
        void advance(detail::padded<T>& state) const { decays.add_outer(decays.until_end(keys), values, true, state); }

        detail::chunk_decays<T> decays;
        detail::padded<T> keys, values;
    };
};

/// A decay a head: Mamba-2's SSD (Dao, Gu, 2024, arXiv 2405.21060) where q, k, v and g are its C, B, dt x and dt A, its
/// groups key heads, and lightning attention (Qin et al., 2024, arXiv 2401.04658) where g is minus the slope of the
/// head; both with a scale of 1.
using head_decay_attention = linear_attention<map_kind::number>;

/// A decay a channel of the keys: gated linear attention (Yang et al., 2023, arXiv 2312.06635).
using channel_decay_attention = linear_attention<map_kind::vector>;

} // namespace cpx
