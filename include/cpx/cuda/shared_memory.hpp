// SPDX-License-Identifier: Apache-2.0
// Targets of relayouts: by one kernel where ranks reach each other's memory, by send and receive elsewhere.
#pragma once

#include <cpx/cuda/exchange.hpp>
#include <cpx/cuda/relayout.hpp>
#include <cpx/cuda/window.hpp>

#include <memory>
#include <optional>
#include <type_traits>

namespace cpx::cuda {

/// As many bytes on every rank, into which relayouts move rows.
///
/// Neighbouring ranks of a host that reach each other's memory (NVLink) are a group, in which one kernel moves rows; to
/// and from other groups they are sent and received, also where ranks are dealt to hosts in turn. The ranks agree on
/// the groups when the memory is made.
/// Made and freed by all ranks in the same order.
class shared_memory {
public:
    /// `most`: ranks of a group, 1 to send and receive between all. `blocks`: of a kernel, one a multiprocessor at
    /// most, the same on every rank; 0: up to 128. Fewer leave room for other kernels beside it. Collective. Throws
    /// `cpx::error` as `window` does.
    shared_memory(nccl& comm, index_t bytes, int most = kernels::most_ranks, int blocks = 0,
                  caller here = caller::here())
        : comm_(comm) {
        auto const groups = find_groups(comm, most, here);
        bool const alone = std::ranges::all_of(groups, [](range g) { return g.size() == 1; });
        group_ = groups[static_cast<std::size_t>(comm.rank())];
        if (group_.size() < comm.ranks() && !alone) near_ = comm.split(static_cast<int>(group_.first), here);
        nccl& members = near_ ? *near_ : comm;
        bool const together = members.ranks() == group_.size() && (group_.size() > 1 || comm.ranks() == 1);
        if (together && window::supported(members, here)) {
            window_ = std::make_unique<window>(members, bytes, blocks, here);
        } else {
            group_ = {comm.rank(), comm.rank() + 1};
            plain_ = buffer<char>((bytes + 255) / 256 * 256, here); // as many as a window has
        }
    }

    nccl& comm() const { return comm_; }
    /// Returns the ranks, this one among them, between which one kernel moves rows.
    range group() const { return group_; }
    /// Returns whether kernels move anything, and whether they move all.
    bool any_kernel() const { return window_ != nullptr; }
    bool one_kernel() const { return window_ && group_.size() == comm_.ranks(); }
    char* data() const { return window_ ? window_->data() : plain_.data(); }
    index_t bytes() const { return window_ ? window_->bytes() : plain_.size(); }

    /// Returns the group's memory as the one-kernel relayout wants it. Throws if an earlier kernel found ranks at
    /// fault.
    peer_memory peers(caller here = caller::here()) const {
        require(window_ != nullptr, "cuda::shared_memory", "ranks whose memory this one reaches", "some", "none", here);
        peer_memory m;
        m.device = comm_.device();
        m.first = static_cast<int>(group_.first);
        for (int peer = 0; peer < static_cast<int>(group_.size()); ++peer) m.base[peer] = window_->of(peer);
        m.bytes = window_->bytes();
        m.blocks = window_->blocks();
        named([&] { m.meeting = window_->meeting(here); }, here);
        return m;
    }
    /// Counts a kernel that the group has been given, so that who is late can be named.
    void begin_call(caller here = caller::here()) const {
        if (window_) window_->comm().begin_call(here);
    }
    /// Notes that what `stream` has been given ends with rows for other groups.
    void sent(cudaStream_t stream, caller here = caller::here()) { sent_.record(stream, here); }
    /// Waits until `stream` has done all it was given. Throws `cpx::error` that names the ranks that did not come, once
    /// a kernel or a message has waited for them for the communicator's deadline.
    void wait(cudaStream_t stream, caller here = caller::here()) const {
        if (!window_) return comm_.wait(stream, here);
        if (near_) {
            comm_.wait(sent_, here); // rows of other groups come before the kernel
            comm_.wait(stream, window_->limit(), here, [this] { return window_->faulty(); });
        }
        named([&] { window_->wait(stream, here); }, here);
    }

