// SPDX-License-Identifier: Apache-2.0
// One rank on a device, and what it prepares once and finds again.
#pragma once

#include "../plan.hpp"
#include "tensor.hpp"

#include <cpx/cuda/communicator.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace cpx::cuda {
class shared_memory;
}

namespace binding {

namespace cuda = cpx::cuda;

/// The memory of a framework.
class framework_memory final : public cuda::memory_resource {
public:
    framework_memory(framework& from, int device) : from_(from), device_(device) {}
    void* allocate(std::size_t bytes, cudaStream_t) override { return from_.allocate(device_, bytes); }
    void deallocate(void* memory, std::size_t, cudaStream_t) noexcept override { from_.release(memory); }

private:
    framework& from_;
    int device_;
};

/// Makes a device current, and the one before again.
class on_device {
public:
    explicit on_device(int device) : before_(cuda::current_device()), changed_(before_ != device) {
        if (changed_) cuda::use_device(device);
    }
    ~on_device() {
        if (changed_) static_cast<void>(cudaSetDevice(before_));
    }
    on_device(on_device const&) = delete;
    on_device& operator=(on_device const&) = delete;

private:
    int before_;
    bool changed_;
};

inline bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda::check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

/// Tells kinds of calls from each other, the same on all ranks: numbers that every rank has, whatever its tensors.
using call_kind = std::array<std::uint64_t, 6>;

inline std::uint64_t number_of(std::string_view text) { return cpx::detail::mix_all(0, text); }

/// Returns what is prepared for: a batch as large as that of a plan over `shardings`, or a little larger, the same on
/// all ranks; nothing if other batches of the layouts may be cut in other ways.
template <class... S>
cpx::capacity capacity_for(S const&... shardings) {
    cpx::capacity most;
    bool known = true;
    auto const add = [&]<class A>(A const& s) {
        if constexpr (!A::every_row) known = known && s.policy().chunks() > 0;
        for (int rank = 0; rank < s.ranks(); ++rank) most.rows = std::max(most.rows, s.rows(rank));
        most.sequences = std::max(most.sequences, s.batch().sequences());
    };
    (add(shardings), ...);
    if (!known) return {};
    auto const up = [](index_t n, index_t least) { // by an eighth at most
        n = std::max(n, least);
        index_t const step =
            std::max<index_t>(1, static_cast<index_t>(std::bit_floor(static_cast<std::uint64_t>(n))) / 8);
        return (n + step - 1) / step * step;
    };
    return {up(most.rows, 64), up(most.sequences, 8)};
}

class device_group {
public:
    device_group(std::unique_ptr<cpx::nccl> joined, bool lent, group_options const& of, framework& from);
    ~device_group();
    /// Ends its part: every later call throws, and what was prepared is freed when the device needs it no longer.
    void leave();

    cpx::nccl& nccl() const { return *nccl_; }
    framework& from() const { return from_; }

    /// Returns the communicator in the framework's current stream, behind all that it was given before.
    cuda::communicator& comm() {
        cpx::require(!left_, "communicator", "communicator", "one that has not left", "one that has");
        auto const now = static_cast<cudaStream_t>(from_.stream(nccl_->device()));
        if (!begun_ || now != comm_.stream()) {
            // A graph begins when the device has done all it was given, and is not in a stream until it is launched.
            if (begun_ && !is_capturing(now) && !is_capturing(comm_.stream())) {
                switched_.record(comm_.stream());
                switched_.before(now);
            }
            comm_.work_in(now);
            begun_ = true;
        }
        return comm_;
    }

    /// The same for a call in which ranks wait for each other. Throws `cpx::error` in a capture.
    cuda::communicator& waited(char const* where) {
        auto& now = comm();
        cpx::require(!is_capturing(now.stream()), where, "call for which ranks wait",
                     "before the capture of a graph or behind it", "in it");
        return now;
    }

    /// Returns whether exchanges move rows into memory that ranks write to each other. It is made when this is first
    /// asked, for results of `bytes()`, the most of any rank and the same on all, which is collective; in a capture
    /// there is none yet.
    template <class F>
    bool shares(F&& bytes) {
        if (path_ == exchange_path::undecided && !is_capturing(comm_.stream()))
            path_ = grow(bytes()) ? exchange_path::window : exchange_path::messages;
        return path_ == exchange_path::window;
    }
    /// Returns whether results of `bytes`, as of `shares`, have room there. Collective where the memory has to grow.
    bool has_room(index_t bytes) { return bytes <= std::ssize(landing()) || (grows() && grow(bytes)); }
    cuda::shared_memory* shared() const { return shared_.empty() ? nullptr : shared_.back().memory.get(); }
    exchange_path path() const { return path_; }
    /// A part of that memory, the same bytes on all ranks: for results that are elsewhere.
    std::span<char> landing() const { return shared_.empty() ? std::span<char>() : shared_.back().landing; }
    /// Waits until the device has done all that it was given in the current stream.
    void wait();
    void lend(bool on) const;

