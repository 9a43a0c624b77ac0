// SPDX-License-Identifier: Apache-2.0
// Runs a plan between GPUs that reach each other's memory by one kernel, from any memory to any.
#pragma once

#include <cpx/cuda/exchange.hpp>
#include <cpx/cuda/window.hpp>

#include <cpx/channels.cuh>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace cpx::cuda {

/// Memory of every rank through which exchanges move rows of any other memory: rings, into which the others' kernels
/// pack, and out of which its own unpack. 32 MiB a rank, whatever is moved, and a communicator of NCCL of its own, so
/// that one that was adopted stays as it is.
///
/// Belongs to the communicator's device and to one thread; the communicator outlives it.
class channels {
public:
    static constexpr int default_blocks = 64; // which fill the wire, and leave NCCL's kernels room beside them

    /// Returns channels of all ranks, or null where they cannot be: the same on every rank. They can where there are 2
    /// to 8 ranks, of one host, each with a GPU that reaches the others' (NVLink), with windows of the loaded NCCL; see
    /// `window::supported`. Collective; takes about as long as joining a communicator.
    ///
    /// `blocks`: of a kernel, each of which takes a multiprocessor, at most; 0 for no channels. Throws `cpx::error` if
    /// ranks want different ones.
    static std::unique_ptr<channels> over(nccl& comm, int blocks = default_blocks, caller here = caller::here()) {
        require(blocks >= 0, where, "blocks", "not negative", blocks, here);
        struct answer {
            int blocks, can;
            cudaUUID_t gpu;
        };
        cudaDeviceProp device{};
        check(cudaGetDeviceProperties(&device, comm.device()), "cudaGetDeviceProperties", here);
        std::size_t free = 0, whole = 0;
        check(cudaMemGetInfo(&free, &whole), "cudaMemGetInfo", here);
        bool can = blocks > 0 && comm.ranks() > 1 && comm.ranks() <= kernels::most_ranks &&
                   free > std::size_t{256} << 20; // also for what NCCL takes
        for (int r = 0; can && r < comm.ranks(); ++r) can = comm.on_this_host(r);
        std::vector<answer> all(static_cast<std::size_t>(comm.ranks()));
        answer const mine{blocks, can, device.uuid};
        comm.gather(&mine, all.data(), sizeof mine, here);
        for (answer const& a : all) {
            require(a.blocks == blocks, where, "blocks, on all ranks", blocks, a.blocks, here);
            // kernels that wait for each other have a GPU each
            can = can && a.can && std::ranges::count_if(all, [&](answer const& other) {
                                      return std::memcmp(&other.gpu, &a.gpu, sizeof a.gpu) == 0;
                                  }) == 1;
        }
        if (!can) return nullptr;
        auto own = comm.split(0, here);
        if (!window::supported(*own, here)) return nullptr;
        blocks = std::min(blocks, window::resident(*own, 0, here));
        return std::unique_ptr<channels>(new channels(comm, std::move(own), blocks, here));
    }

    nccl& comm() const { return comm_; }
    cpx::detail::channel_sizes sizes() const { return {blocks_, narrow(slot_)}; }
    /// Returns the memory as kernels want it. Throws if an earlier kernel has missed ranks, which it names.
    kernels::channel_memory memory(caller here = caller::here()) const {
        kernels::channel_memory m{};
        named(
            [&] {
                auto const& peers = window_.peers(here);
                std::copy_n(peers.base, comm_.ranks(), m.base);
                m.base[comm_.rank()] = window_.data(); // by the address that it has without NCCL, as flags are
                m.all = peers.meeting;
            },
            here);
        m.slot = slot_;
        return m;
    }
    int blocks() const { return blocks_; }
    /// Counts a kernel that the ranks have been given, so that who is late can be named.
    void begin_call(caller here = caller::here()) {
        own_->begin_call(here);
        used_ = true;
    }
    /// Waits until `stream` has done all it was given. Throws `cpx::error` that names the ranks that did not come, once
    /// a kernel has waited for them for the communicator's deadline, or that move rows by another plan; then nothing is
    /// broken.
    void wait(cudaStream_t stream, caller here = caller::here()) const {
        if (!used_) return comm_.wait(stream, here);
        comm_.wait(stream, window_.limit(), here, [this] { return window_.missed(); });
        named([&] { window_.wait(stream, here); }, here);
    }

    channels(channels const&) = delete;
    channels& operator=(channels const&) = delete;

private:
    static constexpr char const* where = "cuda::channels";
    static constexpr index_t bytes_at_once = 128 << 10; // of all peers, on a channel

    static std::int32_t narrow(index_t n) { return static_cast<std::int32_t>(n); }
    /// Returns the bytes of a slot: the same in sum for any ranks.
    static index_t slot_of(int ranks) { return bytes_at_once / ranks / 256 * 256; }

