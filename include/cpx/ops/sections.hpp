// SPDX-License-Identifier: Apache-2.0
// Which rows of a per-channel weight a rank needs when channels are heads.
#pragma once

#include <cpx/core/overlap.hpp>
#include <cpx/core/row_buffer.hpp>
#include <cpx/layout/sharding.hpp>
#include <cpx/ops/local/sums.hpp>

#include <algorithm>

namespace cpx {

namespace detail {

/// Calls `f(first, heads, section, local)` for the heads that `rank` holds of each section, whose rows of a weight are
/// those from `first` and, where the rank's rows stand together, from `local` on.
template <any_sharding S, class F>
void each_section(S const& sharding, int rank, std::span<section const> sections, F&& f) {
    index_t first = 0, local = 0;
    for (section const& s : sections) {
        range const heads = sharding.heads(rank, s.heads);
        f(first, heads, s, local);
        first += s.heads * s.width;
        local += heads.size() * s.width;
    }
}

/// As `local_rows`, of a weight in any memory that fits.
template <class T, any_sharding S, any_memory M>
row_buffer<T, M> held_rows(M const& memory, S const& sharding, int rank, std::span<section const> sections,
                           rows<T const> weight, caller here) {
    index_t held = 0;
    for (section const& s : sections) held += sharding.heads(rank, s.heads).size() * s.width;
    row_buffer<T, M> made(memory, held, weight.width(), here);
    each_section(sharding, rank, sections, [&](index_t first, range heads, section const& s, index_t local) {
        index_t const count = heads.size() * s.width;
        for_each_element(
            memory, count, weight.width(),
            rowwise::copy<T>{weight.sub(first + heads.first * s.width, count), made.view().sub(local, count)}, here);
    });
    return made;
}

} // namespace detail

/// Returns the rows of `weight` that belong to the heads that `rank` holds of `sections`, in local order.
///
/// weight: (sum of heads * width over the sections, columns), such as the (channels, K) weight of a convolution over
/// q, k and v, or the (heads, 1) decay of a recurrence. All rows, unless the sharding is by heads.
template <class T, any_sharding S>
std::vector<std::remove_const_t<T>> local_rows(S const& sharding, int rank, std::span<section const> sections,
                                               rows<T> weight, caller here = caller::here()) {
    detail::require_rank("local_rows", rank, sharding.ranks(), here);
    index_t const all = detail::columns_of("local_rows", sections, here);
    require(all == weight.count(), "local_rows", "rows of the weight", all, weight.count(), here);
    auto const held = detail::held_rows<std::remove_const_t<T>>(host_memory(), sharding, rank, sections, weight, here);
    return {held.view().data(), held.view().data() + held.count() * held.width()};
}
template <class X = detail::any>
detail::refused local_rows(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) {
    static_assert(detail::never<X>, "cpx: local_rows(sharding, rank, sections, weight) wants a sharding, this rank, "
                                    "sections and rows of the weight: rows(list, width), or a tensor's data()");
    return {};
}

namespace detail {

/// Returns whether a rank adds its rows to sums over all ranks. On `replicated`, where all have the same, rank 0 alone.
template <any_sharding S>
bool adds_rows(S const& sharding, int rank) {
    return !S::every_row || rank == 0 || !sharding.sections().empty();
}

} // namespace detail

/// Returns the heads of a section for which `rank` speaks: those that it holds and no lower rank does. All of them
/// where tokens are sharded, for there every rank has rows of its own.
template <any_sharding S>
range owned_heads(S const& sharding, int rank, index_t heads) {
    range owned = sharding.heads(rank, heads);
    if (S::every_row && rank > 0) owned.first = std::max(owned.first, sharding.heads(rank - 1, heads).last);
    return {std::min(owned.first, owned.last), owned.last};
}

namespace detail {

/// As `add_local_rows`, of rows in any memory that fit.
template <class T, any_sharding S, any_memory M>
void add_held_rows(M const& memory, S const& sharding, int rank, std::span<section const> sections, rows<T const> held,
                   rows<T> weight, caller here) {
    each_section(sharding, rank, sections, [&](index_t first, range heads, section const& s, index_t local) {
        range const owned = owned_heads(sharding, rank, s.heads);
        index_t const count = owned.size() * s.width;
        for_each_element(memory, count, weight.width(),
                         rowwise::add<T>{held.sub(local + (owned.first - heads.first) * s.width, count),
                                         weight.sub(first + owned.first * s.width, count)},
                         here);
    });
}

} // namespace detail

/// Adds local rows to the places from which `local_rows` took them: a rank's share of the gradient to that of the
/// weight.
///
/// Where several ranks hold a head and so its whole gradient, the lowest of them adds it (see `owned_heads`): the sum
/// over all ranks counts it once.
template <class T, any_sharding S>
void add_local_rows(S const& sharding, int rank, std::span<section const> sections,
                    std::type_identity_t<rows<T const>> local, rows<T> weight, caller here = caller::here()) {
    detail::require_rank("add_local_rows", rank, sharding.ranks(), here);
    index_t const all = detail::columns_of("add_local_rows", sections, here);
    index_t held = 0;
    for (section const& s : sections) held += sharding.heads(rank, s.heads).size() * s.width;
    require(all == weight.count() && held == local.count(), "add_local_rows",
            "rows of the weight, and of it on this rank", std::to_string(all) + " and " + std::to_string(held),
            std::to_string(weight.count()) + " and " + std::to_string(local.count()), here);
    require(local.width() == weight.width(), "add_local_rows", "width of the rows on this rank", weight.width(),
            local.width(), here);
    detail::require_apart("add_local_rows", {{"weight", weight}}, {{"local", local}}, here);
    detail::add_held_rows(host_memory(), sharding, rank, sections, local, weight, here);
}
template <class X = detail::any>
detail::refused add_local_rows(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {},
                               detail::any = {}) {
    static_assert(detail::never<X>, "cpx: add_local_rows(sharding, rank, sections, local, weight) wants a sharding, "
                                    "this rank, sections, and rows of its share and of the weight: rows(list, width)");
    return {};
}

} // namespace cpx
