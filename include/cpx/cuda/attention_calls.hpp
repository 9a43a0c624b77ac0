// SPDX-License-Identifier: Apache-2.0
// Attention of one rank's rows and its backward, plain or on tensor cores: what `attention` of tensors calls.
#pragma once

#include <cpx/cuda/attention.hpp>

namespace cpx::cuda {

namespace detail {

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
                auto& made = numbers.emplace_back(of.in.template room<index_t>(std::ssize(given)));
                write_numbers(given, made.data(), of.in.stream(), here);
                return made.data();
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

} // namespace detail

/// Writes o and, if it is memory, lse, as `cpx::attention` says. Returns the path it took.
template <gpu_number T, any_sharding Q, any_sharding K>
attention_path attend(attention_rows<T, Q, K> const& of, rows<T> o, rows<float> lse, caller here = caller::here()) {
    namespace attention = kernels::attention;
    char const* const where = "attention";
    auto const path = detail::path_of(of, here, o);
    int const tile = path == attention_path::plain ? attention::tile : attention::core_rows;
    detail::require_attended(where, of, here);
    detail::require_memory(where, "o", o, here);
    if (lse.data()) detail::require_memory(where, "lse", lse, here);
    auto const range = named_range<"cpx attention">();
    if (detail::attend_by_engine(of, o, lse, here)) return attention_path::engine;
    detail::attention_arguments<T> const on(of, tile, tile, here);
    auto const launch = [&](auto kernel, int shared) {
        detail::launch_tiles(where, kernel, on.of_queries.tiles(), of.query_heads, shared, of.in.stream(), here,
                             on.tensors, o, lse);
    };
    if (path == attention_path::plain)
        detail::with_lane_columns(
            of.dim, [&](auto columns) { launch(kernels::attend<T, columns>, attention::tile_bytes(3, of.dim)); });
    else if constexpr (sizeof(T) == 2)
        detail::with_core_columns(
            of.dim, [&](auto D) { launch(kernels::attend_on_cores<T, D>, attention::forward_core_memory(D)); });
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
    detail::require_memory(where, "dq", dq, here);
    auto const range = named_range<"cpx attention_backward_queries">();
    auto const launch = [&](auto kernel, int shared) {
        detail::launch_tiles(where, kernel, on.of_queries.tiles(), of.query_heads, shared, of.in.stream(), here,
                             on.tensors, from, dq);
    };
    if (path == attention_path::plain)
        detail::with_lane_columns(of.dim, [&](auto columns) {
            launch(kernels::attend_backward_queries<T, columns>, attention::tile_bytes(4, of.dim));
        });
    else if constexpr (sizeof(T) == 2)
        detail::with_core_columns(of.dim, [&](auto D) {
            launch(kernels::attend_backward_queries_on_cores<T, D>,
                   attention::backward_core_memory(attention::core_rows, D));
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
    auto const run = [&](int tile, auto&& f) {
        detail::require_attended(where, of, here);
        detail::attention_arguments<T> const on(of, tile, tile, here);
        detail::require_gradients(where, from, here);
        detail::require_memory(where, "dk", dk, here);
        detail::require_memory(where, "dv", dv, here);
        f([&](auto kernel, int shared, auto const&... sums) {
            detail::launch_tiles(where, kernel, on.of_keys.tiles(), of.query_heads / each, shared, of.in.stream(), here,
                                 on.tensors, from, static_cast<int>(each), sums..., dk, dv);
        });
    };
    auto const range = named_range<"cpx attention_backward_keys">();
    if (path == attention_path::plain)
        detail::with_lane_columns(of.dim, [&](auto columns) {
            run(attention::tile, [&](auto const& launch) {
                launch(kernels::attend_backward_keys<T, Out, columns>, attention::tile_bytes(4, of.dim));
            });
        });
    else if constexpr (sizeof(T) == 2)
        detail::with_core_columns(of.dim, [&](auto D) {
            auto sums = of.in.template room<float>(each == 1 ? 0 : 2 * dk.count() * dk.width());
            run(attention::core_keys(D), [&](auto const& launch) {
                launch(kernels::attend_backward_keys_on_cores<T, Out, D>,
                       attention::backward_core_memory(attention::core_keys(D), D), sums.data());
            });
        });
    return path;
}

} // namespace cpx::cuda