    shared_memory(shared_memory const&) = delete;
    shared_memory& operator=(shared_memory const&) = delete;
    ~shared_memory() {
        if (!near_) return; // else the window waits, under the same watchdog
        try {
            comm_.synchronize_device();
        } catch (error const&) { // the communicator has been aborted
        }
    }

private:
    /// Runs `f()`. If ranks were missed, the error names those for which their groups wait, not those that wait.
    template <class F>
    void named(F&& f, caller here) const {
        try {
            f();
        } catch (error const&) {
            if (!near_) throw;
            auto const dead = window_->missed() ? comm_.dead() : std::string();
            if (!dead.empty()) comm_.fail("relayout", "all ranks in time", "nothing from ranks" + dead, here);
            comm_.give_up("relayout"); // what it waits for would never come
            throw;
        }
    }

    /// Returns for every rank the neighbouring ranks of its host, `most` at most.
    static std::vector<range> find_groups(nccl& comm, int most, caller here) {
        require(most >= 1, "cuda::shared_memory", "ranks of a group", "at least 1", most, here);
        index_t const rank = comm.rank(), size = std::min(most, kernels::most_ranks);
        range group{rank, rank + 1};
        while (group.first > 0 && comm.on_this_host(static_cast<int>(group.first - 1))) --group.first;
        while (group.last < comm.ranks() && comm.on_this_host(static_cast<int>(group.last))) ++group.last;
        group.first += (rank - group.first) / size * size;
        group.last = std::min(group.last, group.first + size);

        struct answer {
            range group;
            index_t most;
        } const mine{group, most};
        std::vector<answer> all(static_cast<std::size_t>(comm.ranks()));
        comm.gather(&mine, all.data(), sizeof mine, here);
        std::vector<range> groups;
        for (index_t r = 0; r < comm.ranks(); ++r) {
            answer const& a = all[static_cast<std::size_t>(r)];
            require(a.most == most, "cuda::shared_memory", "ranks of a group, on all ranks", most, a.most, here);
            bool agreed = true; // else hosts look different from different ranks
            for (index_t peer = a.group.first; peer < a.group.last; ++peer)
                agreed = agreed && all[static_cast<std::size_t>(peer)].group == a.group;
            groups.push_back(agreed ? a.group : range{r, r + 1});
        }
        return groups;
    }

    nccl& comm_;
    range group_;
    std::unique_ptr<nccl> near_; ///< the group's, unless it is all ranks
    std::unique_ptr<window> window_;
    event sent_;
    buffer<char> plain_;
};

/// A relayout into shared memory, whichever way that moves; between shardings whose addresses a device cannot compute
/// (`table`, `by_length`) rows are sent and received everywhere.
template <class T, any_sharding From, any_sharding To>
class shared_relayout {
public:
    /// `offset`: bytes in the memory at which the target begins, the same on every rank; `capacity`: bytes of it, for
    /// calls with other offsets than the plan's, 0: all that follow. Collective: ranks compare what they are about to
    /// run. Throws `cpx::error` as `relayout` and `exchange` do.
    shared_relayout(relayout_plan<From, To> const& plan, index_t width, shared_memory& memory, index_t offset = 0,
                    index_t capacity = 0, caller here = caller::here())
        : memory_(memory), offset_(offset), end_(capacity ? offset + capacity : memory.bytes()),
          rows_(plan.target_rows), width_(plan.target_width ? plan.target_width : width) {
        nccl& comm = memory.comm();
        range const mine{offset, end_};
        std::vector<range> all(static_cast<std::size_t>(comm.ranks()));
        comm.gather(&mine, all.data(), sizeof mine, here);
        for (range const other : all)
            require(other == mine, "cuda::shared_relayout", "offset and end of the target, on all ranks",
                    std::to_string(offset) + ", " + std::to_string(end_),
                    std::to_string(other.first) + ", " + std::to_string(other.last), here);
        index_t const bytes = rows_ * width_ * static_cast<index_t>(sizeof(T));
        require(offset >= 0 && offset % 16 == 0 && offset + bytes <= end_ && end_ <= memory.bytes(),
                "cuda::shared_relayout", "place of the target",
                "a multiple of 16 with " + std::to_string(bytes) + " bytes after it in the memory", offset, here);
        if constexpr (by_kernel) {
            if (memory.any_kernel()) kernel_.emplace(plan, width, here);
            if (memory.one_kernel()) {
                detail::agree(comm, plan.id.template for_elements<T>(width), plan, here);
                return;
            }
        }
        exchange_ = std::make_unique<exchange<T>>(plan, width, comm, 0, 0, kernel_ ? memory.group() : range{}, here);
        auto const offsets = plan.from.batch().offsets();
        for (index_t i = 0; i < std::ssize(offsets); ++i)
            digest_ += kernels::offset_digest(i, offsets[static_cast<std::size_t>(i)]);
        digest_ |= 1;
    }

