// SPDX-License-Identifier: Apache-2.0
// The gradients of a convolution's weight and bias, added up in the order of the batch.
#pragma once

#include <cpx/core/rows.hpp>

#include <cpx/pack.cuh>

namespace cpx::kernels {

/// For a channel and tap the sum over all tokens of all sequences, in their order, of whole rows; behind the taps that
/// of dbias. x, dy: (tokens, channels), the gradient being `factor` times dy; weight: (channels, taps); bias, dweight
/// and dbias may be null.
template <class T, class Y = T>
struct conv_weight_sums {
    rows<T const> x;
    rows<Y const> dy;
    rows<T const> weight;
    T const* bias;
    bool silu;
    index_t const* offsets; ///< of the sequences, one more than these
    index_t sequences;
    rows<float> dweight;
    float* dbias;
    float factor = 1;

    __device__ void operator()(index_t channel, index_t tap) const {
        index_t const taps = weight.width();
        float* const sum = tap < taps ? dweight.data() ? &dweight(channel, tap) : nullptr : dbias + channel;
        if (!sum) return;
        for (index_t s = 0; s < sequences; ++s)
            for (index_t t = offsets[s]; t < offsets[s + 1]; ++t) {
                index_t const before = t - taps + 1;
                if (tap < taps && before + tap < offsets[s]) continue;
                float z = bias ? widen(bias[channel]) : 0;
                for (index_t k = 0; k < taps; ++k)
                    if (before + k >= offsets[s]) z += widen(weight(channel, k)) * widen(x(before + k, channel));
                float const d = widen(dy(t, channel)) * factor, dz = silu ? activate_backward<T, true>(z, d) : d;
                *sum += tap < taps ? dz * widen(x(before + tap, channel)) : dz;
            }
    }
};

} // namespace cpx::kernels
