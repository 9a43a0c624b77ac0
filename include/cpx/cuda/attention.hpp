// SPDX-License-Identifier: Apache-2.0
// Launches of attention: where the rows of a rank stand, and the kernels over them.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/row_gather.hpp>
#include <cpx/cuda/write_numbers.hpp>
#include <cpx/plan/segments.hpp>

#include <cpx/attention_backward.cuh>
#include <cpx/attention_sums.cuh>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx::cuda {

namespace detail {

/// The places of a rank's rows in device memory, written in stream order. Cost: O(segments + sequences).
class attention_places {
public:
    template <any_sharding S>
    attention_places(S const& sharding, int rank, memory const& in, caller here) {
        auto list = segments(sharding, rank, here);
        std::ranges::sort(list, {}, [](segment const& s) { return std::pair(s.sequence, s.token); });
        auto const sequences = static_cast<std::size_t>(sharding.batch().sequences());
        std::vector<index_t> first(sequences + 1), tile(sequences + 1), place, row, token;
        index_t count = 0;
        for (segment const& s : list) {
            place.push_back(count);
            row.push_back(s.row);
            token.push_back(s.token);
            first[static_cast<std::size_t>(s.sequence) + 1] += s.count;
            count += s.count;
        }
        for (std::size_t s = 0; s < sequences; ++s) {
            tile[s + 1] = tile[s] + (first[s + 1] + kernels::attention::tile - 1) / kernels::attention::tile;
            first[s + 1] += first[s];
        }
        tiles_ = tile.back();
        require(tiles_ < index_t{1} << 31, "attention", "tiles of rows", "less than 2^31", tiles_, here);
        std::vector<index_t> numbers;
        for (auto const* part : {&first, &tile, &place, &row, &token})
            numbers.insert(numbers.end(), part->begin(), part->end());
        numbers_ = in.room<index_t>(std::ssize(numbers));
        write_numbers(numbers, numbers_.data(), in.stream(), here);
        index_t const *const by_sequence = numbers_.data(), *const by_segment = by_sequence + 2 * (sequences + 1);
        view_ = {by_sequence,
                 by_sequence + sequences + 1,
                 by_segment,
                 by_segment + list.size(),
                 by_segment + 2 * list.size(),
                 static_cast<int>(sequences),
                 static_cast<int>(list.size())};
    }
    index_t tiles() const { return tiles_; }
    kernels::attended_places const& view() const { return view_; }

private:
    block<index_t> numbers_;
    index_t tiles_ = 0;
    kernels::attended_places view_{};
};

/// Launches a block for each tile and head, with memory for `held` tiles of heads.
template <class... P>
void launch_tiles(char const* name, void (*kernel)(P...), index_t tiles, index_t heads, int held, index_t dim,
                  cudaStream_t stream, caller here, std::type_identity_t<P>... arguments) {
    require(dim >= 1 && dim <= 256, name, "dim", "from 1 to 256, of tensors on devices", dim, here);
    require(heads < 65536, name, "heads on a rank", "less than 65536, of tensors on devices", heads, here);
    if (tiles == 0 || heads == 0) return;
    int const shared = kernels::attention::tile_memory(held, static_cast<int>(dim)) * static_cast<int>(sizeof(float));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute",
          here);
    kernel<<<dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(heads)), kernels::attention::threads,
             static_cast<std::size_t>(shared), stream>>>(arguments...);
    check(cudaGetLastError(), name, here);
}
/// Launches a warp for each of `items`.
template <class... P>
void launch_warps(char const* name, void (*kernel)(P...), index_t items, cudaStream_t stream, caller here,
                  std::type_identity_t<P>... arguments) {
    if (items == 0) return;
    kernel<<<static_cast<unsigned>(std::min<index_t>((items + 7) / 8, 65536)), dim3(32, 8), 0, stream>>>(arguments...);
    check(cudaGetLastError(), name, here);
}

} // namespace detail

/// Delta of heads of `dim` columns, see `attention_delta`, of arguments that fit.
template <gpu_number T>
void delta_of_rows(memory const& in, rows<T const> o, rows<T const> dout, index_t dim, rows<float> delta,
                   caller here = caller::here()) {
    detail::require_memory("attention_delta", "o", o, here);
    detail::require_memory("attention_delta", "dout", dout, here);
    detail::require_memory("attention_delta", "delta", delta, here);
    detail::launch_warps("attention_delta", kernels::attention_delta<T>, delta.count() * delta.width(), in.stream(),
                         here, o, dout, static_cast<int>(dim), delta);
}

/// Writes `sum = sum over the readers of a head`, readers ascending, rounded once: as of the host, see `sum_readers`.
template <gpu_number T>
void add_readers(memory const& in, rows<float const> terms, index_t group, index_t width, rows<T> sum,
                 caller here = caller::here()) {
    detail::launch_warps("add_readers", kernels::add_readers<T>, sum.count() * (sum.width() / width), in.stream(), here,
                         terms, group, width, sum);
}

} // namespace cpx::cuda
