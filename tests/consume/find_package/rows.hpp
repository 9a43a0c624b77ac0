// SPDX-License-Identifier: Apache-2.0
// Every header of the host, and a function that both units have.
#pragma once

#include <cpx/cpx.hpp>
#include <cpx/model/hf_config.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/ops.hpp>

#include <atomic>

/// Returns how many rows leave their ranks from zigzag to sequential, after they have.
inline cpx::index_t moved_rows() {
    cpx::thd const batch({0, 7, 20});
    auto const zigzag = cpx::shard(batch, cpx::zigzag<2>{});
    auto const sequential = cpx::shard(batch, cpx::sequential<2>{});
    std::atomic<cpx::index_t> rows = 0;
    cpx::threads::run(2, [&](cpx::threads& comm) {
        auto const plan = cpx::relayout(zigzag, sequential, comm.rank());
        auto const y = cpx::exchange(plan, cpx::make_tensor<float>(zigzag, comm.rank(), 2), comm);
        if (y.data().count() == plan.target_rows) rows += plan.sent_rows();
    });
    return rows;
}
