// SPDX-License-Identifier: Apache-2.0
// Times on a GPU: the median of some rounds of many calls between two events.
#pragma once

#include <cpx/cuda/runtime.hpp>

#include <algorithm>
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
        times.push_back(end.since(begin) / static_cast<float>(calls));
    }
    std::ranges::sort(times);
    return times[times.size() / 2];
}

/// Returns the bytes a second, read and written, of a copy on the device that is much larger than its caches.
inline double copy_bandwidth(cudaStream_t stream) {
    cpx::index const bytes = cpx::index{1} << 30;
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

} // namespace timing
