// SPDX-License-Identifier: Apache-2.0
// The gated delta rule as tensor cores compute it, with exact sums: rounded where the kernels round, and nowhere else.
#pragma once

#include <Eigen/Dense>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

namespace emulator {

using Eigen::Index;
using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using vector = Eigen::VectorXd;

/// What operands are: numbers with so many bits after the leading one, down to a least exponent, from which on they are
/// as far apart. None is too large.
struct format {
    int bits, least;

    /// Returns the nearest number, the even one of two. By its bits: where the compiler contracts products and sums, as
    /// it does by default for Grace, Veltkamp's splitting would return `x`.
    constexpr double operator()(double x) const {
        auto const all = std::bit_cast<std::uint64_t>(x);
        int const exponent = static_cast<int>(all >> 52 & 2047) - 1023, dropped = 52 - bits;
        if (exponent < least) { // a sum with so large a number drops the rest
            double const large = 1.5 * std::bit_cast<double>(static_cast<std::uint64_t>(least + dropped + 1023) << 52);
            return (x + large) - large;
        }
        auto const unit = std::uint64_t{1} << dropped;
        return std::bit_cast<double>((all + unit / 2 - 1 + (all >> dropped & 1)) & ~(unit - 1));
    }
    matrix operator()(matrix const& x) const {
        return x.unaryExpr([of = *this](double v) { return of(v); });
    }
};
inline constexpr format bfloat16{7, -126}, half{10, -14};
static_assert(bfloat16(1.00390625) == 1 && bfloat16(1.01171875) == 1.015625); // halfway, to even
static_assert(bfloat16(-0.999) == -1 && bfloat16(0.0) == 0 && half(-0.9999) == -1);
static_assert(half(0x1.4p-24) == 0x1p-24 && half(-0x1.8p-24) == -0x1p-23 && half(0x1.002p-14) == 0x1p-14);
static_assert(half(0x1p-25) == 0 && half(0x1.ff9p-15) == 0x1.ff8p-15);
inline matrix lower(matrix const& x) { return x.triangularView<Eigen::Lower>(); }
inline matrix strictly_lower(matrix const& x) { return x.triangularView<Eigen::StrictlyLower>(); }

/// Returns (I + L)^-1, made as the kernel makes it: of blocks of 8 on the diagonal, then of 16, then of rows of these,
/// with operands rounded to half and sums that are not; then rounded to `to`.
inline matrix inverse_of(matrix const& l, format to) {
    Index const n = l.rows();
    matrix result = matrix::Zero(n, n), rounded_to_half = matrix::Zero(n, n);
    auto const size = [&](Index begin, Index most) { return std::min(most, n - begin); };
    auto const put = [&](Index row, Index column, matrix const& block) {
        result.block(row, column, block.rows(), block.cols()) = to(block);
        rounded_to_half.block(row, column, block.rows(), block.cols()) = half(block);
    };
    for (Index i = 0; i < n; i += 8) {
        Index const own = size(i, 8);
        matrix block = matrix::Identity(own, own);
        for (Index r = 0; r < own; ++r)
            for (Index k = 0; k < r; ++k) block.row(r) -= l(i + r, i + k) * block.row(k);
        put(i, i, block);
    }
    matrix const& a = rounded_to_half;
    for (Index i = 0; i + 8 < n; i += 16) {
        Index const below = size(i + 8, 8);
        matrix const left = half(-(l.block(i + 8, i, below, 8) * a.block(i, i, 8, 8)));
        put(i + 8, i, a.block(i + 8, i + 8, below, below) * left);
    }
    for (Index i = 16; i < n; i += 16) {
        Index const own = size(i, 16);
        for (Index j = 0; j < i; j += 16) {
            matrix const left = half(-(l.block(i, j, own, i - j) * a.block(j, j, i - j, 16)));
            put(i, j, a.block(i, i, own, own) * left);
        }
    }
    return result;
}

/// One value head of one sequence, or of a segment of one. Rows are tokens; states (keys, values).
struct head {
    matrix q, k, v, dout, state, dlast;
    vector g, beta;
    double scale;
    Index first = 0; ///< the token of its sequence that the first row is
    format round = bfloat16;
    std::vector<Index> cuts = {}; ///< rows, ascending, at which segments begin, but the first
    bool scan = false;            ///< whether states before and after these are made of steps of segments
};
struct results {
    matrix o, last, dq, dk, dv, dstate;
    vector dg, dbeta;
};

/// What a chunk has before states are known: the tokens of a sequence from one multiple of 64 to the next.
struct chunk {
    Index begin;
    matrix q, k, v, dout, a, decay, p, x, scores;
    vector beta, e, onward;
    chunk(head const& in, Index at, Index n)
        : begin(at), q(in.q.middleRows(begin, n)), k(in.k.middleRows(begin, n)), v(in.v.middleRows(begin, n)),
          dout(in.dout.middleRows(begin, n)), beta(in.beta.segment(begin, n)), e(n), onward(n) {
        vector sum(n);
        double total = 0;
        for (Index i = 0; i < n; ++i) sum[i] = total += std::max(in.g[begin + i], -126 * std::log(2.0));
        decay = matrix::Zero(n, n);
        for (Index i = 0; i < n; ++i) {
            e[i] = std::exp(sum[i]);
            onward[i] = std::exp(total - sum[i]);
            for (Index j = 0; j <= i; ++j) decay(i, j) = std::exp(sum[i] - sum[j]);
        }
        a = inverse_of(half(strictly_lower(beta.asDiagonal() * half(k * k.transpose()))), in.round);
        format const round = in.round;
        matrix const exact = lower(q * k.transpose());
        scores = round(exact);
        p = round((in.scale * (scores * a + exact - scores).cwiseProduct(decay)) * beta.asDiagonal());
        x = round(beta.cwiseProduct(onward).asDiagonal() * (a.transpose() * k));
    }
};

inline results run(head const& in) {
    format const round = in.round;
    Index const tokens = in.q.rows(), keys = in.q.cols(), values = in.v.cols();
    results r{matrix(tokens, values), in.state, matrix(tokens, keys), matrix(tokens, keys),
              matrix(tokens, values), in.dlast, vector(tokens),       vector(tokens)};
    std::vector<chunk> chunks;
    std::vector<matrix> states, writes, maps(1); // M of segments but the first
    matrix before;                               // the segment: its state or, on the way back, the gradient of that
    matrix end = in.state;                       // E of the segment so far; of the first the state after it
    auto const joined = [&] { return maps.size() > 1 ? maps.back() * before + end : end; };
    for (Index begin = 0; begin < tokens; begin += chunks.back().q.rows()) {
        auto const next = std::ranges::upper_bound(in.cuts, begin);
        if (in.scan && next != in.cuts.begin() && *std::prev(next) == begin) {
            r.last = joined();
            before = r.last, end.setZero();
            maps.push_back(matrix::Identity(keys, keys));
        }
        Index const most = next == in.cuts.end() ? tokens - begin : *next - begin;
        chunk const& c = chunks.emplace_back(in, begin, std::min(64 - (in.first + begin) % 64, most));
        auto const step = [&](matrix& state, matrix const& v) {
            matrix const y = round(v - c.e.asDiagonal() * (c.k * round(state)));
            state = c.e[c.e.size() - 1] * state + c.x.transpose() * y;
            return y;
        };
        matrix const& s = states.emplace_back(round(r.last));
        matrix const& y = writes.emplace_back(step(r.last, c.v));
        r.o.middleRows(begin, c.q.rows()) = round(in.scale * (c.e.asDiagonal() * (c.q * s)) + c.p * y);
        if (!in.scan) continue;
        step(end, c.v);
        if (maps.size() > 1) step(maps.back(), matrix::Zero(c.q.rows(), keys));
    }
    if (in.scan && tokens > 0) r.last = joined();
    end = in.dlast;
    for (Index i = std::ssize(chunks) - 1; i >= 0; --i) {
        auto const at = static_cast<std::size_t>(i);
        chunk const& c = chunks[at];
        matrix const &s = states[at], &y = writes[at];
        Index const begin = c.begin, n = c.q.rows();
        if (in.scan && std::ranges::binary_search(in.cuts, begin + n)) {
            r.dstate = begin + n == in.cuts.back() ? end : maps.back().transpose() * before + end;
            before = r.dstate, end.setZero();
            maps.pop_back();
        }
        auto const step = [&](matrix& state) {
            matrix const dy = c.x * round(state) + c.p.transpose() * c.dout;
            state = c.e[n - 1] * state + c.q.transpose() * round(in.scale * (c.e.asDiagonal() * c.dout)) -
                    c.k.transpose() * round(c.e.asDiagonal() * dy);
            return dy;
        };
        matrix const ds = round(r.dstate), dv = round(step(r.dstate));
        r.dv.middleRows(begin, n) = dv;
        if (in.scan) step(end);

        vector const b = round(matrix(c.beta));
        matrix const dx = round(c.onward.asDiagonal() * (y * ds.transpose()));
        matrix const exact = lower(in.scale * (c.dout * y.transpose()).cwiseProduct(c.decay)), e = round(exact);
        matrix const times_beta = exact * c.beta.asDiagonal(), weighted = round(times_beta);
        matrix const h = round(times_beta.cwiseProduct(c.scores * c.a));
        matrix const dscores = round(lower(weighted * c.a.transpose()));
        matrix const kdx = c.k * dx.transpose(), inner = kdx + c.scores.transpose() * e;
        matrix const left = round(round(c.a.transpose() * round(inner)) * b.asDiagonal());
        matrix const x = round(strictly_lower(left * c.a.transpose())), z = round(-(b.asDiagonal() * x));
        matrix const read = c.dout * s.transpose();
        vector const t = c.a.cwiseProduct(kdx).colwise().sum();
        r.dq.middleRows(begin, n) = in.scale * (c.e.asDiagonal() * read) + dscores * c.k;
        r.dk.middleRows(begin, n) = round(c.a * b.asDiagonal()) * dx -
                                    round(matrix(round(matrix(c.e)).asDiagonal() * dv)) * s.transpose() +
                                    dscores.transpose() * c.q + (z + z.transpose()) * c.k;
        r.dbeta.segment(begin, n) = c.a.cwiseProduct(round(inner)).colwise().sum().transpose() -
                                    x.cwiseProduct(round(c.k * c.k.transpose())).rowwise().sum();
        vector const rows = c.e.cwiseProduct(in.scale * c.q.cwiseProduct(round(read)).rowwise().sum() -
                                             dv.cwiseProduct(round(c.k * s)).rowwise().sum());
        double const whole = c.e[n - 1] * s.cwiseProduct(ds).sum();
        for (Index j = 0; j < n; ++j)
            r.dg[begin + j] =
                rows.tail(n - j).sum() + c.beta.head(j).dot(t.head(j)) + h.block(j, 0, n - j, j).sum() + whole;
    }
    return r;
}

} // namespace emulator
