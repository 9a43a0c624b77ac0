// SPDX-License-Identifier: Apache-2.0
// What is computed element by element or row by row, in a device's memory.
#pragma once

#include <cpx/core/elements.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/memory.hpp>

#include <cpx/elements.cuh>

namespace cpx::cuda {

/// As `for_each_element` on the host, in the stream of a memory. `f` is copied to the device: it holds rows of that
/// memory and numbers. Can be captured. Throws `cpx::error` if there are 2^39 elements or more.
template <class F>
void for_each_element(memory const& in, index_t count, index_t width, F const& f, caller here = caller::here()) {
    index_t const blocks = (cpx::detail::product("for_each_element", "elements", {count, width}, here) + 255) / 256;
    require(blocks < index_t{1} << 31, "for_each_element", "elements", "less than 2^39", count * width, here);
    if (blocks == 0) return;
    launch(kernels::each_element<F>, detail::dims(blocks), 256, 0, in.stream(), "for_each_element", here, count, width,
           f);
}

} // namespace cpx::cuda