    /// Returns where this rank's rows of the target are.
    rows<T> target() const { return {reinterpret_cast<T*>(memory_.data() + offset_), rows_, width_}; }

    /// Moves this rank's rows of `from` to all targets. Collective, in stream order.
    ///
    /// from: (rows, width), dense, memory of this device. batch: cu_seqlens in its memory. Calls on one memory are in
    /// one stream, or ordered by events. Where one kernel moves all, a call can be captured, and `batch` may hold other
    /// offsets than the plan's, of as many sequences, as long as rows fit. Elsewhere rows are sent as the plan says,
    /// `from` begins at a multiple of 16 bytes, and kernels refuse other offsets. Throws `cpx::error` as `relayout` and
    /// `exchange` do, before anything is enqueued.
    void operator()(rows<T const> from, packed_offsets batch, cudaStream_t stream, caller here = caller::here()) {
        detail::require_apart("cuda::shared_relayout", {{"target", target()}},
                              {{"source", from}, {"offsets", batch.list()}}, here);
        if constexpr (by_kernel)
            if (kernel_) {
                auto peers = memory_.peers(here);
                peers.bytes = end_;
                kernel_->check_call(from, peers, offset_, batch, here);
                if (exchange_) {
                    // Before the kernel, not beside it: its blocks wait for those of other ranks, so all must find
                    // room at once.
                    send(from, stream, here);
                    batch.digest = digest_;
                }
                kernel_->enqueue(from, peers, offset_, batch, stream, here);
                return memory_.begin_call(here); // counted once it is enqueued: what was refused was no call
            }
        send(from, stream, here);
    }

private:
    static constexpr bool by_kernel = detail::computed_on_device<From> && detail::computed_on_device<To>;
    struct no_kernel {};

    void send(rows<T const> from, cudaStream_t stream, caller here) {
        cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
        check(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing", here);
        require(capturing == cudaStreamCaptureStatusNone, "cuda::shared_relayout", "stream",
                "one that does not capture: by send and receive, the plan's offsets stay", "a capture", here);
        (*exchange_)(from, target(), stream, here);
        memory_.sent(stream, here);
    }

    shared_memory& memory_;
    index_t offset_, end_, rows_, width_;
    std::uint32_t digest_ = 0; ///< of the plan's offsets, where some rows are sent
    std::optional<std::conditional_t<by_kernel, relayout<T, From, To>, no_kernel>> kernel_;
    std::unique_ptr<exchange<T>> exchange_; ///< with the ranks that the kernel does not reach
};

/// Returns the relayout of a plan: `make_shared_relayout<float>(cpx::relayout(from, to, rank), width, memory)`. Its
/// arguments are those of the constructor.
template <class T, any_sharding From, any_sharding To>
shared_relayout<T, From, To> make_shared_relayout(relayout_plan<From, To> const& plan, index_t width,
                                                  shared_memory& memory, index_t offset = 0, index_t capacity = 0,
                                                  caller here = caller::here()) {
    return {plan, width, memory, offset, capacity, here};
}

} // namespace cpx::cuda
