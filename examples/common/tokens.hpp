// SPDX-License-Identifier: Apache-2.0
// The packed batch of a reference file.
#pragma once

#include "numbers.hpp"

#include <cpx/core/thd.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/safetensors.hpp>

#include <string>
#include <vector>

namespace examples {

struct packed_tokens {
    cpx::thd batch;
    std::vector<cpx::index_t> ids; ///< one a token, of the vocabulary
};

/// Reads input_ids and cu_seqlens. Throws `cpx::error` that names the file if they do not fit each other or the model.
inline packed_tokens read_tokens(cpx::safetensors const& file, cpx::hf_config const& config) {
    auto const ids = file.read<cpx::index_t>("input_ids", {-1});
    auto const offsets = file.read<cpx::index_t>("cu_seqlens", {-1});
    auto const batch = blame(file.where(), [&] { return cpx::thd::from_offsets(offsets, std::ssize(ids)); });
    cpx::require(batch.tokens() == std::ssize(ids), file.where().c_str(), "last offset in cu_seqlens",
                 "the number of input_ids, " + std::to_string(ids.size()), batch.tokens());
    for (std::size_t i = 0; i < ids.size(); ++i)
        if (ids[i] < 0 || ids[i] >= *config.vocab_size)
            throw cpx::error(file.where(), "token id " + std::to_string(i),
                             "0 to " + std::to_string(*config.vocab_size - 1), std::to_string(ids[i]));
    return {batch, ids};
}

} // namespace examples
