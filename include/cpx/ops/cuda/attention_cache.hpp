// SPDX-License-Identifier: Apache-2.0
// Keys and values kept on devices, and attention over them: `attention_cache<T, cuda::memory>`.
//
//     cpx::attention_cache<__nv_bfloat16, cpx::cuda::memory> cache(heads, sharding, comm);
//
// Elements may be float, bfloat16 or half, sums are float, and so are partials that ranks send. Heads have up to 256
// columns. Everything is in the stream of the memory. A query's keys are added in stretches, in their order, so
// that where caches hold every token, of all heads or of some, results have the bits of one rank. It is made for few
// queries: they read every key by themselves, so a long prompt is better computed by `attention`.
#pragma once

#include <cpx/cuda/cached_attention.hpp>
#include <cpx/cuda/elements.hpp>
#include <cpx/cuda/row_gather.hpp>
#include <cpx/ops/attention_cache.hpp>

namespace cpx::detail {

/// Rows of a sequence are neighbours; it has room for more, and where that ends all rows move to a larger buffer.
template <cuda::gpu_number T>
class cached_keys<T, cuda::memory> {
public:
    cached_keys(index_t sequences, index_t width, cuda::memory const& in)
        : memory_(in), width_(width), places_(static_cast<std::size_t>(sequences)) {}

    cuda::memory const& memory() const { return memory_; }

    void append(std::span<appended_rows const> list, rows<T const> k, rows<T const> v, caller here) {
        cuda::detail::require_memory(where, {{"k", k}, {"v", v}}, here);
        std::vector<index_t> counts;
        for (place const& of : places_) counts.push_back(of.count);
        for (appended_rows const& of : list) counts[static_cast<std::size_t>(of.sequence)] += of.count;
        grow(counts, here);
        auto places = places_;                                            // these count when all has been enqueued
        std::vector<index_t> to(static_cast<std::size_t>(k.count()), -1); // rows of the cache
        for (appended_rows const& of : list) {
            place& own = places[static_cast<std::size_t>(of.sequence)];
            for (index_t i = 0; i < of.count; ++i) to[static_cast<std::size_t>(of.row + i)] = own.first + own.count++;
        }
        auto listed = memory_.template room<index_t>(std::ssize(to));
        cuda::write_numbers(to, listed.data(), memory_.stream(), here);
        std::span<index_t const> const numbers(listed.data(), to.size());
        cuda::scatter_rows<T>(memory_, k, numbers, rows<T>(k_.data(), room_, width_), here);
        cuda::scatter_rows<T>(memory_, v, numbers, rows<T>(v_.data(), room_, width_), here);
        places_ = std::move(places);
    }

    void check(attended_heads const& at, rows<T const> q, rows<T> o, caller here) const {
        char const* const operation = "cached_attention";
        index_t const heads = at.queries.size();
        require(at.dim >= 1 && at.dim <= 256, operation, "dim", "from 1 to 256, of tensors on devices", at.dim, here);
        require(heads < 65536, operation, "heads on a rank", "less than 65536, of tensors on devices", heads, here);
        cuda::detail::require_memory(operation, {{"q", q}, {"o", o}}, here);
    }
    template <class Out>
    void attend(std::span<cached_queries const> list, attended_heads const& at, double scale, rows<T const> q,
                rows<Out> o, rows<float> lse, caller here) const {
        std::vector<cuda::cached_query> queries;
        for (cached_queries const& of : list)
            for (index_t i = 0; i < std::ssize(of.seen); ++i)
                queries.push_back({of.row + i, places_[static_cast<std::size_t>(of.sequence)].first,
                                   of.seen[static_cast<std::size_t>(i)] + 1});
        cuda::attend_over_cache<T, Out>({memory_, q, rows<T const>(k_.data(), room_, width_),
                                         rows<T const>(v_.data(), room_, width_), at.queries.first, at.queries.size(),
                                         at.keys.first, at.group, at.dim, scale},
                                        queries, o, lse, here);
    }

private:
    static constexpr char const* where = "attention_cache";
    /// Where the rows of a sequence are: `count`, with room for more.
    struct place {
        index_t first = 0, count = 0, room = 0;
    };

    /// Makes room for as many rows of every sequence.
    void grow(std::vector<index_t> const& counts, caller here) {
        auto wanted = places_;
        index_t rows = 0;
        bool more = false;
        for (std::size_t s = 0; s < wanted.size(); ++s) {
            if (counts[s] > wanted[s].room) {
                wanted[s].room = std::max({counts[s], 2 * wanted[s].room, index_t{64}});
                more = true;
            }
            wanted[s].first = std::exchange(rows, rows + wanted[s].room);
        }
        if (!more) return;
        product(where, "elements", {rows, width_, static_cast<index_t>(sizeof(T))}, here);
        auto k = memory_.template room<T>(rows * width_), v = memory_.template room<T>(rows * width_);
        for (std::size_t s = 0; s < wanted.size(); ++s) {
            copy(k_.data(), places_[s], k.data(), wanted[s], here);
            copy(v_.data(), places_[s], v.data(), wanted[s], here);
        }
        k_ = std::move(k);
        v_ = std::move(v);
        places_ = std::move(wanted);
        room_ = rows;
    }
    void copy(T const* from, place const& of, T* to, place const& there, caller here) const {
        if (of.count == 0 || width_ == 0) return;
        cuda::check(cudaMemcpyAsync(to + there.first * width_, from + of.first * width_,
                                    static_cast<std::size_t>(of.count * width_) * sizeof(T), cudaMemcpyDeviceToDevice,
                                    memory_.stream()),
                    "cudaMemcpyAsync", here);
    }

    cuda::memory memory_;
    index_t width_, room_ = 0; ///< of a row; rows that there is memory for
    std::vector<place> places_;
    cuda::block<T> k_, v_;
};

} // namespace cpx::detail
