// SPDX-License-Identifier: Apache-2.0
// Runs the model over GPUs: one process, a thread each.
#include "gpus.hpp"

#include "cuda/pass.hpp"

#include <chrono>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <thread>

namespace qwen {

namespace {

/// Returns what `rank` holds of numbers of the whole batch, on its GPU.
cpx::cuda::buffer<cpx::index_t> take(gpu::entry_sharding const& entry, int rank, std::vector<cpx::index_t> const& all) {
    std::vector<cpx::index_t> own;
    entry.for_each_piece(
        rank, [&](cpx::range rows) { own.insert(own.end(), all.begin() + rows.first, all.begin() + rows.last); });
    return gpu::upload(own);
}

/// What one rank computes; the log-probabilities are those of the whole batch.
gpu_output run_rank(gpu_input const& in, cpx::nccl& comm, std::barrier<>& everyone) {
    cpx::cuda::use_device(comm.device());
    int const rank = comm.rank();
    auto const entry = cpx::shard(in.batch, cpx::zigzag<>(comm.ranks()));
    gpu::site at(in, entry, comm, everyone);
    auto const ids = take(entry, rank, in.ids), labels = take(entry, rank, in.labels);
    gpu::movement gather(at, relayout(entry, cpx::replicated<>(comm.ranks(), in.batch), rank), 1);
    gpu::device_rows<float> const all(in.batch.tokens(), 1);
    auto const run = [&]<class How, class Linear, class Mix>(How, Linear const& linear, Mix const& mix) -> gpu_output {
        gpu::pass<How, Linear, Mix> step(at, in.how.attention, linear, mix);
        at.meet();
        auto const own = step.forward(ids, labels);
        cpx::tally const sent = at.sent; // what follows is not the model's
        gather(own, all);
        comm.wait(at.stream);
        at.meet(); // nobody frees memory while another one's exchange still runs
        return {all.read(), sent, at.states};
    };
    return with_linear(in.how, entry, gpu::delta_sections(in.config), run);
}

/// Calls `f(comm)` for every rank in a thread of its own. Throws what failed first, with its rank.
template <class F>
void on_every_gpu(int ranks, std::barrier<>& everyone, F&& f) {
    std::vector<int> devices(static_cast<std::size_t>(ranks));
    std::iota(devices.begin(), devices.end(), 0);
    auto group = cpx::nccl::all(devices, std::chrono::minutes(1)); // for which others wait if one fails alone
    std::mutex guard;
    std::string failure;
    {
        std::vector<std::jthread> threads;
        for (auto& of_rank : group)
            threads.emplace_back([&] {
                try {
                    f(*of_rank);
                } catch (std::exception const& e) {
                    {
                        std::lock_guard const lock(guard);
                        if (failure.empty()) failure = "rank " + std::to_string(of_rank->rank()) + ": " + e.what();
                    }
                    everyone.arrive_and_drop();
                }
            });
    }
    if (!failure.empty()) throw std::runtime_error(failure);
}

} // namespace

int gpus() { return cpx::cuda::devices(); }

gpu_output forward_on_gpus(gpu_input const& in, int ranks) {
    gpu_output result;
    std::barrier everyone(ranks);
    std::mutex guard;
    on_every_gpu(ranks, everyone, [&](cpx::nccl& comm) {
        auto of_rank = run_rank(in, comm, everyone);
        std::lock_guard const lock(guard);
        result.sent += of_rank.sent;
        result.states += of_rank.states;
        if (comm.rank() == 0) result.log_probabilities = std::move(of_rank.log_probabilities);
    });
    return result;
}

} // namespace qwen
