// SPDX-License-Identifier: Apache-2.0
// Attention by cuDNN's graphs. Wants cuDNN 9 and the headers of its frontend, see cmake/find_cudnn.cmake. They take the
// host's compiler half a minute, nvcc three, and do not compile behind nlohmann's JSON: best in a source of their own,
// which hands out an `attention_engine`, say harness/cudnn_attention.cpp.
#pragma once

#if !__has_include(<cudnn_frontend.h>)
#error "cpx: this header needs cuDNN 9 and the headers of its frontend; link cpx::cudnn"
#include "end of compilation" // nothing that follows would tell more
#endif

#include <cpx/cuda/attention_engine.hpp>

#include <cudnn_frontend.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <concepts>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#ifdef NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <dlfcn.h>
namespace cudnn_frontend {
inline void* cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_GLOBAL); // null where there is none
} // namespace cudnn_frontend
#endif

namespace cpx::cuda {

namespace detail {

/// What a graph of cuDNN is built for: counts are the most it takes.
struct cudnn_shape {
    bool half = false, stats = false;
    index_t runs = 0, queries = 0, keys = 0; ///< queries and keys of a run
    index_t query_heads = 0, key_heads = 0, dim = 0;
    index_t q = 0, k = 0, v = 0, o = 0, lse = 0; ///< elements from row to row
    double scale = 1;
    auto operator<=>(cudnn_shape const&) const = default;
};

/// Tensors of a graph by their numbers: those of rows first, whose offsets are `cudnn_offsets` behind them.
enum cudnn_tensor : index_t { cudnn_q = 1, cudnn_k, cudnn_v, cudnn_o, cudnn_lse, cudnn_queries, cudnn_keys };
inline constexpr index_t cudnn_offsets = 100;

/// Returns `count` rounded up so that few graphs serve all: to 4 sizes between powers of 2.
inline index_t cudnn_capacity(index_t count, index_t least) {
    index_t const n = std::max(count, least);
    auto const step = static_cast<index_t>(std::bit_floor(static_cast<std::uint64_t>(n)) / 4);
    return (n + step - 1) / step * step;
}

} // namespace detail

/// Attention by cuDNN on the device that is current when this is made, with the graphs built for it.
///
/// Serves heads of a multiple of 8 up to 256 columns, rows that begin at multiples of 16 bytes, and runs that together
/// see at most 4 times the keys there are; and nothing where libcudnn.so.9 is not found at run time. The bits of a row
/// may depend on the sharding. Cost: a graph is built, on the host, some 100 ms, for the first call of such counts
/// (rounded up), strides and heads; that call cannot be captured, later ones can.
class cudnn_attention final : public attention_engine {
    using graph = cudnn_frontend::graph::Graph;

public:
    cudnn_attention() {
#ifdef NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
        if (!cudnn_frontend::cudnn_dlhandle) return;
#endif
        if (cudnn_frontend::detail::create_handle(&handle_) != CUDNN_STATUS_SUCCESS) handle_ = nullptr;
    }
    cudnn_attention(cudnn_attention const&) = delete;
    ~cudnn_attention() override {
        if (handle_) static_cast<void>(cudnn_frontend::detail::destroy_handle(handle_));
    }
    /// Returns whether there is a cuDNN.
    explicit operator bool() const { return handle_ != nullptr; }

    bool attend(attention_task<__nv_bfloat16> const& task, caller here) override { return run(task, here); }
    bool attend(attention_task<__half> const& task, caller here) override { return run(task, here); }

private:
    template <class T>
    static bool aligned(rows<T> const& x) {
        return reinterpret_cast<std::uintptr_t>(x.data()) % 16 == 0 && x.stride() * index_t{sizeof(T)} % 16 == 0;
    }
    template <class T>
    bool serves(attention_task<T> const& t) const {
        index_t seen = 0;
        for (attended_run const& r : t.runs) seen += r.keys;
        return handle_ && t.dim % 8 == 0 && t.dim <= 256 && aligned(t.q) && aligned(t.k) && aligned(t.v) &&
               aligned(t.o) && reinterpret_cast<std::uintptr_t>(t.lse.data()) % 16 == 0 && seen <= 4 * t.k.count();
    }
    template <class T>
    static detail::cudnn_shape shape_of(attention_task<T> const& t) {
        index_t queries = 0, keys = 0;
        for (attended_run const& r : t.runs) queries = std::max(queries, r.count), keys = std::max(keys, r.keys);
        bool const stats = t.lse.data() != nullptr;
        return {std::same_as<T, __half>,
                stats,
                (detail::cudnn_capacity(std::ssize(t.runs), 4) + 3) / 4 * 4, // tables begin at multiples of 16 bytes
                detail::cudnn_capacity(queries, 64),
                detail::cudnn_capacity(keys, 64),
                t.query_heads,
                t.key_heads,
                t.dim,
                t.q.stride(),
                t.k.stride(),
                t.v.stride(),
                t.o.stride(),
                stats ? t.lse.stride() : 0,
                t.scale};
    }
    /// Returns queries and keys of every run, two numbers to a word, and the first element of each in every tensor;
    /// runs up to the capacity are empty.
    static std::vector<index_t> tables(detail::cudnn_shape const& s, std::vector<attended_run> const& runs) {
        std::vector<index_t> numbers(static_cast<std::size_t>(s.runs));
        auto const put = [&](index_t at, index_t count) {
            numbers[static_cast<std::size_t>(at / 2)] |= count << (at % 2 * 32);
        };
        for (index_t i = 0; i < std::ssize(runs); ++i) {
            put(i, runs[static_cast<std::size_t>(i)].count);
            put(s.runs + i, runs[static_cast<std::size_t>(i)].keys);
        }
        for (index_t tensor = detail::cudnn_q; tensor <= detail::cudnn_lse; ++tensor) {
            index_t const strides[] = {s.q, s.k, s.v, s.o, s.lse}, stride = strides[tensor - detail::cudnn_q];
            bool const of_keys = tensor == detail::cudnn_k || tensor == detail::cudnn_v;
            index_t end = 0;
            for (index_t i = 0; i < s.runs + 2; ++i) {
                index_t row = end;
                if (i < std::ssize(runs)) {
                    attended_run const& r = runs[static_cast<std::size_t>(i)];
                    row = of_keys ? r.first_key : r.row;
                    end = row + (of_keys ? r.keys : r.count);
                }
                numbers.push_back(row * stride);
            }
        }
        return numbers;
    }

