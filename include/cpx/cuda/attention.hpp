// SPDX-License-Identifier: Apache-2.0
// Attention of one rank's rows and its backward, plain or on tensor cores: what `attention` of tensors calls.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/attention_engine.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/row_gather.hpp>
#include <cpx/cuda/write_numbers.hpp>
#include <cpx/plan/places.hpp>

#include <cpx/attention_cores_backward.cuh>
#include <cpx/attention_sums.cuh>

#include <algorithm>
#include <span>
#include <type_traits>
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

/// Returns the path that attention of such elements takes on the current device, forward and back, where all rows begin
/// at multiples of 16 bytes; elsewhere it is plain. Tensor cores want elements of 16 bits, `dim` a multiple of 8, sm_80
/// or later, and shared memory: above 64 columns 100 KiB a block, above 128 Hopper's.
///
/// Both have the bits of one rank wherever `attention` and its backward say so. Tensor cores round weights, and in the
/// backward their gradients, to the precision of T before they multiply; plain kernels round results only.
template <gpu_number T>
attention_path attention_path_of(index_t dim, caller here = caller::here()) {
    bool fits = false;
    if constexpr (sizeof(T) == 2)
        detail::with_core_columns(dim, [&](auto D) {
            namespace attention = kernels::attention;
            constexpr int wanted = std::max(attention::backward_queries_memory<D>, attention::backward_keys_memory<D>);
            fits = dim % 8 == 0 && dim <= 256 &&
                   detail::has_core_memory(kernels::attend_backward_queries_on_cores<T, D>, wanted, here);
        });
    return fits ? attention_path::tensor_cores : attention_path::plain;
}

namespace detail {

/// A rank's rows in device memory, written in stream order, in tiles of `rows`. Cost: O(segments + sequences).
struct attention_places {
    block<index_t> numbers;
    index_t tiles = 0;
    kernels::attended_places view{};

