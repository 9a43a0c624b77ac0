// SPDX-License-Identifier: Apache-2.0
// One of two layouts, chosen for each run by its length.
#pragma once

#include <cpx/core/refused.hpp>
#include <cpx/layout/concept.hpp>

#include <concepts>
#include <type_traits>

namespace cpx {

/// One of two layouts over the same ranks; which one is a value.
template <layout A, layout B>
struct either {
    A first;
    B second;
    bool use_first = true;

    CPX_HOST_DEVICE constexpr int ranks() const { return use_first ? first.ranks() : second.ranks(); }
    CPX_HOST_DEVICE constexpr int chunks() const { return use_first ? first.chunks() : second.chunks(); }
    CPX_HOST_DEVICE constexpr int owner(int chunk) const {
        return use_first ? first.owner(chunk) : second.owner(chunk);
    }
    CPX_HOST_DEVICE constexpr int chunks(int rank) const
        requires listed_layout<A> && listed_layout<B>
    {
        return use_first ? first.chunks(rank) : second.chunks(rank);
    }
    CPX_HOST_DEVICE constexpr int chunk(int rank, int i) const
        requires listed_layout<A> && listed_layout<B>
    {
        return use_first ? first.chunk(rank, i) : second.chunk(rank, i);
    }
};

namespace detail {

template <class A, class B, class Rule>
inline constexpr bool chooses = layout<A> && layout<B> && std::predicate<Rule, index_t>;

} // namespace detail

/// `A` for the runs whose length the rule accepts, `B` for the others.
///
/// miles' rule, "zigzag where 2W divides the length, else sequential":
///
///     cpx::by_length rule{cpx::zigzag<4>{}, cpx::sequential<4>{}, [](cpx::index_t n) { return n % 8 == 0; }};
///
/// `Rule` must be copyable and give the same answer on every rank.
template <class A, class B, class Rule>
struct by_length {
    A first;
    B second;
    Rule rule;

    CPX_HOST_DEVICE constexpr int ranks() const { return first.ranks(); }
    CPX_HOST_DEVICE constexpr auto at(index_t n) const { return either<A, B>{first, second, rule(n)}; }

    /// Rules of a type that holds nothing are one rule; of others, shardings compare what they choose.
    friend constexpr bool operator==(by_length const& a, by_length const& b)
        requires std::equality_comparable<A> && std::equality_comparable<B> && std::is_empty_v<Rule>
    {
        return a.first == b.first && a.second == b.second;
    }
};

/// Says what is wanted, and is a layout, so that nothing more is said.
template <class A, class B, class Rule>
    requires(!detail::chooses<A, B, Rule>)
struct by_length<A, B, Rule> {
    static_assert(detail::never<by_length>,
                  "cpx: by_length{a, b, rule} wants two layouts, and which lengths are cut by the first: "
                  "[](cpx::index_t n) { return n % 8 == 0; }");
    template <class... X>
    constexpr by_length(X const&...) {}

    constexpr int ranks() const { return 1; }
    constexpr int chunks() const { return 1; }
    constexpr int owner(int) const { return 0; }
};

template <class A = detail::any, class B = detail::any, class Rule = detail::any>
by_length(A = {}, B = {}, Rule = {}) -> by_length<A, B, Rule>;

} // namespace cpx
