// SPDX-License-Identifier: Apache-2.0
// Times attention of one new token a sequence over what a device keeps, against a copy of as many bytes.
#include "random.hpp"
#include "timing.hpp"

#include <cpx/cuda/cached_attention.hpp>

#include <array>
#include <cstdio>

namespace {

using cpx::index_t, cpx::rows;
namespace gpu = cpx::cuda;

template <class element>
void table(char const* name, gpu::stream const& stream, double copy) {
    gpu::memory const in(stream);
    std::printf("%-12s %-14s %9s %9s %9s   %s\n", "sequences", "heads", "us", "GB/s", "of copy", name);
    for (auto const& of_caches : {std::array<index_t, 2>{1, 32768}, {16, 8192}, {64, 8192}, {4, 131072}})
        for (auto const& of_heads : {std::array<index_t, 3>{16, 2, 256}, {32, 8, 128}, {32, 32, 128}}) {
            index_t const sequences = of_caches[0], tokens = of_caches[1];
            index_t const heads = of_heads[0], key_heads = of_heads[1], dim = of_heads[2];
            index_t const width = key_heads * dim, bytes = 2 * sequences * tokens * width * index_t{sizeof(element)};
            index_t const caches = (index_t{1} << 28) / bytes + 1; // what is read again has left the GPU's own cache
            index_t const all = caches * sequences * tokens;
            auto const k = timing::random<element>(all * width, 1, -1, 1),
                       v = timing::random<element>(all * width, 2, -1, 1),
                       q = timing::random<element>(sequences * heads * dim, 3, -1, 1);
            auto o = in.room<element>(sequences * heads * dim);
            auto const view = [](auto const& x, index_t columns) {
                return rows<element const>(x.data(), x.size() / columns, columns);
            };
            gpu::cached_rows<element> const of{
                in, view(q, heads * dim), view(k, width), view(v, width), 0, heads, 0, heads / key_heads, dim, 0.0625};
            index_t next = 0;
            float const ms = timing::median_ms(
                stream,
                [&] {
                    std::vector<gpu::cached_query> queries;
                    for (index_t s = 0; s < sequences; ++s)
                        queries.push_back({s, (next * sequences + s) * tokens, tokens});
                    next = (next + 1) % caches;
                    gpu::attend_over_cache(of, queries, rows<element>(o.data(), sequences, heads * dim), rows<float>());
                },
                [] {}, 10, 5);
            double const rate = static_cast<double>(bytes) / (static_cast<double>(ms) * 1e-3);
            std::string const shape = std::to_string(heads) + "/" + std::to_string(key_heads) + " of " +
                                      std::to_string(dim),
                              batch = std::to_string(sequences) + " x " + std::to_string(tokens);
            std::printf("%-12s %-14s %9.1f %9.0f %8.1f%%\n", batch.c_str(), shape.c_str(),
                        static_cast<double>(ms) * 1e3, rate * 1e-9, 100 * rate / copy);
            std::fflush(stdout);
        }
}

} // namespace

int main() {
    if (gpu::devices() == 0) {
        std::printf("cpx: skipped, no GPU\n");
        return 0;
    }
    gpu::stream const stream;
    double const copy = timing::copy_bandwidth(stream);
    std::printf("%s, a copy reads and writes %.0f GB/s\n", timing::device_name().c_str(), copy * 1e-9);
    table<__nv_bfloat16>("bfloat16", stream, copy);
    table<float>("float", stream, copy);
    return 0;
}
