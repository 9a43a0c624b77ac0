// SPDX-License-Identifier: Apache-2.0
// Launches of attention: where the rows of a rank stand, and the kernels over them.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/attention_engine.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/row_gather.hpp>
#include <cpx/cuda/write_numbers.hpp>
#include <cpx/plan/places.hpp>

#include <cpx/attention_cores_backward.cuh>
#include <cpx/attention_sums.cuh>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx::cuda {

/// Which kernels compute attention, see `attention_path_of`.
enum class attention_path { plain, tensor_cores, engine };

/// Attention of one rank's rows, of arguments that fit: q of `queries`, k and v of `keys`, in the memory `in`. Query
/// head h of the rank reads its key head `(first_query + h) / group - first_key`.
template <gpu_number T, any_sharding Q, any_sharding K>
struct attention_rows {
    Q const& queries;
    K const& keys;
    int rank;
    memory const& in;
    rows<T const> q, k, v;
    index_t first_query, query_heads, first_key, group, dim;
    double scale;
    attention_path path = attention_path::plain; ///< this one, where it can be taken
    attention_engine* engine = nullptr;          ///< asked before, for the forward
};

namespace detail {

/// The places of a rank's rows in device memory, written in stream order, in tiles of `rows`. Cost: O(segments +
/// sequences).
class attention_places {
public:
    template <any_sharding S>
    attention_places(S const& sharding, int rank, int rows, memory const& in, caller here) {
        place_lists const lists(sharding, rank, rows, here);
        tiles_ = lists.tiles();
        require(tiles_ < index_t{1} << 31, "attention", "tiles of rows", "less than 2^31", tiles_, here);
        std::vector<index_t> numbers;
        for (auto const* part : {&lists.first, &lists.first_tile, &lists.place, &lists.row, &lists.token})
            numbers.insert(numbers.end(), part->begin(), part->end());
        numbers_ = in.room<index_t>(std::ssize(numbers));
        write_numbers(numbers, numbers_.data(), in.stream(), here);
        auto const sequences = lists.first.size() - 1, segments = lists.place.size();
        index_t const *const by_sequence = numbers_.data(), *const by_segment = by_sequence + 2 * (sequences + 1);
        view_ = {by_sequence,
                 by_sequence + sequences + 1,
                 by_segment,
                 by_segment + segments,
                 by_segment + 2 * segments,
                 static_cast<int>(sequences),
                 static_cast<int>(segments)};
    }
    index_t tiles() const { return tiles_; }
    kernels::attended_places const& view() const { return view_; }

private:
    block<index_t> numbers_;
    index_t tiles_ = 0;
    kernels::attended_places view_{};
};

/// Launches a block of 256 threads for each tile and head.
template <class... P>
void launch_tiles(char const* name, void (*kernel)(P...), index_t tiles, index_t heads, int shared, cudaStream_t stream,
                  caller here, std::type_identity_t<P> const&... arguments) {
    require(heads < 65536, name, "heads on a rank", "less than 65536, of tensors on devices", heads, here);
    if (tiles == 0 || heads == 0) return;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute",
          here);
    kernel<<<dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(heads)), 256, static_cast<std::size_t>(shared),
             stream>>>(arguments...);
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

/// Returns the path that attention of such elements takes on the current device, forward and back, where all rows begin
/// at multiples of 16 bytes; elsewhere it is plain. Tensor cores want elements of 16 bits, `dim` a multiple of 8, code
/// and a GPU of sm_80 or later, and its shared memory: for more than 64 columns 100 KiB a block, for more than 128
/// Hopper's.
///
/// Both have the bits of one rank wherever `attention` and its backward say so. Tensor cores round weights, and in the
/// backward their gradients, to the precision of T before they multiply; plain kernels round results only.
template <gpu_number T>
attention_path attention_path_of(index_t dim, caller here = caller::here()) {
    if constexpr (sizeof(T) == 2) {
        if (dim % 8 != 0 || dim > 256) return attention_path::plain;
        bool fits = false;
        detail::with_core_columns(dim, [&](auto D) {
            namespace attention = kernels::attention;
            constexpr int wanted = attention::backward_core_memory(attention::core_rows, D); // the most of the three
            fits = detail::has_core_memory(kernels::attend_backward_queries_on_cores<T, D>, wanted, here);
        });
        return fits ? attention_path::tensor_cores : attention_path::plain;
    } else {
        return attention_path::plain;
    }
}

namespace detail {

/// Returns the path for these arguments and `x`, the other rows that kernels read or write.
template <class T, class Q, class K, class... X>
attention_path path_of(attention_rows<T, Q, K> const& of, caller here, X const&... x) {
    bool const fit = of.path == attention_path::tensor_cores && row_vector(of.q, of.k, of.v, x...) == 16;
    return fit ? attention_path_of<T>(of.dim, here) : attention_path::plain;
}

/// Throws unless q, k and v are memory of the device, of heads that kernels take.
template <class T, class Q, class K>
void require_attended(char const* where, attention_rows<T, Q, K> const& of, caller here) {
    require_memory(where, "q", of.q, here);
    require_memory(where, "k", of.k, here);
    require_memory(where, "v", of.v, here);
    require(of.dim >= 1 && of.dim <= 256, where, "dim", "from 1 to 256, of tensors on devices", of.dim, here);
}

/// Arguments as kernels read them that take as many queries, or keys, a block.
template <class T>
struct attention_arguments {
    template <class Q, class K>
    attention_arguments(attention_rows<T, Q, K> const& of, int query_rows, int key_rows, caller here)
        : of_queries(of.queries, of.rank, query_rows, of.in, here), of_keys(of.keys, of.rank, key_rows, of.in, here),
          tensors{of.q,
                  of.k,
                  of.v,
                  of_queries.view(),
                  of_keys.view(),
                  of.first_query,
                  of.first_key,
                  static_cast<int>(of.group),
                  static_cast<int>(of.dim),
                  static_cast<float>(of.scale)} {}

    attention_places of_queries, of_keys;
    kernels::attended_tensors<T> tensors;
};
template <class T>
void require_gradients(char const* where, kernels::attended_gradients<T> const& from, caller here) {
    require_memory(where, "dout", from.dout, here);
    require_memory(where, "lse", from.lse, here);
    require_memory(where, "delta", from.delta, here);
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
