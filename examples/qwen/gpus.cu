// SPDX-License-Identifier: Apache-2.0
// Runs the model over GPUs: one process, a thread each.
#include "cuda/rank.hpp"

#include <chrono>
#include <numeric>

namespace qwen {

int gpus() { return cpx::cuda::devices(); }

outcome run_on_gpus(checkpoint<float> const& model, input const& in, strategy const& how, int ranks, bool backward,
                    products by) {
    std::vector<int> devices(static_cast<std::size_t>(ranks));
    std::iota(devices.begin(), devices.end(), 0);
    auto const group = cpx::nccl::all(devices, std::chrono::minutes(1)); // for which others wait if one fails alone
    std::barrier everyone(ranks);
    bool const fixed = by == products::fixed;
    return run_ranks<gpu_rank>(model.config, in, how, ranks, gpu_rank::chunk, backward, fixed, by_table,
                               [&](cpx::threads& threads) {
                                   auto& comm = *group[static_cast<std::size_t>(threads.rank())];
                                   cpx::cuda::use_device(comm.device());
                                   return gpu_rank(model, comm, everyone, fixed);
                               });
}

} // namespace qwen
