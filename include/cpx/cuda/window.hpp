// SPDX-License-Identifier: Apache-2.0
// Memory of every rank that the others' kernels can store to, by NCCL's symmetric windows.
#pragma once

#include <cpx/cuda/relayout.hpp>
#include <cpx/transport/nccl.hpp>
#include <cpx/transport/nccl_host_page.hpp>

#if !__has_include(<nccl_device.h>)
#error "cpx: this header needs NCCL 2.28 or newer, whose nccl_device.h is not found"
#include "end of compilation"
#endif
#include <nccl_device.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace cpx::cuda {

namespace detail {

template <class = void>
__global__ void window_pointers(ncclWindow_t window, int ranks, void** pointers) {
    for (int rank = 0; rank < ranks; ++rank) pointers[rank] = ncclGetLsaPointer(window, 0, rank);
}

} // namespace detail

/// As many bytes of memory on every rank, which each rank's kernels reach.
///
/// Only where all ranks reach each other by loads and stores, as the GPUs of one host with NVLink; see `supported`.
/// Never uses multicast. Made and freed by all ranks in the same order.
class window {
public:
    /// Returns whether all ranks reach each other's memory and the loaded NCCL has the version (patches aside) of the
    /// headers that this was compiled with, because kernels read its windows. Collective; the same on every rank.
    static bool supported(nccl& comm, caller here = caller::here()) {
        comm.begin_call(here);
        int loaded = 0;
        static_cast<void>(ncclGetVersion(&loaded));
#ifdef NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER // from NCCL 2.29 on
        ncclDevCommRequirements wanted = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
        ncclDevCommRequirements wanted{};
#endif
        wanted.lsaBarrierCount = 1;
        ncclDevComm device;
        bool can = comm.ranks() <= kernels::most_ranks && loaded / 100 == NCCL_VERSION_CODE / 100;
        can = can && comm.outcome(
                         "ncclDevCommCreate", [&] { return ncclDevCommCreate(comm.get(), &wanted, &device); }, here) ==
                         ncclSuccess;
        if (can) {
            can = device.lsaSize == comm.ranks();
            comm.call(
                "ncclDevCommDestroy", [&] { return ncclDevCommDestroy(comm.get(), &device); }, here);
        }
        std::vector<char> all(static_cast<std::size_t>(comm.ranks()));
        char const mine = can;
        comm.gather(&mine, all.data(), 1, here);
        return std::find(all.begin(), all.end(), 0) == all.end();
    }

    /// Returns how many blocks a kernel has that meets others here: as many as `wanted`; if that is 0, as many as pay,
    /// up to 128. Ranks on one GPU, which NCCL bears from 2.30 on if it is told to, share its multiprocessors.
    /// Collective. Throws `cpx::error` if there are fewer.
    static int resident(nccl& comm, int wanted, caller here = caller::here()) {
        cudaDeviceProp mine{};
        check(cudaGetDeviceProperties(&mine, comm.device()), "cudaGetDeviceProperties", here);
        std::vector<cudaUUID_t> all(static_cast<std::size_t>(comm.ranks()));
        comm.gather(&mine.uuid, all.data(), sizeof mine.uuid, here);
        std::ptrdiff_t sharers = 1; // of the GPU that has most ranks: all ranks have as many blocks
        for (cudaUUID_t const& one : all)
            sharers = std::max(sharers, std::ranges::count_if(all, [&](cudaUUID_t const& other) {
                                   return std::memcmp(&other, &one, sizeof one) == 0;
                               }));
        // a kernel's blocks wait for those of other ranks, so all of them must be resident
        int const most = mine.multiProcessorCount / static_cast<int>(sharers);
        if (wanted == 0) return std::min(128, most);
        require(wanted >= 1 && wanted <= most, "cuda::window", "blocks",
                cpx::detail::in_words("1 to the multiprocessors, ", most), wanted, here);
        return wanted;
    }

