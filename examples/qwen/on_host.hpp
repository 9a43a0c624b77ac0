// SPDX-License-Identifier: Apache-2.0
// Runs a model over threads of the host.
#pragma once

#include "host.hpp"
#include "run.hpp"

namespace qwen {

template <class T>
outcome run(checkpoint<T> const& model, input const& in, strategy const& how, int ranks, cpx::index_t chunk,
            bool backward) {
    auto const make = [&](cpx::threads& threads) { return host_rank<T>(model, threads, chunk); };
    return run_ranks<host_rank<T>>(model.config, in, how, ranks, chunk, backward, true, by_layout, make);
}

} // namespace qwen
