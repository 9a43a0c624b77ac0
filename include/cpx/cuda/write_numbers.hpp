// SPDX-License-Identifier: Apache-2.0
// Small tables that go to a device in stream order, while the host goes on.
#pragma once

#include <cpx/cuda/runtime.hpp>
#include <cpx/plan/lane_rectangles.hpp>

#include <cpx/lane_rectangles.cuh>
#include <cpx/launch_list.cuh>

#include <algorithm>
#include <span>
#include <type_traits>

namespace cpx::cuda {

namespace detail {

/// Calls `launch(part, items)` for as many of a list as a launch takes, until there are no more.
template <class List, class T, class F>
void in_launches(std::span<T const> list, F&& launch) {
    constexpr auto most = static_cast<std::size_t>(List::most);
    List part; // what a launch does not read may be anything
    for (std::size_t first = 0; first < list.size(); first += most) {
        std::size_t const count = std::min(most, list.size() - first);
        std::copy_n(list.begin() + static_cast<std::ptrdiff_t>(first), count, part.items);
        launch(part, static_cast<unsigned>(count));
    }
}
/// Calls `f` with how many numbers a launch is to bring, of `count`: what is launched is copied, needed or not.
template <class F>
void with_room(std::size_t count, F&& f) {
    if (count <= 128)
        f(std::integral_constant<int, 128>());
    else if (count <= 640)
        f(std::integral_constant<int, 640>());
    else
        f(std::integral_constant<int, 4000>());
}
inline constexpr index_t most_lane_numbers = 4000; ///< that one launch brings

} // namespace detail

/// Loads what `write_numbers` and `list_lanes` launch: if first launches did, those might wait for the device.
inline void load_write_numbers(caller here = caller::here()) {
    cudaFuncAttributes loaded{};
    for (std::size_t const count : {std::size_t{0}, std::size_t{640}, std::size_t{4000}})
        detail::with_room(count, [&](auto most) {
            check(cudaFuncGetAttributes(&loaded, kernels::write_numbers<most>), "cudaFuncGetAttributes", here);
            check(cudaFuncGetAttributes(&loaded, kernels::list_lanes<most>), "cudaFuncGetAttributes", here);
        });
}

/// Writes numbers that the host has, in stream order: with launches, each of which brings 32 KB, so that nobody waits
/// and it can be captured.
inline void write_numbers(std::span<index_t const> numbers, index_t* to, cudaStream_t stream,
                          caller here = caller::here()) {
    detail::with_room(numbers.size(), [&](auto most) {
        using items = kernels::launch_list<std::int64_t, most>;
        detail::in_launches<items>(numbers, [&](items const& part, unsigned count) {
            kernels::write_numbers<most><<<1, 256, 0, stream>>>(part, to, static_cast<int>(count));
            check(cudaGetLastError(), "write_numbers", here);
            to += count;
        });
    });
}

namespace detail {

/// Writes a word `words` times and the rectangles of `lane_tables`, of which these are the numbers, in stream order.
inline void list_lanes(std::span<index_t const> numbers, std::uint64_t* word, int words,
                       cpx::detail::rectangle* rectangles, cudaStream_t stream, caller here) {
    auto const& all = *reinterpret_cast<cpx::detail::lane_list const*>(numbers.data());
    with_room(numbers.size(), [&](auto most) {
        using items = kernels::launch_list<std::int64_t, most>;
        in_launches<items>(numbers, [&](items const& list, unsigned) {
            auto const blocks = static_cast<unsigned>(all.jobs / 8 + 1);
            kernels::list_lanes<most><<<blocks, 256, 0, stream>>>(list, word, words, rectangles);
            check(cudaGetLastError(), "list_lanes", here);
        });
    });
}

} // namespace detail

} // namespace cpx::cuda
