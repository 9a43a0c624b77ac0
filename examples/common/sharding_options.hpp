// SPDX-License-Identifier: Apache-2.0
// Shardings from the command line: text such as "zigzag:batch", "aligned:64" and "0,8,20" becomes cpx types.
#pragma once

#include "numbers.hpp"

#include <cpx/cpx.hpp>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace examples {

inline constexpr int most_ranks = 4096;  ///< of a sharding that is only looked at
inline constexpr int most_threads = 256; ///< ranks that run, a thread each
inline constexpr cpx::index_t most_tokens = 1'000'000'000'000;

/// Returns the batch of the offsets (cu_seqlens) in "0,8,20".
inline cpx::thd parse_batch(std::string_view text, char const* where = "--cu") {
    return blame(where, [&] { return cpx::thd(parse_numbers(text, 0, most_tokens, where, "offset")); });
}

inline int parse_ranks(std::string_view text, int most, char const* where = "--ranks") {
    return static_cast<int>(parse_number(text, 1, most, where, "number of ranks"));
}

/// Where chunks may begin: anywhere, or at multiples of `unit` tokens of a sequence.
struct cut_spec {
    int unit = 0; ///< 0: balanced
};

/// Returns what "balanced" or "aligned:64" means.
inline cut_spec parse_cut(std::string_view text, char const* where = "--cut") {
    if (text == "balanced") return {};
    std::string_view const aligned = "aligned:";
    cpx::require(text.substr(0, aligned.size()) == aligned, where, "cut", "balanced or aligned:UNIT", cpx::quote(text));
    return {static_cast<int>(parse_number(text.substr(aligned.size()), 1, 1 << 30, where, "unit of aligned"))};
}

/// A sharding by name, not yet bound to a batch.
struct sharding_spec {
    char const* option = "--layout"; ///< that it comes from
    std::string name = "zigzag";
    cpx::scope scope = cpx::scope::sequence;
    std::vector<int> owners = {};            ///< of a table: the rank that owns each chunk
    std::vector<cpx::section> sections = {}; ///< of head_sharded; if empty, one head of width 1 a rank

    /// Returns whether every rank holds every token, so that there is nothing to cut.
    bool every_row() const { return name == "head_sharded" || name == "replicated"; }
};

/// Returns what "NAME", "NAME:sequence" or "NAME:batch" means. A table lists its owners: "table=0,1,1,0:batch".
inline sharding_spec parse_sharding(std::string_view text, char const* where = "--layout") {
    auto const fail = [&](char const* what, char const* expected, std::string_view got) {
        throw cpx::error(where, what, expected, cpx::quote(got));
    };
    std::size_t const colon = text.find(':');
    std::string_view name = text.substr(0, colon);
    sharding_spec spec;
    if (name.substr(0, 6) == "table=") {
        for (cpx::index_t const owner : parse_numbers(name.substr(6), 0, most_ranks - 1, where, "owner of chunk"))
            spec.owners.push_back(static_cast<int>(owner));
        name = "table";
    } else if (name != "sequential" && name != "zigzag" && name != "striped" && name != "head_sharded" &&
               name != "replicated") {
        fail("layout", "sequential, zigzag, striped, table=OWNER,OWNER..., head_sharded or replicated", name);
    }
    spec.option = where;
    spec.name = name;
    if (colon == std::string_view::npos) return spec;

    std::string_view const scope = text.substr(colon + 1);
    if (spec.every_row()) fail("scope of a sharding in which every rank holds every token", "none", scope);
    if (scope != "sequence" && scope != "batch") fail("scope", "sequence or batch", scope);
    if (scope == "batch") spec.scope = cpx::scope::batch;
    return spec;
}

/// Returns "zigzag over sequence", "table 0,1,1,0 over batch" or "head_sharded".
inline std::string describe(sharding_spec const& spec) {
    std::string text = spec.name;
    std::size_t const shown = std::min<std::size_t>(spec.owners.size(), 16);
    for (std::size_t c = 0; c < shown; ++c) text.append(c ? "," : " ").append(std::to_string(spec.owners[c]));
    if (shown < spec.owners.size()) text += ",...";
    if (spec.every_row()) return text;
    return text + (spec.scope == cpx::scope::batch ? " over batch" : " over sequence");
}

/// The type of all shardings by tokens that are known at run time only: any layout is a table of owners, and a cut at
/// multiples of 1 token is balanced. Programs that know their layout write its own type instead, as new_layout does, or
/// choose one by `with_layout`.
template <cpx::scope Scope>
using token_sharding = cpx::sharding<cpx::table, Scope, cpx::aligned<cpx::dynamic>>;

/// Calls `f(layout)` with a layout that has a name, of its own type: 3 types. Returns its result. Throws `cpx::error`
/// on any other.
template <class F>
auto with_named_layout(sharding_spec const& spec, int ranks, F&& f) {
    if (spec.name == "sequential") return f(cpx::sequential<>(ranks));
    if (spec.name == "zigzag") return f(cpx::zigzag<>(ranks));
    cpx::require(spec.name == "striped", spec.option, "layout", "sequential, zigzag or striped", spec.name);
    return f(cpx::striped<>(ranks));
}
/// Returns the layout that `spec` says. Throws `cpx::error` on head_sharded and replicated, which have no chunks.
inline cpx::table make_layout(sharding_spec const& spec, int ranks) {
    cpx::require(!spec.every_row(), spec.option, "layout", "sequential, zigzag, striped or table", spec.name);
    if (spec.name == "table") return blame(spec.option, [&] { return cpx::table(ranks, spec.owners); });
    return with_named_layout(spec, ranks, [](auto const& layout) { return cpx::table(layout); });
}

/// Calls `f(sharding)` with the sharding by tokens that `spec` and `cut` describe: 2 types. Returns its result.
template <class F>
auto with_token_sharding(cpx::thd const& batch, sharding_spec const& spec, cut_spec cut, int ranks, F&& f) {
    cpx::table const layout = make_layout(spec, ranks);
    cpx::aligned<cpx::dynamic> const where(std::max(cut.unit, 1));
    if (spec.scope == cpx::scope::batch) return f(token_sharding<cpx::scope::batch>(batch, layout, where));
    return f(token_sharding<cpx::scope::sequence>(batch, layout, where));
}

/// As `with_token_sharding` of a layout that has a name, whose own type it has over sequences: 4 types. The cut is a
/// value.
template <class F>
auto with_layout(cpx::thd const& batch, sharding_spec const& spec, cut_spec cut, int ranks, F&& f) {
    cpx::aligned<cpx::dynamic> const where(std::max(cut.unit, 1));
    if (spec.scope == cpx::scope::batch)
        return f(token_sharding<cpx::scope::batch>(batch, make_layout(spec, ranks), where));
    return with_named_layout(spec, ranks, [&](auto const& layout) { return f(cpx::shard(batch, layout, where)); });
}

/// As `with_token_sharding`, for head_sharded and replicated, too: 4 types.
template <class F>
auto with_sharding(cpx::thd const& batch, sharding_spec const& spec, cut_spec cut, int ranks, F&& f) {
    if (spec.name == "replicated") return f(cpx::replicated<>(ranks, batch));
    if (spec.name != "head_sharded") return with_token_sharding(batch, spec, cut, ranks, f);
    std::vector<cpx::section> const one_head_a_rank{{ranks, 1}};
    return f(cpx::head_sharded<>(ranks, batch, spec.sections.empty() ? one_head_a_rank : spec.sections));
}

} // namespace examples
