// SPDX-License-Identifier: Apache-2.0
// Rectangles of an exchange, computed from its lanes and cu_seqlens.
#pragma once

#include <cpx/plan/lane_rectangles.hpp>

#include <cpx/launch_list.cuh>
#include <cpx/rectangles.cuh>

namespace cpx::kernels {

/// Writes all numbers, also the listed ones, and the rectangles of all jobs, a warp each. `sent`: a `lane_list`.
template <int N>
__global__ void __launch_bounds__(256) list_lanes(__grid_constant__ launch_list<std::int64_t, N> const sent) {
    auto const& all = *reinterpret_cast<cpx::detail::lane_list const*>(sent.items);
    int const thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), job = thread / 32, lane = thread % 32;
    for (int n = 0; n < all.numbers; ++n) {
        auto const [to, number, count, offsets] = all.all_numbers()[n];
        for (int i = thread; i < count; i += static_cast<int>(gridDim.x * blockDim.x))
            to[i] = offsets ? all.offsets()[min(i, all.sequences)] : number;
    }
    all.put_listed(thread, static_cast<int>(gridDim.x * blockDim.x));
    if (job >= all.jobs) return;
    auto const sum = [&](index_t n, index_t& total) {
        index_t until = n;
        for (int step = 1; step < 32; step *= 2) {
            index_t const left = __shfl_up_sync(~0u, until, step);
            if (lane >= step) until += left;
        }
        total += __shfl_sync(~0u, until, 31);
        return until - n;
    };
    cpx::detail::list_lane(all, all.all_jobs()[job], lane, 32, sum);
}

} // namespace cpx::kernels