    template <any_sharding S>
    attention_places(S const& sharding, int rank, int rows, memory const& in, caller here) {
        place_lists const lists(sharding, rank, rows, here);
        tiles = lists.tiles();
        require(tiles < index_t{1} << 31, "attention", "tiles of rows", "less than 2^31", tiles, here);
        std::vector<index_t> listed;
        for (auto const* each : {&lists.first, &lists.first_tile, &lists.place, &lists.row, &lists.token})
            listed.insert(listed.end(), each->begin(), each->end());
        numbers = numbers_on_device(in, listed, here);
        auto const sequences = lists.first.size() - 1, segments = lists.place.size();
        index_t const *const by_sequence = numbers.data(), *const by_segment = by_sequence + 2 * (sequences + 1);
        view = {by_sequence,
                by_sequence + sequences + 1,
                by_segment,
                by_segment + segments,
                by_segment + 2 * segments,
                static_cast<int>(sequences),
                static_cast<int>(segments)};
    }
};

/// Launches a block of 256 threads for each tile and head.
template <class... P>
void launch_tiles(char const* name, void (*kernel)(P...), index_t tiles, index_t heads, int shared, cudaStream_t stream,
                  caller here, std::type_identity_t<P> const&... arguments) {
    require(heads < 65536, name, "heads on a rank", "less than 65536, of tensors on devices", heads, here);
    if (tiles > 0 && heads > 0)
        launch(kernel, dims(tiles, heads), 256, static_cast<std::size_t>(shared), stream, name, here, arguments...);
}
/// Launches a warp for each of `items`.
template <class... P>
void launch_warps(char const* name, void (*kernel)(P...), index_t items, cudaStream_t stream, caller here,
                  std::type_identity_t<P> const&... arguments) {
    if (items > 0)
        launch(kernel, dims(std::min<index_t>((items + 7) / 8, 65536)), dim3(32, 8), 0, stream, name, here,
               arguments...);
}

/// Returns the path for these arguments and `x`, the other rows that kernels read or write.
template <class T, class Q, class K, class... X>
attention_path path_of(attention_rows<T, Q, K> const& of, caller here, X const&... x) {
    bool const fit = of.path == attention_path::tensor_cores && row_vector(of.q, of.k, of.v, x...) == 16;
    return fit ? attention_path_of<T>(of.dim, here) : attention_path::plain;
}

/// Throws unless q, k and v are memory of the device, of heads that kernels take.
template <class T, class Q, class K>
void require_attended(char const* where, attention_rows<T, Q, K> const& of, caller here) {
    require_memory(where, {{"q", of.q}, {"k", of.k}, {"v", of.v}}, here);
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
                  of_queries.view,
                  of_keys.view,
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
    require_memory(where, {{"dout", from.dout}, {"lse", from.lse}, {"delta", from.delta}}, here);
}

/// Returns whether the engine has computed it.
template <class T, class Q, class K>
bool attend_by_engine(attention_rows<T, Q, K> const& of, rows<T> o, rows<float> lse, caller here) {
    if constexpr (sizeof(T) == 2 && K::every_row) {
        if (!of.engine || of.query_heads == 0 || of.first_query % of.group != 0 || of.query_heads % of.group != 0)
            return false;
        index_t const first = (of.first_query / of.group - of.first_key) * of.dim;
        index_t const key_heads = of.query_heads / of.group, width = key_heads * of.dim;
        std::vector<block<index_t>> numbers; // until the engine has returned: freed in stream order
        std::vector<block<char>> rooms;
        engine_memory const memory{
            [&](index_t bytes) { return rooms.emplace_back(of.in.template room<char>(bytes)).data(); },
            [&](std::span<index_t const> given) {
                return numbers.emplace_back(numbers_on_device(of.in, given, here)).data();
            }};
        attention_task<T> const task{of.q,
                                     of.k.columns(first, width),
                                     of.v.columns(first, width),
                                     o,
                                     lse,
                                     attended_runs(of.queries, of.rank, of.keys.batch(), here),
                                     of.query_heads,
                                     key_heads,
                                     of.dim,
                                     of.scale,
                                     of.in.stream(),
                                     memory};
        return task.runs.empty() || of.engine->attend(task, here);
    } else {
        return false;
    }
}

/// Calls `plain(columns of a lane)`, or `cores(columns of a head)` of tensor cores.
template <class T, class Plain, class Cores>
void on_path(attention_path path, index_t dim, Plain&& plain, Cores&& cores) {
    if (path == attention_path::plain)
        with_lane_columns(dim, plain);
    else if constexpr (sizeof(T) == 2)
        with_core_columns(dim, cores);
}

} // namespace detail

/// Writes o and, if it is memory, lse, as `cpx::attention` says. Returns the path it took.
template <gpu_number T, any_sharding Q, any_sharding K>
attention_path attend(attention_rows<T, Q, K> const& of, rows<T> o, rows<float> lse, caller here = caller::here()) {
    namespace attention = kernels::attention;
    char const* const where = "attention";
    auto const path = detail::path_of(of, here, o);
    int const tile = path == attention_path::plain ? attention::tile : attention::core_rows;
    detail::require_attended(where, of, here);
    detail::require_memory(where, {{"o", o}}, here);
    if (lse.data()) detail::require_memory(where, {{"lse", lse}}, here);
    auto const range = named_range<"cpx attention">();
    if (detail::attend_by_engine(of, o, lse, here)) return attention_path::engine;
    detail::attention_arguments<T> const on(of, tile, tile, here);
    auto const launch = [&](auto kernel, int shared) {
        detail::launch_tiles(where, kernel, on.of_queries.tiles, of.query_heads, shared, of.in.stream(), here,
                             on.tensors, o, lse);
    };
    detail::on_path<T>(
        path, of.dim, [&](auto columns) { launch(kernels::attend<T, columns>, attention::tile_bytes(3, of.dim)); },
        [&](auto D) { launch(kernels::attend_on_cores<T, D>, attention::forward_core_memory(D)); });
    return path;
}

