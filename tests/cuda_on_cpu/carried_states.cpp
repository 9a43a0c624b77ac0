// SPDX-License-Identifier: Apache-2.0
// Copies of states, and maps that they go through: every element and no other, whatever their number and where they
// begin.
#include "words.hpp"

#include <cpx/carried_states.cuh>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
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

TEST_CASE("sums of maps times states are float64's, of sizes that fill tiles and that do not") {
    namespace kernels = cpx::kernels;
    std::mt19937 random(3);
    std::normal_distribution<float> number;
    auto const some = [&](int count) {
        std::vector<float> made(static_cast<std::size_t>(count));
        for (float& x : made) x = number(random);
        return made;
    };
    constexpr int heads = 2;
    for (int const rows : {1, 31, 64, 70, 128})
        for (int const columns : {1, 33, 64, 130}) {
            CAPTURE(rows);
            CAPTURE(columns);
            auto const map = some(heads * rows * rows), x = some(heads * rows * columns),
                       before = some(heads * rows * columns);
            std::vector<float> sum = before, again = before;
            kernels::launch_list<kernels::state_join, 128> list{};
            list.items[0] = {map.data(), x.data(), sum.data()};
            list.items[1] = {map.data(), x.data(), again.data()};
            auto const tiles = [](int n) { return static_cast<unsigned>((n + 63) / 64); };
            gpu::now().warps_run = gpu::order::random;
            gpu::now().launch({tiles(rows) * tiles(columns), heads, 2}, {32, 8},
                              [&] { kernels::join_states(list, rows, columns); });
            gpu::now().warps_run = gpu::order::ascending;
            CHECK(sum == again);
            double error = 0;
            for (int h = 0; h < heads; ++h)
                for (int r = 0; r < rows; ++r)
                    for (int c = 0; c < columns; ++c) {
                        auto const at = [](int i) { return static_cast<std::size_t>(i); };
                        double exact = before[at((h * rows + r) * columns + c)];
                        for (int k = 0; k < rows; ++k)
                            exact += static_cast<double>(map[at((h * rows + r) * rows + k)]) *
                                     x[at((h * rows + k) * columns + c)];
                        error = std::max(error, std::abs(exact - sum[at((h * rows + r) * columns + c)]));
                    }
            CHECK(error <= 1e-6 * (10 + rows));
        }
}
