// SPDX-License-Identifier: Apache-2.0
// Attention of one rank's rows and its backward by cuDNN's graphs. Wants cuDNN 9 and its frontend's headers.
#pragma once

#include <cpx/cuda/attention.hpp>
#include <cpx/cuda/elements.hpp>

#include <cudnn_frontend.h>

#include <bit>
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>

#ifdef NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <dlfcn.h>
namespace cudnn_frontend {
inline void* cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_GLOBAL); // null where there is no cuDNN
} // namespace cudnn_frontend
#endif

namespace cpx::cuda {

namespace detail {

/// What a graph of cuDNN is built for: counts are the most it takes.
struct cudnn_shape {
    bool backward = false, half = false;
    index_t entries = 0, queries = 0, keys = 0, query_rows = 0, key_rows = 0; ///< of each entry, and of all
    index_t query_heads = 0, key_heads = 0, dim = 0;
    index_t q = 0, k = 0, v = 0, o = 0, lse = 0, dout = 0, dq = 0; ///< strides of rows
    float scale = 1;
    auto operator<=>(cudnn_shape const&) const = default;
};

/// Names of a graph's tensors; offsets of rows follow, one for each.
enum cudnn_name : index_t { to_q = 1, to_k, to_v, to_o, to_lse, to_dout, to_dq, to_dk, to_dv, of_queries, of_keys };
inline constexpr index_t cudnn_offsets = 100;

/// Returns `count` rounded up so that few graphs serve all counts: to 4 sizes between powers of 2.
inline index_t cudnn_capacity(index_t count, index_t least) {
    auto const step = std::bit_floor(static_cast<std::uint64_t>(std::max(count, least))) / 4;
    return (std::max(count, least) + static_cast<index_t>(step) - 1) / static_cast<index_t>(step) *
           static_cast<index_t>(step);
}

/// The rank's segments of queries as entries of cuDNN's batch, each with the keys of its sequence up to its last one.
struct cudnn_entries {
    std::vector<segment> list;
    index_t queries = 0, keys = 0, query_rows = 0, key_rows = 0; ///< most of an entry, and of all

    template <any_sharding S>
    cudnn_entries(S const& sharding, int rank, caller here) : list(segments(sharding, rank, here)) {
        std::ranges::sort(list, {}, [](segment const& s) { return std::pair(s.sequence, s.token); });
        for (segment const& s : list) {
            queries = std::max(queries, s.count);
            keys = std::max(keys, s.token + s.count);
            query_rows += s.count;
            key_rows += s.token + s.count;
        }
    }
};

/// Adds what segments give to the gradients of keys, in their order, and rounds once.
template <class T>
struct add_segments {
    rows<T const> parts;
    rows<T> sums;
    index_t const *first, *first_segment; ///< of every sequence: its first token, and its first segment
    index_t const *part, *seen;           ///< of every segment: its first row of parts, and how many
    index_t sequences;

    __device__ void operator()(index_t row, index_t column) const {
        index_t low = 0, high = sequences; // the last sequence that begins at the row or before it
        while (high - low > 1) {
            index_t const middle = (low + high) / 2;
            (first[middle] <= row ? low : high) = middle;
        }
        float sum = 0;
        index_t const token = row - first[low];
        for (index_t s = first_segment[low]; s < first_segment[low + 1]; ++s)
            if (token < seen[s]) sum += static_cast<float>(parts(part[s] + token, column));
        sums(row, column) = static_cast<T>(sum);
    }
};

} // namespace detail

/// Attention by cuDNN on the device that is current when this is made, and the graphs it has built for it.
///
/// Any thread may call. A graph is built, on the host, for the first call of such counts (rounded up), strides and
/// heads; that call cannot be captured, later ones can.
class cudnn_attention {
    using graph = cudnn_frontend::graph::Graph;
    using pointers = std::unordered_map<index_t, void*>;

public:
    cudnn_attention() {
#ifdef NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
        if (!cudnn_frontend::cudnn_dlhandle) return;
#endif
        if (cudnn_frontend::detail::create_handle(&handle_) != CUDNN_STATUS_SUCCESS) handle_ = nullptr;
    }
    cudnn_attention(cudnn_attention const&) = delete;
    ~cudnn_attention() {
        if (handle_) static_cast<void>(cudnn_frontend::detail::destroy_handle(handle_));
    }