    template <class T>
    bool run(attention_task<T> const& t, caller here) {
        if (!serves(t)) return false;
        detail::cudnn_shape const shape = shape_of(t);
        std::lock_guard const lock(guard_);
        auto const [at, fresh] = graphs_.try_emplace(shape);
        if (fresh) at->second = built(shape);
        if (!at->second) return false;
        index_t* const numbers = t.memory.holding(tables(shape, t.runs));
        std::unordered_map<index_t, void*> pointers{{detail::cudnn_q, const_cast<T*>(t.q.data())},
                                                    {detail::cudnn_k, const_cast<T*>(t.k.data())},
                                                    {detail::cudnn_v, const_cast<T*>(t.v.data())},
                                                    {detail::cudnn_o, t.o.data()},
                                                    {detail::cudnn_queries, numbers},
                                                    {detail::cudnn_keys, numbers + shape.runs / 2}};
        if (shape.stats) pointers[detail::cudnn_lse] = t.lse.data();
        for (index_t tensor = detail::cudnn_q; tensor <= detail::cudnn_lse; ++tensor)
            pointers[detail::cudnn_offsets + tensor] =
                numbers + shape.runs + (tensor - detail::cudnn_q) * (shape.runs + 2);
        std::int64_t bytes = 0;
        require_good(at->second->get_workspace_size(bytes), here);
        void* const workspace = t.memory.room(bytes);
        require(cudnn_frontend::detail::set_stream(handle_, t.stream) == CUDNN_STATUS_SUCCESS, "attention", "stream",
                "one that cuDNN takes", "another", here);
        require_good(at->second->execute(handle_, pointers, workspace), here);
        return true;
    }
    static void require_good(cudnn_frontend::error_t result, caller here) {
        require(result.is_good(), "attention", "cuDNN", "success", result.get_message().c_str(), here);
    }

    /// Returns null where cuDNN has no plan.
    std::shared_ptr<graph> built(detail::cudnn_shape const& s) const {
        namespace fe = cudnn_frontend;
        using fe::graph::Tensor_attributes;
        auto made = std::make_shared<graph>();
        made->set_io_data_type(s.half ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        auto const list = [&](index_t number, index_t count, fe::DataType_t type) {
            return made->tensor(Tensor_attributes()
                                    .set_uid(number)
                                    .set_dim({count, 1, 1, 1})
                                    .set_stride({1, 1, 1, 1})
                                    .set_data_type(type));
        };
        auto const describe = [&](Tensor_attributes& x, index_t number, index_t heads, index_t most, index_t dim,
                                  index_t stride) {
            x.set_uid(number)
                .set_dim({s.runs, heads, most, dim})
                .set_stride({most * stride, dim, stride, 1})
                .set_ragged_offset(list(detail::cudnn_offsets + number, s.runs + 1, fe::DataType_t::INT64));
        };
        auto const input = [&](index_t number, index_t heads, index_t most, index_t stride) {
            Tensor_attributes x;
            describe(x, number, heads, most, s.dim, stride);
            return made->tensor(x);
        };
        auto options = fe::graph::SDPA_attributes();
        options.set_name("attention")
            .set_attn_scale(static_cast<float>(s.scale))
            .set_padding_mask(true)
            .set_seq_len_q(list(detail::cudnn_queries, s.runs, fe::DataType_t::INT32))
            .set_seq_len_kv(list(detail::cudnn_keys, s.runs, fe::DataType_t::INT32))
            .set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT)
            .set_diagonal_band_right_bound(0)
            .set_generate_stats(s.stats);
        auto [o, lse] = made->sdpa(input(detail::cudnn_q, s.query_heads, s.queries, s.q),
                                   input(detail::cudnn_k, s.key_heads, s.keys, s.k),
                                   input(detail::cudnn_v, s.key_heads, s.keys, s.v), options);
        o->set_output(true);
        describe(*o, detail::cudnn_o, s.query_heads, s.queries, s.dim, s.o);
        if (s.stats) {
            lse->set_output(true).set_data_type(fe::DataType_t::FLOAT);
            describe(*lse, detail::cudnn_lse, s.query_heads, s.queries, 1, s.lse);
        }
        return made->build(handle_, {fe::HeurMode_t::A}).is_good() ? made : nullptr;
    }

    cudnnHandle_t handle_ = nullptr;
    std::mutex guard_;
    std::map<detail::cudnn_shape, std::shared_ptr<graph>> graphs_;
};

} // namespace cpx::cuda
