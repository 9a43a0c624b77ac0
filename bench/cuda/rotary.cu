// SPDX-License-Identifier: Apache-2.0
// Rotary embedding and rows moved by a list, beside a copy on the device. Bytes: of the 32-byte sectors touched. Exit
// code 1 if a result is wrong.
#include "../../harness/graph.hpp"
#include "timing.hpp"

#include <cpx/cuda/rotary.hpp>
#include <cpx/layout/zigzag.hpp>

#include <chrono>
#include <cmath>
#include <cstdio>

namespace {

using cpx::index_t;
using cpx::rows;
using cpx::cuda::buffer;
namespace cuda = cpx::cuda;

/// Returns a number that looks random, from -4 to 4.
__host__ __device__ float value_at(index_t i) {
    auto z = static_cast<std::uint64_t>(i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 29)) * 0xbf58476d1ce4e5b9ull;
    return static_cast<float>(static_cast<std::int32_t>(z >> 32)) * 0x1p-29f;
}

template <class T>
__global__ void fill_values(T* to, index_t count) {
    index_t const step = static_cast<index_t>(gridDim.x) * blockDim.x;
    for (index_t i = static_cast<index_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        to[i] = static_cast<T>(value_at(i));
}
template <class T>
void fill(buffer<T> const& to) {
    fill_values<<<1024, 256>>>(to.data(), to.size());
    cuda::check(cudaDeviceSynchronize(), "fill_values");
}
template <class T>
void poison(buffer<T> const& to) {
    cuda::check(cudaMemset(to.data(), 0xff, static_cast<std::size_t>(to.size()) * sizeof(T)), "cudaMemset");
    cuda::check(cudaDeviceSynchronize(), "cudaMemset");
}
template <class T>
std::vector<float> values_of(buffer<T> const& from, index_t first, index_t count) {
    std::vector<T> values(static_cast<std::size_t>(count));
    cuda::check(cudaMemcpy(values.data(), from.data() + first, values.size() * sizeof(T), cudaMemcpyDeviceToHost),
                "cudaMemcpy");
    return {values.begin(), values.end()};
}
template <class T>
float rounded(float value) {
    return static_cast<float>(static_cast<T>(value));
}

/// Returns the milliseconds of one of the `calls` calls that `f()` makes: a graph of 20 times f, median of 9 rounds.
template <class F>
float milliseconds(cuda::stream const& stream, int calls, F&& f) {
    harness::graph const graph(stream, [&] {
        for (int i = 0; i < 20; ++i) f();
    });
    return timing::median_ms(
               stream, [&] { graph.launch(stream); }, [] {}, 2) /
           static_cast<float>(20 * calls);
}

double copy_speed = 0; // bytes a second, read and written
bool all_right = true;

/// Returns the percentage of a copy's speed.
double print(std::string const& name, float ms, double bytes, double error, double allowed) {
    double const speed = bytes / (ms * 1e-3), of_copy = 100 * speed / copy_speed;
    bool const right = error <= allowed;
    all_right = all_right && right;
    std::printf("%-58s %9.4f ms %8.1f GB/s %6.1f %% of copy  error %.1e %s\n", name.c_str(), ms, speed * 1e-9, of_copy,
                error, right ? "ok" : "WRONG");
    return of_copy;
}

enum class from { list, three_axes, segments };

/// q and k of `tokens` rows, two sets of them in turn, so that no cache holds what comes next. Returns the percentage
/// of a copy's speed.
template <class T>
double rotate(cuda::stream const& stream, char const* name, index_t tokens, index_t q_heads, index_t k_heads,
              index_t head_dim, index_t half, bool in_place, from kind = from::list, bool backward = false) {
    std::vector<double> frequencies;
    for (index_t i = 0; i < half; ++i)
        frequencies.push_back(std::pow(1e7, -static_cast<double>(i) / static_cast<double>(half)));
    auto const axes = kind == from::three_axes
                          ? cpx::rotary_axes({half - 2 * (half / 3), half / 3, half / 3}, cpx::axis_order::interleaved)
                          : std::vector<int>();
    cuda::rotary_pairs const pairs(frequencies, axes);
    std::vector<std::int64_t> host(static_cast<std::size_t>(3 * tokens));
    for (index_t axis = 0; axis < 3; ++axis)
        for (index_t row = 0; row < tokens; ++row)
            host[static_cast<std::size_t>(axis * tokens + row)] = (row * 31 + axis * 1009) % 1000000;
    std::vector<cpx::segment> segments;
    if (kind == from::segments)
        for (index_t row = 0, count = 0; row < tokens; row += count) {
            count = std::min(tokens - row, tokens / 11 + 1);
            segments.push_back({0, row * 7, row, count});
            for (index_t i = 0; i < count; ++i) host[static_cast<std::size_t>(row + i)] = row * 7 + i;
        }
    buffer<std::int64_t> const list{std::span<std::int64_t const>(host)};
    cuda::segment_table const table(segments);
    cuda::rotary_positions const positions =
        kind == from::segments ? cuda::rotary_positions(table)
        : kind == from::list
            ? cuda::rotary_positions(std::span<std::int64_t const>(list.data(), static_cast<std::size_t>(tokens)))
            : cuda::rotary_positions(rows<std::int64_t const>(list.data(), 3, tokens));

    index_t const widths[] = {q_heads * head_dim, k_heads * head_dim};
    std::vector<buffer<T>> x, y;
    std::vector<cuda::rotated<T>> sets[2];
    for (auto& set : sets)
        for (index_t const width : widths) {
            x.emplace_back(tokens * width), fill(x.back());
            if (!in_place) y.emplace_back(tokens * width), poison(y.back());
            set.push_back({rows<T const>(x.back().data(), tokens, width),
                           rows<T>((in_place ? x : y).back().data(), tokens, width)});
        }
    auto const call = [&](std::vector<cuda::rotated<T>> const& set) {
        if (backward)
            cuda::rotary_backward(std::span<cuda::rotated<T> const>(set), head_dim, pairs, positions, stream);
        else
            cuda::rotary(std::span<cuda::rotated<T> const>(set), head_dim, pairs, positions, stream);
    };

    call(sets[0]);
    stream.synchronize();
    double error = 0; // in units of what T and 2e-6 of the inputs allow
    for (index_t sample = 0; sample < 64; ++sample)
        for (std::size_t t = 0; t < 2; ++t) {
            index_t const row = sample * 7919 % tokens;
            auto const found = values_of((in_place ? x : y)[t], row * widths[t], widths[t]);
            for (index_t c = 0; c < widths[t]; ++c) {
                index_t const channel = c % head_dim, pair = channel % std::max<index_t>(half, 1);
                double const self = rounded<T>(value_at(row * widths[t] + c));
                double exact = self, other = 0;
                if (channel < 2 * half) {
                    other = rounded<T>(value_at(row * widths[t] + (channel < half ? c + half : c - half)));
                    index_t const axis = axes.empty() ? 0 : axes[static_cast<std::size_t>(pair)];
                    double const angle = static_cast<double>(host[static_cast<std::size_t>(axis * tokens + row)]) *
                                         frequencies[static_cast<std::size_t>(pair)] * (backward ? -1 : 1);
                    exact = self * std::cos(angle) + (channel < half ? -other : other) * std::sin(angle);
                }
                double const ulp = std::same_as<T, float> ? 0x1p-24 : std::same_as<T, __half> ? 0x1p-11 : 0x1p-8;
                double const difference = std::abs(found[static_cast<std::size_t>(c)] - exact);
                double const share =
                    difference / (1.0001 * ulp * std::abs(exact) + 2e-6 * (std::abs(self) + std::abs(other)) + 1e-30);
                error = share <= error ? error : share; // NaN stays
            }
        }
    float const ms = milliseconds(stream, 2, [&] { call(sets[0]), call(sets[1]); });
    double const channels = static_cast<double>(in_place ? 2 * half : head_dim);
    double const bytes = static_cast<double>(tokens * (q_heads + k_heads)) * channels * sizeof(T) * 2 +
                         static_cast<double>(tokens) * (kind == from::segments ? 0
                                                        : kind == from::list   ? 8
                                                                               : 24);
    return print(name, ms, bytes, error, 1);
}

/// Loads and stores `wide` of every `apart` 16-byte words and computes nothing: what the pattern of accesses allows.
__global__ void touch(uint4* words, index_t count, int wide, int apart) {
    index_t const i = static_cast<index_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    uint4* const word = words + i / wide * apart + i % wide;
    uint4 value = *word;
    value.x ^= 1;
    *word = value;
}

void touch_sectors(cuda::stream const& stream, index_t tokens, index_t heads, int bytes, int head_bytes) {
    buffer<char> const x[2] = {buffer<char>(tokens * heads * head_bytes), buffer<char>(tokens * heads * head_bytes)};
    int const wide = bytes / 16, apart = head_bytes / 16;
    index_t const count = tokens * heads * wide;
    float const ms = milliseconds(stream, 2, [&] {
        for (auto const& b : x)
            touch<<<static_cast<unsigned>((count + 127) / 128), 128, 0, stream>>>(reinterpret_cast<uint4*>(b.data()),
                                                                                  count, wide, apart);
    });
    print("  the same sectors touched, nothing computed", ms, 32.0 * static_cast<double>(count), 0, 0);
}

template <class T>
void move(cuda::stream const& stream, index_t count, index_t width) {
    std::vector<std::int32_t> shuffled(static_cast<std::size_t>(count));
    for (index_t i = 0; i < count; ++i)
        shuffled[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i * 7919 % count); // coprime: a permutation
    buffer<std::int32_t> const list{std::span<std::int32_t const>(shuffled)};
    std::span<std::int32_t const> const numbers(list.data(), shuffled.size());
    buffer<T> const x(count * width), y(count * width);
    rows<T> const a(x.data(), count, width), b(y.data(), count, width);
    auto const check = [&](bool scatters, bool adds) {
        double error = 0;
        for (index_t sample = 0; sample < 64; ++sample) {
            index_t const i = sample * 6151 % count, row = shuffled[static_cast<std::size_t>(i)];
            auto const found = values_of(y, (scatters ? row : i) * width, width);
            for (index_t c = 0; c < width; ++c) {
                float expected = rounded<T>(value_at((scatters ? i : row) * width + c));
                if (adds) expected = rounded<T>(expected + rounded<T>(value_at(row * width + c)));
                double const difference = std::abs(found[static_cast<std::size_t>(c)] - expected);
                error = difference <= error ? error : difference; // NaN stays
            }
        }
        return error;
    };
    std::string const shape = " " + std::to_string(count) + " x " + std::to_string(width) + ", " +
                              std::to_string(sizeof(T)) + " bytes an element";
    double const bytes = static_cast<double>(count * width) * sizeof(T),
                 numbers_read = 4.0 * static_cast<double>(count);
    auto const time = [&](char const* name, double traffic, bool scatters, bool adds, auto&& f) {
        fill(x);
        adds ? fill(y) : poison(y);
        f();
        stream.synchronize();
        double const error = check(scatters, adds);
        print(name + shape, milliseconds(stream, 1, f), traffic, error, 0);
    };
    time("gather", 2 * bytes + numbers_read, false, false, [&] { cuda::gather_rows(a, numbers, b, stream); });
    time("scatter", 2 * bytes + numbers_read, true, false,
         [&] { cuda::scatter_rows(a, numbers, b, cuda::other_rows::stay, stream); });
    time("scatter, others zero", 3 * bytes + numbers_read, true, false,
         [&] { cuda::scatter_rows(a, numbers, b, cuda::other_rows::zeros, stream); });
    time("scatter and add", 3 * bytes + numbers_read, true, true,
         [&] { cuda::scatter_add_rows(a, numbers, std::span<std::int32_t const>(), b, stream); });
}

/// Makes the tokens of a new packing known to kernels: uploads a rank's segments, or computes them on the device.
template <class L>
void new_packing(cuda::stream const& stream, char const* name, L const& layout, index_t sequences) {
    auto const sharding = cpx::shard(cpx::thd::uniform(sequences, 32768 / sequences), layout);
    buffer<std::int64_t> const offsets{sharding.batch().offsets()};
    std::span<std::int64_t const> const list(offsets.data(), static_cast<std::size_t>(offsets.size()));
    cuda::segment_table table(cpx::segments(sharding, 0));
    using clock = std::chrono::steady_clock;
    auto const host_us = [&](auto&& f) { // median of 101
        std::vector<double> times;
        for (int i = 0; i < 101; ++i) {
            stream.synchronize();
            auto const start = clock::now();
            f();
            times.push_back(1e6 * std::chrono::duration<double>(clock::now() - start).count());
        }
        std::ranges::nth_element(times, times.begin() + 50);
        return times[50];
    };
    auto const compute = [&] { table.write(sharding, 0, list, stream); };
    double const uploaded = host_us([&] { table.write(cpx::segments(sharding, 0)); }), computed = host_us(compute);
    std::printf("segments of %4lld sequences, %-10s host: uploaded %7.1f us, computed %6.1f us; device: %6.1f us\n",
                static_cast<long long>(sequences), name, uploaded, computed,
                1e3 * static_cast<double>(milliseconds(stream, 1, compute)));
}

} // namespace

