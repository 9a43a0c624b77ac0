// SPDX-License-Identifier: Apache-2.0
// What a pass must move, counted from who owns which rows: no plan is asked.
#pragma once

#include "names.hpp"

#include <cpx/cpx.hpp>
#include <cpx/model/qwen_config.hpp>
#include <cpx/ops/gated_delta_net.hpp>

namespace qwen {

/// Returns the sizes of the model's gated delta nets.
inline cpx::gated_delta_net_config delta_net_config(cpx::qwen_config const& c, cpx::index_t chunk) {
    return {c.hidden_size,
            {c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim},
            c.linear_conv_kernel_dim,
            chunk,
            c.rms_norm_eps};
}

/// What one forward pass must move, counted from who owns which rows, what gathering whole tensors would move, and how
/// evenly ranks have rows.
struct needs {
    cpx::volume least, all_gather;
    double imbalance = 1; ///< the most rows of a rank where linear attention runs, by the mean
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

/// Counts a forward pass of a batch of text whose hidden states enter zigzag over sequences.
needs count_forward(cpx::qwen_config const& config, strategy const& how, cpx::thd const& batch, int ranks,
                    cpx::index_t chunk);

} // namespace qwen