    /// Writes o and lse as `cpx::attention` does, of T's precision; returns false, and writes nothing, where cuDNN does
    /// not serve: `served` says where. A row's bits may depend on the sharding.
    template <gpu_number T, any_sharding Q, any_sharding K>
    bool attend(attention_rows<T, Q, K> const& of, rows<T> o, rows<float> lse, caller here = caller::here()) {
        auto const range = named_range<"cpx attention by cuDNN">();
        detail::cudnn_entries const entries(of.queries, of.rank, here);
        if (!served(of, entries, lse, o)) return false;
        if (entries.list.empty()) return true;
        auto shape = shape_of(of, entries);
        shape.o = o.stride();
        shape.lse = lse.stride();
        return run(shape, of, entries,
                   {{detail::to_o, o.data()}, {detail::to_lse, lse.data()}}, here);
    }

    /// Writes dq, and what the rank's queries give to dk and dv of all keys, as `cpx::attention_backward_queries` and
    /// `_keys` do; returns false, and writes nothing, where cuDNN does not serve. Takes memory for dk and dv of every
    /// segment, and cuDNN's. The bits of dq may differ from call to call.
    template <gpu_number T, any_sharding Q, any_sharding K>
    bool attend_backward(attention_rows<T, Q, K> const& of, std::type_identity_t<rows<T const>> o,
                         std::type_identity_t<rows<T const>> dout, rows<float const> lse, rows<T> dq, rows<T> dk,
                         rows<T> dv, caller here = caller::here()) {
        auto const range = named_range<"cpx attention backward by cuDNN">();
        detail::cudnn_entries const entries(of.queries, of.rank, here);
        if (!served(of, entries, lse, o, dout, dq, dk, dv)) return false;
        index_t const width = of.query_heads / of.group * of.dim;
        if (dk.width() != width || dv.width() != width) return false; // heads whose queries are on other ranks
        auto shape = shape_of(of, entries);
        shape.backward = true;
        shape.o = o.stride();
        shape.lse = lse.stride();
        shape.dout = dout.stride();
        shape.dq = dq.stride();
        auto parts = of.in.template room<T>(2 * shape.key_rows * width);
        rows<T> const part_k(parts.data(), shape.key_rows, width),
            part_v(parts.data() + shape.key_rows * width, shape.key_rows, width);
        if (!entries.list.empty() &&
            !run(shape, of, entries,
                 {{detail::to_o, const_cast<T*>(o.data())},
                  {detail::to_lse, const_cast<float*>(lse.data())},
                  {detail::to_dout, const_cast<T*>(dout.data())},
                  {detail::to_dq, dq.data()},
                  {detail::to_dk, part_k.data()},
                  {detail::to_dv, part_v.data()}},
                 here))
            return false;
        add(of, entries, part_k, dk, part_v, dv, here);
        return true;
    }

private:
    /// Whether cuDNN serves: elements of 16 bits, `dim` a multiple of 8, rows that begin at multiples of 16 bytes, whole
    /// groups of heads, and segments that together see at most 4 times the keys there are.
    template <class T, class Q, class K, class L, class... X>
    bool served(attention_rows<T, Q, K> const& of, detail::cudnn_entries const& entries, rows<L> lse,
                X const&... x) const {
        static_assert(K::every_row, "cpx: cuDNN's attention wants all keys of a sequence");
        return handle_ && sizeof(T) == 2 && of.dim % 8 == 0 && of.dim <= 256 &&
               detail::row_vector(of.q, of.k, of.v, x...) == 16 && (lse.data() || entries.list.empty()) &&
               reinterpret_cast<std::uintptr_t>(lse.data()) % 16 == 0 && of.first_query % of.group == 0 &&
               of.query_heads % of.group == 0 && entries.key_rows <= 4 * of.keys.batch().tokens();
    }
    template <class T, class Q, class K>
    detail::cudnn_shape shape_of(attention_rows<T, Q, K> const& of, detail::cudnn_entries const& entries) const {
        detail::cudnn_shape s;
        s.half = std::same_as<T, __half>;
        s.entries = detail::cudnn_capacity(std::ssize(entries.list), 4);
        s.entries += -s.entries & 3; // tables begin at multiples of 16 bytes
        s.queries = detail::cudnn_capacity(entries.queries, 64);
        s.keys = detail::cudnn_capacity(entries.keys, 64);
        s.query_rows = detail::cudnn_capacity(entries.query_rows, 64);
        s.key_rows = detail::cudnn_capacity(entries.key_rows, 64);
        s.query_heads = of.query_heads;
        s.key_heads = of.query_heads / of.group;
        s.dim = of.dim;
        s.q = of.q.stride();
        s.k = of.k.stride();
        s.v = of.v.stride();
        s.scale = static_cast<float>(of.scale);
        return s;
    }