/// Writes dq, as `cpx::attention_backward_queries` says. Returns the path it took.
template <gpu_number T, any_sharding Q, any_sharding K>
attention_path attend_backward_queries(attention_rows<T, Q, K> const& of,
                                       std::type_identity_t<kernels::attended_gradients<T>> const& from, rows<T> dq,
                                       caller here = caller::here()) {
    namespace attention = kernels::attention;
    char const* const where = "attention_backward_queries";
    auto const path = detail::path_of(of, here, from.dout, dq);
    int const tile = path == attention_path::plain ? attention::tile : attention::core_rows;
    detail::require_attended(where, of, here);
    detail::attention_arguments<T> const on(of, tile, tile, here);
    detail::require_gradients(where, from, here);
    detail::require_memory(where, {{"dq", dq}}, here);
    auto const range = named_range<"cpx attention_backward_queries">();
    auto const launch = [&](auto kernel, int shared) {
        detail::launch_tiles(where, kernel, on.of_queries.tiles, of.query_heads, shared, of.in.stream(), here,
                             on.tensors, from, dq);
    };
    detail::on_path<T>(
        path, of.dim,
        [&](auto columns) { launch(kernels::attend_backward_queries<T, columns>, attention::tile_bytes(4, of.dim)); },
        [&](auto D) {
            launch(kernels::attend_backward_queries_on_cores<T, D>, attention::backward_queries_memory<D>);
        });
    return path;
}

/// Writes dk and dv of what every `each` query heads, side by side, give, as `cpx::attention_backward_keys` says. Out:
/// T, or float where sums are not whole. Returns the path it took; tensor cores' takes memory for float sums of dk and
/// dv, unless `each` is 1.
template <gpu_number T, any_sharding Q, any_sharding K, class Out>
attention_path attend_backward_keys(attention_rows<T, Q, K> const& of,
                                    std::type_identity_t<kernels::attended_gradients<T>> const& from, index_t each,
                                    rows<Out> dk, rows<Out> dv, caller here = caller::here()) {
    namespace attention = kernels::attention;
    char const* const where = "attention_backward_keys";
    auto const path = detail::path_of(of, here, from.dout, dk, dv);
    auto const range = named_range<"cpx attention_backward_keys">();
    auto const run = [&](int tile, auto kernel, int shared, auto const&... sums) {
        detail::require_attended(where, of, here);
        detail::attention_arguments<T> const on(of, tile, tile, here);
        detail::require_gradients(where, from, here);
        detail::require_memory(where, {{"dk", dk}, {"dv", dv}}, here);
        detail::launch_tiles(where, kernel, on.of_keys.tiles, of.query_heads / each, shared, of.in.stream(), here,
                             on.tensors, from, static_cast<int>(each), sums..., dk, dv);
    };
    detail::on_path<T>(
        path, of.dim,
        [&](auto columns) {
            run(attention::tile, kernels::attend_backward_keys<T, Out, columns>, attention::tile_bytes(4, of.dim));
        },
        [&](auto D) {
            auto sums = of.in.template room<float>(each == 1 ? 0 : 2 * dk.count() * dk.width());
            run(attention::core_keys(D), kernels::attend_backward_keys_on_cores<T, Out, D>,
                attention::backward_keys_memory<D>, sums.data());
        });
    return path;
}

/// Delta of heads of `dim` columns, see `attention_delta`, of arguments that fit.
template <gpu_number T>
void delta_of_rows(memory const& in, rows<T const> o, rows<T const> dout, index_t dim, rows<float> delta,
                   caller here = caller::here()) {
    char const* const where = "attention_delta";
    detail::require_memory(where, {{"o", o}, {"dout", dout}, {"delta", delta}}, here);
    detail::launch_warps(where, kernels::attention_delta<T>, delta.count() * delta.width(), in.stream(), here, o, dout,
                         static_cast<int>(dim), delta);
}

/// Writes `sum = sum over the readers of a head`, readers ascending, rounded once: as of the host, see `sum_readers`.
template <gpu_number T>
void add_readers(memory const& in, rows<float const> terms, index_t group, index_t width, rows<T> sum,
                 caller here = caller::here()) {
    detail::launch_warps("add_readers", kernels::add_readers<T>, sum.count() * (sum.width() / width), in.stream(), here,
                         terms, group, width, sum);
}

} // namespace cpx::cuda
