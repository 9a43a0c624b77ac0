// SPDX-License-Identifier: Apache-2.0
// Positions of text, images and videos on a GPU: 131072 tokens in 64 sequences with 1000 items, replayed with another
// packing. Exit code 1 if they are not those of the host.
#include "../../harness/graph.hpp"
#include "timing.hpp"

#include <cpx/cuda/mrope.hpp>
#include <cpx/layout/sequential.hpp>

#include <chrono>
#include <cstdio>

namespace {

using cpx::index_t;
using cpx::cuda::buffer;
namespace cuda = cpx::cuda;

constexpr index_t tokens = 131072, sequences = 64, image_count = 600, video_count = 100, frames = 4;
constexpr cpx::media_tokens placeholders{151655, 151656};

/// A packing: in every sequence 9 or 10 images and 1 or 2 videos, whose frames have 3 tokens of text between them.
struct packing {
    cpx::thd batch{{0}};
    std::vector<std::int64_t> ids, images, videos;
    cpx::media items;

    explicit packing(std::uint64_t seed) {
        auto const random = [&](index_t from, index_t to) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            return from + static_cast<index_t>(seed >> 33) % (to - from + 1);
        };
        std::vector<index_t> offsets{0};
        std::vector<cpx::media_grid> of_images, of_videos;
        auto const put = [&](index_t id, index_t count) { ids.insert(ids.end(), static_cast<std::size_t>(count), id); };
        for (index_t s = 0; s < sequences; ++s) {
            index_t const mean = tokens / sequences, odd = s % 2;
            index_t const length = odd ? 2 * mean - (offsets[offsets.size() - 1] - offsets[offsets.size() - 2])
                                       : random(mean - 400, mean + 400);
            auto const share = [&](index_t all) { return all * (s + 1) / sequences - all * s / sequences; };
            for (index_t i = 0; i < share(image_count); ++i) {
                of_images.push_back({1, 2 * random(4, 9), 2 * random(4, 9)});
                put(7, 3);
                put(placeholders.image, of_images.back().height * of_images.back().width / 4);
            }
            for (index_t i = 0; i < share(video_count); ++i) {
                of_videos.push_back({frames, 2 * random(4, 9), 2 * random(4, 9)});
                for (index_t frame = 0; frame < frames; ++frame) {
                    put(7, 3);
                    put(placeholders.video, of_videos.back().height * of_videos.back().width / 4);
                }
            }
            offsets.push_back(offsets.back() + length);
            put(7, offsets.back() - std::ssize(ids));
        }
        auto const list = [](auto const& grids) {
            std::vector<std::int64_t> numbers;
            for (auto const& g : grids) numbers.insert(numbers.end(), {g.time, g.height, g.width});
            return numbers;
        };
        images = list(of_images), videos = list(of_videos);
        items = cpx::media(of_images, of_videos);
        batch = cpx::thd(offsets);
    }
};

template <class T>
std::span<T const> view(buffer<T> const& b) {
    return {b.data(), static_cast<std::size_t>(b.size())};
}

/// Returns in how many numbers the device's positions and deltas differ from the host's.
index_t differences(cuda::rank_positions& p, packing const& b) {
    p.check();
    auto const whole = cpx::mrope_positions(b.items, b.batch, b.ids, placeholders);
    std::vector<std::int32_t> axes(static_cast<std::size_t>(3 * tokens));
    std::vector<index_t> deltas(static_cast<std::size_t>(sequences));
    cuda::check(cudaMemcpy(axes.data(), p.axes().data(), axes.size() * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
    cuda::check(cudaMemcpy(deltas.data(), p.deltas().data(), deltas.size() * 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
    index_t count = 0;
    for (std::size_t i = 0; i < axes.size(); ++i) count += axes[i] != whole.axes[i];
    for (std::size_t i = 0; i < deltas.size(); ++i) count += deltas[i] != whole.deltas[i];
    return count;
}

} // namespace

int main(int argc, char** argv) {
    if (int const code = timing::refusal(argc, argv); code >= 0) return code;
    cuda::stream const stream;
    packing const first(1), second(2);
    cuda::rank_positions p({tokens, sequences, sequences, image_count, video_count}, 0, 1);
    buffer<std::int64_t> ids(tokens), offsets(sequences + 1), of_images(3 * image_count), of_videos(3 * video_count);
    auto const write = [&](packing const& b) {
        ids.write(b.ids), offsets.write(b.batch.offsets());
        of_images.write(b.images), of_videos.write(b.videos);
        cuda::check(cudaMemset(const_cast<std::int32_t*>(p.axes().data()), 0x7f, 12 * tokens), "cudaMemset");
        cuda::check(cudaDeviceSynchronize(), "cudaMemset");
    };
    auto const sharding = [](packing const& b) { return cpx::shard(b.batch, cpx::sequential<1>()); };
    cuda::device_grids const grids{view(of_images), view(of_videos), {}};
    auto const find = [&] { p.set(sharding(first), view(offsets), std::span<std::int64_t const>(), stream); };
    auto const compute = [&] {
        p.count(view(ids), placeholders, grids, stream);
        p.place(view(ids), placeholders, p.counts(), stream);
    };
    auto const both = [&] { find(), compute(); };
    write(first);
    both();
    stream.synchronize();
    harness::graph const all(stream, both), without(stream, compute);
    index_t wrong[2] = {};
    for (int i = 0; i < 2; ++i) {
        write(i == 0 ? first : second);
        all.launch(stream);
        stream.synchronize();
        wrong[i] = differences(p, i == 0 ? first : second);
    }
    auto const us = [&](auto&& f) { return 1e3f * timing::median_ms(stream, f, [&] { stream.synchronize(); }); };
    std::printf("%s: %ld tokens, %ld sequences, %ld images, %ld videos of %ld frames; wrong numbers: %ld, of another "
                "packing %ld\n",
                timing::device_name().c_str(), long(tokens), long(sequences), long(image_count), long(video_count),
                long(frames), long(wrong[0]), long(wrong[1]));
    float const figure = us([&] { all.launch(stream); });
    std::printf("%-64s %8.1f us\n", "a graph: grids, segments from cu_seqlens, counts, positions", figure);
    std::printf("%-64s %8.1f us\n", "a graph: without segments", us([&] { without.launch(stream); }));
    std::printf("%-64s %8.1f us\n", "launches: all", us(both));
    std::printf("%-64s %8.1f us\n", "launches: segments alone", us(find));
    auto const host = sharding(second);
    std::printf("%-64s %8.1f us\n", "launches: segments listed by the host", us([&] { p.set(host, stream); }));
    auto const begin = std::chrono::steady_clock::now();
    static_cast<void>(cpx::mrope_positions(second.items, second.batch, second.ids, placeholders));
    std::printf("%-64s %8.1f us\n", "one thread of the host",
                1e6 * std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    timing::limits limits;
    limits.at_most("positions of 131072 tokens, 64 sequences, 1000 items", figure, 60, "us");
    limits.print();
    return wrong[0] + wrong[1] == 0 ? 0 : 1;
}
