// SPDX-License-Identifier: Apache-2.0
// Memory of every rank into which relayouts move rows, by one kernel where ranks reach each other's memory.
#pragma once

#include <cpx/core/near_ranks.hpp>
#include <cpx/cuda/memory.hpp>
#include <cpx/cuda/window.hpp>

#include <array>
#include <map>
#include <memory>
#include <mutex>

namespace cpx::cuda {

/// As many bytes on every rank, into which relayouts move rows, and halos and carries: where tensors are that peers
/// write, and messages.
///
/// Each rank allocates and frees as it likes: where a target is, its rank tells the others in the call. Neighbouring
/// ranks of a host that reach each other's memory (NVLink) are a group, in which one kernel moves rows; to and from
/// other groups they are sent and received, also where ranks are dealt to hosts in turn. The ranks agree on the groups
/// when the memory is made. Made and freed by all ranks in the same order. Calls through one memory are in one stream,
/// or in streams that events order: their kernels meet at the same flags, and what is freed is free at once.
class shared_memory final : public peer_resource {
public:
    /// `most`: ranks of a group, 1 to send and receive between all. `blocks`: of a kernel, one a multiprocessor at
    /// most, the same on every rank; 0: up to 128. Fewer leave room for other kernels. `own`: groups have communicators
    /// of their own, so that `comm`, an adopted one, stays as it is. Collective. Throws `cpx::error` as `window` does.
    shared_memory(nccl& comm, index_t bytes, int most = kernels::most_ranks, int blocks = 0, bool own = false,
                  caller here = caller::here())
        : comm_(comm) {
        constexpr index_t limit = index_t{1} << 36; // as kernels tell each other of places
        require(bytes >= 0 && bytes < limit, "cuda::shared_memory", "bytes", "from 0 to less than 64 GiB", bytes, here);
        blocks = window::resident(comm, blocks, here);
        auto const groups = find_groups(comm, {most, bytes, blocks}, here);
        bool const alone = std::ranges::all_of(groups, [](range g) { return g.size() == 1; });
        group_ = groups[static_cast<std::size_t>(comm.rank())];
        if ((own || group_.size() < comm.ranks()) && !alone) near_ = comm.split(static_cast<int>(group_.first), here);
        nccl& members = near_ ? *near_ : comm;
        bool const together = members.ranks() == group_.size() && (group_.size() > 1 || comm.ranks() == 1);
        if (together && window::supported(members, here)) {
            window_ = std::make_unique<window>(members, bytes, blocks, here);
        } else {
            group_ = {comm.rank(), comm.rank() + 1};
            plain_ = buffer<char>((bytes + 255) / 256 * 256, here); // as many as a window has
        }
    }

    void* allocate(std::size_t bytes, cudaStream_t) override {
        std::lock_guard const lock(guard_);
        index_t const size = (static_cast<index_t>(bytes) + 255) / 256 * 256;
        index_t first = 0; // the first gap that is large enough
        for (auto const& [block, end] : blocks_) {
            if (block - first >= size) break;
            first = end;
        }
        require(size <= this->bytes() - first, "cuda::shared_memory", "bytes of a tensor",
                cpx::detail::in_words("at most the free ones, of ", this->bytes()), bytes);
        blocks_[first] = first + size;
        return data() + first;
    }
    void deallocate(void* memory, std::size_t, cudaStream_t) noexcept override {
        std::lock_guard const lock(guard_);
        blocks_.erase(static_cast<char*>(memory) - data());
    }
    /// Returns whether this is where `memory` is.
    bool holds(void const* memory) const {
        auto const at = static_cast<char const*>(memory) - data();
        return at >= 0 && at < bytes();
    }
    /// Returns whether nothing is allocated.
    bool empty() const {
        std::lock_guard const lock(guard_);
        return blocks_.empty();
    }
    /// Returns where what begins at `memory` has been allocated, in bytes. Throws `cpx::error` if nothing has been.
    range place(void const* memory, caller here = caller::here()) const override {
        std::lock_guard const lock(guard_);
        auto const found = blocks_.find(static_cast<char const*>(memory) - data());
        require(found != blocks_.end(), "cuda::shared_memory", "target", "a tensor in this memory", "another", here);
        return {found->first, found->second};
    }

    nccl& comm() const { return comm_; }
    /// Returns the ranks, this one among them, between which one kernel moves rows.
    range group() const { return group_; }
    /// Returns whether kernels move anything, and whether they move all.
    bool any_kernel() const { return window_ != nullptr; }
    bool one_kernel() const { return window_ && group_.size() == comm_.ranks(); }
    char* data() const { return window_ ? window_->data() : plain_.data(); }
    index_t bytes() const { return window_ ? window_->bytes() : plain_.size(); }

    /// Returns the group's memory for the one-kernel relayout. Throws if an earlier kernel found ranks at fault.
    peer_memory peers(caller here = caller::here()) const override {
        require(window_ != nullptr, "cuda::shared_memory", "ranks whose memory this one reaches", "some", "none", here);
        peer_memory m;
        named([&] { m = window_->peers(here); }, here);
        m.first = static_cast<int>(group_.first);
        return m;
    }
    /// Counts a kernel that the group has been given, so that who is late can be named.
    void begin_call(caller here = caller::here()) const override {
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
            comm_.wait(stream, window_->limit(), here, [this] { return window_->missed(); });
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
            if (!near_ || !window_->missed()) throw;
            if (auto const dead = comm_.dead(); !dead.empty())
                comm_.fail("relayout", "all ranks in time", "nothing from ranks" + dead, here);
            comm_.give_up("relayout"); // what it waits for would never come
            throw;
        }
    }

    using numbers = std::array<index_t, 3>; ///< ranks of a group at most, bytes, blocks
    /// Returns for every rank the neighbouring ranks of its host, `most` at most.
    static std::vector<range> find_groups(nccl& comm, numbers const& mine, caller here) {
        require(mine[0] >= 1, "cuda::shared_memory", "ranks of a group", "at least 1", mine[0], here);
        struct answer {
            range group;
            numbers wanted;
        } const own{cpx::detail::near_ranks(comm.rank(), comm.ranks(), std::min<index_t>(mine[0], kernels::most_ranks),
                                            [&](int r) { return comm.on_this_host(r); }),
                    mine};
        std::vector<answer> all(static_cast<std::size_t>(comm.ranks()));
        comm.gather(&own, all.data(), sizeof own, here);
        std::vector<range> found;
        for (answer const& a : all) {
            for (std::size_t i = 0; i < mine.size(); ++i)
                require(a.wanted[i] == mine[i], "cuda::shared_memory",
                        std::array{"ranks of a group, on all ranks", "bytes, on all ranks", "blocks, on all ranks"}[i],
                        mine[i], a.wanted[i], here);
            found.push_back(a.group);
        }
        return cpx::detail::agreed_groups(found);
    }

    nccl& comm_;
    range group_;
    std::unique_ptr<nccl> near_; ///< the group's, unless it is that of all ranks
    std::unique_ptr<window> window_;
    event sent_;
    buffer<char> plain_;
    mutable std::mutex guard_;
    std::map<index_t, index_t> blocks_; ///< that have been allocated: where they begin and end
};

} // namespace cpx::cuda
