// SPDX-License-Identifier: Apache-2.0
// Times attention on one GPU, forward and backward, by plain kernels and on tensor cores, against what these multiply,
// and the forward by cuDNN, where its frontend was found and it is there.
#include "../../harness/cudnn_attention.hpp"
#include "timing.hpp"

#include <cpx/core/thd.hpp>
#include <cpx/cuda/attention.hpp>
#include <cpx/cuda/elements.hpp>
#include <cpx/layout/head_sharded.hpp>

#include <array>
#include <cstdio>
#include <initializer_list>
#include <utility>

namespace {

using cpx::index_t, cpx::rows;
namespace gpu = cpx::cuda;
using element = __nv_bfloat16;

/// Numbers from -1 to 1.
struct noise {
    rows<element> to;
    std::uint64_t seed;
    __device__ void operator()(index_t row, index_t column) const {
        std::uint64_t z = (static_cast<std::uint64_t>(row * to.width() + column) + 1) * 0x9e3779b97f4a7c15ull * seed;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        to(row, column) = static_cast<element>(static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-23f - 1);
    }
};

/// What is timed. All queries and keys are on the rank.
struct work {
    char const* name;
    std::vector<index_t> lengths;
    index_t query_heads, key_heads, dim;
};

/// Milliseconds of a forward, and of a backward: gradients of queries, then of keys and values.
struct times {
    double forward, queries, keys;
};

/// Once after another time; a plain kernel of seconds is not asked twice.
template <class F>
double ms_of(cudaStream_t stream, bool plain, F const& f) {
    if (!plain)
        return static_cast<double>(timing::median_ms(
            stream, f, [] {}, 2, 5));
    gpu::event begin, end;
    begin.record(stream);
    f();
    end.record(stream);
    float ms = 0;
    gpu::check(cudaEventSynchronize(end), "cudaEventSynchronize");
    gpu::check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    return static_cast<double>(ms);
}

/// Returns 0 of a backward that the path does not have, and of a forward that `engine` does not serve.
times time(work const& w, gpu::attention_path path, gpu::attention_engine* engine, gpu::stream const& stream) {
    cpx::thd const batch = cpx::thd::from_lengths(w.lengths);
    cpx::replicated<> const whole(1, batch);
    gpu::memory const in(stream);
    index_t const tokens = batch.tokens(), width = w.query_heads * w.dim, key_width = w.key_heads * w.dim;
    auto const random = [&](index_t columns, std::uint64_t seed) {
        auto made = in.room<element>(tokens * columns);
        rows<element> const view(made.data(), tokens, columns);
        gpu::for_each_element(in, tokens, columns, noise{view, 2 * seed + 1});
        return made;
    };
    auto q = random(width, 1), k = random(key_width, 2), v = random(key_width, 3), dout = random(width, 4);
    auto o = in.room<element>(tokens * width), dq = in.room<element>(tokens * width),
         dk = in.room<element>(tokens * key_width), dv = in.room<element>(tokens * key_width);
    auto lse = in.room<float>(tokens * w.query_heads), delta = in.room<float>(tokens * w.query_heads);
    auto const view = [&](auto& x) { return rows(x.data(), tokens, x.size() / tokens); };
    index_t const group = w.query_heads / w.key_heads;
    gpu::attention_rows<element, cpx::replicated<>, cpx::replicated<>> const of{
        whole,
        whole,
        0,
        in,
        view(q),
        view(k),
        view(v),
        0,
        w.query_heads,
        0,
        group,
        w.dim,
        1 / std::sqrt(static_cast<double>(w.dim)),
        path,
        engine};
    bool const plain = path == gpu::attention_path::plain;
    bool taken = true;
    times t{};
    t.forward = ms_of(stream, plain, [&] { taken &= gpu::attend(of, view(o), view(lse)) == path; });
    if (engine) return taken ? t : times{};
    gpu::delta_of_rows<element>(in, view(o), view(dout), w.dim, view(delta));
    cpx::kernels::attended_gradients<element> const from{view(dout), view(lse), view(delta)};
    t.queries = ms_of(stream, plain, [&] { taken &= gpu::attend_backward_queries(of, from, view(dq)) == path; });
    t.keys =
        ms_of(stream, plain, [&] { taken &= gpu::attend_backward_keys(of, from, group, view(dk), view(dv)) == path; });
    cpx::require(taken, "bench", "path", plain ? "plain" : "tensor cores", "the other one");
    return t;
}

} // namespace

