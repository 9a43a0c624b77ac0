// SPDX-License-Identifier: Apache-2.0
// What every block of the model needs of one GPU: memory, norms and projections there, exchanges with the others.
#pragma once

#include "elementwise.cuh"
#include "norm.cuh"

#include "../gpus.hpp"

#include <cpx/cpx.hpp>
#include <cpx/cuda/communicator.hpp>

#include <cublas_v2.h>

#include <barrier>

namespace qwen::gpu {

/// Hidden states are zigzag over sequence.
using entry_sharding = cpx::sharding<cpx::zigzag<>>;

/// Owns dense (count, width) elements of the current device's memory, not initialised.
template <class T>
class device_rows {
public:
    device_rows(index_t count, index_t width) : values_(count * width), count_(count), width_(width) {}

    rows<T> view() const { return {values_.data(), count_, width_}; }
    rows<T> columns(index_t first, index_t width) const { return view().columns(first, width); }
    operator rows<T>() const { return view(); }
    operator rows<T const>() const { return view(); }
    std::vector<T> read() const { return values_.read(); }

private:
    cpx::cuda::buffer<T> values_;
    index_t count_, width_;
};

/// Returns a copy of `values` in the current device's memory.
template <class T>
cpx::cuda::buffer<T> upload(std::vector<T> const& values) {
    return cpx::cuda::buffer<T>(std::span<T const>(values));
}

inline cpx::tally tally_of(cpx::plan const& p, index_t width) {
    return {p.messages(), p.sent_rows(), p.sent_elements(width) * static_cast<index_t>(sizeof(float))};
}

/// cuBLAS on one stream, in float32 throughout: no TF32.
class blas {
public:
    explicit blas(cudaStream_t stream) {
        check(cublasCreate(&handle_), "cublasCreate");
        check(cublasSetMathMode(handle_, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode");
        check(cublasSetStream(handle_, stream), "cublasSetStream");
    }
    blas(blas const&) = delete;
    blas& operator=(blas const&) = delete;
    ~blas() { static_cast<void>(cublasDestroy(handle_)); }

    /// y = x W^T; the weight is (out, in). Throws `cpx::error` if the shapes do not fit.
    void linear(rows<float const> x, rows<float const> weight, rows<float> y) const {
        cpx::require(x.count() == y.count() && x.width() == weight.width() && y.width() == weight.count(), "linear",
                     "rows and width of y, and width of x",
                     std::to_string(x.count()) + ", " + std::to_string(weight.count()) + ", " +
                         std::to_string(weight.width()),
                     std::to_string(y.count()) + ", " + std::to_string(y.width()) + ", " + std::to_string(x.width()));
        if (y.count() == 0) return;
        float const one = 1, zero = 0;
        // cuBLAS counts along columns: what is row-major here is transposed there, y^T = (W^T)^T x^T.
        check(cublasSgemm_64(handle_, CUBLAS_OP_T, CUBLAS_OP_N, y.width(), y.count(), x.width(), &one, weight.data(),
                             weight.stride(), x.data(), x.stride(), &zero, y.data(), y.stride()),
              "cublasSgemm");
    }

private:
    static void check(cublasStatus_t status, char const* call) {
        cpx::require(status == CUBLAS_STATUS_SUCCESS, "cublas", call, "success", cublasGetStatusString(status));
    }

    cublasHandle_t handle_ = nullptr;
};

/// One rank on its GPU: the weights in its memory, its stream, its rows of the residual stream.
class site {
public:
    /// `everyone`: where all ranks meet. The device of `transport` must be current.
    site(gpu_input const& in, entry_sharding const& where, cpx::nccl& transport, std::barrier<>& everyone)
        : config(in.config), sharding(where), comm(transport), device(comm, stream), on_host_(in.weights),
          everyone_(everyone), blas_(stream) {
        for (auto const& [name, w] : on_host_)
            weights_.emplace(name, cpx::cuda::buffer<float>(std::span<float const>(
                                       w.data(), static_cast<std::size_t>(w.count() * w.width()))));
    }

    int rank() const { return comm.rank(); }
    device_rows<float> make(index_t width) const { return {sharding.rows(rank()), width}; }
    /// Returns a weight as the host has it. If the embedding is tied, `lm_head.weight` is the same one.
    rows<float const> on_host(std::string const& name) const { return on_host_.at(stored(name)); }
    /// Returns the same in this device's memory.
    rows<float const> weight(std::string const& name) const {
        rows<float const> const shape = on_host(name);
        return {weights_.at(stored(name)).data(), shape.count(), shape.width()};
    }
    float eps() const { return static_cast<float>(config.rms_norm_eps); }

    /// Normalises whole rows, or heads that are as wide as the weight.
    void norm(std::string const& name, rows<float const> x, rows<float> y) const {
        rms_norm(x, weight(name).data(), weight(name).width(), eps(), y, stream);
    }
    void linear(std::string const& name, rows<float const> x, rows<float> y) const { blas_.linear(x, weight(name), y); }
    void add(rows<float const> x, rows<float> h) const { gpu::add(x, h, stream); }

    /// Waits, on the host, for all ranks: none of them may allocate memory while another one's exchange waits for it.
    void meet() const { everyone_.arrive_and_wait(); }

    cpx::qwen_config const& config;
    entry_sharding sharding;
    cpx::nccl& comm;
    cpx::cuda::stream stream;
    cpx::cuda::communicator device;
    cpx::tally sent, states; ///< by this rank to others: rows, and recurrent states

private:
    std::string stored(std::string const& name) const {
        return config.tie_word_embeddings && name == "lm_head.weight" ? "model.embed_tokens.weight" : name;
    }

    std::map<std::string, rows<float const>> const& on_host_;
    std::barrier<>& everyone_;
    blas blas_;
    std::map<std::string, cpx::cuda::buffer<float>> weights_;
};

/// Returns a plan when all ranks have come: what is made of it allocates.
template <class Plan>
Plan const& met(site const& at, Plan const& plan) {
    at.meet();
    return plan;
}

/// An exchange made ready, which counts what it sends. Made and called by all ranks in the same order.
class movement {
public:
    /// `width`: of rows that move whole; `stride`: from row to row of the source, 0 for dense.
    movement(site& at, cpx::plan const& plan, index_t width = 0, index_t stride = 0)
        : at_(at), each_(tally_of(plan, width)), exchange_(met(at, plan), width, at.comm, {stride}) {}

    void operator()(rows<float const> from, rows<float> to) {
        exchange_(from, to, at_.stream);
        at_.sent += each_;
    }

private:
    site& at_;
    cpx::tally each_;
    cpx::cuda::exchange<float> exchange_;
};

} // namespace qwen::gpu
