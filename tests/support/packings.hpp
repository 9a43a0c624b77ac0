// SPDX-License-Identifier: Apache-2.0
// All ways to pack a few tokens into sequences.
#pragma once

#include <cpx/core/thd.hpp>

#include <string>

namespace support {

/// By how many tokens exhaustive tests stop earlier: sanitizers make them some twenty times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr cpx::index_t fewer = 3;
#else
inline constexpr cpx::index_t fewer = 0;
#endif

/// Calls `f(thd)` with every way to write `tokens` as a sum of positive lengths, each in its order.
template <class F>
void for_each_composition(cpx::index_t tokens, F&& f) {
    std::uint64_t const cuts = tokens > 0 ? std::uint64_t{1} << (tokens - 1) : 1;
    for (std::uint64_t cut_after = 0; cut_after < cuts; ++cut_after) {
        std::vector<cpx::index_t> offsets{0};
        for (cpx::index_t t = 1; t < tokens; ++t)
            if (cut_after >> (t - 1) & 1) offsets.push_back(t);
        if (tokens > 0) offsets.push_back(tokens);
        f(cpx::thd(offsets));
    }
}

/// Calls `f(thd)` with every composition, and with each of them again with sequences of length 0 among the others.
///
/// Where the empty sequences stand goes through all places, and every fifth time they stand everywhere.
template <class F>
void for_each_packing(cpx::index_t tokens, F&& f) {
    std::size_t turn = 0;
    for_each_composition(tokens, [&](cpx::thd const& batch) {
        f(batch);
        std::vector<cpx::index_t> offsets(batch.offsets().begin(), batch.offsets().end());
        std::size_t const places = offsets.size();
        if (++turn % 5 == 0)
            for (std::size_t i = 0; i < places; ++i) offsets.push_back(batch.offsets()[i]);
        else
            offsets.push_back(batch.offsets()[turn % places]);
        std::ranges::sort(offsets);
        f(cpx::thd(offsets));
    });
}

/// Returns "3 0 5".
inline std::string text(cpx::thd const& batch) {
    std::string lengths;
    for (cpx::index_t s = 0; s < batch.sequences(); ++s) lengths += (s ? " " : "") + std::to_string(batch.length(s));
    return lengths;
}

inline cpx::thd lengths(std::vector<cpx::index_t> const& list) { return cpx::thd::from_lengths(list); }

} // namespace support
