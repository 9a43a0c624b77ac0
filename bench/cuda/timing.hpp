// SPDX-License-Identifier: Apache-2.0
// Times on a GPU, the median of some rounds of many calls between two events; and the limits that they are to keep.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

namespace timing {

/// Returns the median over `rounds` of the milliseconds that one of `calls` calls of `f()` on `stream` takes; `before`
/// runs ahead of each round, for ranks to start together.
template <class F, class B>
float median_ms(cudaStream_t stream, F&& f, B&& before, int calls = 20, int rounds = 9) {
    cpx::cuda::event begin, end;
    for (int i = 0; i < 3; ++i) f();
    std::vector<float> times;
    for (int round = 0; round < rounds; ++round) {
        before();
        begin.record(stream);
        for (int i = 0; i < calls; ++i) f();
        end.record(stream);
        float ms = 0;
        cpx::cuda::check(cudaEventSynchronize(end), "cudaEventSynchronize");
        cpx::cuda::check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
        times.push_back(ms / static_cast<float>(calls));
    }
    std::ranges::sort(times);
    return times[times.size() / 2];
}

/// Lets the GPU rest for a second. At its power's limit it slows down, some 0.1 s after it has begun to draw so much:
/// without rest a figure would depend on what was timed before it.
inline void rest(cudaStream_t stream) {
    cpx::cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    std::this_thread::sleep_for(std::chrono::seconds(1));
}

/// Returns `median_ms` of a GPU that has called `f()`, which takes some `ms`, for a second, as in training.
template <class F>
float sustained_ms(cudaStream_t stream, F&& f, double ms, int calls, int rounds) {
    for (double spent = 0; spent < 1000; spent += ms) f();
    return median_ms(
        stream, f, [] {}, calls, rounds);
}

/// Returns the bytes a second, read and written, of a copy on the device that is much larger than its caches.
inline double copy_bandwidth(cudaStream_t stream) {
    cpx::index_t const bytes = cpx::index_t{1} << 30;
    cpx::cuda::buffer<char> from(bytes), to(bytes);
    float const ms = median_ms(
        stream,
        [&] {
            cpx::cuda::check(cudaMemcpyAsync(to.data(), from.data(), static_cast<std::size_t>(bytes),
                                             cudaMemcpyDeviceToDevice, stream),
                             "cudaMemcpyAsync");
        },
        [] {}, 5);
    return 2 * static_cast<double>(bytes) / (ms * 1e-3);
}

/// Returns the name of the current device.
inline std::string device_name() {
    cudaDeviceProp properties{};
    cpx::cuda::check(cudaGetDeviceProperties(&properties, cpx::cuda::current_device()), "cudaGetDeviceProperties");
    return properties.name;
}

/// Figures beside what they are to keep on H200s, as a table below the others. Other GPUs get no verdict, and a limit
/// that is missed changes no exit code: how fast something is, is no question of right or wrong.
class limits {
public:
    /// `figure`: NaN if it was not measured.
    void at_most(std::string const& what, double figure, double limit, char const* unit) {
        lines_.push_back({what, "at most", unit, figure, limit, figure <= limit});
    }
    void at_least(std::string const& what, double figure, double limit, char const* unit) {
        lines_.push_back({what, "at least", unit, figure, limit, figure >= limit});
    }
    void print() const {
        if (lines_.empty()) return;
        bool const set_for_this = device_name().find("H200") != std::string::npos;
        std::printf("\n%-76s %15s   %-20s verdict\n", "limits on H200s", "measured", "limit");
        for (line const& l : lines_) {
            bool const run = !std::isnan(l.figure);
            std::printf("%-76s %10.1f %-4s   %-8s %6.1f %-4s %s\n", l.what.c_str(), l.figure, l.unit, l.sense, l.limit,
                        l.unit,
                        !run            ? "not run"
                        : !set_for_this ? "none on this GPU"
                        : l.kept        ? "ok"
                                        : "missed");
        }
    }

private:
    struct line {
        std::string what;
        char const *sense, *unit;
        double figure, limit;
        bool kept;
    };
    std::vector<line> lines_;
};

/// Returns the exit code of a program that takes no arguments and wants a GPU, after it has said which it lacks; -1 if
/// it can run.
inline int refusal(int argc, char** argv) {
    if (argc > 1) return std::fprintf(stderr, "usage: %s (no arguments)\n", argv[0]), 2;
    if (cpx::cuda::devices() == 0) return std::printf("cpx: skipped, 1 GPU wanted, 0 found\n"), 0;
    return -1;
}

} // namespace timing
