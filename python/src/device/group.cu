// SPDX-License-Identifier: Apache-2.0
// Communicators of ranks on devices.
#include "group.hpp"

#include <cstring>

namespace binding {

namespace {

void end(device_group* g) { delete g; }

} // namespace

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
