// SPDX-License-Identifier: Apache-2.0
// Where kernels write what the host is to read.
#pragma once

#include <cpx/cuda/nvcc.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>

namespace cpx::detail {

/// Returns `count` of T{} in host memory that kernels of every device write; null if there is no memory for them.
template <class T>
std::shared_ptr<T> host_page(int count = 1) {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, sizeof(T) * static_cast<std::size_t>(count), cudaHostAllocPortable) != cudaSuccess)
        return nullptr;
    std::shared_ptr<T> const page(static_cast<T*>(memory), [](T* p) { static_cast<void>(cudaFreeHost(p)); });
    std::fill_n(page.get(), count, T{});
    return page;
}

} // namespace cpx::detail
