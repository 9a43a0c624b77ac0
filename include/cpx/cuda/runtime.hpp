// SPDX-License-Identifier: Apache-2.0
// Streams, events, buffers and graphs that free themselves, and errors of the CUDA runtime as cpx::error.
#pragma once

#include <cpx/cuda/nvcc.hpp>

#include <cpx/core/size.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <span>
#include <utility>
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

/// A stream of the current device that does not wait for the default stream.
class stream {
public:
    stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
    stream(stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
    stream& operator=(stream&& other) noexcept {
        std::swap(stream_, other.stream_);
        return *this;
    }
    ~stream() {
        if (stream_) static_cast<void>(cudaStreamDestroy(stream_));
    }
    operator cudaStream_t() const { return stream_; }
    void synchronize(caller here = caller::here()) const {
        check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", here);
    }

private:
    cudaStream_t stream_ = nullptr;
};

/// A point in a stream.
class event {
public:
    event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
    event(event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    event& operator=(event&& other) noexcept {
        std::swap(event_, other.event_);
        return *this;
    }
    ~event() {
        if (event_) static_cast<void>(cudaEventDestroy(event_));
    }
    operator cudaEvent_t() const { return event_; }
    void record(cudaStream_t in, caller here = caller::here()) {
        check(cudaEventRecord(event_, in), "cudaEventRecord", here);
    }
    /// Lets what `in` is given from now on wait for this point.
    void before(cudaStream_t in, caller here = caller::here()) const {
        check(cudaStreamWaitEvent(in, event_, 0), "cudaStreamWaitEvent", here);
    }
    /// Returns the milliseconds from `start` to this point; waits until it has been reached.
    float since(event const& start, caller here = caller::here()) const {
        float milliseconds = 0;
        check(cudaEventSynchronize(event_), "cudaEventSynchronize", here);
        check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "cudaEventElapsedTime", here);
        return milliseconds;
    }

private:
    cudaEvent_t event_ = nullptr;
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
        cudaError_t const result = cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<std::size_t>(bytes));
        if (result != cudaSuccess) check(result, ("cudaMalloc of " + std::to_string(bytes) + " bytes").c_str(), here);
    }
    /// Copies `values` to the device; returns when they are there.
    explicit buffer(std::span<T const> values, caller here = caller::here()) : buffer(std::ssize(values), here) {
        write(values, here);
    }
    buffer(buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    buffer& operator=(buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~buffer() {
        if (data_) static_cast<void>(cudaFree(data_));
    }

    T* data() const { return data_; }
    index_t size() const { return count_; }

    void write(std::span<T const> values, caller here = caller::here()) {
        require(std::ssize(values) == count_, "cuda::buffer", "elements to write", count_, values.size(), here);
        if (count_ == 0) return;
        check(cudaMemcpy(data_, values.data(), values.size_bytes(), cudaMemcpyHostToDevice), "cudaMemcpy", here);
        check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize", here); // what was staged may not be there yet
    }
    /// Returns the elements once the device has done all it was given.
    std::vector<T> read(caller here = caller::here()) const {
        auto values = cpx::detail::zeros<T>("cuda::buffer", {count_}, here);
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", here);
        if (count_ > 0)
            check(cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy",
                  here);
        return values;
    }

private:
    T* data_ = nullptr;
    index_t count_ = 0;
};

/// What a stream was given, to be given again at once.
class graph {
public:
    /// Captures what `f()` gives to `in` instead of running it.
    template <class F>
    graph(cudaStream_t in, F&& f, caller here = caller::here()) {
        cudaGraph_t captured = nullptr;
        check(cudaStreamBeginCapture(in, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture", here);
        try {
            f();
        } catch (...) {
            static_cast<void>(cudaStreamEndCapture(in, &captured));
            if (captured) static_cast<void>(cudaGraphDestroy(captured));
            static_cast<void>(cudaGetLastError());
            throw;
        }
        check(cudaStreamEndCapture(in, &captured), "cudaStreamEndCapture", here);
        cudaError_t const result = cudaGraphInstantiate(&graph_, captured, 0);
        static_cast<void>(cudaGraphDestroy(captured));
        check(result, "cudaGraphInstantiate", here);
    }
    graph(graph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
    graph& operator=(graph&& other) noexcept {
        std::swap(graph_, other.graph_);
        return *this;
    }
    ~graph() {
        if (graph_) static_cast<void>(cudaGraphExecDestroy(graph_));
    }
    void launch(cudaStream_t in, caller here = caller::here()) const {
        check(cudaGraphLaunch(graph_, in), "cudaGraphLaunch", here);
    }

private:
    cudaGraphExec_t graph_ = nullptr;
};

} // namespace cpx::cuda
