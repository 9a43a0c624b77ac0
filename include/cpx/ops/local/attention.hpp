// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention of one query head over one sequence.
#pragma once

#include <cpx/ops/local/linear.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace cpx {
namespace detail {

/// Throws `cpx::error` unless each of `tokens` is a token of a sequence of `count`.
inline void require_tokens(char const* where, char const* what, std::span<index_t const> tokens, index_t count,
                           caller here) {
    for (index_t const token : tokens)
        if (token < 0 || token >= count) require(false, where, what, "0 to " + std::to_string(count - 1), token, here);
}

/// As `attend_head`, of arguments that fit.
template <class T>
void attend_one_head(rows<T const> q, std::span<index_t const> positions, rows<T const> k, rows<T const> v, T scale,
                     rows<T> o, std::span<T> lse) {
    // Rows of heads that lie far apart in the caller's buffer would fall on the same few cache lines.
    padded<T> const keys(k), values(v);
    padded<T> out(1, v.width());
    index_t const queries = std::ssize(positions), block = linear_rows;
    std::vector<T> weights(static_cast<std::size_t>(block * k.count()));
    for (index_t first = 0; first < queries; first += block) {
        auto const of_block = positions.subspan(static_cast<std::size_t>(first),
                                                static_cast<std::size_t>(std::min(block, queries - first)));
        index_t const visible = *std::max_element(of_block.begin(), of_block.end()) + 1;
        rows<T> const scores(weights.data(), std::ssize(of_block), visible);
        project<T>(q.sub(first, scores.count()), keys.view().sub(0, visible), scores);
        for (index_t i = 0; i < scores.count(); ++i) {
            T* const weight = scores.row(i);
            index_t const count = of_block[static_cast<std::size_t>(i)] + 1;
            for (index_t j = 0; j < count; ++j) weight[j] *= scale;
            T const highest = *std::max_element(weight, weight + count);
            T total = 0;
            for (index_t j = 0; j < count; ++j) total += weight[j] = std::exp(weight[j] - highest);
            if (!lse.empty()) lse[static_cast<std::size_t>(first + i)] = highest + std::log(total);
            std::fill_n(out.row(0), out.stride(), T(0));
            combine(weight, count, values, T(0), out.row(0));
            for (index_t d = 0; d < v.width(); ++d) o(first + i, d) = out(0, d) / total;
        }
    }
}

} // namespace detail

/// Computes `o_i = sum_j softmax_j(scale q_i . k_j) v_j` over the keys `j <= positions[i]`.
///
/// q: (queries, Dk), any tokens of the sequence in any order, `positions[i]` is the token of query i;
/// k: (tokens, Dk), v: (tokens, Dv), the whole sequence; o: (queries, Dv), not overlapping the others.
/// lse: one a query, takes the logarithm of the sum of the exponentials of the scaled scores; empty if not wanted.
/// A row of o is a function of its query and of the keys and values up to its token, bit for bit.
/// Cost: queries * tokens * (Dk + Dv) multiplications; copies k and v once.
/// Source: Vaswani et al., "Attention Is All You Need", 2017, arXiv 1706.03762, eq. 1.
///
/// Throws `cpx::error` if shapes do not fit, memory overlaps or a position is not a token of the sequence.
template <class T>
void attend_head(rows<T const> q, std::span<index_t const> positions, rows<T const> k, rows<T const> v, T scale,
                 rows<T> o, std::span<T> lse = {}, caller here = caller::here()) {
    auto const queries = static_cast<index_t>(positions.size());
    detail::require_shape("attend_head", "q", q, queries, k.width(), here);
    detail::require_shape("attend_head", "v", v, k.count(), v.width(), here);
    detail::require_shape("attend_head", "o", o, queries, v.width(), here);
    if (!lse.empty()) require(std::ssize(lse) == queries, "attend_head", "size of lse", queries, lse.size(), here);
    detail::require_tokens("attend_head", "position", positions, k.count(), here);
    detail::require_apart("attend_head", {{"o", o}, {"lse", lse}},
                          {{"q", q}, {"k", k}, {"v", v}, {"positions", positions}}, here);

    detail::attend_one_head(q, positions, k, v, scale, o, lse);
}
template <class T = detail::refused, class... X>
    requires(
        !detail::takes<void(rows<T const>, std::span<index_t const>, rows<T const>, rows<T const>, T, rows<T>), X...> &&
        !detail::takes<void(rows<T const>, std::span<index_t const>, rows<T const>, rows<T const>, T, rows<T>,
                            std::span<T>),
                       X...>)
detail::refused attend_head(X&&...) {
    static_assert(detail::never<X...>,
                  "cpx: attend_head<T>(q, positions, k, v, scale, o) wants rows of T and positions of index_t, not "
                  "const where they are written; take rows with view() or data()");
    return {};
}

} // namespace cpx