    /// Allocates `bytes`, where windows are `supported`. Bytes and blocks are the same on all ranks. Collective. Throws
    /// `cpx::error` if there is not so much memory.
    window(nccl& comm, index_t bytes, int blocks, caller here = caller::here())
        : window(comm) { // now the object is complete: its destructor runs if what follows throws
        own_.device = comm.device();
        own_.bytes = (bytes + 255) / 256 * 256;
        own_.blocks = blocks;
        auto const flags =
            sizeof(std::uint64_t) * static_cast<std::size_t>(kernels::meeting::count(blocks, comm.ranks()));
        std::size_t const total = (static_cast<std::size_t>(own_.bytes) + flags + 4095) / 4096 * 4096;
        comm.call(
            "ncclMemAlloc", [&] { return ncclMemAlloc(&memory_, total); }, here);
        done(cudaMemset(memory_, 0, total), "cudaMemset", here);
        comm.call(
            "ncclCommWindowRegister",
            [&] { return ncclCommWindowRegister(comm.get(), memory_, total, &window_, NCCL_WIN_COLL_SYMMETRIC); },
            here);

        {
            buffer<void*> const pointers(comm.ranks(), here); // freed before another rank can wait for this device
            detail::window_pointers<><<<1, 1>>>(window_, comm.ranks(), pointers.data());
            done(cudaGetLastError(), "window_pointers", here);
            done(cudaMemcpy(own_.base, pointers.data(), sizeof(void*) * static_cast<std::size_t>(comm.ranks()),
                            cudaMemcpyDeviceToHost),
                 "window_pointers", here);
        }
        for (int r = 0; r < comm.ranks(); ++r) {
            // this rank's own memory by the address that it has without NCCL, which survives an abort
            char* const memory = r == comm.rank() ? data() : own_.base[r];
            own_.meeting.flags[r] = reinterpret_cast<std::uint64_t*>(memory + own_.bytes);
        }
        epochs_ = buffer<std::uint32_t>(std::vector<std::uint32_t>(static_cast<std::size_t>(blocks) + 1), here);
        page_ = cpx::detail::host_page<host_page>();
        require(page_ != nullptr, "nccl", "cudaHostAlloc", "success", "a failure", here);
        own_.meeting.epochs = epochs_.data();
        own_.meeting.found = &page_->found;
        own_.meeting.rank = comm.rank();
        own_.meeting.ranks = comm.ranks();
        own_.meeting.patience = static_cast<std::uint64_t>(comm.deadline().count()) * 1'000'000;
        comm.synchronize_device(here); // now what was set to 0 is 0
        comm.before_abort(this, [this] { stop(); });
        char const ready = 1;
        std::vector<char> everyone(static_cast<std::size_t>(comm.ranks()));
        comm.gather(&ready, everyone.data(), 1, here); // nobody's flags are written before they are 0
    }
    window(window const&) = delete;
    window& operator=(window const&) = delete;
    ~window() {
        try { // under the watchdog, which aborts what waits for a rank that is gone
            comm_.synchronize_device();
            if (window_)
                comm_.call("ncclCommWindowDeregister", [&] { return ncclCommWindowDeregister(comm_.get(), window_); });
        } catch (error const&) { // the abort has taken away what was shared
            stop();
            static_cast<void>(cudaDeviceSynchronize());
        }
        comm_.forget(this);
        if (memory_) static_cast<void>(ncclMemFree(memory_));
    }

    /// Returns this rank's memory.
    char* data() const { return static_cast<char*>(memory_); }
    index_t bytes() const { return own_.bytes; }
    nccl& comm() const { return comm_; }

    /// Returns all ranks' memory as this device reaches it. Throws `cpx::error` that names ranks that a kernel missed.
    peer_memory const& peers(caller here = caller::here()) const {
        if (missed()) check_faults(here);
        return own_;
    }

    /// Waits until `stream` has done all it was given. Throws `cpx::error` that names the ranks that did not come; or
    /// those that had other offsets or shardings, or rows that did not fit: then nothing is broken.
    void wait(cudaStream_t stream, caller here = caller::here()) const {
        comm_.wait(stream, limit(), here, [this] { return missed(); });
        if (missed())
            std::this_thread::sleep_for(
                std::chrono::milliseconds(10)); // so that other blocks can report what they find
        check_faults(here);
    }

