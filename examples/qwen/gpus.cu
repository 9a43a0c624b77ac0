// SPDX-License-Identifier: Apache-2.0
// Runs the model over GPUs, a rank each: threads of one process, or processes.
#include "cuda/rank.hpp"

#include <chrono>
#include <numeric>

namespace qwen {

int gpus() { return cpx::cuda::devices(); }

outcome run_on_gpus(checkpoint<float> const& model, input const& in, strategy const& how, group const& on,
                    bool backward, products by) {
    std::chrono::minutes const deadline(1); // for which others wait if one fails alone
    std::vector<std::unique_ptr<cpx::nccl>> of_threads;
    std::unique_ptr<cpx::nccl> of_process;
    if (on.launched) {
        cpx::cuda::use_device(on.launched->rank() % gpus());
        of_process = cpx::nccl::over(*on.launched, deadline);
    } else {
        std::vector<int> devices(static_cast<std::size_t>(on.ranks));
        std::iota(devices.begin(), devices.end(), 0);
        of_threads = cpx::nccl::all(devices, deadline);
    }
    std::barrier everyone(on.launched ? 1 : on.ranks);
    bool const fixed = by == products::fixed;
    return run_ranks<gpu_rank>(
        model.config, in, how, on, gpu_rank::chunk, backward, fixed, by_table, [&](cpx::transport_ref& rank) {
            auto& comm = on.launched ? *of_process : *of_threads[static_cast<std::size_t>(rank.rank())];
            cpx::cuda::use_device(comm.device());
            return gpu_rank(model, comm, on.experts_over, everyone, fixed);
        });
}

} // namespace qwen