    channels(nccl& comm, std::unique_ptr<nccl> own, int blocks, caller here)
        : comm_(comm), own_(std::move(own)), blocks_(blocks), slot_(slot_of(comm.ranks())),
          window_(*own_, kernels::channel_memory::bytes(blocks, comm.ranks(), slot_), blocks, here) {
        // Loads the kernel now: if its first launch loads it, that waits for kernels that wait for this one.
        cudaFuncAttributes loaded{};
        check(cudaFuncGetAttributes(&loaded, kernels::exchange_by_channels<>), "cudaFuncGetAttributes", here);
    }
    /// Runs `f()`. If ranks were missed, the communicator fails, too, with an error that names those that are dead.
    template <class F>
    void named(F&& f, caller here) const {
        try {
            f();
        } catch (error const&) {
            if (!window_.missed()) throw;
            if (auto const dead = comm_.dead(); !dead.empty())
                comm_.fail("exchange", "all ranks in time", "nothing from ranks" + dead, here);
            comm_.give_up("exchange");
            throw;
        }
    }

    nccl& comm_;
    std::unique_ptr<nccl> own_;
    int blocks_;
    index_t slot_;
    window window_;
    bool used_ = false;
};

/// A plan made ready for channels, as `exchange` makes it ready for messages: its tables, made once, used by every
/// call. Any plan but one that adds; rows of buffers are dense.
///
/// Each call is one kernel on the caller's stream: it packs into the peers' rings, unpacks what comes, and copies what
/// stays. No host synchronisation, no allocation. Can be captured. Made by all ranks; calls are collective and in the
/// same order on all ranks, in one stream or ordered by events. The channels outlive it.
template <class T>
class channel_exchange {
public:
    /// As `exchange`. `room`: what plans that come later take; none: none come.
    channel_exchange(plan const& p, index_t width, channels& by, std::optional<movement_room> room = {},
                     caller here = caller::here())
        : by_(by), width_(width), room_(room) {
        require(width >= 0, where, "width", "not negative", width, here);
        require_device(here);
        auto const made = make(p, here);
        detail::agree(by.comm(), p.id.template for_elements<T>(width), p, here);
        index_t words = made.words();
        if (room) {
            auto const most = cpx::detail::most_tables(*room, p.ranks(), sizeof(T), here).rectangles;
            words = std::max(
                words, (2 * p.ranks() + 1) * words_in<cpx::detail::channel_message>() +
                           most * (words_in<cpx::detail::channel_run>() + words_in<cpx::detail::channel_column>()));
        }
        list_ = buffer<index_t>(words, here);
        load_write_numbers(here);
        static_cast<void>(by.comm().others(here)); // allocated now, not in a capture
        cuda::stream const stream;
        put(p, made, stream, here);
        done_.record(stream, here);
        by.comm().wait(done_, here);
    }

    /// Replaces the plan from the next call on, in the order of the stream, as `exchange::set` does. Whether ranks have
    /// the same one is compared by every call, before anything moves: ranks that have not are told at the next wait.
    void set(plan const& p, cudaStream_t stream, caller here = caller::here()) {
        require(room_.has_value(), where, "exchange", "one made with room for other plans", "one without", here);
        auto const made = make(p, here);
        require(
            made.words() <= list_.size(), where, "words of the plan's tables",
            [&] { return "at most " + std::to_string(list_.size()); }, made.words(), here);
        put(p, made, stream, here);
    }

