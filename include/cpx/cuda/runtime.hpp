// SPDX-License-Identifier: Apache-2.0
// Streams, events, buffers and graphs that free themselves, and errors of the CUDA runtime as cpx::error.
#pragma once

#include <cpx/cuda/nvcc.hpp>

#include <cpx/core/size.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

namespace cpx::cuda {

/// Throws `cpx::error` that names the call unless `result` is success.
inline void check(cudaError_t result, char const* call, caller here = caller::here()) {
    if (result == cudaSuccess) return;
    static_cast<void>(cudaGetLastError()); // an error that was thrown is not reported again by the next call
    throw error("cuda", call, "success", std::string(cudaGetErrorName(result)) + ", " + cudaGetErrorString(result),
                here);
}

/// Returns how many GPUs this process may use; 0 without a driver.
inline int devices() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    static_cast<void>(cudaGetLastError());
    return 0;
}

inline int current_device() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    return device;
}

/// Returns an attribute of the current device.
inline int device_attribute(cudaDeviceAttr of, caller here = caller::here()) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, of, current_device()), "cudaDeviceGetAttribute", here);
    return value;
}

inline void use_device(int device, caller here = caller::here()) {
    check(cudaSetDevice(device), "cudaSetDevice", here);
}

/// Returns the device on which `pointer` is memory, or -1: host memory, or none at all.
inline int device_of(void const* pointer) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return -1;
    }
    return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged ? attributes.device : -1;
}

inline bool captures(cudaStream_t stream, caller here = caller::here()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing", here);
    return status != cudaStreamCaptureStatusNone;
}

namespace detail {

/// Calls `f` with the least of ascending numbers that is not less than `n`, or with the last, as an
/// std::integral_constant.
template <int First, int... More, class F>
void with_least(index_t n, F&& f) {
    if constexpr (sizeof...(More) == 0)
        f(std::integral_constant<int, First>());
    else
        n <= First ? f(std::integral_constant<int, First>()) : with_least<More...>(n, f);
}

template <auto End>
struct ended_by {
    void operator()(auto* handle) const { static_cast<void>(End(handle)); }
};
/// A handle of CUDA's, with the call that ends it.
template <class Handle, auto End>
using owned = std::unique_ptr<std::remove_pointer_t<Handle>, ended_by<End>>;

} // namespace detail

/// A stream of the current device that does not wait for the default stream.
class stream {
public:
    stream() {
        cudaStream_t made = nullptr;
        check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        stream_.reset(made);
    }
    operator cudaStream_t() const { return stream_.get(); }
    void synchronize(caller here = caller::here()) const {
        check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize", here);
    }

private:
    detail::owned<cudaStream_t, cudaStreamDestroy> stream_;
};

/// A point in a stream.
class event {
public:
    event() {
        cudaEvent_t made = nullptr;
        check(cudaEventCreate(&made), "cudaEventCreate");
        event_.reset(made);
    }
    operator cudaEvent_t() const { return event_.get(); }
    void record(cudaStream_t in, caller here = caller::here()) {
        check(cudaEventRecord(*this, in), "cudaEventRecord", here);
    }
    /// Lets what `in` is given from now on wait for this point.
    void before(cudaStream_t in, caller here = caller::here()) const {
        check(cudaStreamWaitEvent(in, *this, 0), "cudaStreamWaitEvent", here);
    }

private:
    detail::owned<cudaEvent_t, cudaEventDestroy> event_;
};

/// Owns `size()` elements of the current device's memory, not initialised.
template <class T>
class buffer {
public:
    buffer() = default;
    explicit buffer(index_t count, caller here = caller::here()) : count_(count) {
        index_t const bytes =
            cpx::detail::product("cuda::buffer", "bytes", {count, static_cast<index_t>(sizeof(T))}, here);
        if (count == 0) return;
        void* made = nullptr;
        cudaError_t const result = cudaMalloc(&made, static_cast<std::size_t>(bytes));
        if (result != cudaSuccess) check(result, ("cudaMalloc of " + std::to_string(bytes) + " bytes").c_str(), here);
        data_.reset(static_cast<T*>(made));
    }
    /// Copies `values` to the device; returns when they are there.
    explicit buffer(std::span<T const> values, caller here = caller::here()) : buffer(std::ssize(values), here) {
        write(values, here);
    }
    T* data() const { return data_.get(); }
    index_t size() const { return count_; }

    void write(std::span<T const> values, caller here = caller::here()) {
        require(std::ssize(values) == count_, "cuda::buffer", "elements to write", count_, values.size(), here);
        if (count_ == 0) return;
        check(cudaMemcpy(data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice), "cudaMemcpy", here);
        check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize", here); // what was staged may not be there yet
    }
    /// Returns the elements once the device has done all it was given.
    std::vector<T> read(caller here = caller::here()) const {
        auto values = cpx::detail::zeros<T>("cuda::buffer", {count_}, here);
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", here);
        if (count_ > 0)
            check(cudaMemcpy(values.data(), data(), values.size() * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy",
                  here);
        return values;
    }

private:
    detail::owned<T*, cudaFree> data_;
    index_t count_ = 0;
};

} // namespace cpx::cuda
