// SPDX-License-Identifier: Apache-2.0
// Gradients of the parameters of log decays against float64's, of heads that fill a warp and that do not, whatever the
// order in which warps run.
#include "words.hpp"

#include <cpx/delta_rule_log_decays.cuh>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace {

namespace kernels = cpx::kernels;
using floats = std::vector<float>;

/// A packed batch of one tensor of 300 rows: sequences, one of them without tokens, that leave some rows alone.
struct batch {
    std::vector<kernels::delta_sequence> sequences{
        {3, 75, -2, 2, 0, 1, 0}, {75, 75, 75, 0, 2, 0, 0}, {75, 275, 75, 4, 2, 1, 0}};
    int totals[4] = {6};
    static constexpr int rows = 300, chunks = 6;

    kernels::delta_plan plan() {
        kernels::delta_plan plan{};
        plan.sequences = sequences.data();
        plan.totals = totals;
        plan.count = 3;
        return plan;
    }
};

void check(int heads, gpu::order warps) {
    CAPTURE(heads);
    gpu::now().warps_run = warps;
    batch of;
    std::mt19937 random(static_cast<unsigned>(heads));
    std::normal_distribution<float> number;
    auto const some = [&](int count, float scale) {
        floats made(static_cast<std::size_t>(count));
        for (float& x : made) x = scale * number(random);
        return made;
    };
    floats const a = some(batch::rows * heads, 3), a_log = some(heads, 1), dt_bias = some(heads, 1);
    floats const dg = some(batch::rows * heads, 1);
    floats da(a.size(), NAN), terms(static_cast<std::size_t>(2 * batch::chunks * heads), NAN),
        da_log(static_cast<std::size_t>(heads), NAN), ddt_bias(da_log);
    kernels::delta_log_decays<float> const decays{{}, {a.data(), heads}, a_log.data(), dt_bias.data()};
    auto const blocks = static_cast<unsigned>((heads + 31) / 32);
    // two blocks more than there are chunks, as in launches whose chunks the host does not know
    gpu::now().launch({batch::chunks + 2, blocks}, {256, 1}, [&] {
        kernels::delta_rule_parameter_terms(of.plan(), decays, dg.data(), kernels::delta_rows<float>{da.data(), heads},
                                            heads, terms.data());
    });
    gpu::now().launch({blocks, 2}, {1024, 1}, [&] {
        kernels::delta_rule_parameter_sums(of.totals, terms.data(), heads, da_log.data(), ddt_bias.data());
    });
    for (int h = 0; h < heads; ++h) {
        auto const head = static_cast<std::size_t>(h);
        double sum_a_log = 0, sum_dt_bias = 0, sizes = 0;
        for (int row = 0; row < batch::rows; ++row) {
            auto const i = static_cast<std::size_t>(row * heads + h);
            if (row < 3 || row >= 275) {
                CHECK(std::isnan(da[i])); // as it was
                continue;
            }
            auto const by = cpx::delta_rule_gate_backward<double>(a[i], a_log[head], dt_bias[head], dg[i]);
            CHECK(std::abs(static_cast<double>(da[i]) - by.a) <= 1e-6 * std::abs(by.a));
            sum_a_log += by.a_log, sum_dt_bias += by.dt_bias, sizes += std::abs(by.a_log) + std::abs(by.dt_bias);
            CHECK(decays.at(row, h) == cpx::delta_rule_gate(a[i], a_log[head], dt_bias[head]));
        }
        CHECK(std::abs(static_cast<double>(da_log[head]) - sum_a_log) <= 1e-6 * sizes);
        CHECK(std::abs(static_cast<double>(ddt_bias[head]) - sum_dt_bias) <= 1e-6 * sizes);
    }
    gpu::now().warps_run = gpu::order::ascending;
}

} // namespace

TEST_SUITE("cuda_on_cpu") {
    TEST_CASE("gradients of the parameters of log decays are float64's, and those of no sequence are left alone") {
        for (auto const warps : {gpu::order::ascending, gpu::order::descending, gpu::order::random})
            for (int const heads : {1, 32, 40}) check(heads, warps);
    }

    TEST_CASE("a batch without chunks has gradients of zero") {
        int const none = 0;
        float da_log = NAN, ddt_bias = NAN;
        gpu::now().launch({1, 2}, {1024, 1},
                          [&] { kernels::delta_rule_parameter_sums(&none, nullptr, 1, &da_log, &ddt_bias); });
        CHECK(da_log == 0);
        CHECK(ddt_bias == 0);
    }
}