int main(int argc, char** argv) {
    if (int const code = timing::refusal(argc, argv); code >= 0) return code;
    gpu::stream const stream;
    double const limit = 989.4; // TFLOP/s of dense products of 16 bits, H100 SXM and H200 (their data sheets)
    std::printf(
        "%s\ncausal attention, bfloat16, every head of a rank; of limit: of %.0f TFLOP/s, products of what is not "
        "masked, 2 forward, 5 back\n",
        timing::device_name().c_str(), limit);
    std::printf("%-12s %-14s %-13s %-9s %10s %9s %9s   %s\n", "sequences", "heads", "path", "", "ms", "TFLOP/s",
                "of limit", "queries + keys, ms");
    timing::limits limits;
    std::vector<work> all; // heads of Qwen3.5, and of Qwen3
    for (auto const& [name, lengths] : std::initializer_list<std::pair<char const*, std::vector<index_t>>>{
             {"1 x 8192", {8192}},
             {"4 x 8192", {8192, 8192, 8192, 8192}},
             {"1 x 32768", {32768}},
             {"8, 32768", {12288, 7001, 5120, 3333, 2500, 1536, 987, 3}}})
        for (auto const& [queries, keys, dim] : {std::array{16, 2, 256}, std::array{32, 8, 128}})
            all.push_back({name, lengths, queries, keys, dim});
    auto const cudnn = cudnn_attention();
    for (work const& w : all) {
        double pairs = 0; // of a query and a key that it sees
        for (index_t const n : w.lengths) pairs += static_cast<double>(n) * static_cast<double>(n + 1) / 2;
        double const flop = 2 * pairs * static_cast<double>(w.query_heads * w.dim); // of a product
        times of[3];
        char const* const names[] = {"plain", "tensor cores", "cuDNN"};
        for (auto const path :
             {gpu::attention_path::plain, gpu::attention_path::tensor_cores, gpu::attention_path::engine}) {
            bool const asks = path == gpu::attention_path::engine;
            if (asks && !cudnn) continue;
            times const t = of[static_cast<int>(path)] = time(w, path, asks ? cudnn.get() : nullptr, stream);
            std::string const heads =
                std::to_string(w.query_heads) + "/" + std::to_string(w.key_heads) + " of " + std::to_string(w.dim);
            for (bool const back : {false, true}) {
                double const ms = back ? t.queries + t.keys : t.forward;
                if (ms == 0) continue;
                double const rate = flop * (back ? 5 : 2) / (ms * 1e-3) * 1e-12;
                std::printf("%-12s %-14s %-13s %-9s %10.3f %9.1f %8.1f%%", w.name, heads.c_str(),
                            names[static_cast<int>(path)], back ? "backward" : "forward", ms, rate, 100 * rate / limit);
                if (back) std::printf("   %.3f + %.3f", t.queries, t.keys);
                std::printf("\n");
            }
            std::fflush(stdout);
        }
        std::string const what = std::string(w.name) + ", " + std::to_string(w.query_heads) + " heads, ";
        limits.at_least(what + "forward, times the plain one's speed", of[0].forward / of[1].forward, 3, "x");
        limits.at_least(what + "backward, times the plain one's speed",
                        (of[0].queries + of[0].keys) / (of[1].queries + of[1].keys), 3, "x");
    }
    limits.print();
    return 0;
}
