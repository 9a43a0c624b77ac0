// SPDX-License-Identifier: Apache-2.0
// How the tokens of a chunk fade where every channel of the keys has a decay of its own.
#pragma once

#include <cpx/ops/local/chunks.hpp>
#include <cpx/ops/local/linear.hpp>

#include <algorithm>
#include <cmath>

namespace cpx::detail {

/// Computes `to = a b`, element by element over a padded row.
template <class T>
void multiply(T const* a, T const* b, index_t stride, T* to) {
    for (index_t c = 0; c < stride; c += lane_count<T>) {
        lanes<T> of_a, of_b;
        load<T>(a + c, of_a);
        load<T>(b + c, of_b);
        store<T>(of_a * of_b, to + c);
    }
}
template <class T>
void add_multiple(T const* a, T const* b, index_t stride, T* to) {
    for (index_t c = 0; c < stride; c += lane_count<T>) {
        lanes<T> of_a, of_b, of_to;
        load<T>(a + c, of_a);
        load<T>(b + c, of_b);
        load<T>(to + c, of_to);
        store<T>(of_to + of_a * of_b, to + c);
    }
}

/// Returns a b^T, the products of the rows of two.
template <class T>
padded<T> row_products(padded<T> const& a, padded<T> const& b) {
    padded<T> result(a.count(), b.count());
    linear<T>(a.view(), b.view(), result.view());
    return result;
}

/// The decays of a chunk of n >= 1 tokens: every token multiplies channel d of the state by its factor, then writes.
///
/// What token j wrote has faded, when token i reads, by the factors of tokens j + 1 to i. No quotient of products is
/// formed, for factors may be 0, or their product: a chunk is split in the middle, and its halves again, and a pair on
/// two sides of a split has the product from j to the split times that from the split to i. So all pairs of a split
/// are one product of matrices. Row i of a result depends on the tokens up to i alone, bit for bit.
template <class T>
class chunk_decays {
public:
    /// g: (n, channels), logarithms of the factors, or (n, 1): those of all channels.
    chunk_decays(rows<T const> g, index_t channels)
        : n_(g.count()), channels_(channels), factors_(n_, channels), since_(n_, channels), until_(n_, channels) {
        for (index_t i = 0; i < n_; ++i)
            for (index_t d = 0; d < channels; ++d)
                factors_(i, d) = d >= g.width() ? factors_(i, 0) : std::exp(static_cast<double>(g(i, d)));
        fill(0, 0, n_, since_);
        fill(0, n_, n_, until_);
    }

    /// Returns x, row i times the factors of tokens 0 to i: the queries of the state before the chunk.
    padded<T> since_start(padded<T> const& x) const { return times(x, since_); }
    /// Returns y, row j times the factors after token j: the keys under which the state after the chunk holds tokens.
    padded<T> until_end(padded<T> const& y) const { return times(y, until_); }
    /// Returns the factor of the whole chunk.
    T whole(index_t channel) const { return since_(n_ - 1, channel); }

    /// Returns (n, n): the products of x_i and y_j, every channel faded as from j to i, for j <= i; else 0.
    padded<T> pairs(padded<T> const& x, padded<T> const& y) const {
        padded<T> result(n_, n_);
        for (index_t i = 0; i < n_; ++i) result(i, i) = dot(x.row(i), y.row(i), channels_);
        for_each_split(x, y, [&](index_t begin, index_t middle, index_t end, padded<T> const& scaled, auto const&) {
            linear<T>(scaled.view().sub(middle, end - middle), scaled.view().sub(begin, middle - begin),
                      result.view().sub(middle, end - middle).columns(begin, middle - begin));
        });
        return result;
    }

    /// Adds the gradients of x, y and g, given that of `pairs(x, y)` for j <= i. dg: (n, channels).
    ///
    /// A gradient of g is a sum of products that hold its factor, never a difference.
    void pairs_backward(padded<T> const& x, padded<T> const& y, padded<T> const& dpairs, padded<T>& dx, padded<T>& dy,
                        padded<T>& dg) const {
        padded<T> turned(n_, n_), dscaled(n_, channels_);
        for (index_t i = 0; i < n_; ++i)
            for (index_t j = 0; j <= i; ++j) turned(j, i) = dpairs(i, j);
        for (index_t i = 0; i < n_; ++i) {
            accumulate(dpairs.row(i), i, i + 1, y, dx.row(i));
            accumulate(turned.row(i), i, i + 1, x, dy.row(i));
        }
        for_each_split(x, y, [&](index_t begin, index_t middle, index_t end, auto const& scaled, auto const& factors) {
            for (index_t i = begin; i < end; ++i) std::fill_n(dscaled.row(i), dscaled.stride(), T(0));
            for (index_t i = middle; i < end; ++i) accumulate(dpairs.row(i), begin, middle, scaled, dscaled.row(i));
            for (index_t j = begin; j < middle; ++j) accumulate(turned.row(j), middle, end, scaled, dscaled.row(j));
            spread(begin, middle, end, factors, scaled, dscaled, dx, dy, dg);
        });
    }

