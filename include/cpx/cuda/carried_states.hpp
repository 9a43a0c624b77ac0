// SPDX-License-Identifier: Apache-2.0
// States and maps of a recurrence in device memory: copied, joined, transposed in stream order, without an upload.
#pragma once

#include <cpx/cuda/write_numbers.hpp>

#include <cpx/carried_states.cuh>

#include <span>

namespace cpx::cuda {

namespace detail {

inline index_t tiles_of(index_t rows, index_t columns, index_t side) {
    return (rows + side - 1) / side * ((columns + side - 1) / side);
}

} // namespace detail

/// Copies every `from` of a list to its `to`, or zeros where it is null. They do not overlap.
inline void copy_states(std::span<kernels::state_copy const> list, cudaStream_t stream, caller here = caller::here()) {
    using items = kernels::launch_list<kernels::state_copy, 128>;
    detail::in_launches<items>(list, [&](items const& some, unsigned count) {
        launch_early(kernels::copy_states, dim3(64, count), 256, 0, stream, "copy_states", here, some);
    });
}

/// Adds `map x` to every `sum` of a list, for `heads` heads of (rows, columns), products in ascending order, in float.
/// Maps are (rows, rows) or, where `map_columns` is 1, (map_rows, 1): factors of rows, or of all. No two sums overlap.
inline void join_states(index_t heads, index_t rows, index_t columns, index_t map_rows, index_t map_columns,
                        std::span<kernels::state_join const> list, cudaStream_t stream, caller here = caller::here()) {
    if (heads * rows * columns == 0) return;
    using items = kernels::launch_list<kernels::state_join, 128>;
    int const r = static_cast<int>(rows), c = static_cast<int>(columns);
    bool const matrix = map_columns == rows && map_rows == rows;
    detail::in_launches<items>(list, [&](items const& some, unsigned count) {
        if (matrix)
            launch(kernels::join_states,
                   detail::dims(detail::tiles_of(rows, columns, kernels::joined_tile), heads, count), dim3(32, 8), 0,
                   stream, "join_states", here, some, r, c);
        else
            launch(kernels::scale_states, dim3(64, count), 256, 0, stream, "join_states", here, some, heads * rows, r,
                   c, map_rows == 1);
    });
}

/// Transposes every `from` of a list, (heads, n, n), into its `to`.
inline void transpose_maps(index_t heads, index_t n, std::span<kernels::state_copy const> list, cudaStream_t stream,
                           caller here = caller::here()) {
    if (heads * n == 0) return;
    using items = kernels::launch_list<kernels::state_copy, 128>;
    detail::in_launches<items>(list, [&](items const& some, unsigned count) {
        launch(kernels::transpose_maps, detail::dims(detail::tiles_of(n, n, 32), heads, count), dim3(32, 8), 0, stream,
               "transpose_maps", here, some, static_cast<int>(n));
    });
}

} // namespace cpx::cuda
