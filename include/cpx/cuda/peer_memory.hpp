// SPDX-License-Identifier: Apache-2.0
// Memory of other ranks that a device's kernels reach.
#pragma once

#include <cpx/core/index.hpp>
#include <cpx/cuda/memory.hpp>

#include <cpx/meeting.cuh>

namespace cpx::cuda {

/// Memory of the ranks that this device reaches, and where their kernels meet; see `shared_memory`.
struct peer_memory {
    char* base[kernels::most_ranks] = {}; ///< of the same place in every peer's memory
    int first = 0;                        ///< the rank that base[0] belongs to; the next ones follow
    int device = -1;                      ///< of this rank
    index_t bytes = 0;                    ///< from there on, the same on every rank
    kernels::meeting meeting{};
    int blocks = 128; ///< a launch, the same on every rank, all of them resident
};

/// What allocates such memory: each rank as it likes.
class peer_resource : public memory_resource {
public:
    /// Returns the memory of all ranks. Throws `cpx::error` if an earlier kernel found ranks at fault.
    virtual peer_memory peers(caller here = caller::here()) const = 0;
    /// Returns where what begins at `memory` has been allocated, in bytes. Throws `cpx::error` if nothing has been.
    virtual range place(void const* memory, caller here = caller::here()) const = 0;
    /// Counts a kernel that meets those of other ranks, so that who is late can be named.
    virtual void begin_call(caller here = caller::here()) const = 0;
};

} // namespace cpx::cuda