    /// Adds the gradients of x and g, given that of `since_start(x)`.
    void since_start_backward(padded<T> const& x, padded<T> const& dscaled, padded<T>& dx, padded<T>& dg) const {
        spread(0, 0, n_, since_, since_start(x), dscaled, dx, dx, dg);
    }
    void until_end_backward(padded<T> const& y, padded<T> const& dscaled, padded<T>& dy, padded<T>& dg) const {
        spread(0, n_, n_, until_, until_end(y), dscaled, dy, dy, dg);
    }
    /// Adds the gradient of g, given the state before the chunk and the gradient of the one after it.
    void whole_backward(padded<T> const& state, padded<T> const& dstate, padded<T>& dg) const {
        padded<T> kept(1, channels_);
        for (index_t d = 0; d < channels_; ++d) kept(0, d) = whole(d) * dot(state.row(d), dstate.row(d), state.width());
        T const once = 1;
        for (index_t i = 0; i < n_; ++i) accumulate(&once, 0, 1, kept, dg.row(i));
    }

    /// Computes `state = keep state + x^T y`, where keep is `whole` if the state `fades`, else 1.
    void add_outer(padded<T> const& x, padded<T> const& y, bool fades, padded<T>& state) const {
        padded<T> turned(channels_, n_);
        for (index_t i = 0; i < n_; ++i)
            for (index_t d = 0; d < channels_; ++d) turned(d, i) = x(i, d);
        for (index_t d = 0; d < channels_; ++d) combine(turned.row(d), n_, y, fades ? whole(d) : T(1), state.row(d));
    }

private:
    /// Sets the rows of a split: from `middle` on the factors from there to each token, before it those after each.
    void fill(index_t begin, index_t middle, index_t end, padded<T>& to) const {
        padded<double> product(1, channels_);
        auto const put = [&](index_t i, double const* factors) {
            if (factors) multiply(product.row(0), factors, product.stride(), product.row(0));
            for (index_t d = 0; d < channels_; ++d) to(i, d) = static_cast<T>(product(0, d));
        };
        std::fill_n(product.row(0), channels_, 1.0);
        for (index_t i = middle; i < end; ++i) put(i, factors_.row(i));
        std::fill_n(product.row(0), channels_, 1.0);
        for (index_t i = middle; i-- > begin;) put(i, i + 1 == middle ? nullptr : factors_.row(i + 1));
    }

    static padded<T> times(padded<T> x, padded<T> const& by) {
        for (index_t i = 0; i < x.count(); ++i) multiply(x.row(i), by.row(i), x.stride(), x.row(i));
        return x;
    }

    /// Calls `f(begin, middle, end, scaled, factors)` for every split: x from `middle` on and y before it, scaled.
    template <class F>
    void for_each_split(padded<T> const& x, padded<T> const& y, F&& f) const {
        padded<T> factors(n_, channels_), scaled(n_, channels_);
        for (index_t half = 1; half < n_; half *= 2)
            for (index_t begin = 0; begin + half < n_; begin += 2 * half) {
                index_t const middle = begin + half, end = std::min(middle + half, n_);
                fill(begin, middle, end, factors);
                for (index_t i = begin; i < end; ++i)
                    multiply((i < middle ? y : x).row(i), factors.row(i), factors.stride(), scaled.row(i));
                f(begin, middle, end, std::as_const(scaled), std::as_const(factors));
            }
    }

    /// Gives the gradients of the scaled rows of a split to the rows, and to the tokens whose factors scaled them.
    void spread(index_t begin, index_t middle, index_t end, padded<T> const& factors, padded<T> const& scaled,
                padded<T> const& dscaled, padded<T>& dx, padded<T>& dy, padded<T>& dg) const {
        T const once = 1;
        padded<T> later(1, channels_), earlier(1, channels_);
        for (index_t i = end; i-- > middle;) {
            add_multiple(factors.row(i), dscaled.row(i), factors.stride(), dx.row(i));
            add_multiple(scaled.row(i), dscaled.row(i), factors.stride(), later.row(0));
            accumulate(&once, 0, 1, later, dg.row(i));
        }
        for (index_t i = begin; i < middle; ++i) {
            accumulate(&once, 0, 1, earlier, dg.row(i));
            add_multiple(factors.row(i), dscaled.row(i), factors.stride(), dy.row(i));
            add_multiple(scaled.row(i), dscaled.row(i), factors.stride(), earlier.row(0));
        }
    }

    index_t n_, channels_;
    padded<double> factors_; ///< double, for many equal ones, rounded to T, would be off in one direction
    padded<T> since_, until_;
};

} // namespace cpx::detail