    /// Returns after what time kernels have ended. The first gives up by itself, those behind it then end at once; the
    /// communicator is aborted only if they do not.
    std::chrono::milliseconds limit() const { return 2 * comm_.deadline() + std::chrono::seconds(1); }

    /// Returns whether a kernel has missed ranks.
    bool missed() const { return !found(&kernels::faults::missing).empty(); }

private:
    explicit window(nccl& comm) : comm_(comm) {}

    /// Ends the kernels that wait for others, and those that are yet to begin, as if they had waited long enough.
    void stop() const {
        if (!page_) return;
        int before = comm_.device();
        static_cast<void>(cudaGetDevice(&before));
        static_cast<void>(cudaSetDevice(comm_.device()));
        // By a copy, which does not queue behind kernels that wait for their turn, however few queues the device has.
        static_cast<void>(cudaMemcpyAsync(own_.meeting.epochs + own_.blocks, &page_->one, sizeof page_->one,
                                          cudaMemcpyHostToDevice, stopper_));
        for (int ms = 0; ms < 1000 && cudaStreamQuery(stopper_) == cudaErrorNotReady; ++ms)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::this_thread::sleep_for(std::chrono::milliseconds(1)); // kernels look every few microseconds
        static_cast<void>(cudaSetDevice(before));
    }

    /// Returns the ranks that kernels have found at fault, or of which they have found `what`, each after a space.
    std::string found(std::uint8_t (kernels::faults::*fault)[kernels::most_ranks], std::uint8_t what = 1) const {
        std::uint8_t const volatile* const ranks = own_.meeting.found->*fault; // kernels may be writing
        std::string names;
        for (int r = 0; r < comm_.ranks(); ++r)
            if (ranks[r] == what) names += ' ' + std::to_string(comm_.number(r));
        return names;
    }

    /// Throws if a kernel has found ranks at fault; later kernels find anew, unless ranks were missed.
    void check_faults(caller here) const {
        using field = kernels::relayout_field;
        struct {
            field in;
            char const *name, *expected, *actual;
        } constexpr fields[] = {
            {field::offsets, "cu_seqlens of a relayout", "those of this rank", "others on ranks"},
            {field::source, "source sharding of a relayout", "that of this rank", "another on ranks"},
            {field::target, "target sharding of a relayout", "that of this rank", "another on ranks"},
            {field::other, "valid lengths or elements of a relayout", "those of this rank", "others on ranks"}};
        std::string differs[std::size(fields)];
        for (std::size_t i = 0; i < std::size(fields); ++i)
            differs[i] = found(&kernels::faults::differs, static_cast<std::uint8_t>(fields[i].in));
        auto const refused = found(&kernels::faults::refused);
        if (auto const names = found(&kernels::faults::missing); !names.empty())
            comm_.fail("kernel that meets other ranks",
                       "all ranks within " + std::to_string(comm_.deadline().count()) + " ms",
                       "nothing from ranks" + names, here);
        auto const* const first = std::ranges::find_if(differs, [](auto const& names) { return !names.empty(); });
        if (refused.empty() && first == std::end(differs)) return;
        page_->found = {};
        if (!refused.empty())
            throw error("nccl", "cu_seqlens of a relayout",
                        "offsets that ascend from 0, with rows that fit the tensors", "others on ranks" + refused,
                        here);
        auto const& of = fields[first - differs];
        throw error("nccl", of.name, of.expected, of.actual + *first, here);
    }
    void done(cudaError_t result, char const* call, caller here) {
        if (result != cudaSuccess) comm_.fail(call, result, here);
    }

    /// What kernels and copies of this rank share with the host.
    struct host_page {
        kernels::faults found{};
        std::uint32_t one = 1;
    };

    nccl& comm_;
    void* memory_ = nullptr;
    ncclWindow_t window_ = nullptr;
    stream stopper_; ///< of its own: the others may be waiting for what is to be stopped
    buffer<std::uint32_t> epochs_;
    std::shared_ptr<host_page> page_;
    peer_memory own_{}; ///< its base[0] is rank 0's
};

} // namespace cpx::cuda
