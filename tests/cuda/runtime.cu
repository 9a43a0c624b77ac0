// SPDX-License-Identifier: Apache-2.0
#include <cpx/cuda/runtime.hpp>

#include <cpx/core/element_name.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <doctest/doctest.h>

#include "../../harness/graph.hpp"
#include "gpus.hpp"

#include <numeric>

static_assert(cpx::element_name<__half> == "float16" && cpx::element_name<__nv_bfloat16> == "bfloat16");

namespace {

__global__ void add_one(int* values, int count) {
    int const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) values[i] += 1;
}

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("an error of the runtime names its call, and is not reported twice") {
        std::string message;
        try {
            cpx::cuda::check(cudaErrorInvalidValue, "cudaMemcpy");
        } catch (cpx::error const& e) {
            message = e.what();
        }
        for (char const* passage : {"runtime.cu", "cuda: cudaMemcpy", "cudaErrorInvalidValue"})
            CHECK_MESSAGE(message.find(passage) != std::string::npos, message);
    }

    TEST_CASE("buffers hold what was written, and a graph does again what was captured") {
        if (!has_gpus()) return;
        std::vector<int> values(1000);
        std::iota(values.begin(), values.end(), 0);
        cpx::cuda::buffer<int> memory{std::span<int const>(values)};
        CHECK(memory.read() == values);
        CHECK(cpx::cuda::device_of(memory.data()) == cpx::cuda::current_device());
        CHECK(cpx::cuda::device_of(values.data()) == -1);
        cpx::cuda::stream const stream;
        harness::graph const graph(stream, [&] { add_one<<<8, 128, 0, stream>>>(memory.data(), 1000); });
        CHECK(memory.read() == values);
        for (int i = 0; i < 3; ++i) graph.launch(stream);
        for (int& value : values) value += 3;
        CHECK(memory.read() == values);
    }
}
