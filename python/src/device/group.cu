// SPDX-License-Identifier: Apache-2.0
// Communicators of ranks on devices.
#include "group.hpp"

#include <cpx/cuda/shared_memory.hpp>

#include <cstring>
#include <mutex>
#include <thread>

// A process may load an older NCCL without them, which `cpx::cuda::window::supported` sees before it calls them.
#pragma weak ncclDevCommCreate
#pragma weak ncclDevCommDestroy

namespace binding {

namespace {

void end(device_group* g) { delete g; }

/// The windows of which an allocator has memory, and that of which it is to take memory in this thread.
struct windows {
    std::mutex guard;
    std::vector<std::shared_ptr<cuda::shared_memory>> lent;
    static inline thread_local std::weak_ptr<cuda::shared_memory> now;

    static windows& all() { // never ends: frameworks free memory when the process ends
        static auto& of = *new windows;
        return of;
    }
};

} // namespace

device_group::device_group(std::unique_ptr<cpx::nccl> joined, bool lent, group_options const& of, framework& from)
    : nccl_(std::move(joined)), lent_(lent), of_(of), from_(from), memory_(from, nccl_->device()),
      comm_(*nccl_, nullptr, memory_) {}

device_group::~device_group() { leave(); }

void device_group::leave() {
    if (std::exchange(left_, true)) return;
    int before = 0;
    static_cast<void>(cudaGetDevice(&before));
    static_cast<void>(cudaSetDevice(nccl_->device()));
    // The device may wait for ever for a rank that is gone, where another ends the communicator: then freeing
    // would, too.
    bool const done = !lent_ || (nccl_->get() && has_done_all());
    if (lent_) nccl_->give_up("leave"); // its owner may have ended it: it is not touched any more
    if (!done) {
        static_cast<void>(new auto(std::move(prepared_)));
        static_cast<void>(new auto(std::move(shared_)));
    }
    prepared_.clear();
    for (auto& [memory, landing] : shared_) {
        memory->deallocate(landing.data(), landing.size(), nullptr);
        auto& all = windows::all();
        std::lock_guard const lock(all.guard);
        // Memory of which tensors still have some stays as long as the process: its end is for all ranks together.
        if (memory->empty()) std::erase(all.lent, memory);
        memory.reset();
    }
    shared_.clear();
    static_cast<void>(cudaSetDevice(before));
}

bool device_group::grow(index_t result) {
    auto const ranks = static_cast<std::size_t>(nccl_->ranks());
    if (ranks == 1 || of_.window == 0) return false;
    bool const grown = of_.window == group_options::grown;
    index_t const step = index_t{32} << 20;
    index_t bytes = of_.window;
    if (grown) { // twice the last, at least: so all of those before are no larger than it
        index_t const least = shared_.empty() ? 2 * step : 2 * shared()->bytes();
        bytes = std::max(least, (8 * result + step - 1) / step * step);
    }
    std::size_t free = 0, whole = 0;
    cuda::check(cudaMemGetInfo(&free, &whole), "cudaMemGetInfo");
    struct answer {
        index_t window, blocks, free;
    } const mine{bytes, of_.blocks, static_cast<index_t>(free)};
    std::vector<answer> all(ranks);
    nccl_->gather(&mine, all.data(), sizeof mine, cpx::caller::here());
    index_t least_free = mine.free;
    for (answer const& a : all) {
        cpx::require(a.window == mine.window, "communicator", "window, bytes, on all ranks", mine.window, a.window);
        cpx::require(a.blocks == mine.blocks, "communicator", "blocks, on all ranks", mine.blocks, a.blocks);
        least_free = std::min(least_free, a.free);
    }
    if (grown) { // leaves half to the framework
        bytes = std::min({bytes, least_free / 2 / step * step, (index_t{1} << 36) - step});
        full_ = bytes < 4 * result || bytes < 2 * step;
    } else {
        full_ = least_free <= bytes + (index_t{256} << 20); // NCCL's
    }
    if (full_) return false;
    auto made = std::make_shared<cuda::shared_memory>(*nccl_, bytes, cpx::kernels::most_ranks, of_.blocks, true);
    if (!made->one_kernel()) return false;
    auto const part = static_cast<std::size_t>(bytes / 4 / 256 * 256);
    std::span const landing(static_cast<char*>(made->allocate(part, nullptr)), part);
    {
        std::lock_guard const lock(windows::all().guard);
        windows::all().lent.push_back(made);
    }
    shared_.push_back({std::move(made), landing});
    return true;
}

void device_group::wait() {
    auto const& now = comm();
    if (shared_.empty()) return now.wait();
    for (auto const& s : shared_) s.memory->wait(now.stream());
}

void device_group::lend(bool on) const { windows::now = on && shared() ? shared_.back().memory : nullptr; }

bool device_group::has_done_all() const {
    auto const end = std::chrono::steady_clock::now() + nccl_->deadline();
    while (begun_ && cudaStreamQuery(comm_.stream()) == cudaErrorNotReady) {
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    static_cast<void>(cudaGetLastError());
    return true;
}

group_pointer adopt_group(void* comm, int device, group_options const& of, framework& from) {
    on_device const here(device);
    auto joined = cpx::nccl::adopt(static_cast<ncclComm_t>(comm), cpx::adopted::is_left, of.deadline);
    return {new device_group(std::move(joined), true, of, from), end};
}

group_pointer make_group(std::string const& id, int rank, int ranks, int device, group_options const& of,
                         framework& from) {
    on_device const here(device);
    ncclUniqueId common{};
    std::size_t const size = sizeof common.internal;
    cpx::require(id.size() == size, "communicator", "bytes of the id", size, id.size());
    std::memcpy(common.internal, id.data(), size);
    auto joined = std::make_unique<cpx::nccl>(common, rank, ranks, of.deadline);
    return {new device_group(std::move(joined), false, of, from), end};
}

std::string new_group_id() {
    auto const id = cpx::nccl::new_id();
    return {id.internal, sizeof id.internal};
}

int rank_of(device_group const& g) { return g.nccl().rank(); }
int ranks_of(device_group const& g) { return g.nccl().ranks(); }
exchange_path path_of(device_group const& g) { return g.path(); }
index_t room_of(device_group const& g) { return 5 * (static_cast<index_t>(g.landing().size()) / 2); } // of 4: 2.5
void lend(device_group& g, bool on) { g.lend(on); }
bool holds(device_group& g, void const* memory) { return g.shared() && g.shared()->holds(memory); }

void require_there(device_group const& g) {
    ncclComm_t const comm = g.nccl().get(); // none: it has failed, as the call will say
    ncclResult_t state = ncclSuccess;
    cpx::require(!comm || ncclCommGetAsyncError(comm, &state) == ncclSuccess, "communicator", "NCCL's communicator",
                 "one that lasts until this one has left", "one that its process group has ended");
}

void wait_for(device_group& g) {
    on_device const here(g.nccl().device());
    g.wait();
}

void leave(device_group& g) { g.leave(); }

void fail(device_group& g, char const* why) { g.nccl().give_up(why); }

} // namespace binding

extern "C" {

/// What torch's allocator calls for memory of a pool of its own: of the window that is lent, or, where that is full,
/// of the device, and results that are made there are copied to them. Null if there is none.
[[gnu::visibility("default")]] void* cpx_window_allocate(std::size_t bytes, int device, cudaStream_t) {
    using namespace binding;
    if (auto const window = windows::now.lock()) try {
            return window->allocate(bytes, nullptr);
        } catch (cpx::error const&) { // it is full
        }
    void* memory = nullptr;
    try {
        on_device const here(device);
        if (cudaMalloc(&memory, bytes) != cudaSuccess) static_cast<void>(cudaGetLastError()), memory = nullptr;
    } catch (cpx::error const&) {
    }
    return memory;
}
[[gnu::visibility("default")]] void cpx_window_free(void* memory, std::size_t bytes, int, cudaStream_t) {
    auto& all = binding::windows::all();
    std::lock_guard const lock(all.guard);
    for (auto const& window : all.lent)
        if (window->holds(memory)) return window->deallocate(memory, bytes, nullptr);
    static_cast<void>(cudaFree(memory));
}
}