int main(int argc, char** argv) {
    if (int const code = timing::refusal(argc, argv); code >= 0) return code;
    using bf16 = __nv_bfloat16;
    cuda::stream const stream;
    copy_speed = timing::copy_bandwidth(stream);
    std::printf("%s, copy of 1 GiB: %.1f GB/s read and written\n", timing::device_name().c_str(), copy_speed * 1e-9);
    char const* const in_place = "32768 rows, 16 + 2 heads, 64 of 256, bf16, in place";
    timing::limits limits;
    limits.at_least("rotary, " + std::string(in_place) + ", of copy",
                    rotate<bf16>(stream, in_place, 32768, 16, 2, 256, 32, true), 80, "%");
    touch_sectors(stream, 32768, 18, 128, 512);
    rotate<bf16>(stream, "  of segments", 32768, 16, 2, 256, 32, true, from::segments);
    rotate<bf16>(stream, "  interleaved axes", 32768, 16, 2, 256, 32, true, from::three_axes);
    rotate<bf16>(stream, "  backward", 32768, 16, 2, 256, 32, true, from::list, true);
    rotate<bf16>(stream, "  elsewhere: all channels move", 32768, 16, 2, 256, 32, false);
    rotate<__half>(stream, "  half", 32768, 16, 2, 256, 32, true);
    rotate<float>(stream, "  float", 32768, 16, 2, 256, 32, true);
    rotate<bf16>(stream, "131072 rows, 16 + 2 heads, 64 of 256, bf16, in place", 131072, 16, 2, 256, 32, true);
    rotate<bf16>(stream, "32768 rows, 32 + 8 heads, 128 of 128, bf16, in place", 32768, 32, 8, 128, 64, true);
    rotate<bf16>(stream, "32768 rows, 32 + 8 heads, 128 of 128, bf16, elsewhere", 32768, 32, 8, 128, 64, false);
    rotate<bf16>(stream, "4096 rows, 16 + 2 heads, 64 of 256, bf16, in place", 4096, 16, 2, 256, 32, true);
    rotate<bf16>(stream, "64 rows, 16 + 2 heads, 64 of 256, bf16, in place", 64, 16, 2, 256, 32, true);
    rotate<bf16>(stream, "1 row, 16 + 2 heads, 64 of 256, bf16, in place", 1, 16, 2, 256, 32, true);
    move<bf16>(stream, 65536, 2048);
    move<bf16>(stream, 65536, 2047);
    move<float>(stream, 1 << 20, 64);
    move<float>(stream, 128, 1 << 20);
    for (index_t const sequences : {64, 4096}) {
        new_packing(stream, "zigzag<4>", cpx::zigzag<4>{}, sequences);
        new_packing(stream, "zigzag<>", cpx::zigzag<>(4), sequences);
    }
    limits.print();
    return all_right ? 0 : 1;
}
