// SPDX-License-Identifier: Apache-2.0
// Compiles kernels and links NCCL, that of NCCL_ROOT. Without arguments it moves nothing: whoever builds it may have no
// GPU.
#include <cpx/cuda/exchange.hpp>
#include <cpx/cuda/row_gather.hpp>
#include <cpx/cuda/shared_memory.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/layout/zigzag.hpp>

#include <cstdio>

#ifndef CPX_NCCL_ELSEWHERE
#error "headers of another NCCL than that of NCCL_ROOT"
#endif

int main(int argc, char**) {
    int version = 0;
    if (ncclGetVersion(&version) != ncclSuccess || cpx::cuda::devices() < 0) return 1;
    if (argc == 1) return 0;
    auto const comm = cpx::nccl::from_environment();
    cpx::thd const batch({0, 7, 20});
    auto const plan = cpx::relayout(cpx::shard(batch, cpx::zigzag<>(comm->ranks())),
                                    cpx::shard(batch, cpx::sequential<>(comm->ranks())), comm->rank());
    cpx::cuda::exchange<float> move(plan, 1, *comm);
    cpx::cuda::stream const stream;
    cpx::cuda::buffer<float> const x(plan.source_rows), y(plan.target_rows);
    move(cpx::rows<float const>(x.data(), x.size(), 1), cpx::rows<float>(y.data(), y.size(), 1), stream);
    comm->wait(stream);
}