    template <class Made>
    struct slot {
        std::unique_ptr<Made> made;
        std::uint64_t batch = 0;
        cpx::capacity most;
        bool captured = false;
    };
    /// Returns what calls of a kind have prepared for a batch; every rank finds the same. `need()`: returns
    /// `capacity_for` of the batch; `make(most)`: for batches of a capacity, or, of none, for this one alone, which is
    /// collective; `set(made)`: for this batch in place of another.
    ///
    /// What a graph has captured stays as it is. Throws `cpx::error` if something is to be made in a capture.
    template <class Made, class Need, class Make, class Set>
    Made& find(char const* where, call_kind kind, std::uint64_t batch, Need&& need, Make&& make, Set&& set) {
        static char const type = 0; // of Made
        auto& entry = prepared_[{&type, kind}];
        if (!entry) entry = std::make_shared<std::vector<slot<Made>>>();
        auto& slots = *static_cast<std::vector<slot<Made>>*>(entry.get());
        bool const capturing = is_capturing(comm_.stream());
        auto found = std::ranges::find(slots, batch, &slot<Made>::batch);
        if (found == slots.end()) {
            cpx::require(!capturing, where, "first call of a batch", "before the capture of a graph", "in it");
            cpx::capacity const wanted = need();
            found = std::ranges::find_if(slots, [&](auto const& s) {
                return !s.captured && wanted.rows > 0 && wanted.rows <= s.most.rows &&
                       wanted.sequences <= s.most.sequences;
            });
            if (found != slots.end()) {
                found->batch = 0; // of none, should it fail
                set(*found->made);
            } else {
                std::erase_if(slots, [&](auto const& s) { // which is too small, or for one batch: a few of those
                    return !s.captured && (wanted.rows > 0 || std::ssize(slots) > 8);
                });
                slots.push_back({make(wanted), 0, wanted, false});
                found = slots.end() - 1;
            }
            found->batch = batch;
        }
        found->captured = found->captured || capturing;
        return *found->made;
    }

private:
    /// Waits for the device, at most for the deadline, and asks nothing of NCCL.
    bool has_done_all() const;
    bool grows() const { return of_.window == group_options::grown && !full_; }
    /// Makes memory in which results of so many bytes have room, or that of which the options say. Collective. Returns
    /// false, on all ranks, if that cannot be.
    bool grow(index_t result);

    std::unique_ptr<cpx::nccl> nccl_;
    bool lent_, begun_ = false, left_ = false;
    group_options of_;
    exchange_path path_ = exchange_path::undecided;
    framework& from_;
    framework_memory memory_;
    cuda::communicator comm_;
    cuda::event switched_;
    struct written_by_all {
        std::shared_ptr<cuda::shared_memory> memory;
        std::span<char> landing;
    };
    std::vector<written_by_all> shared_; ///< the last is in use; graphs and tensors have the others
    bool full_ = false;                  ///< it grew for the last time
    std::map<std::pair<char const*, call_kind>, std::shared_ptr<void>> prepared_;
};

// Tensors as cpx has them.

template <class T>
constexpr std::pair<int, int> number_type() {
    auto const kind = std::same_as<T, __nv_bfloat16>                      ? number_kind::bfloat
                      : std::same_as<T, __half> || std::floating_point<T> ? number_kind::floating
                      : std::same_as<T, boolean>                          ? number_kind::boolean
                      : std::signed_integral<T>                           ? number_kind::integer
                                                                          : number_kind::natural;
    return {static_cast<int>(kind), static_cast<int>(8 * sizeof(T))};
}

template <class T>
void require_type(tensor const& t) {
    auto const [kind, bits] = number_type<T>();
    if (t.kind != kind || t.bits != bits)
        throw cpx::error(t.where, std::string("dtype of ") + t.name, number_name(kind, bits),
                         number_name(t.kind, t.bits));
}
template <class T>
cpx::rows<T const> rows_of(tensor const& t) {
    if (!t) return {};
    require_type<T>(t);
    auto const [count, width, stride] = rows_in(t);
    return {static_cast<T const*>(t.data), count, width, stride};
}
template <class T>
cpx::rows<T> rows_to(tensor const& t) {
    auto const r = rows_of<T>(t);
    return {const_cast<T*>(r.data()), r.count(), r.width(), r.stride()};
}
template <class T>
std::span<T> list_to(tensor const& t, index_t size = -1) {
    if (!t) return {};
    require_type<T>(t);
    require_list(t, size);
    return {static_cast<T*>(t.data), static_cast<std::size_t>(t.elements())};
}
/// Returns the elements of a tensor as rows of what one entry of its first dimension has.
template <class T>
cpx::rows<T> states_in(tensor const& t) {
    auto const list = list_to<T>(t);
    if (!t) return {};
    index_t const count = t.dimensions() > 0 ? t.size(0) : 1;
    return {list.data(), count, count > 0 ? std::ssize(list) / count : 0};
}

template <class T>
struct as {
    using type = T;
};
/// Calls `f(as<T>())` for the numbers of a tensor, which are one of `T`. Throws `cpx::error` if they are others.
template <class... T, class F>
void with_type(tensor const& t, F&& f) {
    bool done = false;
    std::string expected;
    auto const attempt = [&]<class U>(as<U> type) {
        auto const [kind, bits] = number_type<U>();
        expected += (expected.empty() ? "" : ", ") + number_name(kind, bits);
        if (done || t.kind != kind || t.bits != bits) return;
        done = true;
        f(type);
    };
    (attempt(as<T>()), ...);
    if (!done) throw cpx::error(t.where, std::string("dtype of ") + t.name, expected, number_name(t.kind, t.bits));
}

} // namespace binding
