// SPDX-License-Identifier: Apache-2.0
// Attention with all its inputs, as plain double-precision formulas over tokens, and on the ranks of any sharding.
#pragma once

#include <cpx/ops.hpp>

#include <ops/on_ranks.hpp>

namespace reference {

using cpx::index_t;

/// Attention with whole rows of q, k, v.
template <class T>
struct attention {
    cpx::thd batch;
    cpx::attention_heads heads;
    double scale;
    std::vector<T> q, k, v;

    cpx::section queries() const { return {heads.query_heads, heads.dim}; }
    cpx::section keys() const { return {heads.key_heads, heads.dim}; }
    index_t width() const { return heads.query_heads * heads.dim; }
};

template <class T>
attention<T> random_attention(cpx::thd const& batch, cpx::attention_heads const& heads, std::uint64_t seed) {
    support::splitmix numbers(seed);
    index_t const keys = batch.tokens() * heads.key_heads * heads.dim;
    return {batch,
            heads,
            1 / std::sqrt(static_cast<double>(heads.dim)),
            on_ranks::uniform<T>(numbers, batch.tokens() * heads.query_heads * heads.dim, 3),
            on_ranks::uniform<T>(numbers, keys, 3),
            on_ranks::uniform<T>(numbers, keys)};
}

/// o_t = sum_j softmax_j(scale q_t . k_j) v_j over the tokens j of the sequence up to t.
template <class T>
std::vector<double> run(attention<T> const& p) {
    index_t const dim = p.heads.dim, key_width = p.heads.key_heads * dim;
    auto const at = [](std::vector<T> const& values, index_t i) {
        return static_cast<double>(values[static_cast<std::size_t>(i)]);
    };
    std::vector<double> o(p.q.size());
    for (index_t row = 0; row < p.batch.tokens(); ++row)
        for (index_t h = 0; h < p.heads.query_heads; ++h) {
            index_t const first = p.batch.offset(p.batch.sequence(row)), q = row * p.width() + h * dim;
            index_t const key = h / (p.heads.query_heads / p.heads.key_heads) * dim;
            std::vector<double> weight;
            double highest = -std::numeric_limits<double>::infinity(), sum = 0;
            for (index_t j = first; j <= row; ++j) {
                double dot = 0;
                for (index_t d = 0; d < dim; ++d) dot += at(p.q, q + d) * at(p.k, j * key_width + key + d);
                weight.push_back(p.scale * dot);
                highest = std::max(highest, weight.back());
            }
            for (double& w : weight) sum += w = std::exp(w - highest);
            for (index_t j = first; j <= row; ++j)
                for (index_t d = 0; d < dim; ++d)
                    o[static_cast<std::size_t>(q + d)] +=
                        weight[static_cast<std::size_t>(j - first)] / sum * at(p.v, j * key_width + key + d);
        }
    return o;
}

/// Queries on `sharding`, keys and values on `everywhere`.
template <class T, cpx::any_sharding Q, cpx::any_sharding K>
std::vector<T> run(attention<T> const& p, Q const& sharding, K const& everywhere) {
    return on_ranks::assemble<T>(sharding, {p.queries()}, [&](cpx::threads& comm) {
        int const rank = comm.rank();
        auto const q = on_ranks::take(p.q, {p.queries()}, sharding, rank);
        auto const k = on_ranks::take(p.k, {p.keys()}, everywhere, rank),
                   v = on_ranks::take(p.v, {p.keys()}, everywhere, rank);
        auto o = on_ranks::poisoned<T>(sharding, rank, q.width());
        cpx::attention(q.view(), k.view(), v.view(), p.heads, p.scale, o.view());
        return o;
    });
}

template <class T, cpx::any_sharding Q>
std::vector<T> run_gathered(attention<T> const& p, Q const& sharding) {
    return run(p, sharding, cpx::replicated<>(sharding.ranks(), p.batch));
}

template <class T>
std::vector<T> run_by_heads(attention<T> const& p, int ranks) {
    cpx::head_sharded<> const split(ranks, p.batch, {p.queries(), p.keys(), p.keys()});
    return run(p, split, split);
}

} // namespace reference
