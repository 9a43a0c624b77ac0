// SPDX-License-Identifier: Apache-2.0
// The gated delta rule as tensor cores compute it, with exact sums: rounded where the kernels round, and nowhere else.
#pragma once

#include <Eigen/Dense>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

using Eigen::Index;
using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using vector = Eigen::VectorXd;

/// Returns the nearest number with `bits` after the leading one, the even one of two. By its bits: where the compiler
/// contracts products and sums, as it does by default for Grace, Veltkamp's splitting would return `x`.
constexpr double rounded(double x, int bits) {
    int const dropped = 52 - bits;
    auto const all = std::bit_cast<std::uint64_t>(x), unit = std::uint64_t{1} << dropped;
    return std::bit_cast<double>((all + unit / 2 - 1 + (all >> dropped & 1)) & ~(unit - 1));
}
static_assert(rounded(1.00390625, 7) == 1 && rounded(1.01171875, 7) == 1.015625); // halfway, to even
static_assert(rounded(-0.999, 7) == -1 && rounded(0, 7) == 0);
inline matrix bf16(matrix const& x) {
    return x.unaryExpr([](double v) { return rounded(v, 7); });
}
inline matrix half(matrix const& x) {
    return x.unaryExpr([](double v) { return rounded(v, 10); });
}
inline matrix lower(matrix const& x) { return x.triangularView<Eigen::Lower>(); }
inline matrix strictly_lower(matrix const& x) { return x.triangularView<Eigen::StrictlyLower>(); }

/// Returns (I + L)^-1, made as the kernel makes it: of blocks of 8 on the diagonal, then of 16, then of rows of these,
/// with operands rounded to half and sums that are not; then rounded to bfloat16.
inline matrix inverse_of(matrix const& l) {
    Index const n = l.rows();
    matrix result = matrix::Zero(n, n), rounded_to_half = matrix::Zero(n, n);
    auto const size = [&](Index begin, Index most) { return std::min(most, n - begin); };
    auto const put = [&](Index row, Index column, matrix const& block) {
        result.block(row, column, block.rows(), block.cols()) = bf16(block);
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
        a = inverse_of(half(strictly_lower(beta.asDiagonal() * half(k * k.transpose()))));
        matrix const exact = lower(q * k.transpose());
        scores = bf16(exact);
        p = bf16((in.scale * (scores * a + exact - scores).cwiseProduct(decay)) * beta.asDiagonal());
        x = bf16(beta.cwiseProduct(onward).asDiagonal() * (a.transpose() * k));
    }
};

inline results run(head const& in) {
    Index const tokens = in.q.rows(), keys = in.q.cols(), values = in.v.cols();
    results r{matrix(tokens, values), in.state, matrix(tokens, keys), matrix(tokens, keys),
              matrix(tokens, values), in.dlast, vector(tokens),       vector(tokens)};
    std::vector<chunk> chunks;
    std::vector<matrix> states, writes;
    for (Index begin = 0; begin < tokens; begin += chunks.back().q.rows()) {
        chunk const& c = chunks.emplace_back(in, begin, std::min<Index>(64 - (in.first + begin) % 64, tokens - begin));
        matrix const& s = states.emplace_back(bf16(r.last));
        matrix const& y = writes.emplace_back(bf16(c.v - c.e.asDiagonal() * (c.k * s)));
        r.o.middleRows(begin, c.q.rows()) = bf16(in.scale * (c.e.asDiagonal() * (c.q * s)) + c.p * y);
        r.last = c.e[c.e.size() - 1] * r.last + c.x.transpose() * y;
    }
    for (Index i = std::ssize(chunks) - 1; i >= 0; --i) {
        auto const at = static_cast<std::size_t>(i);
        chunk const& c = chunks[at];
        matrix const &s = states[at], &y = writes[at];
        Index const begin = c.begin, n = c.q.rows();
        matrix const ds = bf16(r.dstate), dy = c.x * ds + c.p.transpose() * c.dout, dv = bf16(dy);
        r.dv.middleRows(begin, n) = dv;
        r.dstate = c.e[n - 1] * r.dstate + c.q.transpose() * bf16(in.scale * (c.e.asDiagonal() * c.dout)) -
                   c.k.transpose() * bf16(c.e.asDiagonal() * dy);

        vector const b = bf16(matrix(c.beta));
        matrix const dx = bf16(c.onward.asDiagonal() * (y * ds.transpose()));
        matrix const exact = lower(in.scale * (c.dout * y.transpose()).cwiseProduct(c.decay)), e = bf16(exact);
        matrix const times_beta = exact * c.beta.asDiagonal(), weighted = bf16(times_beta);
        matrix const h = bf16(times_beta.cwiseProduct(c.scores * c.a));
        matrix const dscores = bf16(lower(weighted * c.a.transpose()));
        matrix const kdx = c.k * dx.transpose(), inner = kdx + c.scores.transpose() * e;
        matrix const left = bf16(bf16(c.a.transpose() * bf16(inner)) * b.asDiagonal());
        matrix const x = bf16(strictly_lower(left * c.a.transpose())), z = bf16(-(b.asDiagonal() * x));
        matrix const read = c.dout * s.transpose();
        vector const t = c.a.cwiseProduct(bf16(kdx)).colwise().sum();
        r.dq.middleRows(begin, n) = in.scale * (c.e.asDiagonal() * read) + dscores * c.k;
        r.dk.middleRows(begin, n) = bf16(c.a * b.asDiagonal()) * dx -
                                    bf16(matrix(bf16(matrix(c.e)).asDiagonal() * dv)) * s.transpose() +
                                    dscores.transpose() * c.q + (z + z.transpose()) * c.k;
        r.dbeta.segment(begin, n) = c.a.cwiseProduct(bf16(inner)).colwise().sum().transpose() -
                                    x.cwiseProduct(bf16(c.k * c.k.transpose())).rowwise().sum();
        vector const rows = c.e.cwiseProduct(in.scale * c.q.cwiseProduct(bf16(read)).rowwise().sum() -
                                             dv.cwiseProduct(bf16(c.k * s)).rowwise().sum());
        double const whole = c.e[n - 1] * s.cwiseProduct(ds).sum();
        for (Index j = 0; j < n; ++j)
            r.dg[begin + j] =
                rows.tail(n - j).sum() + c.beta.head(j).dot(t.head(j)) + h.block(j, 0, n - j, j).sum() + whole;
    }
    return r;
}

} // namespace emulator
