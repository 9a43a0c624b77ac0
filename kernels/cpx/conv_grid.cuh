// SPDX-License-Identifier: Apache-2.0
// How a convolution is cut into blocks: what was fastest without spills.
#pragma once

#include <cpx/core/index.hpp>

#include <cpx/causal_conv1d.cuh>
#include <cpx/causal_conv1d_backward.cuh>

#include <algorithm>

namespace cpx::kernels {

/// A thread walks `strip` rows, a block has `threads.y` strips.
struct conv_grid {
    dim3 threads;
    int strip = 0;
    index_t strip_blocks = 0, blocks = 0;
    index_t most_strip_blocks = 0; ///< of as many rows, or fewer
};

/// Returns a grid of whole waves of `resident` blocks. Strips have about `wanted` rows or, where rows are few, as many
/// as fill one wave. Without channels the grid is that of one channel: nothing is launched then, but the size of the
/// workspace may be asked for.
inline conv_grid cut_convolution(index_t resident, index_t rows, index_t channels, int vector, index_t wanted) {
    index_t const in_a_row = std::max<index_t>(1, (channels + vector - 1) / vector);
    index_t const warps = std::min<index_t>(4, (in_a_row + 31) / 32);
    index_t const lanes = 32 * (warps == 3 ? 4 : warps), tiles = (in_a_row + lanes - 1) / lanes;
    index_t const together = 128 / lanes; // strips of a block
    index_t const per_wave = resident * together * wanted;
    index_t const waves = std::max<index_t>(1, (rows * tiles + per_wave / 2) / per_wave);
    index_t const most = std::max<index_t>(1, resident * waves / tiles), strips = most * together;
    index_t const strip = std::max<index_t>(16, ((rows + strips - 1) / strips + 3) / 4 * 4);
    index_t const blocks = (rows + strip * together - 1) / (strip * together);
    return {dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(together)), static_cast<int>(strip), blocks,
            blocks * tiles, most};
}

// Fastest on an H200, for 32768 rows and 8192 channels. A strip is slow at its beginning and end, where nothing hides
// its loads. In the backward that costs more: it has one wave of long strips.
inline conv_grid cut_forward(index_t multiprocessors, index_t rows, index_t channels, int vector) {
    return cut_convolution(multiprocessors * conv_resident, rows, channels, vector, vector == 4 ? 256 : 128);
}
inline conv_grid cut_backward(index_t multiprocessors, index_t rows, index_t channels, int vector, bool parts) {
    return cut_convolution(multiprocessors * conv_backward_resident(vector, parts), rows, channels, vector,
                           vector > 1 ? 1024 : 512);
}

} // namespace cpx::kernels
