// SPDX-License-Identifier: Apache-2.0
// Names that the host's pass and the GPUs' share.
#pragma once

#include <cpx/core/index.hpp>

#include <string>

namespace qwen3_5 {

/// How full attention sees all keys: keys and values gathered on every rank, or queries, keys and values by heads.
enum class attention_by { gather, heads };

inline std::string layer_name(cpx::index_t layer, char const* suffix) {
    return "model.layers." + std::to_string(layer) + '.' + suffix;
}

} // namespace qwen3_5
