// SPDX-License-Identifier: Apache-2.0
// What another library is asked that may compute attention in place of cpx's kernels. Of kernels it knows nothing, so
// that an engine can be compiled by the host's compiler.
#pragma once

#if !__has_include(<cuda_runtime_api.h>)
#error "cpx: this header needs CUDA's headers; link cpx::cuda or cpx::nccl, or CUDA::cudart"
#include "end of compilation" // nothing that follows would tell more
#endif

#include <cpx/core/rows.hpp>
#include <cpx/plan/segments.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <span>
#include <vector>

namespace cpx::cuda {

/// Neighbouring queries of a rank, of which the last sees `keys` rows from `first_key` on, each before it one fewer.
struct attended_run {
    index_t row, count, first_key, keys;
};

/// Memory of the device that lives until the work of a task has ended.
struct engine_memory {
    std::function<void*(index_t bytes)> room;
    std::function<index_t*(std::span<index_t const> numbers)> holding; ///< written in stream order
};

/// Attention of one rank's rows, of arguments that fit, of bfloat16 or half elements: o is written, and lse, if it is
/// memory, as `cpx::attention` says. Key head h is read by `query_heads / key_heads` query heads, side by side.
template <class T>
struct attention_task {
    rows<T const> q, k, v;
    rows<T> o;
    rows<float> lse;
    std::vector<attended_run> runs; ///< each with queries
    index_t query_heads, key_heads, dim;
    double scale;
    cudaStream_t stream; ///< everything is in its order
    engine_memory const& memory;
};

/// Computes attention for cpx where it can: `attention_heads::engine`. May be asked by several threads.
class attention_engine {
public:
    virtual ~attention_engine() = default;
    /// Returns false, and has written nothing, where it does not serve.
    virtual bool attend(attention_task<__nv_bfloat16> const& task, caller here) = 0;
    virtual bool attend(attention_task<__half> const& task, caller here) = 0;
};

namespace detail {

template <any_sharding S>
std::vector<attended_run> attended_runs(S const& queries, int rank, thd const& keys, caller here) {
    std::vector<attended_run> list;
    for (segment const& s : segments(queries, rank, here))
        if (s.count > 0) list.push_back({s.row, s.count, keys.offset(s.sequence), s.token + s.count});
    return list;
}

} // namespace detail

} // namespace cpx::cuda
