// SPDX-License-Identifier: Apache-2.0
// The gradient of a convolution's weight, added up in the order of the batch, which the library does not on GPUs.
#pragma once

#include "launch.cuh"

#include <cpx/ops/local/activation.hpp>

namespace qwen::gpu {

/// For every channel and tap: the sum over all tokens of all sequences, in their order, of whole rows.
struct conv_weight_backward {
    rows<float const> x, dy, weight;
    index_t const* offsets;
    index_t sequences;
    rows<float> dweight;
    __device__ void operator()(index_t c, index_t tap) const {
        index_t const taps = weight.width();
        float& sum = dweight(c, tap);
        for (index_t s = 0; s < sequences; ++s)
            for (index_t t = offsets[s]; t < offsets[s + 1]; ++t) {
                index_t const before = t - taps + 1;
                if (before + tap < offsets[s]) continue;
                float z = 0;
                for (index_t k = 0; k < taps; ++k)
                    if (before + k >= offsets[s]) z += weight(c, k) * x(before + k, c);
                sum += cpx::silu_backward(z, dy(t, c)) * x(before + tap, c);
            }
    }
};

} // namespace qwen::gpu
