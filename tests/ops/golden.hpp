// SPDX-License-Identifier: Apache-2.0
// Golden files: tests/golden/README.md says what they hold.
#pragma once

#include <cpx/model/json.hpp>
#include <cpx/model/safetensors.hpp>

#include <support/files.hpp>

#include <ops/reference.hpp>

namespace golden {

using cpx::index_t;

inline cpx::safetensors open(std::string const& name) {
    return cpx::safetensors(std::string(support::golden_dir) + '/' + name + ".safetensors");
}

inline cpx::thd batch_of(cpx::safetensors const& file) { return cpx::thd(file.read<index_t>("cu_seqlens")); }

/// Returns the hidden states and the weights of a layer, or of "grad." their gradients.
inline reference::layer<double> read_layer(cpx::safetensors const& file, std::string const& prefix = "weight.") {
    auto const config = cpx::json_value::parse(file.metadata("config"), "config");
    auto const get = [&](char const* key) { return config.get<index_t>(key); };
    reference::layer<double> p{batch_of(file),
                               {get("hidden_size"),
                                {get("linear_num_key_heads"), get("linear_num_value_heads"), get("linear_key_head_dim"),
                                 get("linear_value_head_dim")},
                                get("linear_conv_kernel_dim"),
                                16,
                                config.get<double>("rms_norm_eps")},
                               file.read<double>(prefix == "grad." ? "d_hidden_states" : "hidden_states"),
                               {}};
    for (char const* name : {"in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight",
                             "conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight"})
        p.weights.push_back(file.read<double>(prefix + name));
    return p;
}

} // namespace golden
