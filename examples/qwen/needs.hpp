// SPDX-License-Identifier: Apache-2.0
// What a pass must move, counted from who owns which rows: no plan is asked.
#pragma once

#include "names.hpp"

#include <cpx/model/qwen_config.hpp>
#include <cpx/ops.hpp>

namespace qwen {

/// Returns the sizes of the model's gated delta nets.
inline cpx::gated_delta_net_config delta_net_config(cpx::qwen_config const& c, cpx::index_t chunk) {
    return {c.hidden_size,
            {c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim},
            c.linear_conv_kernel_dim,
            chunk,
            c.rms_norm_eps};
}

/// What one forward pass must move, counted from who owns which rows, and what gathering whole tensors would move.
struct needs {
    cpx::volume least, all_gather;
};

/// Adds what moving one tensor of `width` between two shardings takes.
template <class From, class To>
void count(From const& from, To const& to, cpx::index_t width, needs& n) {
    cpx::volume const least = lower_bound(from, to, width);
    cpx::index_t const everywhere = (from.ranks() - 1) * from.batch().tokens();
    n.least.rows += least.rows;
    n.least.elements += least.elements;
    if (least.rows == 0) return;
    n.all_gather.rows += everywhere;
    n.all_gather.elements += everywhere * width;
}

/// Counts a forward pass of a batch of text.
template <class Entry, class Linear, class Mix>
needs count_forward(cpx::qwen_config const& c, attention_by attention, Entry const& entry, Linear const& linear,
                    Mix const& mix, cpx::gated_delta_net_config const& net) {
    needs n;
    cpx::index_t const v = net.heads.value_heads * net.heads.value_dim;
    cpx::index_t const q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
    cpx::index_t const conv = 2 * net.heads.key_heads * net.heads.key_dim + v;
    cpx::index_t const ranks = entry.ranks(), before = net.kernel - 1;
    cpx::head_sharded<> const o(static_cast<int>(ranks), entry.batch(), {{c.num_attention_heads, c.head_dim}});
    cpx::section const query{c.num_attention_heads, c.head_dim}, key{c.num_key_value_heads, c.head_dim};
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

} // namespace qwen
