// SPDX-License-Identifier: Apache-2.0
// What a layout is: how many ranks, how many chunks, and who owns each chunk.
#pragma once

#include <cpx/core/config.hpp>
#include <cpx/core/error.hpp>
#include <cpx/core/extent.hpp>
#include <cpx/core/index.hpp>

#include <concepts>
#include <limits>
#include <type_traits>

namespace cpx {

/// Cuts a run of tokens into `chunks()` chunks and gives chunk `c` to rank `owner(c)`, `0 <= owner(c) < ranks()`.
///
/// Everything else (rows, segments, routes, halos, carries, pictures) is derived from these three functions.
/// A rank holds its chunks in ascending order. Chunks may be empty.
template <class L>
concept layout = std::copyable<L> && requires(L const l, int chunk) {
    { l.ranks() } -> std::same_as<int>;
    { l.chunks() } -> std::same_as<int>;
    { l.owner(chunk) } -> std::same_as<int>;
};

/// A layout that also lists the chunks of a rank: `chunk(rank, i)` is its i-th, ascending, `0 <= i < chunks(rank)`.
///
/// No layout needs it. With it, what follows from a layout is found among the chunks of one rank, which may be few
/// however many ranks there are; without it, among all chunks. Law: it lists the chunks that `owner` gives the rank.
template <class L>
concept listed_layout = layout<L> && requires(L const l, int number) {
    { l.chunks(number) } -> std::same_as<int>;
    { l.chunk(number, number) } -> std::same_as<int>;
};

/// Chooses a layout from the length of the run that it cuts: `at(n)` is the layout of a run of `n` tokens.
///
/// For rules such as "zigzag where 2W divides the length, else sequential"; see `either`.
template <class R>
concept length_rule = std::copy_constructible<R> && requires(R const r, index_t n) {
    { r.ranks() } -> std::same_as<int>;
    { r.at(n) } -> layout;
};

/// What a sharding can be made of.
template <class P>
concept layout_policy = layout<P> || length_rule<P>;

/// A layout that is wholly known at compile time, so that routes between two of them are, too.
template <class L>
concept static_layout = layout<L> && std::is_empty_v<L> && std::default_initializable<L> &&
                        requires { typename std::integral_constant<int, L{}.ranks()>; };

/// Returns the layout with which `policy` cuts a run of `n` tokens.
template <layout_policy P>
CPX_HOST_DEVICE constexpr auto layout_at(P const& policy, [[maybe_unused]] index_t n) {
    if constexpr (layout<P>)
        return policy;
    else
        return policy.at(n);
}

/// The number of ranks of a policy or sharding if its type tells, else `dynamic`.
template <class P>
inline constexpr int static_ranks = [] {
    if constexpr (requires { P::static_ranks; })
        return P::static_ranks;
    else if constexpr (std::is_empty_v<P> && requires { typename std::integral_constant<int, P{}.ranks()>; })
        return P{}.ranks();
    else
        return dynamic;
}();

namespace detail {

inline constexpr int most_chunks = std::numeric_limits<int>::max();

/// Returns `ranks`. Throws `cpx::error`, on the host, if there are none, or if `chunks` chunks for each of them are too
/// many to count.
CPX_HOST_DEVICE constexpr int ranks_with(int chunks, int ranks, char const* layout, caller here) {
    if (int const most = most_chunks / chunks; ranks > most || ranks < 1) {
#ifndef __CUDA_ARCH__
        // Not by require: of a constant, compilers would tell how the text is made.
        throw error(layout, "ranks", ranks < 1 ? "at least 1" : "at most " + std::to_string(most),
                    std::to_string(ranks), here);
#endif
    }
    return ranks;
}

} // namespace detail

} // namespace cpx
