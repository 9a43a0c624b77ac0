// SPDX-License-Identifier: Apache-2.0
#include <cpx/cuda/memory.hpp>

#include <cpx/core/element_name.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <doctest/doctest.h>

#include "../../harness/graph.hpp"
#include "gpus.hpp"

#include <support/rejects.hpp>

#include <numeric>

static_assert(cpx::element_name<__half> == "float16" && cpx::element_name<__nv_bfloat16> == "bfloat16");

namespace {

__global__ void add_one(int* values, int count) {
    int const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) values[i] += 1;
}

/// Gives memory so many bytes behind a multiple of 256.
struct begins_at final : cpx::cuda::memory_resource {
    explicit begins_at(std::size_t offset) : offset_(offset) {}
    void* allocate(std::size_t, cudaStream_t) override { return ++given, all_ + offset_; }
    void deallocate(void*, std::size_t, cudaStream_t) noexcept override { --given; }
    int given = 0;

private:
    alignas(256) char all_[512];
    std::size_t offset_;
};

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

    TEST_CASE("a block refuses memory that begins where kernels do not want it, and gives it back") {
        begins_at good(0), bad(16);
        CHECK(cpx::cuda::block<float>(4, good, nullptr).data() != nullptr);
        CHECK(good.given == 0);
        support::rejects({"runtime.cu", "cuda::memory_resource: address: expected a multiple of 256"},
                         [&] { cpx::cuda::block<float>(4, bad, nullptr); });
        CHECK(bad.given == 0);
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
