// SPDX-License-Identifier: Apache-2.0
// Communicators of ranks on devices.
#include "group.hpp"

#include <cpx/cuda/channels.hpp>

#include <cstring>
#include <thread>

// A process may load an older NCCL without them, which `cpx::cuda::window::supported` sees before it calls them.
#pragma weak ncclDevCommCreate
#pragma weak ncclDevCommDestroy

namespace binding {

namespace {

void end(device_group* g) { delete g; }

} // namespace

device_group::device_group(std::unique_ptr<cpx::nccl> joined, bool lent, int blocks, framework& from)
    : nccl_(std::move(joined)), lent_(lent), blocks_(blocks), from_(from), memory_(from, nccl_->device()),
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
        static_cast<void>(channels_.release());
    }
    prepared_.clear();
    channels_.reset();
    static_cast<void>(cudaSetDevice(before));
}

cuda::channels* device_group::channels() {
    if (path_ == exchange_path::undecided && !is_capturing(comm_.stream())) {
        if (nccl_->ranks() > 1) channels_ = cuda::channels::over(*nccl_, blocks_);
        path_ = channels_ ? exchange_path::channels : exchange_path::messages;
    }
    return channels_.get();
}

void device_group::wait() {
    auto const& now = comm();
    channels_ ? channels_->wait(now.stream()) : now.wait();
}

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
    return {new device_group(std::move(joined), true, of.blocks, from), end};
}

group_pointer make_group(std::string const& id, int rank, int ranks, int device, group_options const& of,
                         framework& from) {
    on_device const here(device);
    ncclUniqueId common{};
    std::size_t const size = sizeof common.internal;
    cpx::require(id.size() == size, "communicator", "bytes of the id", size, id.size());
    std::memcpy(common.internal, id.data(), size);
    auto joined = std::make_unique<cpx::nccl>(common, rank, ranks, of.deadline);
    return {new device_group(std::move(joined), false, of.blocks, from), end};
}

std::string new_group_id() {
    auto const id = cpx::nccl::new_id();
    return {id.internal, sizeof id.internal};
}

int rank_of(device_group const& g) { return g.nccl().rank(); }
int ranks_of(device_group const& g) { return g.nccl().ranks(); }
exchange_path path_of(device_group const& g) { return g.path(); }

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