    /// Runs the shape's graph; `more` are tensors beside q, k and v. Returns false if cuDNN has none.
    template <class T, class Q, class K>
    bool run(detail::cudnn_shape const& shape, attention_rows<T, Q, K> const& of, detail::cudnn_entries const& entries,
             pointers more, caller here) {
        std::lock_guard const lock(guard_);
        std::shared_ptr<graph> const with = graph_of(shape);
        if (!with) return false;
        index_t const first_key = (of.first_query / of.group - of.first_key) * of.dim;
        more[detail::to_q] = const_cast<T*>(of.q.data());
        more[detail::to_k] = const_cast<T*>(of.k.data() + first_key);
        more[detail::to_v] = const_cast<T*>(of.v.data() + first_key);
        // counts, two to a word, then first elements of entries in every tensor; entries that are not there are empty
        index_t const width = shape.key_heads * shape.dim, words = shape.entries / 2, each = shape.entries + 2;
        std::pair<index_t, index_t> const strides[] = {
            {detail::to_q, shape.q},     {detail::to_o, shape.o},   {detail::to_lse, shape.lse},
            {detail::to_dout, shape.dout}, {detail::to_dq, shape.dq}, {detail::to_k, shape.k},
            {detail::to_v, shape.v},     {detail::to_dk, width},    {detail::to_dv, width}};
        std::vector<index_t> numbers(static_cast<std::size_t>(2 * words));
        auto const put = [&](index_t at, index_t count) {
            numbers[static_cast<std::size_t>(at / 2)] |= count << (at % 2 * 32);
        };
        for (index_t i = 0; i < std::ssize(entries.list); ++i) {
            segment const& s = entries.list[static_cast<std::size_t>(i)];
            put(i, s.count);
            put(shape.entries + i, s.token + s.count);
        }
        for (auto const& [name, stride] : strides) {
            bool const by_query = name != detail::to_k && name != detail::to_v && name != detail::to_dk &&
                                  name != detail::to_dv,
                       part = name == detail::to_dk || name == detail::to_dv;
            index_t next = 0;
            for (index_t i = 0; i < each; ++i) {
                if (i < std::ssize(entries.list)) {
                    segment const& s = entries.list[static_cast<std::size_t>(i)];
                    index_t const row = by_query ? s.row : part ? next : of.keys.batch().offset(s.sequence);
                    numbers.push_back(row * stride);
                    next = by_query || !part ? row + s.count : next + s.token + s.count;
                } else {
                    numbers.push_back(next * stride);
                }
            }
        }
        auto tables = of.in.template room<index_t>(std::ssize(numbers));
        write_numbers(numbers, tables.data(), of.in.stream(), here);
        more[detail::of_queries] = tables.data();
        more[detail::of_keys] = tables.data() + words;
        index_t at = 2 * words;
        for (auto const& named : strides) {
            more[detail::cudnn_offsets + named.first] = tables.data() + at;
            at += each;
        }
        std::int64_t bytes = 0;
        require_good(with->get_workspace_size(bytes), here);
        auto workspace = of.in.template room<std::byte>(bytes);
        require(cudnn_frontend::detail::set_stream(handle_, of.in.stream()) == CUDNN_STATUS_SUCCESS, "attention",
                "stream", "one that cuDNN takes", "another", here);
        require_good(with->execute(handle_, more, workspace.data()), here);
        return true;
    }
    static void require_good(cudnn_frontend::error_t result, caller here) {
        require(result.is_good(), "attention", "cuDNN", "success", result.get_message().c_str(), here);
    }

