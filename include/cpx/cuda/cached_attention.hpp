// SPDX-License-Identifier: Apache-2.0
// Launches of attention over kept keys and values, for queries each of which sees some neighbouring rows of them.
#pragma once

#include <cpx/cuda/arguments.hpp>
#include <cpx/cuda/launch.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/cuda/nvtx.hpp>
#include <cpx/cuda/write_numbers.hpp>

#include <cpx/attention_cache_cores.cuh>

#include <algorithm>
#include <span>
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

inline constexpr index_t most_partials = index_t{1} << 24; ///< floats of one launch, unless one query wants more

/// Launches the kernel for the partials of so many stretches.
template <gpu_number T>
void launch_stretches(cached_rows<T> const& of, kernels::cached_tensors<T> const& t, index_t stretches,
                      kernels::stretch_partials const& partials, caller here) {
    auto const grid = [&](int heads_at_once) {
        return dims(stretches * t.keys() * ((of.group + heads_at_once - 1) / heads_at_once));
    };
    char const* const where = "cached_attention";
    if constexpr (sizeof(T) == 2)
        if (of.dim % 8 == 0 && row_vector(of.q, of.k, of.v) == 16) {
            bool done = false;
            with_core_columns(of.dim, [&](auto D) {
                auto* const kernel = kernels::attend_over_stretch_on_cores<T, D>;
                constexpr int shared = kernels::attention::cache_memory(D);
                if (!(done = has_core_memory(kernel, shared, here))) return;
                launch_early(kernel, grid(kernels::attention::cache_heads), kernels::attention::cache_threads, shared,
                             of.in.stream(), where, here, t, partials);
            });
            if (done) return;
        }
    with_least<1, 4, 8>(of.group, [&](auto G) { // query heads that read one key head, of a block
        with_lane_columns(of.dim, [&](auto E) {
            launch_early(kernels::attend_over_stretch<T, E, G>, grid(G), kernels::attention::threads, 0, of.in.stream(),
                         where, here, t, partials);
        });
    });
}

} // namespace detail

/// Writes o and, if it is memory, lse, of every query; where it sees nothing, 0 and minus infinity. Out: T, or float.
///
/// A query's keys are taken in stretches, whose length depends on their number and which are joined in their order: its
/// bits depend on nothing but itself, what it sees and how they are multiplied. Reads the cache once for every 8 query
/// heads that read a key head. Elements of 16 bits are multiplied on tensor cores, by weights to some 16 bits or more,
/// where `dim` is a multiple of 8, rows of q, k and v all begin at multiples of 16 bytes, and code and GPU are of sm_80
/// or later; without them the same numbers have other bits.
template <gpu_number T, gpu_number Out>
void attend_over_cache(cached_rows<T> const& of, std::vector<cached_query> const& queries, rows<Out> o, rows<float> lse,
                       caller here = caller::here()) {
    using kernels::attention::stretch_of, kernels::attention::threads;
    char const* const where = "cached_attention";
    if (queries.empty() || of.query_heads == 0) return;
    auto const range = named_range<"cpx cached_attention">();
    std::vector<kernels::seen_rows> seen(queries.size() + 1);
    for (std::size_t i = 0; i < queries.size(); ++i) {
        auto const& [row, first, count] = queries[i];
        seen[i] = {seen[i].stretch, row, first, count};
        seen[i + 1].stretch = seen[i].stretch + (count + stretch_of(count) - 1) / stretch_of(count);
    }
    kernels::cached_tensors<T> t{of.q,
                                 of.k,
                                 of.v,
                                 {},
                                 static_cast<int>(of.query_heads),
                                 static_cast<int>(of.group),
                                 static_cast<int>(of.first_query / of.group - of.first_key),
                                 static_cast<int>(of.first_query % of.group),
                                 static_cast<int>(of.dim),
                                 static_cast<float>(of.scale)};
    block<index_t> listed;
    if (queries.size() > kernels::seen_list::most) {
        static_assert(sizeof(kernels::seen_rows) == 4 * sizeof(index_t));
        std::span const numbers(reinterpret_cast<index_t const*>(seen.data()), 4 * seen.size());
        listed = numbers_on_device(of.in, numbers, here);
    }
    index_t const partial = of.query_heads * (kernels::partial_width(t.dim) + 2); // floats
    index_t const most = std::clamp<index_t>(detail::most_partials / partial, 1, (index_t{1} << 31) - 1);
    block<float> room;
    for (std::size_t begin = 0, end = 0; begin < queries.size(); begin = end) {
        for (end = begin + 1; end < queries.size() && seen[end + 1].stretch - seen[begin].stretch <= most;) ++end;
        index_t const stretches = seen[end].stretch - seen[begin].stretch;
        if (stretches * partial > room.size()) room = of.in.template room<float>(stretches * partial);
        kernels::stretch_partials const partials{
            room.data(),
            reinterpret_cast<float2*>(room.data() + stretches * of.query_heads * kernels::partial_width(t.dim))};
        t.queries.queries = static_cast<int>(end - begin);
        if (listed.size() > 0)
            t.queries.elsewhere = reinterpret_cast<kernels::seen_rows const*>(listed.data()) + begin;
        else
            std::copy(seen.begin() + static_cast<std::ptrdiff_t>(begin),
                      seen.begin() + static_cast<std::ptrdiff_t>(end) + 1, t.queries.here);
        if (stretches > 0) detail::launch_stretches(of, t, stretches, partials, here);
        launch_early(kernels::join_stretches<Out>, detail::dims(t.queries.queries, of.query_heads), threads, 0,
                     of.in.stream(), where, here, o, lse, t.queries, partials, t.dim);
    }
}

} // namespace cpx::cuda
