// SPDX-License-Identifier: Apache-2.0
// What a call of the gated delta rule's operator takes of the host, and of the device, on one rank: what
// python/bench/overhead_cuda.py prints of cpx.torch.
#include <cpx/cpx.hpp>
#include <cpx/cuda/shared_communicator.hpp>
#include <cpx/ops/cuda/gated_delta_rule.hpp>

#include "random.hpp"
#include "timing.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

using cpx::index_t, cpx::rows;
namespace cuda = cpx::cuda;
using element = __nv_bfloat16;

/// Returns the microseconds that the host takes for one of ten calls, the median of many tens, while the device has
/// nothing else to do.
template <class F>
double host_us(cudaStream_t stream, F&& f) {
    constexpr int calls = 10, rounds = 101;
    std::vector<double> times;
    for (int round = 0; round < rounds; ++round) {
        cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        auto const begin = std::chrono::steady_clock::now();
        for (int i = 0; i < calls; ++i) f();
        auto const spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin);
        times.push_back(spent.count() / calls * 1e6);
    }
    std::ranges::sort(times);
    return times[times.size() / 2];
}

/// Prints the times of a forward that saves nothing, of one that saves what the backward needs, and of the backward.
void time(cuda::communicator& comm, std::vector<index_t> const& lengths, cpx::delta_rule_heads const& heads,
          bool normalise, bool of_host) {
    auto const sharding = cpx::shard(cpx::thd::from_lengths(lengths), cpx::zigzag<1>());
    auto const plan = cpx::carry<cpx::scan>(sharding, 0);
    index_t const tokens = sharding.rows(0), keys = heads.key_heads * heads.key_dim,
                  values = heads.value_heads * heads.value_dim, gates = heads.value_heads;
    float const most = std::sqrt(3.0f / static_cast<float>(heads.key_dim)); // of vectors that are one long
    auto const q = timing::random<element>(tokens * keys, 1, -most, most),
               k = timing::random<element>(tokens * keys, 2, -most, most),
               v = timing::random<element>(tokens * values, 3, -1, 1),
               dout = timing::random<element>(tokens * values, 6, -1, 1);
    auto const g = timing::random<float>(tokens * gates, 4, -1, 0),
               beta = timing::random<float>(tokens * gates, 5, 0, 1);
    cuda::buffer<element> const o(tokens * values), dq(tokens * keys), dk(tokens * keys), dv(tokens * values);
    cuda::buffer<float> const dg(tokens * gates), dbeta(tokens * gates);
    auto const on = [&](auto const& b) {
        using T = std::remove_reference_t<decltype(*b.data())>;
        return cpx::sharded(rows<T>(b.data(), tokens, b.size() / tokens), sharding, 0, comm.memory());
    };
    using S = std::remove_cvref_t<decltype(sharding)>;
    cpx::delta_rule_options options;
    options.qk_l2norm = normalise;
    cuda::state_exchange by(comm);
    auto const forward = [&](cpx::delta_rule_saved<element, cuda::memory>* saved) {
        cpx::gated_delta_rule(plan,
                              cpx::delta_rule_tensors<element, S, cuda::memory>{
                                  on(q), on(k), on(v), on(g), on(beta), on(o), {}, {}, saved},
                              heads, options, by);
    };
    cpx::delta_rule_saved<element, cuda::memory> kept;
    kept.keeps = true;
    forward(&kept);
    auto const saves = [&] {
        cpx::delta_rule_saved<element, cuda::memory> saved;
        saved.keeps = true;
        forward(&saved);
    };
    auto const back = [&] {
        cpx::gated_delta_rule_backward(plan,
                                       cpx::delta_rule_tensors<element, S, cuda::memory>{
                                           on(q), on(k), on(v), on(g), on(beta), on(o), {}, {}, &kept},
                                       cpx::delta_rule_gradient_tensors<element, S, cuda::memory>{
                                           on(dout), on(dq), on(dk), on(dv), on(dg), on(dbeta), {}, {}},
                                       heads, options, by);
    };
    auto const took = [&](auto&& f) {
        if (of_host) return host_us(comm.stream(), f);
        return static_cast<double>(timing::median_ms(
            comm.stream(), f, [] {}, 10));
    };
    double const alone = took([&] { forward(nullptr); }), saving = took(saves), backward = took(back);
    std::printf("C++    %-6s %2td x %-6td %-5s %10.*f %10.*f %10.*f\n", of_host ? "us" : "ms", std::ssize(lengths),
                lengths[0], normalise ? "norms" : "", of_host ? 1 : 3, alone, of_host ? 1 : 3, saving, of_host ? 1 : 3,
                backward);
    std::fflush(stdout);
}

} // namespace

int main(int argc, char** argv) try {
    if (int const code = timing::refusal(argc, argv); code >= 0) return code;
    cpx::nccl joined(cpx::nccl::new_id(), 0, 1);
    cpx::cuda::stream const stream;
    cpx::cuda::communicator comm(joined, stream);
    std::printf("gated delta rule, one rank, %s: us of the host for a call, of tiny tensors; ms of the device\n",
                timing::device_name().c_str());
    std::printf("%-28s %10s %10s %10s\n", "", "forward", "saving", "backward");
    for (bool const normalise : {false, true}) {
        time(comm, {20}, {2, 2, 16, 16}, normalise, true);
        for (auto const& lengths : {std::vector<index_t>(1, 32768), std::vector<index_t>(4, 8192)})
            time(comm, lengths, {16, 32, 128, 128}, normalise, false);
    }
    comm.wait();
} catch (std::exception const& error) {
    std::fprintf(stderr, "bench.cuda.delta_rule_calls: %s\n", error.what());
    return 1;
}
