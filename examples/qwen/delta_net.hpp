// SPDX-License-Identifier: Apache-2.0
// The sizes of a model's gated delta nets.
#pragma once

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

} // namespace qwen
