// SPDX-License-Identifier: Apache-2.0
// Launches of attention over kept keys and values, for queries each of which sees some neighbouring rows of them.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/write_numbers.hpp>

#include <cpx/attention_cache.cuh>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace cpx::cuda {

/// Attention over a cache, of arguments that fit, in the memory `in`. Query head h of the rank reads its key head
/// `(first_query + h) / group - first_key`.
template <gpu_number T>
struct cached_rows {
    memory const& in;
    rows<T const> q, k, v; ///< (rows, query heads * dim); the others: (rows of the cache, key heads * dim)
    index_t first_query, query_heads, first_key, group, dim;
    double scale;
};
/// A row of q, and the rows of the cache that it sees: `count` from `first` on.
struct cached_query {
    index_t row, first, count;
};

namespace detail {

inline constexpr index_t most_parts = index_t{1} << 22; ///< floats of one launch, unless one query wants more

/// Calls `f` with how many query heads that read one key head a block takes.
template <class F>
void with_heads_at_once(index_t group, F&& f) {
    if (group == 1)
        f(std::integral_constant<int, 1>());
    else if (group <= 4)
        f(std::integral_constant<int, 4>());
    else
        f(std::integral_constant<int, 8>());
}

template <gpu_number T>
void require_cached(cached_rows<T> const& of, caller here) {
    char const* const where = "cached_attention";
    require(of.dim >= 1 && of.dim <= 256, where, "dim", "from 1 to 256, of tensors on devices", of.dim, here);
    require(of.query_heads < 65536, where, "heads on a rank", "less than 65536, of tensors on devices", of.query_heads,
            here);
    require_memory(where, "q", of.q, here);
}

} // namespace detail

/// Writes o and, if it is memory, lse, of every query; where it sees nothing, 0 and minus infinity. Out: T, or float.
///
/// A query's keys are taken in stretches of 256, which are joined in their order: its bits depend on nothing but itself
/// and what it sees. Reads the cache once for every 8 query heads that read a key head.
template <gpu_number T, gpu_number Out>
void attend_over_cache(cached_rows<T> const& of, std::vector<cached_query> const& queries, rows<Out> o, rows<float> lse,
                       caller here = caller::here()) {
    using kernels::attention::stretch, kernels::attention::threads;
    char const* const where = "cached_attention";
    detail::require_cached(of, here);
    detail::require_memory(where, "o", o, here);
    if (queries.empty() || of.query_heads == 0) return;
    auto const range = named_range<"cpx cached_attention">();
    auto const n = queries.size();
    std::vector<index_t> numbers(4 * n + 1); // splits, and the number behind the last; rows, firsts, counts
    for (std::size_t i = 0; i < n; ++i) {
        auto const& [row, first, count] = queries[i];
        numbers[i + 1] = numbers[i] + (count + stretch - 1) / stretch;
        numbers[n + 1 + i] = row;
        numbers[2 * n + 1 + i] = first;
        numbers[3 * n + 1 + i] = count;
    }
    auto listed = of.in.template room<index_t>(std::ssize(numbers));
    write_numbers(numbers, listed.data(), of.in.stream(), here);
    index_t const part = of.query_heads * (of.dim + 2);
    index_t const most = std::clamp<index_t>(detail::most_parts / part, 1, (index_t{1} << 31) - 1);
    block<float> parts;
    for (std::size_t begin = 0, end = 0; begin < n; begin = end) {
        for (end = begin + 1; end < n && numbers[end + 1] - numbers[begin] <= most;) ++end;
        index_t const splits = numbers[end] - numbers[begin];
        if (splits * part > parts.size()) parts = of.in.template room<float>(splits * part);
        auto const list = [&](std::size_t which) { return listed.data() + (which > 0 ? which * n + 1 : 0) + begin; };
        kernels::cached_tensors<T> const t{of.q,
                                           of.k,
                                           of.v,
                                           list(0),
                                           list(1),
                                           list(2),
                                           list(3),
                                           static_cast<int>(end - begin),
                                           of.first_query,
                                           of.first_key,
                                           static_cast<int>(of.query_heads),
                                           static_cast<int>(of.group),
                                           static_cast<int>(of.dim),
                                           static_cast<float>(of.scale)};
        index_t const keys = (of.first_query + of.query_heads - 1) / of.group - of.first_query / of.group + 1;
        if (splits > 0)
            detail::with_heads_at_once(of.group, [&](auto G) {
                detail::with_lane_columns(of.dim, [&](auto E) {
                    dim3 const grid(static_cast<unsigned>(splits),
                                    static_cast<unsigned>(keys * ((of.group + G - 1) / G)));
                    kernels::attend_over_stretch<T, E, G><<<grid, threads, 0, of.in.stream()>>>(t, parts.data());
                });
            });
        check(cudaGetLastError(), where, here);
        dim3 const grid(static_cast<unsigned>(end - begin), static_cast<unsigned>(of.query_heads));
        kernels::join_stretches<Out>
            <<<grid, threads, 0, of.in.stream()>>>(o, lse, t.split, t.row, parts.data(), static_cast<int>(of.dim));
        check(cudaGetLastError(), where, here);
    }
}

} // namespace cpx::cuda