    std::shared_ptr<graph> graph_of(detail::cudnn_shape const& shape) {
        auto const [at, fresh] = graphs_.try_emplace(shape);
        if (fresh) at->second = built(shape);
        return at->second;
    }
    /// Returns null where cuDNN has no plan.
    std::shared_ptr<graph> built(detail::cudnn_shape const& s) {
        namespace fe = cudnn_frontend;
        using fe::graph::Tensor_attributes;
        auto made = std::make_shared<graph>();
        auto const type = s.half ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
        made->set_io_data_type(type)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        auto const offsets = [&](index_t of) {
            return made->tensor(Tensor_attributes()
                                    .set_uid(detail::cudnn_offsets + of)
                                    .set_dim({s.entries + 1, 1, 1, 1})
                                    .set_stride({1, 1, 1, 1})
                                    .set_data_type(fe::DataType_t::INT64));
        };
        auto const counts = [&](index_t of) {
            return made->tensor(Tensor_attributes()
                                    .set_uid(of)
                                    .set_dim({s.entries, 1, 1, 1})
                                    .set_stride({1, 1, 1, 1})
                                    .set_data_type(fe::DataType_t::INT32));
        };
        auto const describe = [&](auto&& x, index_t of, index_t heads, index_t most, index_t dim, index_t stride) {
            x.set_uid(of)
                .set_dim({s.entries, heads, most, dim})
                .set_stride({most * stride, dim, stride, 1})
                .set_ragged_offset(offsets(of));
        };
        auto const input = [&](index_t of, index_t heads, index_t most, index_t dim, index_t stride) {
            Tensor_attributes x;
            describe(x, of, heads, most, dim, stride);
            x.set_data_type(of == detail::to_lse ? fe::DataType_t::FLOAT : type);
            return made->tensor(x);
        };
        auto const output = [&](auto const& x, index_t of, index_t heads, index_t most, index_t dim, index_t stride) {
            x->set_output(true);
            describe(*x, of, heads, most, dim, stride);
        };
        auto const q = input(detail::to_q, s.query_heads, s.queries, s.dim, s.q);
        auto const k = input(detail::to_k, s.key_heads, s.keys, s.dim, s.k);
        auto const v = input(detail::to_v, s.key_heads, s.keys, s.dim, s.v);
        auto const with = [&](auto&& options, char const* name) {
            options.set_name(name)
                .set_attn_scale(s.scale)
                .set_padding_mask(true)
                .set_seq_len_q(counts(detail::of_queries))
                .set_seq_len_kv(counts(detail::of_keys))
                .set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT)
                .set_diagonal_band_right_bound(0);
            return options;
        };
        if (!s.backward) {
            auto options = with(fe::graph::SDPA_attributes(), "attention");
            options.set_generate_stats(true);
            auto [o, lse] = made->sdpa(q, k, v, options);
            output(o, detail::to_o, s.query_heads, s.queries, s.dim, s.o);
            output(lse, detail::to_lse, s.query_heads, s.queries, 1, s.lse);
            lse->set_data_type(fe::DataType_t::FLOAT);
        } else {
            auto const o = input(detail::to_o, s.query_heads, s.queries, s.dim, s.o);
            auto const dout = input(detail::to_dout, s.query_heads, s.queries, s.dim, s.dout);
            auto const lse = input(detail::to_lse, s.query_heads, s.queries, 1, s.lse);
            auto options = with(fe::graph::SDPA_backward_attributes(), "attention_backward");
            options.set_max_total_seq_len_q(s.query_rows).set_max_total_seq_len_kv(s.key_rows);
            options.set_deterministic_algorithm(std::getenv("PROBE_DETERMINISTIC") != nullptr);
            auto [dq, dk, dv] = made->sdpa_backward(q, k, v, o, dout, lse, options);
            index_t const width = s.key_heads * s.dim;
            output(dq, detail::to_dq, s.query_heads, s.queries, s.dim, s.dq);
            output(dk, detail::to_dk, s.key_heads, s.keys, s.dim, width);
            output(dv, detail::to_dv, s.key_heads, s.keys, s.dim, width);
        }
        auto result = made->build(handle_, {fe::HeurMode_t::A});
        if (result.is_bad()) std::fprintf(stderr, "PROBE: %s\n", result.get_message().c_str());
        return result.is_good() ? made : nullptr;
    }

    /// Adds the segments' parts.
    template <class T, class Q, class K>
    void add(attention_rows<T, Q, K> const& of, detail::cudnn_entries const& entries, rows<T> part_k, rows<T> dk,
             rows<T> part_v, rows<T> dv, caller here) {
        thd const& batch = of.keys.batch();
        index_t const sequences = batch.sequences();
        if (batch.tokens() == 0) return;
        std::vector<index_t> numbers, part, seen;
        for (index_t s = 0; s <= sequences; ++s) numbers.push_back(batch.offset(s));
        index_t next = 0, row = 0;
        for (index_t s = 0; s <= sequences; ++s) {
            while (next < std::ssize(entries.list) && entries.list[static_cast<std::size_t>(next)].sequence < s) ++next;
            numbers.push_back(next);
        }
        for (segment const& s : entries.list) {
            part.push_back(row);
            seen.push_back(s.token + s.count);
            row += s.token + s.count;
        }
        numbers.insert(numbers.end(), part.begin(), part.end());
        numbers.insert(numbers.end(), seen.begin(), seen.end());
        auto tables = of.in.template room<index_t>(std::ssize(numbers));
        write_numbers(numbers, tables.data(), of.in.stream(), here);
        index_t const* const first = tables.data();
        index_t const* const by_segment = first + 2 * (sequences + 1);
        for (auto const& [parts, sums] : {std::pair(part_k, dk), std::pair(part_v, dv)})
            for_each_element(of.in, batch.tokens(), sums.width(),
                             detail::add_segments<T>{parts, sums, first, first + sequences + 1, by_segment,
                                                     by_segment + std::ssize(part), sequences},
                             here);
    }

    cudnnHandle_t handle_ = nullptr;
    std::mutex guard_;
    std::map<detail::cudnn_shape, std::shared_ptr<graph>> graphs_;
};

} // namespace cpx::cuda
