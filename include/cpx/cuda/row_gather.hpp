// SPDX-License-Identifier: Apache-2.0
// Gathers and scatters rows of GPU memory by a list of rows.
#pragma once

#include <cpx/core/row_list.hpp>
#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/cuda/nvtx.hpp>

#include <cpx/row_gather.cuh>

#include <algorithm>
#include <bit>
#include <span>
#include <type_traits>

namespace cpx::cuda {

/// What becomes of the rows that a scatter does not write.
enum class other_rows { stay, zeros };

namespace detail {

/// Blocks and threads for `count` rows of `vectors` vectors, `each` a thread, fewer where a row would not fill a warp.
struct row_shape {
    dim3 grid, block;
    row_shape(index_t count, index_t vectors, index_t each) {
        index_t const wanted =
            std::clamp<index_t>((vectors + each - 1) / each, std::clamp<index_t>(vectors, 1, 32), 256);
        auto const columns = std::bit_ceil(static_cast<unsigned>(wanted)), rows = 256 / columns;
        index_t const across = (vectors + columns * each - 1) / (columns * each);
        block = dim3(columns, rows);
        grid = dim3(static_cast<unsigned>((count + rows - 1) / rows),
                    static_cast<unsigned>(std::clamp<index_t>(across, 1, 65535)));
    }
};

/// Checks the arguments of all operators here; `listed` has a row for every number of the list, and of the order.
template <class T, class I, class L>
void require_listed(char const* where, rows<T const> from, std::span<I const> list, rows<T> to, rows<L> listed,
                    char const* of, caller here, std::span<I const> order = {}) {
    require_sizes(where, {"from", from}, here);
    require_sizes(where, {"to", to}, here);
    require(from.width() == to.width(), where, "width of to", from.width(), to.width(), here);
    require(std::ssize(list) == listed.count(), where, "numbers in the list", in_words(of, ", ", listed.count()),
            list.size(), here);
    require(order.empty() || order.size() == list.size(), where, "numbers in the order", list.size(), order.size(),
            here);
    require_memory(where, {{"from", from}, {"to", to}, {"list", list}, {"order", order}}, here);
    require_apart(where, {{"to", to}}, {{"from", from}, {"list", list}, {"order", order}}, here);
}

template <bool Scatter, class T, class I>
void move_rows(rows<T const> from, I const* list, index_t count, rows<T> to, cudaStream_t stream, caller here) {
    index_t const width = to.width() * static_cast<index_t>(sizeof(T));
    if (count == 0 || width == 0) return;
    kernels::with_bytes<1>(row_vector(from, to), [&](auto size) {
        row_shape const shape(count, width / size, 4);
        launch_early(kernels::move_rows<Scatter, kernels::bytes_at_once<size>, I>, shape.grid, shape.block, 0, stream,
                     "move_rows", here,
                     kernels::listed_rows<I>{reinterpret_cast<char const*>(from.data()),
                                             reinterpret_cast<char*>(to.data()), list, nullptr, count,
                                             Scatter ? to.count() : from.count(), width,
                                             from.stride() * static_cast<index_t>(sizeof(T)),
                                             to.stride() * static_cast<index_t>(sizeof(T))});
    });
}

} // namespace detail

/// Copies row list[i] of `from` to row i of `to`; a negative number gives a row of zeros.
///
/// from: (any, width), to: (list.size(), width), any element and alignment; list: on the device. They do not overlap.
/// 16 bytes at once where both buffers' beginnings and strides are multiples of 16, else the largest power of two. A
/// number that is not below from.count() ends the kernel with an error, which the next call that waits reports. Throws
/// `cpx::error` before it launches if shapes do not fit or memory is not this device's. Can be captured.
template <class T, row_number I>
    requires std::is_trivially_copyable_v<T>
void gather_rows(std::type_identity_t<rows<T const>> from, std::span<I const> list, rows<T> to, cudaStream_t stream,
                 caller here = caller::here()) {
    detail::require_listed<T, I>("cuda::gather_rows", from, list, to, to, "the rows of to", here);
    auto const range = named_range<"cpx gather_rows">();
    detail::move_rows<false, T>(from, list.data(), to.count(), to, stream, here);
}

/// Copies row i of `from` to row list[i] of `to`; a negative number: nowhere. The other rows stay, or become zeros.
///
/// Numbers that are not negative must differ: if two are equal, either row may be in that place in the end.
/// from: (list.size(), width), to: (any, width); all else as in `gather_rows`, whose gradient this is with `zeros` if
/// the numbers differ. Cost: with `zeros` all of `to` is written first.
template <class T, row_number I>
    requires std::is_trivially_copyable_v<T>
void scatter_rows(std::type_identity_t<rows<T const>> from, std::span<I const> list, rows<T> to, other_rows others,
                  cudaStream_t stream, caller here = caller::here()) {
    detail::require_listed<T, I>("cuda::scatter_rows", from, list, to, from, "the rows of from", here);
    auto const range = named_range<"cpx scatter_rows">();
    if (others == other_rows::zeros)
        detail::move_rows<false, T, I>(rows<T const>(to.data(), 0, to.width()), nullptr, to.count(), to, stream, here);
    detail::move_rows<true, T>(from, list.data(), from.count(), to, stream, here);
}

/// The same in the stream of a memory, as on the host.
template <class T>
    requires std::is_trivially_copyable_v<T>
void gather_rows(memory const& in, std::type_identity_t<rows<T const>> from, std::span<index_t const> list, rows<T> to,
                 caller here = caller::here()) {
    gather_rows<T, index_t>(from, list, to, in.stream(), here);
}
template <class T>
    requires std::is_trivially_copyable_v<T>
void scatter_rows(memory const& in, std::type_identity_t<rows<T const>> from, std::span<index_t const> list, rows<T> to,
                  caller here = caller::here()) {
    scatter_rows<T, index_t>(from, list, to, other_rows::stay, in.stream(), here);
}

/// Adds row order[i] of `from`, or row i without an order, to row list[i] of `to`; a negative number: to none.
///
/// Equal numbers of `list` must stand next to each other, as in a list that is sorted or has no number twice: `grouped`
/// makes such a list of any other, with its order. Then the bits are always the same: a row of `to` is read once, the
/// rows are added to it in float, i ascending, and the sum is rounded once. Shapes, alignment and errors as in
/// `scatter_rows`. Cost: reads `from` once, writes the rows that change; a row's additions are one after the other.
template <gpu_number T, row_number I>
void scatter_add_rows(std::type_identity_t<rows<T const>> from, std::span<I const> list, std::span<I const> order,
                      rows<T> to, cudaStream_t stream, caller here = caller::here()) {
    detail::require_listed<T, I>("cuda::scatter_add_rows", from, list, to, from, "the rows of from", here, order);
    if (from.count() == 0 || from.width() == 0) return;
    auto const range = named_range<"cpx scatter_add_rows">();
    kernels::with_bytes<sizeof(T)>(detail::row_vector(from, to), [&](auto size) {
        constexpr int at_once = size / static_cast<int>(sizeof(T));
        index_t const element = static_cast<index_t>(sizeof(T));
        detail::row_shape const shape(from.count(), from.width() / at_once, 1);
        launch_early(kernels::add_rows<T, at_once, I>, shape.grid, shape.block, 0, stream, "add_rows", here,
                     kernels::listed_rows<I>{reinterpret_cast<char const*>(from.data()),
                                             reinterpret_cast<char*>(to.data()), list.data(),
                                             order.empty() ? nullptr : order.data(), from.count(), to.count(),
                                             from.width(), from.stride() * element, to.stride() * element});
    });
}

} // namespace cpx::cuda
