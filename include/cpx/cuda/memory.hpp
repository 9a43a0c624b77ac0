// SPDX-License-Identifier: Apache-2.0
// Tensors in a device's memory: allocated, filled and freed in the order of a stream.
#pragma once

#include <cpx/core/memory.hpp>
#include <cpx/cuda/runtime.hpp>
#include <cpx/layout/sharded.hpp>

#include <array>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>

namespace cpx::cuda {

/// Where device memory comes from. A framework that has an allocator derives it from this.
///
/// Both calls are in stream order: what is allocated is there for what the stream is given next, and what is freed may
/// still be used by what the stream was given before. Memory begins at multiples of 256 bytes, as that of cudaMalloc
/// and of frameworks does; a `block` refuses any other. Any thread may call.
class memory_resource {
public:
    virtual ~memory_resource() = default;
    /// Returns `bytes` of the current device's memory. Throws an exception if there is not so much.
    virtual void* allocate(std::size_t bytes, cudaStream_t in) = 0;
    virtual void deallocate(void* memory, std::size_t bytes, cudaStream_t in) noexcept = 0;
};

namespace detail {

/// The memory that CUDA keeps for one device. Every device that can reach it may, for NCCL's kernels do.
class device_pool final : public memory_resource {
public:
    explicit device_pool(int device) {
        cudaMemPoolProps wanted{};
        wanted.allocType = cudaMemAllocationTypePinned;
        wanted.location.type = cudaMemLocationTypeDevice;
        wanted.location.id = device;
        check(cudaMemPoolCreate(&pool_, &wanted), "cudaMemPoolCreate");
        auto keep = std::numeric_limits<std::uint64_t>::max(); // what is free stays for the next
        check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
        for (int peer = 0; peer < devices(); ++peer) {
            int reached = 0;
            if (peer == device || cudaDeviceCanAccessPeer(&reached, peer, device) != cudaSuccess || !reached) continue;
            cudaMemAccessDesc access{};
            access.location.type = cudaMemLocationTypeDevice;
            access.location.id = peer;
            access.flags = cudaMemAccessFlagsProtReadWrite;
            check(cudaMemPoolSetAccess(pool_, &access, 1), "cudaMemPoolSetAccess");
        }
    }
    void* allocate(std::size_t bytes, cudaStream_t in) override {
        void* memory = nullptr;
        cudaError_t const result = cudaMallocFromPoolAsync(&memory, bytes, pool_, in);
        if (result != cudaSuccess)
            check(result, ("cudaMallocFromPoolAsync of " + std::to_string(bytes) + " bytes").c_str());
        return memory;
    }
    void deallocate(void* memory, std::size_t, cudaStream_t in) noexcept override {
        static_cast<void>(cudaFreeAsync(memory, in));
    }

private:
    cudaMemPool_t pool_ = nullptr; // lives as long as the process
};

} // namespace detail

/// Returns CUDA's own stream-ordered memory of the current device, made when it is first asked for.
inline memory_resource& default_resource() {
    static std::mutex guard;
    static std::array<memory_resource*, 64> pools{};
    std::lock_guard const lock(guard);
    auto const device = static_cast<std::size_t>(current_device());
    require(device < pools.size(), "cuda::default_resource", "device", "less than 64", device);
    if (!pools[device]) pools[device] = new detail::device_pool(static_cast<int>(device));
    return *pools[device];
}

/// Owns elements that a `memory` gave, and returns them in the order of its stream, which outlives them; or has
/// elements that are lent, which it leaves alone.
template <class T>
class block {
public:
    block() = default;
    /// Throws `cpx::error` on memory that begins at no multiple of 256, and what the resource throws.
    block(index_t count, memory_resource& from, cudaStream_t in, caller here = caller::here())
        : data_(count == 0 ? nullptr : static_cast<T*>(from.allocate(bytes(count), in))), count_(count), from_(&from),
          in_(in) {
        auto const place = reinterpret_cast<std::uintptr_t>(data_);
        if (place % 256 == 0) return;
        from.deallocate(data_, bytes(count), in);
        throw error("cuda::memory_resource", "address", "a multiple of 256", std::to_string(place), here);
    }
    block(T* lent, index_t count) : data_(lent), count_(count) {}
    block(block&& other) noexcept { swap(other); }
    block& operator=(block&& other) noexcept {
        swap(other);
        return *this;
    }
    ~block() {
        if (data_ && from_) from_->deallocate(data_, bytes(count_), in_);
    }
    bool lent() const { return data_ && !from_; }
    T* data() { return data_; }
    T const* data() const { return data_; }
    index_t size() const { return count_; }

private:
    static std::size_t bytes(index_t count) { return static_cast<std::size_t>(count) * sizeof(T); }
    void swap(block& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        std::swap(from_, other.from_);
        std::swap(in_, other.in_);
    }
    T* data_ = nullptr;
    index_t count_ = 0;
    memory_resource* from_ = nullptr;
    cudaStream_t in_ = nullptr;
};

/// A device's memory in the order of a stream, as tensors and views of them know it.
///
/// Belongs to the device that is current when it is made. Stream and resource outlive it and all that was allocated.
class memory {
public:
    template <class T>
    using block = cuda::block<T>;
    template <class T>
    using sum = float;

    explicit memory(cudaStream_t in, memory_resource& from = default_resource()) : stream_(in), from_(&from) {}

    cudaStream_t stream() const { return stream_; }

    /// Returns zeros, as many as `counts` multiply to. Throws `cpx::error` of no size, and what the resource throws.
    template <class T>
    block<T> zeros(char const* where, std::initializer_list<index_t> counts, caller here = caller::here()) const {
        index_t const count = cpx::detail::product(where, "elements", counts, here);
        cpx::detail::product(where, "bytes", {count, static_cast<index_t>(sizeof(T))}, here);
        block<T> made(count, *from_, stream_);
        if (count > 0)
            check(cudaMemsetAsync(made.data(), 0, static_cast<std::size_t>(count) * sizeof(T), stream_),
                  "cudaMemsetAsync", here);
        return made;
    }
    /// Returns elements that are not initialised.
    template <class T>
    block<T> room(index_t count) const {
        return block<T>(count, *from_, stream_);
    }
    template <class T>
    void write(T* to, std::span<T const> from, caller here = caller::here()) const {
        copy(to, from.data(), from.size_bytes(), cudaMemcpyHostToDevice, here);
    }
    template <class T>
    std::vector<T> read(std::span<T const> from, caller here = caller::here()) const {
        std::vector<T> values(from.size());
        copy(values.data(), from.data(), from.size_bytes(), cudaMemcpyDeviceToHost, here);
        return values;
    }

    friend bool operator==(memory const&, memory const&) = default;

private:
    void copy(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind, caller here) const {
        if (bytes == 0) return;
        check(cudaMemcpyAsync(to, from, bytes, kind, stream_), "cudaMemcpyAsync", here);
        check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", here);
    }

    cudaStream_t stream_;
    memory_resource* from_;
};

namespace detail {

/// Throws `cpx::error` unless `x` is in the stream of `other`, the first tensor.
template <class T, class A, any_sharding S>
void require_stream(char const* where, char const* what, sharded<T, S, memory> const& x,
                    sharded<A, S, memory> const& other, caller here) {
    require(x.memory().stream() == other.memory().stream(), where, (std::string("stream of ") + what).c_str(),
            "that of the first tensor", "another", here);
}

} // namespace detail

} // namespace cpx::cuda
