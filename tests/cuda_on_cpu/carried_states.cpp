// SPDX-License-Identifier: Apache-2.0
// Copies of states: every element and no other, whatever their number and where they begin.
#include "words.hpp"

#include <cpx/carried_states.cuh>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

TEST_CASE("states are copied, or made zero, wherever they begin and however many elements they have") {
    namespace kernels = cpx::kernels;
    for (std::size_t const count : {0u, 1u, 3u, 4u, 5u, 64u, 70u, 2051u})
        for (std::size_t from = 0; from < 5; ++from)
            for (std::size_t to = 0; to < 5; ++to) {
                CAPTURE(count);
                CAPTURE(from);
                CAPTURE(to);
                alignas(16) float x[2100], y[2100], zeroed[2100];
                for (std::size_t i = 0; i < 2100; ++i) x[i] = static_cast<float>(i) + 1, y[i] = zeroed[i] = -7;
                kernels::launch_list<kernels::state_copy, 128> list{};
                list.items[0] = {x + from, y + to, static_cast<std::int64_t>(count)};
                list.items[1] = {nullptr, zeroed + to, static_cast<std::int64_t>(count)};
                gpu::now().launch({3, 2}, {256, 1}, [&] { kernels::copy_states(list); });
                std::vector<std::size_t> wrong;
                for (std::size_t i = 0; i < 2100; ++i) {
                    bool const inside = i >= to && i < to + count;
                    float const copied = inside ? x[i - to + from] : -7, zero = inside ? 0.0f : -7;
                    if (y[i] != copied || zeroed[i] != zero) wrong.push_back(i);
                }
                CHECK(wrong == std::vector<std::size_t>());
            }
}
