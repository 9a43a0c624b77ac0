// SPDX-License-Identifier: Apache-2.0
// What the host's pass and the GPUs' share: names, and the ways to run the model.
#pragma once

#include "../common/sharding_options.hpp"

#include <string>

namespace qwen {

/// How full attention sees all keys: keys and values gathered on every rank, or queries, keys and values by heads.
enum class attention_by { gather, heads };

/// One way to run the model under context parallelism.
struct strategy {
    attention_by attention = attention_by::gather;
    examples::sharding_spec linear = {}; ///< of linear attention; named "none" where no layer has it
    bool serial = false;
    examples::cut_spec cut = {};
    bool rule_in_half = false; ///< between rows of bfloat16

    /// Returns whether the recurrence runs by heads; then there is no carry and no cut.
    bool by_heads() const { return linear.name == "head_sharded"; }
    /// Returns whether no layer has linear attention.
    bool without() const { return linear.name == "none"; }
    /// Whether ranks hand states on.
    bool hands_on() const { return !by_heads() && !without(); }
};

/// Calls `f(carry, linear, mix)`: the shardings on which linear attention and its recurrence run, the same unless that
/// runs by heads, of these `sections`. Hidden states enter on `entry`.
template <class Entry, class F>
auto with_linear(strategy const& how, Entry const& entry, std::vector<cpx::section> const& sections, F const& f) {
    if (how.by_heads()) return f(cpx::serial(), entry, cpx::head_sharded<>(entry.ranks(), entry.batch(), sections));
    return examples::with_layout(entry.batch(), how.linear, how.cut, entry.ranks(), [&](auto const& linear) {
        return how.serial ? f(cpx::serial(), linear, linear) : f(cpx::scan(), linear, linear);
    });
}

/// Where hidden states enter: the type of linear attention on zigzag, too.
using entry_sharding = cpx::sharding<cpx::zigzag<>, cpx::scope::sequence, cpx::aligned<cpx::dynamic>>;

inline entry_sharding enter(cpx::thd const& batch, int ranks) {
    return entry_sharding(batch, cpx::zigzag<>(ranks), cpx::aligned<cpx::dynamic>(1));
}

inline std::string layer_name(cpx::index_t layer, char const* suffix) {
    return "model.layers." + std::to_string(layer) + '.' + suffix;
}

} // namespace qwen