    /// Moves this rank's rows of `from` to where they belong in everybody's `to`; they must not overlap. `back`: the
    /// other way. from, to: as of `exchange`. Throws `cpx::error` before anything is enqueued if a buffer does not fit,
    /// or if the communicator is broken.
    void operator()(rows<T const> from, rows<T> to, cudaStream_t stream, bool back = false,
                    caller here = caller::here()) {
        require_device(here);
        auto const &source = back ? target_ : source_, &target = back ? source_ : target_;
        cpx::detail::check_buffers(where, from, {source.rows, source.width}, to, {target.rows, target.width}, here);
        require_dense("source", from, here);
        require_dense("target", to, here);
        by_.comm().begin_call(here);
        auto const memory = by_.memory(here);
        kernels::channel_rows r{};
        r.messages = reinterpret_cast<cpx::detail::channel_message const*>(list_.data());
        r.columns = reinterpret_cast<cpx::detail::channel_column const*>(r.messages + messages_);
        r.runs = reinterpret_cast<cpx::detail::channel_run const*>(r.columns + columns_);
        r.source = reinterpret_cast<char const*>(from.data());
        r.target = reinterpret_cast<char*>(to.data());
        r.word = word_ ^ static_cast<std::uint32_t>(back) << 1;
        r.others = by_.comm().others(here);
        r.back = back;
        auto const range = named_range<"cpx exchange, channels">();
        if (!target.covered && to.count() > 0 && to.width() > 0)
            check(cudaMemsetAsync(to.data(), 0, static_cast<std::size_t>(to.count() * to.width()) * sizeof(T), stream),
                  "cudaMemsetAsync", here);
        cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
        check(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing", here);
        launch_early(kernels::exchange_by_channels<>, dim3(static_cast<unsigned>(by_.blocks())), dim3(1024), 0, stream,
                     "exchange_by_channels", here, r, memory);
        by_.begin_call(here); // counted once it is enqueued: what was refused was no call
        if (capturing == cudaStreamCaptureStatusNone) done_.record(stream, here);
    }

    channel_exchange(channel_exchange const&) = delete;
    channel_exchange& operator=(channel_exchange const&) = delete;
    /// Waits for what is in flight, with the communicator's deadline.
    ~channel_exchange() {
        try {
            by_.comm().wait(done_);
        } catch (error const&) { // kernels end by themselves
        }
    }

private:
    static constexpr char const* where = "cuda::channel_exchange";
    /// One end of the plan, as the caller's buffer is to be, and whether what comes fills it.
    struct end {
        index_t rows = 0, width = 0;
        bool covered = true;
    };
    template <class U>
    static constexpr index_t words_in() {
        static_assert(sizeof(U) % sizeof(index_t) == 0);
        return static_cast<index_t>(sizeof(U) / sizeof(index_t));
    }

    void require_device(caller here) const {
        require(current_device() == by_.comm().device(), where, "current device", by_.comm().device(), current_device(),
                here);
    }
    static void require_dense(char const* which, auto const& b, caller here) {
        if (b.count() > 1 && b.stride() != b.width())
            throw error(where, std::string("stride of ") + which, std::to_string(b.width()), std::to_string(b.stride()),
                        here);
        require(b.count() == 0 || detail::address(b.data()) % 16 == 0, where, "alignment of the buffer", "16 bytes",
                detail::address(b.data()) % 16, here);
        detail::require_memory(where, which, b, here);
    }
    end end_of(index_t rows, index_t width, bool covered) const { return {rows, width ? width : width_, covered}; }
    /// Returns the tables of a plan. Throws if it does not fit.
    cpx::detail::channel_table make(plan const& p, caller here) const {
        nccl& comm = by_.comm();
        cpx::detail::require_own(where, "rank of the plan", p.rank, p.ranks(), comm.rank(), comm.ranks(), here);
        require(p.kind != flow::sums, where, "plan", "one that moves rows", "one that adds them", here);
        auto const size = static_cast<index_t>(sizeof(T));
        auto const source = end_of(p.source_rows, p.source_width, true),
                   target = end_of(p.target_rows, p.target_width, true);
        constexpr index_t most = (index_t{1} << 31) - 4096;
        for (end const& e : {source, target}) {
            index_t const largest = std::max(e.rows, e.width * size);
            require(largest < most, where, "rows, and bytes of a row", "less than 2^31 - 4096 each", largest, here);
        }
        return {p, {source.width, target.width, source.width, target.width, size}, by_.sizes()};
    }
    /// Gives the tables to the device, in the order of the stream.
    void put(plan const& p, cpx::detail::channel_table const& made, cudaStream_t stream, caller here) {
        std::vector<index_t> words(static_cast<std::size_t>(made.words()));
        auto* next = reinterpret_cast<char*>(words.data());
        auto const add = [&](auto const& list) {
            std::size_t const bytes = list.size() * sizeof list[0];
            if (bytes > 0) std::memcpy(next, list.data(), bytes);
            next += bytes;
        };
        add(made.messages), add(made.columns), add(made.runs);
        write_numbers(words, list_.data(), stream, here);
        messages_ = std::ssize(made.messages), columns_ = std::ssize(made.columns);
        source_ = end_of(p.source_rows, p.source_width, p.covers_source());
        target_ = end_of(p.target_rows, p.target_width, p.covers_target());
        identity const id = p.id.template for_elements<T>(width_);
        by_.comm().runs(id);
        auto const print = cpx::detail::mix(0, id.fingerprint());
        word_ = static_cast<std::uint32_t>(print ^ print >> 32) | 1;
    }

    channels& by_;
    event done_; ///< the end of the last call
    index_t width_;
    std::optional<movement_room> room_;
    end source_, target_;
    buffer<index_t> list_; ///< messages, columns, runs
    index_t messages_ = 0, columns_ = 0;
    std::uint32_t word_ = 0;
};

} // namespace cpx::cuda
