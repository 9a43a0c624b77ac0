// SPDX-License-Identifier: Apache-2.0
// Counts what a pass must move, for every way to run it.
#include "needs.hpp"

namespace qwen {

namespace {

template <class Entry, class Linear, class Mix>
needs count_on(cpx::qwen_config const& c, attention_by attention, Entry const& entry, Linear const& linear,
               Mix const& mix, cpx::gated_delta_net_config const& net) {
    needs n;
    cpx::index_t const v = net.heads.value_heads * net.heads.value_dim;
    cpx::index_t const q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
    cpx::index_t const conv = 2 * net.heads.key_heads * net.heads.key_dim + v;
    cpx::index_t const ranks = entry.ranks(), before = net.kernel - 1;
    cpx::head_sharded<> const o(static_cast<int>(ranks), entry.batch(), {{c.num_attention_heads, c.head_dim}});
    cpx::section const query{c.num_attention_heads, c.head_dim}, key{c.num_key_value_heads, c.head_dim};
    cpx::index_t most = 0;
    for (int rank = 0; rank < ranks; ++rank) most = std::max(most, linear.rows(rank));
    if (cpx::index_t const tokens = entry.batch().tokens(); tokens > 0)
        n.imbalance = static_cast<double>(most * ranks) / static_cast<double>(tokens);
    cpx::layer_type before_this = cpx::layer_type::full_attention;
    for (cpx::layer_type const type : c.layer_types) {
        bool const full = type == cpx::layer_type::full_attention;
        if (!full && type != before_this) { // a stretch of linear attention: there and back
            count(entry, linear, c.hidden_size, n);
            count(linear, entry, c.hidden_size, n);
        }
        before_this = type;
        if (full && attention == attention_by::gather) {
            count(entry, cpx::replicated<>(static_cast<int>(ranks), entry.batch()), 2 * kv, n);
        } else if (full) {
            count(entry, cpx::head_sharded<>(static_cast<int>(ranks), entry.batch(), {query, key, key}), q + 2 * kv, n);
            count(o, entry, q, n);
        } else if constexpr (Mix::every_row) {
            count(linear, mix, conv + 2 * net.heads.value_heads, n);
            count(cpx::head_sharded<>(static_cast<int>(ranks), entry.batch(), net.output_sections()), linear, v, n);
        } else {
            cpx::index_t const halo = halo_lower_bound(mix, before);
            n.least.rows += halo;
            n.least.elements += halo * conv;
            cpx::index_t tails = 0; // the last rows of every segment, which would be gathered on every rank
            for (int rank = 0; rank < ranks; ++rank)
                for (auto const& segment : segments(mix, rank)) tails += std::min(before, segment.count);
            n.all_gather.rows += halo ? (ranks - 1) * tails : 0;
            n.all_gather.elements += halo ? (ranks - 1) * tails * conv : 0;
        }
    }
    return n;
}

} // namespace

needs count_forward(cpx::qwen_config const& config, strategy const& how, cpx::thd const& batch, int ranks,
                    cpx::index_t chunk) {
    auto const net = delta_net_config(config, chunk);
    auto const entry = enter(batch, ranks);
    auto const count = [&](auto const&, auto const& linear, auto const& mix) {
        return count_on(config, how.attention, entry, linear, mix, net);
    };
    if (how.without()) return count(0, entry, entry);
    return with_linear(how, entry, net.sections(), by_layout, count);
}

} // namespace qwen
