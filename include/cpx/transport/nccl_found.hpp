// SPDX-License-Identifier: Apache-2.0
// What kernels find out about other ranks, for the host to read.
#pragma once

#include <cpx/cuda/nvcc.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace cpx::detail {

/// A number for every rank, in host memory that kernels write: not 0 if they have found it at fault.
class found_ranks {
public:
    /// Returns the numbers, or null if there is no memory for them.
    std::uint32_t* numbers(int ranks) {
        if (numbers_) return numbers_.get();
        void* memory = nullptr;
        auto const bytes = sizeof(std::uint32_t) * static_cast<std::size_t>(ranks);
        if (cudaHostAlloc(&memory, bytes, cudaHostAllocPortable) != cudaSuccess) return nullptr;
        numbers_ = {static_cast<std::uint32_t*>(memory), [](auto* all) { static_cast<void>(cudaFreeHost(all)); }};
        std::fill_n(numbers_.get(), ranks, 0u);
        ranks_ = ranks;
        return numbers_.get();
    }
    /// Returns the ranks found since the last call. The device has done what was to find them.
    std::vector<int> take() {
        std::vector<int> found;
        for (int r = 0; numbers_ && r < ranks_; ++r)
            if (std::exchange(numbers_.get()[r], 0u)) found.push_back(r);
        return found;
    }

private:
    std::shared_ptr<std::uint32_t> numbers_; ///< once asked for
    int ranks_ = 0;
};

} // namespace cpx::detail
