// SPDX-License-Identifier: Apache-2.0
// Shardings by tokens described by values, made twice: by cpx, and token by token from the definitions of the words.
#pragma once

#include <cpx/cpx.hpp>

#include <support/erased.hpp>
#include <support/packings.hpp>
#include <support/random.hpp>

namespace support {

enum class shape { sequential, zigzag, striped, table, by_length };

struct spec {
    shape layout = shape::sequential;
    cpx::scope cuts = cpx::scope::sequence;
    int unit = 0; ///< 0: balanced, else aligned to so many tokens
    int ranks = 1;
    std::vector<int> owners{}; ///< of a table
};

inline std::string text(spec const& s) {
    static constexpr char const* names[] = {"sequential", "zigzag", "striped", "table", "by_length"};
    std::string result = names[static_cast<int>(s.layout)];
    result += '<' + std::to_string(s.ranks) + (s.cuts == cpx::scope::sequence ? "> over sequence" : "> over batch");
    if (s.unit > 0) result += ", aligned<" + std::to_string(s.unit) + '>';
    return result;
}

/// The rule of `shape::by_length`: zigzag for even lengths, sequential for odd ones.
inline bool even(cpx::index_t n) { return n % 2 == 0; }

namespace detail {

template <cpx::scope Scope, class P>
any_tokens make(cpx::thd const& batch, P const& policy, int unit) {
    if (unit == 0) return cpx::shard<Scope>(batch, policy);
    if (unit == 2) return cpx::shard<Scope>(batch, policy, cpx::aligned<2>{});
    if (unit == 64) return cpx::shard<Scope>(batch, policy, cpx::aligned<64>{});
    return cpx::shard<Scope>(batch, policy, cpx::aligned<cpx::dynamic>{unit});
}

template <cpx::scope Scope>
any_tokens make(cpx::thd const& batch, spec const& s) {
    switch (s.layout) {
    case shape::sequential: return make<Scope>(batch, cpx::sequential<>{s.ranks}, s.unit);
    case shape::zigzag: return make<Scope>(batch, cpx::zigzag<>{s.ranks}, s.unit);
    case shape::striped: return make<Scope>(batch, cpx::striped<>{s.ranks}, s.unit);
    case shape::table: return make<Scope>(batch, cpx::table(s.ranks, s.owners), s.unit);
    default:
        return make<Scope>(batch, cpx::by_length{cpx::zigzag<>{s.ranks}, cpx::sequential<>{s.ranks}, &even}, s.unit);
    }
}

} // namespace detail

inline any_tokens make(cpx::thd const& batch, spec const& s) {
    return s.cuts == cpx::scope::sequence ? detail::make<cpx::scope::sequence>(batch, s)
                                          : detail::make<cpx::scope::batch>(batch, s);
}

/// Returns the owners of the chunks of a run of `n` tokens.
inline std::vector<int> chunk_owners(spec const& s, cpx::index_t n) {
    std::vector<int> owners;
    int const w = s.ranks;
    bool const folded = s.layout == shape::zigzag || (s.layout == shape::by_length && even(n));
    if (s.layout == shape::table) return s.owners;
    owners.reserve(4 * static_cast<std::size_t>(w));
    if (s.layout == shape::striped)
        for (int deal = 0; deal < 4; ++deal)
            for (int r = 0; r < w; ++r) owners.push_back(r);
    else
        for (int r = 0; r < w; ++r) owners.push_back(r);
    if (folded)
        for (int r = w; r-- > 0;) owners.push_back(r);
    return owners;
}

/// Returns the nearest multiple of `unit`, the greater of two that are as near, but at most `n`.
inline cpx::index_t nearest_multiple(cpx::index_t t, cpx::index_t unit, cpx::index_t n) {
    cpx::index_t best = 0;
    while (best + unit <= t) best += unit;
    if ((t - best) * 2 >= unit) best += unit;
    return best < n ? best : n;
}

/// Returns the rank of every global row, from the definitions alone: cut the run, move the cuts, count those before.
inline std::vector<int> brute_owners(cpx::thd const& batch, spec const& s) {
    std::vector<int> result;
    result.reserve(static_cast<std::size_t>(batch.tokens()));
    std::vector<cpx::index_t> cuts;
    auto const cut_run = [&](cpx::index_t first, cpx::index_t last) {
        std::vector<int> const owners = chunk_owners(s, last - first);
        cpx::index_t const chunks = static_cast<cpx::index_t>(owners.size());
        cuts.clear();
        for (cpx::index_t c = 1; c < chunks; ++c) {
            cpx::index_t at = first + (last - first) * c / chunks;
            if (s.unit > 0 && at < last) {
                cpx::index_t q = 0;
                while (batch.offset(q + 1) <= at) ++q;
                at = batch.offset(q) + nearest_multiple(at - batch.offset(q), s.unit, batch.length(q));
            }
            cuts.push_back(at);
        }
        for (cpx::index_t row = first; row < last; ++row) {
            std::size_t chunk = 0;
            for (cpx::index_t const at : cuts) chunk += at <= row;
            result.push_back(owners[chunk]);
        }
    };
    if (s.cuts == cpx::scope::batch)
        cut_run(0, batch.tokens());
    else
        for (cpx::index_t q = 0; q < batch.sequences(); ++q) cut_run(batch.offset(q), batch.offset(q + 1));
    return result;
}

/// Returns the five layouts over both scopes with each of the cuts, on `ranks` ranks.
inline std::vector<spec> all_specs(int ranks, std::vector<int> const& units, std::uint64_t seed = 1) {
    splitmix numbers(seed * 1000 + static_cast<std::uint64_t>(ranks));
    std::vector<spec> list;
    for (shape const layout : {shape::sequential, shape::zigzag, shape::striped, shape::table, shape::by_length})
        for (cpx::scope const cuts : {cpx::scope::sequence, cpx::scope::batch})
            for (int const unit : units)
                list.push_back({layout, cuts, unit, ranks,
                                random_owners(numbers, ranks, static_cast<int>(numbers.between(1, 3 * ranks)))});
    return list;
}

} // namespace support
